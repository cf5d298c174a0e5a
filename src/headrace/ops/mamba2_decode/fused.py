"""The launches of the fused mixer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace.ops.mamba2_decode.kernel import convolve_kernel, gate_norm_kernel, state_kernel
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.gated_delta_decode import ColumnsRows, ReplayRows, Ring
    from headrace.ops.mamba2_decode import MixerWeights

CHANNELS = 256
"""Channels that a program convolves."""

TILE = 4096
"""Elements of a head's state that a program holds: 32 registers of a thread."""

BATCH = 4
"""Pending tokens whose loads are on the way together."""

PART = 1024
"""Columns of a program that gates without a norm."""

_PER_WARP, _MAX_WARPS, _MIN_PADDED = 512, 16, 32
"""Normed columns of a warp, most warps, and fewest columns that threads do not share."""


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
    """Decode or verify; see the package."""
    heads, p_dim, d_dim = state.shape[1:]
    n, width = token_index.shape
    taps, channels = weights.conv.shape
    inner = heads * p_dim
    shared = (channels - inner) // 2
    row_names = ("base_block", "base_len", "computed", "write_block", "write_len", "ring_block")
    places: dict[str, Tensor | None]
    if ring is None:
        blocks: Tensor = rows.window_blocks  # type: ignore[union-attr]
        places = {"blocks": blocks, "accepted": rows.accepted}  # type: ignore[union-attr]
        places |= dict.fromkeys(row_names)
        blocks_stride, entries = blocks.stride(0), taps - 2 + width
    else:
        places = {"blocks": None, "accepted": None}
        places |= {name: getattr(rows, name) for name in row_names}
        blocks_stride, entries = 0, taps - 1
    # Written by one launch and read by the next: x, B and C, then outputs. L2 keeps it.
    made = inputs.new_empty(inputs.shape[0], channels + inner, dtype=torch.float32)
    sizes: dict[str, Any] = {"MADE": made.shape[1], "QUERY": width, "IS_REPLAY": ring is not None}
    length = 0 if ring is None else ring.inputs.shape[1]
    launch_kernel(
        convolve_kernel,
        (n, -(-channels // CHANNELS)),
        inputs,
        weights.conv,
        weights.conv_bias,
        window,
        token_index,
        query_lens,
        *places.values(),
        None if ring is None else ring.inputs,
        None if ring is None else ring.updates,
        made,
        inputs.stride(0),
        blocks_stride,
        window.stride(0),
        F=channels,
        INNER=inner,
        SHARED=shared,
        UPDATE=shared + inner + heads,
        TAPS=taps,
        ENTRIES_PADDED=1 << max(entries - 1, 1).bit_length(),
        RING=length,
        BLOCK=CHANNELS,
        **sizes,
        num_warps=2,
    )
    state_rows = min(max(TILE // d_dim, 1), p_dim)
    launch_kernel(
        state_kernel,
        (n, heads, p_dim // state_rows),
        dt,
        weights.dt_bias,
        weights.decay_rate,
        weights.skip,
        state,
        token_index,
        query_lens,
        *places.values(),
        None if ring is None else ring.updates,
        made,
        dt.stride(0),
        blocks_stride,
        state.stride(0),
        H=heads,
        P=p_dim,
        D=d_dim,
        GROUPS=shared // d_dim,
        ROWS=state_rows,
        BATCH=BATCH,
        RING=length,
        INTERVAL=1 if ring is None else ring.interval,
        **sizes,
        num_warps=4,
    )
    part = min(PART, inner) if weights.norm is None else weights.norm.shape[1]
    padded = max(1 << (part - 1).bit_length(), _MIN_PADDED)
    launch_kernel(
        gate_norm_kernel,
        (n, width, -(-inner // part)),
        made,
        gate,
        weights.norm,
        out,
        token_index,
        query_lens,
        *(places[name] for name in ("blocks", "accepted", "base_block", "ring_block")),
        gate.stride(0),
        out.stride(0),
        blocks_stride,
        weights.norm_eps,
        F=channels,
        INNER=inner,
        PART=part,
        PART_PADDED=padded,
        GATES_AFTER=weights.gates_after_norm,
        **sizes,
        num_warps=min(max(padded // _PER_WARP, 1), _MAX_WARPS),
    )
