"""The two copies in PyTorch: the specification of the kernels, and what runs on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.state_columns.plan import plan_move, plan_save

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.ops.state_columns.plan import MovePlan, SavePlan
    from headrace.ops.state_columns.pool import StatePool


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
    places = _places(rows, scheduled)
    before = accepted[places].to(torch.int64)
    _assert_counts(before, max_accepted)
    blocks = table[places].to(torch.int64)
    plan = plan_move(
        computed=computed[places],
        scheduled=scheduled,
        accepted=before,
        state_column=state_column[places],
        block_size=block_size,
    )
    active = plan.active & (_column(blocks, plan.target) != 0)
    _copy(pools, blocks, active, plan)
    _assign(accepted_out, places, active, plan.accepted)
    _assign(state_column_out, places, active, plan.target)


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
    places = _places(rows, scheduled)
    kept = accepted[places].to(torch.int64)
    _assert_counts(kept, max_accepted)
    length, drafts = valid_length(computed, drafts, new_computed)
    ends = length[places].to(torch.int64)
    if drafts is not None:
        ends = ends + scheduled - drafts + kept - 1
    blocks = table[places].to(torch.int64)
    plan = plan_save(
        new_computed=ends,
        scheduled=scheduled,
        accepted=kept,
        state_column=state_column[places],
        block_size=block_size,
    )
    active = _column(blocks, plan.source) != 0
    _copy(pools, blocks, active, plan)
    _assign(accepted_out, places, active & plan.resets, torch.ones_like(kept))


def _copy(
    pools: Sequence[StatePool],
    blocks: Tensor,
    active: Tensor,
    plan: MovePlan | SavePlan,
) -> None:
    """Copy states between columns of the same row, [N] rows at once.

    Every source is read before anything is written. Rows that copy nothing write the null block's
    own bytes back to it, since torch has no masked scatter without a host synchronisation.
    """
    window_block = _column(blocks, plan.source)
    state_block = _column(blocks, plan.source + plan.offset)
    target_block = _column(blocks, plan.target)
    copies = active & plan.copies & (window_block != 0) & (state_block != 0) & (target_block != 0)
    nowhere = torch.zeros_like(target_block)
    target_block = torch.where(copies, target_block, nowhere)
    state_block = torch.where(copies, state_block, nowhere)
    window_block = torch.where(copies, window_block, nowhere)
    shift = torch.where(copies, plan.offset, nowhere)
    for pool in pools:
        tensor = pool.tensor
        if pool.kind == "recurrent":
            tensor[:, target_block] = tensor[:, state_block]
            continue
        axis = 2 if pool.entries == "first" else tensor.dim() - 1
        old = tensor[:, target_block]
        entry = torch.arange(tensor.shape[axis], device=tensor.device) + shift[:, None]
        inside = entry < tensor.shape[axis]
        shape = [1] * tensor.dim()
        shape[1], shape[axis] = entry.shape
        index = entry.clamp(max=tensor.shape[axis] - 1).view(shape).expand(old.shape)
        shifted = tensor[:, window_block].gather(axis, index)
        tensor[:, target_block] = torch.where(inside.view(shape), shifted, old)


def _places(rows: Tensor | None, scheduled: Tensor) -> Tensor:
    """Place of each batch row, [N] i64."""
    if rows is None:
        return torch.arange(scheduled.shape[0], device=scheduled.device)
    return rows.to(torch.int64)


def _column(blocks: Tensor, column: Tensor) -> Tensor:
    """Block ids [N] of one column per row; the null block for columns outside the table."""
    inside = (column >= 0) & (column < blocks.shape[1])
    clamped = column.clamp(0, blocks.shape[1] - 1)
    return torch.where(inside, blocks.gather(1, clamped[:, None])[:, 0], 0)


def _assign(out: Tensor, places: Tensor, active: Tensor, value: Tensor) -> None:
    """Set out[places] where active. Adding differences lets padded rows name any place."""
    change = torch.where(active, value.to(out.dtype) - out[places], torch.zeros_like(out[places]))
    out.index_add_(0, places, change)


def _assert_counts(accepted: Tensor, max_accepted: int) -> None:
    """Fail, without waiting for the device, if a count is beyond what a step can keep."""
    torch._assert_async((accepted <= max_accepted).all())  # noqa: SLF001  no public form


def valid_length(
    computed: Tensor | None, drafts: Tensor | None, new_computed: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Choose between the two ways of telling the valid tokens after a step.

    Returns:
        The length after the step and None, or the length before it and the drafts.
    """
    if new_computed is not None and computed is None and drafts is None:
        return new_computed, None
    if new_computed is None and computed is not None and drafts is not None:
        return computed, drafts
    msg = "give either new_computed, or computed and drafts"
    raise ValueError(msg)


def refuse_shared(read: Tensor, written: Tensor, name: str) -> None:
    """Refuse the founding fault: a count is reset while others still decide by it."""
    starts = read.data_ptr(), written.data_ptr()
    ends = (
        starts[0] + read.numel() * read.element_size(),
        starts[1] + written.numel() * written.element_size(),
    )
    if max(starts) < min(ends):
        msg = f"{name} and {name}_out share memory; pass a snapshot, for example {name}.clone()"
        raise ValueError(msg)
