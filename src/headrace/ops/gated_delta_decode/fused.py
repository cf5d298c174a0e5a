"""The launch of the fused kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.gated_delta_decode.kernel import gated_delta_decode_kernel
from headrace.ops.gated_delta_decode.kernel_replay import (
    replay_answer_kernel,
    replay_prepare_kernel,
)
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.gated_delta_decode.rows import ColumnsRows, MixerWeights, ReplayRows, Ring

ROWS, NUM_WARPS = 32, 4
"""Value rows that a program holds at a time (32 x 128 elements: 32 registers of each thread).

Measured on an H200 (256 rows of a token, bfloat16 states): 183 us a layer, of which the bytes are
134; the same as one launch with a program for each key head, without splitting, takes 213.
"""

BATCH = 4
"""Pending tokens whose loads are on the way together."""

PREPARE_WARPS, CHUNK = 1, 32
"""Of the first replay kernel: its warps, and channels of keys and queries multiplied at a time.

Measured on an H200 (256 rows of 4 tokens): both launches take 219 us a layer; with 2 warps 243,
with 4 342.
"""

ANSWER_WARPS, ANSWER_REGISTERS, REPLAY_ROWS = 4, 128, 16
"""Of the second one: its warps, their registers (so that four programs share a multiprocessor), and
value rows of a base that are made at a time (with more of them they would not fit in)."""

FEW_TOKENS = 4
"""Rows of more tokens need more registers: four warps for the first kernel, 168 for the second."""

LEAST_WIDTH = 16
"""Tensor cores take products of so many terms and columns."""


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
    """Decode or verify; see the package."""
    if ring is not None and state.dtype == torch.bfloat16:
        _ask(
            inputs, gate, logits, weights, window, state, token_index, query_lens,
            rows, out, ring,  # type: ignore[arg-type]
        )  # fmt: skip
        return
    hv, v_dim, k_dim = state.shape[1:]
    hk = weights.unit_scale.numel() // 2
    taps = weights.conv.shape[0]
    width = token_index.shape[1]
    scratch = 2 * hk * k_dim + 2 * hv * v_dim + 2 * hv
    scheme: list[Tensor | None]
    if ring is None:
        scheme = [rows.window_blocks, rows.accepted, *[None] * 8]  # type: ignore[union-attr]
        blocks_stride = rows.window_blocks.stride(0)  # type: ignore[union-attr]
        entries = taps - 2 + width
    else:
        names = ("base_block", "base_len", "computed", "write_block", "write_len", "ring_block")
        scheme = [None, None, *(getattr(rows, name) for name in names), ring.inputs, ring.updates]
        blocks_stride = 0
        entries = taps - 1
    # Written and read by programs of the same row and key head; L2 keeps it.
    made = torch.empty(inputs.shape[0], scratch, dtype=torch.float32, device=inputs.device)
    arguments = (
        inputs,
        gate,
        logits,
        out,
        weights.conv,
        weights.gate_bias,
        weights.gate_factor,
        weights.unit_scale,
        weights.norm,
        window,
        state,
        token_index,
        query_lens,
        *scheme,
        made,
        inputs.stride(0),
        gate.stride(0),
        logits.stride(0),
        out.stride(0),
        blocks_stride,
        window.stride(0),
        state.stride(0),
        weights.norm_eps,
    )
    value_rows = min(ROWS, v_dim)
    n = token_index.shape[0]

    def launch(phase: int, *grid: int) -> None:
        launch_kernel(
            gated_delta_decode_kernel,
            grid,
            *arguments,
            HK=hk,
            GROUP=hv // hk,
            K=k_dim,
            V=v_dim,
            ROWS=value_rows,
            BATCH=BATCH,
            TAPS=taps,
            QUERY=width,
            ENTRIES_PADDED=1 << max(entries - 1, 1).bit_length(),
            RING=0 if ring is None else ring.inputs.shape[1],
            INTERVAL=1 if ring is None else ring.interval,
            IS_REPLAY=ring is not None,
            PHASE=phase,
            enable_fp_fusion=not is_fixed,
            num_warps=NUM_WARPS,
        )

    launch(1, n, hk)
    launch(2, n, hv)


def _ask(
    inputs: Tensor,
    gate: Tensor,
    logits: Tensor,
    weights: MixerWeights,
    window: Tensor,
    state: Tensor,
    token_index: Tensor,
    query_lens: Tensor,
    rows: ReplayRows,
    out: Tensor,
    ring: Ring,
) -> None:
    """Decode or verify with bfloat16 states of the replay scheme, by products."""
    hv, v_dim, k_dim = state.shape[1:]
    hk = weights.unit_scale.numel() // 2
    taps = weights.conv.shape[0]
    n, width = token_index.shape
    length = ring.inputs.shape[1]
    answers = 2 * max(LEAST_WIDTH // 4, 1 << (width - 1).bit_length())
    sizes = {
        "HK": hk, "GROUP": hv // hk, "K": k_dim, "V": v_dim, "QUERY": width, "ANSWERS": answers,
        "PENDING": max(LEAST_WIDTH, length), "RING": length,
    }  # fmt: skip
    device = inputs.device
    # Written by one launch and read by the next.
    queries = torch.empty(inputs.shape[0], hk, k_dim, dtype=torch.float32, device=device)
    asked = torch.empty(n, hv, 2 * answers, k_dim, dtype=torch.bfloat16, device=device)
    shares = torch.empty(n, hv, answers, sizes["PENDING"], dtype=torch.float32, device=device)
    places = (
        rows.base_block, rows.base_len, rows.computed, rows.write_block, rows.write_len,
        rows.ring_block,
    )  # fmt: skip
    launch_kernel(
        replay_prepare_kernel,
        (n, hk),
        inputs,
        logits,
        weights.conv,
        weights.gate_bias,
        weights.gate_factor,
        weights.unit_scale,
        window,
        token_index,
        query_lens,
        *places,
        ring.inputs,
        ring.updates,
        queries,
        asked,
        shares,
        inputs.stride(0),
        logits.stride(0),
        window.stride(0),
        HEADS=max(LEAST_WIDTH // answers, 1 << (hv // hk - 1).bit_length()),
        TAPS=taps,
        TOKENS=1 << (width - 1).bit_length(),
        TERMS=2 * LEAST_WIDTH,
        CHUNK=min(CHUNK, k_dim),
        ENTRIES=1 << (taps - 2).bit_length(),
        num_warps=PREPARE_WARPS if width <= FEW_TOKENS else 4,
        **sizes,
    )
    launch_kernel(
        replay_answer_kernel,
        (n, hv),
        state,
        asked,
        shares,
        gate,
        weights.norm,
        out,
        token_index,
        query_lens,
        *places,
        ring.updates,
        gate.stride(0),
        out.stride(0),
        state.stride(0),
        weights.norm_eps,
        ROWS=min(REPLAY_ROWS, v_dim),
        IS_INTERPRETED=state.device.type == "cpu",
        num_warps=ANSWER_WARPS,
        maxnreg=ANSWER_REGISTERS if width <= FEW_TOKENS else 168,
        **sizes,
    )
