"""Decode and verify of a Mamba-2 mixer, fused: everything between its projections.

For each row of a batch, 1 to 8 tokens: causal convolution over the row's window, SiLU, time steps,
the state's update and what it answers, skip, gate and norm. States and windows live in pools and
are updated in place, in either state scheme, as `headrace.ops.gated_delta_decode` says. Of a token
the ring keeps what PyTorch operations keep of it too.

Three launches: the convolution owns channels, since heads of a group share theirs; the state owns
heads; gate and norm own a token's part that is normed by itself.

Rows without tokens, with accepted 0 or with null blocks change nothing. Bits of a token's result
depend neither on its batch mates nor on how its tokens are grouped into steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.ops.mamba2_decode import reference
from headrace.rt.kernels import can_launch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.gated_delta_decode import ColumnsRows, ReplayRows, Ring

__all__ = ["MAX_PART", "MixerWeights", "mamba2_decode"]

MAX_PART = 32768
"""Columns normed together that a program can hold."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixerWeights:
    """Weights of the mixer between its projections.

    Attributes:
        conv: [W, F], oldest tap first.
        conv_bias: [F]; None without.
        dt_bias: [H] f32.
        decay_rate: A, negative, [H] f32.
        skip: D, [H] f32.
        norm: Factors of each part that is normed by itself, [parts, H*P/parts] f32; None without.
        norm_eps: Added to the mean square.
        gates_after_norm: Whether the gate comes after the norm and not before it.
    """

    conv: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    decay_rate: Tensor
    skip: Tensor
    norm: Tensor | None
    norm_eps: float
    gates_after_norm: bool


def mamba2_decode(
    inputs: Tensor,
    gate: Tensor,
    dt: Tensor,
    weights: MixerWeights,
    window: Tensor,
    state: Tensor,
    token_index: Tensor,
    query_lens: Tensor,
    rows: ColumnsRows | ReplayRows,
    out: Tensor,
    *,
    ring: Ring | None = None,
) -> None:
    """Run the mixer of one layer over the generating rows of a step.

    Args:
        inputs: Conv inputs: x (H*P), B and C (G*D each), [T, F]; rows may be strided.
        gate: [T, H*P]; rows may be strided.
        dt: Time steps before bias and softplus, [T, H]; rows may be strided.
        weights: The layer's.
        window: [S, W-1+s, F]; overwritten at the rows' blocks.
        state: [S, H, P, D] f32 or bf16; overwritten at the rows' blocks. P and D are powers of 2.
        token_index: Packed index of each row's tokens, [N, Q] i64.
        query_lens: [N]; 0 for padded rows.
        rows: Where the rows' states are.
        out: [T, H*P]; overwritten at the rows' tokens.
        ring: The ring's pools, updates [RB, R, G*D + H*P + H] f32: B, dt * x, log decay; None in
            the columns scheme.

    Raises:
        ValueError: Sizes that do not fit each other.

    Source: Mamba-2, arXiv:2405.21060.
    """
    _check(inputs, gate, dt, weights, window, state, ring)
    run = reference.mamba2_decode
    if can_launch(inputs):
        from headrace.ops.mamba2_decode import fused  # noqa: PLC0415  needs Triton

        run = fused.mamba2_decode
    run(inputs, gate, dt, weights, window, state, token_index, query_lens, rows, out, ring=ring)


def _check(
    inputs: Tensor,
    gate: Tensor,
    dt: Tensor,
    weights: MixerWeights,
    window: Tensor,
    state: Tensor,
    ring: Ring | None,
) -> None:
    heads, p_dim, d_dim = state.shape[1:]
    inner, channels = heads * p_dim, inputs.shape[1]
    groups = (channels - inner) // (2 * d_dim)
    expected = {
        "inputs": (channels, inner + 2 * groups * d_dim),
        "gate": (gate.shape[1], inner),
        "dt": (dt.shape[1], heads),
        "conv": (weights.conv.shape[1], channels),
        "window": (window.shape[2], channels),
        "heads per group": (heads % groups if groups else -1, 0),
    }
    if ring is not None:
        expected["ring.inputs"] = (ring.inputs.shape[2], channels)
        expected["ring.updates"] = (ring.updates.shape[2], groups * d_dim + inner + heads)
    if weights.norm is not None:
        expected["norm"] = (weights.norm.numel(), inner)
        expected["norm's part beyond the most"] = (max(weights.norm.shape[1] - MAX_PART, 0), 0)
    for name, (got, wanted) in expected.items():
        if got != wanted:
            msg = f"{name}: {got} columns where {groups} groups and states of {heads, p_dim, d_dim}"
            raise ValueError(f"{msg} need {wanted}")
    for name, tensor in (("inputs", inputs), ("gate", gate), ("dt", dt)):
        if tensor.stride(1) != 1:
            msg = f"{name}: columns must be adjacent, strides are {tensor.stride()}"
            raise ValueError(msg)
    if p_dim & (p_dim - 1) or d_dim & (d_dim - 1):
        msg = f"head and state sizes must be powers of 2, not P={p_dim}, D={d_dim}"
        raise ValueError(msg)
