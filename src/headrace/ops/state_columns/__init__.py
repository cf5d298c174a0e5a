"""Move and save recurrent states between the columns of a state table (align.md, sections 3 to 6).

Column p of a sequence's table row ends as the state after exactly (p+1)*bs tokens. Before that it
holds an earlier state, or the state after one draft. Two copies keep that true:

* `premove`, before the forward pass: the running state goes to the column that this step writes.
* `save`, after the verification: if a column boundary lies inside the kept tokens, the state
  exactly there is brought from its scratch column to the column that it completes.

How a step uses them (worker, one stream, in this order)::

    snapshot_accepted, snapshot_column = accepted.clone(), state_column.clone()
    premove(pools, table, scheduled=..., accepted=snapshot_accepted, state_column=snapshot_column,
            accepted_out=accepted, state_column_out=state_column, computed=computed, ...)
    ...                        # metadata (accepted is gathered now), forward, sample, verify
    accepted[...] = ...        # this step's counts, at least 1
    snapshot_accepted = accepted.clone()
    save(pools, table, scheduled=..., accepted=snapshot_accepted, state_column=state_column,
         accepted_out=accepted, new_computed=computed_after, ...)

Two index spaces. Per-sequence arrays (`table`, `computed`, `accepted`, `state_column`,
`new_computed`) have R places. Batch arrays (`scheduled`, `drafts`) have N rows. `rows` [N] names
the place of each batch row (the `slots` layout, for example [5, 2, 7]); without it, row i is place
i.

What holds for both copies, in the reference and in the kernels:

* Decisions read `accepted` and `state_column`, which nobody writes during the call; results go to
  `accepted_out` and `state_column_out`, which must be other memory. Each has one writer per place.
* All copies of one call act as one simultaneous assignment.
* A row with 0 scheduled tokens, with accepted 0, or without a block in its running column changes
  nothing at all; padded rows may name any place. A copy from a null block is left out. Block 0 is
  never changed.
* There is no host synchronisation. Accepted above `max_accepted` fails an asynchronous assertion.

`plan_move` and `plan_save` give the decisions alone, for N rows at once.

Shapes: L layers, S state blocks, R places, N rows, M columns of a table row, E window entries
(W-1+s), F channels of a window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.state_columns import reference
from headrace.ops.state_columns.plan import MovePlan, SavePlan, plan_move, plan_save
from headrace.ops.state_columns.pool import StatePool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "MovePlan",
    "SavePlan",
    "StatePool",
    "plan_move",
    "plan_save",
    "premove",
    "save",
]


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
    """Bring each row's running state to the column that this step writes.

    Args:
        pools: State tensors of one group. Overwritten at the moved rows' target blocks only.
        table: State-block ids by column, [R, M] i32.
        computed: Tokens in each sequence's state before the step, [R] i32 or i64.
        scheduled: Tokens of this step, drafts included, [N]; 0 for padded rows.
        accepted: Tokens the last verify kept, [R]; a snapshot, not written here.
        state_column: Column of each running state, -1 if none, [R]; a snapshot, not written here.
        accepted_out: Counts that the step's kernels use, [R]; 1 where the column changed. Other
            memory than accepted. Places without a taking-part row keep their value.
        state_column_out: Column that this step writes, [R]; other memory than state_column.
        block_size: bs, tokens per column.
        max_accepted: s + 1.
        rows: Place of each batch row, [N], distinct where scheduled > 0; None for row i = place i.

    Raises:
        ValueError: An output shares memory with the array that the decisions read.
    """
    run = reference.premove
    if table.device.type != "cpu":
        from headrace.ops.state_columns import fused  # noqa: PLC0415  needs Triton

        run = fused.premove
    run(
        pools,
        table,
        computed=computed,
        scheduled=scheduled,
        accepted=accepted,
        state_column=state_column,
        accepted_out=accepted_out,
        state_column_out=state_column_out,
        block_size=block_size,
        max_accepted=max_accepted,
        rows=rows,
    )


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
    """Save the state at a column boundary that lies inside the kept tokens of a verify.

    The tokens that are valid after the step come either precomputed (`new_computed`) or are derived
    from `computed` (before the step) and `drafts`.

    Args:
        pools: State tensors of one group. Overwritten at the completed columns' blocks only.
        table: State-block ids by column, [R, M] i32.
        scheduled: Tokens of this step, drafts included, [N]; 0 for padded rows.
        accepted: Tokens this step's verify kept, bonus included, [R]; a snapshot, not written here.
        state_column: Column that this step wrote, [R].
        accepted_out: [R]; becomes 1 where the saved column is the running one. Other memory than
            accepted. All other places keep their value.
        block_size: bs, tokens per column.
        max_accepted: s + 1.
        computed: Tokens in each state before this step, [R]; needed without new_computed.
        drafts: Drafts among the scheduled tokens, [N]; needed without new_computed.
        new_computed: Valid tokens after this step, [R].
        rows: Place of each batch row, [N], distinct where scheduled > 0; None for row i = place i.

    Raises:
        ValueError: accepted_out shares memory with accepted, or neither or both ways of telling
            the valid tokens are given.
    """
    run = reference.save
    if table.device.type != "cpu":
        from headrace.ops.state_columns import fused  # noqa: PLC0415  needs Triton

        run = fused.save
    run(
        pools,
        table,
        scheduled=scheduled,
        accepted=accepted,
        state_column=state_column,
        accepted_out=accepted_out,
        block_size=block_size,
        max_accepted=max_accepted,
        computed=computed,
        drafts=drafts,
        new_computed=new_computed,
        rows=rows,
    )
