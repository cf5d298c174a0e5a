"""The launch of the fused kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.gated_delta_decode.kernel import gated_delta_decode_kernel
from headrace.ops.gated_delta_decode.kernel_replay import (
    replay_advance_kernel,
    replay_answer_kernel,
)
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.gated_delta_decode.rows import ColumnsRows, MixerWeights, ReplayRows, Ring

ROWS, NUM_WARPS = 32, 4
"""Value rows that a program holds at a time (32 x 128 elements: 32 registers of each thread)."""

BATCH = 4
"""Pending tokens whose loads are on the way together."""

REPLAY_ROWS = 128
"""Value rows of a program that asks bfloat16 states; 64 of them take a tenth longer on an H200."""

LEAST_WIDTH = 16
"""Tensor cores take products of so many terms and columns."""

MIN_PROGRAMS = 256
"""With fewer rows x key heads than this, states are spread over more programs in three launches.

Measured on an H200 (benchmarks/results/kernels-h200.json): 11 instead of 22 us a layer for one row,
within a fifth of each other from 32 rows on, either way.
"""


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
) -> None:
    """Decode or verify; see the package."""
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
    is_split = n * hk < MIN_PROGRAMS

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
            num_warps=NUM_WARPS,
        )

    if ring is not None and state.dtype == torch.bfloat16:
        launch(1, n, hk)
        _ask(state, made, token_index, query_lens, tuple(scheme[2:8]), ring, hk)
        launch(3, n, hk)
    elif is_split:
        launch(1, n, hk)
        launch(2, n, hk, hv // hk * v_dim // value_rows)
        launch(3, n, hk)
    else:
        launch(0, n, hk)


def _ask(
    state: Tensor,
    made: Tensor,
    token_index: Tensor,
    query_lens: Tensor,
    rows: tuple[Tensor | None, ...],
    ring: Ring,
    hk: int,
) -> None:
    """The states' part for bfloat16 states of the replay scheme."""
    hv, v_dim, k_dim = state.shape[1:]
    width, length = token_index.shape[1], ring.inputs.shape[1]
    value_rows = min(REPLAY_ROWS, v_dim)
    grid = token_index.shape[0], hk, hv // hk * v_dim // value_rows
    sizes = {
        "HK": hk, "GROUP": hv // hk, "K": k_dim, "V": v_dim, "ROWS": value_rows,
        "PENDING": max(LEAST_WIDTH, length), "RING": length, "num_warps": NUM_WARPS,
    }  # fmt: skip
    stride = state.stride(0)
    launch_kernel(
        replay_advance_kernel, grid, state, query_lens, *rows, ring.updates, stride, **sizes
    )
    launch_kernel(
        replay_answer_kernel,
        grid,
        state,
        made,
        token_index,
        query_lens,
        *rows,
        ring.updates,
        stride,
        QUERY=width,
        IS_INTERPRETED=state.device.type == "cpu",
        COLUMNS=max(LEAST_WIDTH, 1 << (2 * width - 1).bit_length()),
        **sizes,
    )
