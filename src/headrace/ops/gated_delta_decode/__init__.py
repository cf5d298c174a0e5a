"""Decode and verify of a Gated DeltaNet mixer, fused: everything between its projections.

For each row of a batch, 1 to 8 tokens: causal convolution over the row's window, SiLU, queries
and keys to unit length, gates, the gated delta rule, gated RMS norm. States and windows live in
pools and are updated in place. Either state scheme:

* columns: the state is read from column accepted-1, the state after token t goes to column t, the
  window is read at offset accepted-1 and moved forward in column 0.
* replay: the state is the base plus the pending tokens of the ring; the step's tokens go to the
  ring; the base is written on the way where the committed tokens reach write_len.

Rows without tokens, with accepted 0 or with null blocks change nothing. Bits of a token's result
depend neither on its batch mates nor on how its tokens are grouped into steps.

Learning rates are sigmoids: a layer whose `max_rate` is not 1 (OLMo hybrid) cannot use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.gated_delta_decode import reference
from headrace.ops.gated_delta_decode.rows import ColumnsRows, MixerWeights, ReplayRows, Ring
from headrace.rt.kernels import can_launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ColumnsRows", "MixerWeights", "ReplayRows", "Ring", "check_mixer", "gated_delta_decode"]


def gated_delta_decode(
    inputs: Tensor,
    gate: Tensor,
    logits: Tensor,
    weights: MixerWeights,
    window: Tensor,
    state: Tensor,
    token_index: Tensor,
    query_lens: Tensor,
    rows: ColumnsRows | ReplayRows,
    out: Tensor,
    *,
    ring: Ring | None = None,
    is_fixed: bool = False,
) -> None:
    """Run the mixer of one layer over the generating rows of a step.

    Args:
        inputs: Conv inputs: queries, keys, values, [T, F]; rows may be strided.
        gate: Output gate, [T, HV*V]; rows may be strided.
        logits: Negated rate logits, then decay logits, [T, 2*HV]; rows may be strided.
        weights: The layer's.
        window: [S, W-1+s, F]; overwritten at the rows' blocks.
        state: [S, HV, V, K] f32 or bf16; overwritten at the rows' blocks. K and V are powers of 2.
        token_index: Packed index of each row's tokens, [N, Q] i64.
        query_lens: [N]; 0 for padded rows.
        rows: Where the rows' states are.
        out: [T, HV*V]; overwritten at the rows' tokens.
        ring: The ring's pools; None in the columns scheme.
        is_fixed: Launch the same code for any number of rows, and leave no rounding to the
            compiler: both schemes then give the same bits. States must be float32.

    Raises:
        ValueError: Sizes that do not fit each other, or states that cannot be fixed.

    Source: Gated Delta Networks, arXiv:2412.06464.
    """
    check_mixer(inputs, gate, logits, weights, window, state, ring)
    if is_fixed and state.dtype != torch.float32:
        msg = f"states are {state.dtype}, whose bits depend on when they are stored; use float32"
        raise ValueError(msg)
    run = reference.gated_delta_decode
    if can_launch(inputs):
        from headrace.ops.gated_delta_decode import fused  # noqa: PLC0415  needs Triton

        run = fused.gated_delta_decode
    run(
        inputs, gate, logits, weights, window, state, token_index, query_lens, rows, out,
        ring=ring, is_fixed=is_fixed,
    )  # fmt: skip


def check_mixer(
    inputs: Tensor,
    gate: Tensor,
    logits: Tensor,
    weights: MixerWeights,
    window: Tensor,
    state: Tensor,
    ring: Ring | None,
) -> None:
    """Refuse sizes that do not fit each other; arguments as those of `gated_delta_decode`.

    Raises:
        ValueError: With the sizes.
    """
    hv, v_dim, k_dim = state.shape[1:]
    hk = weights.unit_scale.numel() // 2
    channels = 2 * hk * k_dim + hv * v_dim
    expected = {
        "inputs": (inputs.shape[1], channels),
        "gate": (gate.shape[1], hv * v_dim),
        "logits": (logits.shape[1], 2 * hv),
        "conv": (weights.conv.shape[1], channels),
        "window": (window.shape[2], channels),
        "value heads per key head": (hv % hk, 0),
    }
    if ring is not None:
        expected["ring.inputs"] = (ring.inputs.shape[2], channels)
        expected["ring.updates"] = (ring.updates.shape[2], hk * k_dim + hv * v_dim + 2 * hv)
    for name, (got, wanted) in expected.items():
        if got != wanted:
            msg = f"{name}: {got} columns where {hk} key heads and states of {hv, v_dim, k_dim} "
            raise ValueError(msg + f"need {wanted}")
    for name, tensor in (("inputs", inputs), ("gate", gate), ("logits", logits)):
        if tensor.stride(1) != 1:
            msg = f"{name}: columns must be adjacent, strides are {tensor.stride()}"
            raise ValueError(msg)
    if ring is not None and not inputs.dtype == window.dtype == ring.inputs.dtype:
        msg = f"inputs are {inputs.dtype}, windows {window.dtype}, rings {ring.inputs.dtype}; "
        raise ValueError(msg + "they hold the same values and must have one dtype")
    if k_dim & (k_dim - 1) or v_dim & (v_dim - 1):
        msg = f"head sizes must be powers of 2, not K={k_dim}, V={v_dim}"
        raise ValueError(msg)
