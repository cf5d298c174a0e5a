"""Which state goes where: the arithmetic of align.md, sections 4 and 6, for N rows at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MovePlan:
    """What happens before the forward pass.

    Attributes:
        active: Rows that take part in the step, [N] bool.
        copies: Rows whose state changes column, [N] bool; a subset of active.
        source: Column with the conv window, [N] i64; its recurrent state is `offset` further right.
        target: Column that the step writes, [N] i64.
        offset: accepted - 1, [N] i64.
        accepted: Accepted count that the step's kernels must use, [N] i64.
    """

    active: Tensor
    copies: Tensor
    source: Tensor
    target: Tensor
    offset: Tensor
    accepted: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavePlan:
    """What happens after the verification.

    Attributes:
        copies: Rows whose kept tokens contain a boundary that is not yet in its column, [N] bool.
        source: Running column, [N] i64; the recurrent state is `offset` further right.
        target: Column completed by the copy, [N] i64.
        offset: Tokens from the first kept token to the boundary, [N] i64.
        resets: Rows whose accepted count becomes 1, [N] bool.
    """

    copies: Tensor
    source: Tensor
    target: Tensor
    offset: Tensor
    resets: Tensor


def plan_move(
    *, computed: Tensor, scheduled: Tensor, accepted: Tensor, state_column: Tensor, block_size: int
) -> MovePlan:
    """Decide which running states must change column before the forward pass.

    Args:
        computed: Tokens in each row's state before the step, [N].
        scheduled: Tokens of this step, drafts included, [N]; 0 for rows that take no part.
        accepted: Tokens the last verify kept, bonus included, [N]; 1 for new and prefill rows.
        state_column: Column of the running state, [N]; -1 if there is none yet.
        block_size: bs, tokens per column.

    Returns:
        Columns, offsets and counts; for rows that are not active, accepted stays as it was.
    """
    accepted = accepted.to(torch.int64)
    previous = state_column.to(torch.int64)
    ends = computed.to(torch.int64) + scheduled.to(torch.int64)
    current = torch.div(ends + block_size - 1, block_size, rounding_mode="floor") - 1
    active = (scheduled > 0) & (accepted > 0)
    copies = active & (previous >= 0) & (previous != current)
    return MovePlan(
        active=active,
        copies=copies,
        source=previous,
        target=current,
        offset=accepted - 1,
        accepted=torch.where(copies, torch.ones_like(accepted), accepted),
    )


def plan_save(
    *,
    new_computed: Tensor,
    scheduled: Tensor,
    accepted: Tensor,
    state_column: Tensor,
    block_size: int,
) -> SavePlan:
    """Decide which states at a boundary must be saved after the verification.

    Args:
        new_computed: Valid tokens after this step, [N]: computed + scheduled - drafts +
            accepted - 1.
        scheduled: Tokens of this step, [N]; 0 for rows that take no part.
        accepted: Tokens this step's verify kept, bonus included, [N].
        state_column: Column that this step wrote, [N].
        block_size: bs, tokens per column, larger than the most drafts of a step.

    Returns:
        Columns and offsets; without meaning where neither copies nor resets is set.
    """
    accepted = accepted.to(torch.int64)
    source = state_column.to(torch.int64)
    kept = new_computed.to(torch.int64)
    running = kept - (accepted - 1)
    column_end = torch.div(kept, block_size, rounding_mode="floor")
    aligned = column_end * block_size
    offset = aligned - running
    target = column_end - 1
    found = (scheduled > 0) & (accepted > 0) & (source >= 0) & (offset >= 0)
    same = source == target
    return SavePlan(
        copies=found & ~(same & (offset == 0)),
        source=source,
        target=target,
        offset=offset,
        resets=found & same,
    )
