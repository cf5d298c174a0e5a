"""Launches of the fused kernels: one launch moves all layers and tensors of all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.state_columns.kernel import columns_kernel
from headrace.ops.state_columns.reference import refuse_shared, valid_length
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.ops.state_columns.pool import StatePool

TILES = 8
"""Programs that share one state of one layer. Most find nothing to do and leave at once."""

CHANNEL_TILE, BLOCK = 256, 2048
"""Channels of a window, and elements of a state, that a program copies at a time."""


def premove(
    pools: Sequence[StatePool],
    table: Tensor,
    *,
    computed: Tensor,
    scheduled: Tensor,
    accepted: Tensor,
    state_column: Tensor,
    accepted_out: Tensor,
    state_column_out: Tensor,
    block_size: int,
    max_accepted: int,
    rows: Tensor | None = None,
) -> None:
    """Bring each row's running state to the column that this step writes; see the package."""
    refuse_shared(accepted, accepted_out, "accepted")
    refuse_shared(state_column, state_column_out, "state_column")
    counts = (scheduled, computed, None, accepted, state_column, rows, accepted_out)
    _launch(
        pools, table, (*counts, state_column_out),
        block_size=block_size, max_accepted=max_accepted, is_save=False,
    )  # fmt: skip


def save(
    pools: Sequence[StatePool],
    table: Tensor,
    *,
    scheduled: Tensor,
    accepted: Tensor,
    state_column: Tensor,
    accepted_out: Tensor,
    block_size: int,
    max_accepted: int,
    computed: Tensor | None = None,
    drafts: Tensor | None = None,
    new_computed: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """Save the state at a boundary inside the kept tokens of a verify; see the package."""
    refuse_shared(accepted, accepted_out, "accepted")
    length, drafts = valid_length(computed, drafts, new_computed)
    counts = (scheduled, length, drafts, accepted, state_column, rows, accepted_out)
    _launch(
        pools, table, (*counts, None),
        block_size=block_size, max_accepted=max_accepted, is_save=True,
    )  # fmt: skip


def _launch(
    pools: Sequence[StatePool],
    table: Tensor,
    counts: tuple[Tensor | None, ...],
    *,
    block_size: int,
    max_accepted: int,
    is_save: bool,
) -> None:
    scheduled, computed, drafts, accepted, state_column, rows, *outputs = counts
    assert scheduled is not None
    if table.stride(1) != 1:
        msg = f"a table row must be contiguous, strides are {table.stride()}"
        raise ValueError(msg)
    layers = pools[0].tensor.shape[0]
    sizes = [_window_size(pool) for pool in pools]
    launch_kernel(
        columns_kernel,
        (scheduled.shape[0], layers * len(pools), TILES),
        tuple(pool.tensor for pool in pools),
        tuple(pool.tensor.stride(0) for pool in pools),
        tuple(pool.tensor.stride(1) for pool in pools),
        table,
        scheduled,
        computed,
        drafts,
        accepted,
        state_column,
        rows,
        *outputs,
        table.stride(0),
        COLUMNS=table.shape[1],
        BLOCK_SIZE=block_size,
        MAX_ACCEPTED=max_accepted,
        IS_SAVE=is_save,
        IS_DERIVED=drafts is not None,
        IS_MAPPED=rows is not None,
        IS_WINDOW=tuple(pool.kind == "window" for pool in pools),
        ENTRIES=tuple(entries for entries, _ in sizes),
        ENTRIES_PADDED=tuple(1 << (entries - 1).bit_length() for entries, _ in sizes),
        CHANNELS=tuple(channels for _, channels in sizes),
        ENTRIES_FIRST=tuple(pool.entries == "first" for pool in pools),
        CHANNEL_TILE=CHANNEL_TILE,
        BLOCK=BLOCK,
        TILES=TILES,
        num_warps=4,
        debug=True,  # the assertion on accepted
    )


def _window_size(pool: StatePool) -> tuple[int, int]:
    """Entries and channels of a window; (1, elements) of a recurrent state."""
    block = pool.tensor.shape[2:]
    elements = int(torch.Size(block).numel())
    if pool.kind == "recurrent":
        return 1, elements
    entries = int(block[0] if pool.entries == "first" else block[-1])
    return entries, elements // entries
