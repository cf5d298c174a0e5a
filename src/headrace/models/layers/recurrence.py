"""Any recurrence over the rows of a step: where states come from, where they go, in what order.

A family brings its arithmetic, `Recurrence`: one token for many rows, and pieces of prompts. All
the rest is the same for every recurrent layer and is here: columns or replay, accepted offsets,
prompt rows with exports, generated tokens that are computed again, rows that must change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from headrace.models.batch import StateGroupSpec, StateTensorSpec
from headrace.models.layers.state_plan import ColumnsPlan
from headrace.ops.gated_delta_step import store_states

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.layers.state_plan import KnownPlan, ReplayPlan, ScanPlan, StatePlan


def convolved_group(
    kind: str,
    layers: tuple[int, ...],
    *,
    window: tuple[int, int],
    state: tuple[int, ...],
    update_width: int,
    dtype: str,
    state_dtype: str,
) -> StateGroupSpec:
    """Describe the pools of layers that convolve their inputs before they recur.

    Args:
        kind: The group's name.
        layers: Model layer indices.
        window: Inputs kept and channels, [W-1+s, F].
        state: Shape of a recurrent state.
        update_width: Numbers of an update, U.
        dtype: Of the conv windows.
        state_dtype: Of the recurrent states.
    """
    return StateGroupSpec(
        kind=kind,
        layers=layers,
        state=(
            StateTensorSpec(name="window", kind="window", shape=window, dtype=dtype),
            StateTensorSpec(name="recurrent", kind="recurrent", shape=state, dtype=state_dtype),
        ),
        ring=(
            StateTensorSpec(name="conv_input", kind="ring", shape=window[1:], dtype=dtype),
            StateTensorSpec(name="update", kind="ring", shape=(update_width,), dtype="float32"),
        ),
    )


class Recurrence(Protocol):
    """The arithmetic of one family's state.

    A token is a row of f32 numbers: first the update, which is all that the state takes of it, then
    what its output reads the state with. An update of zeros leaves a state as it is.
    """

    @property
    def update_width(self) -> int:
        """Numbers of an update, U."""

    def step(self, state: Tensor, token: Tensor, *, wants_output: bool) -> Tensor | None:
        """Apply one token to the state of each row, in place.

        Args:
            state: [N, ...] f32, contiguous.
            token: Whole tokens [N, I], or only updates [N, U] if no output is wanted.
            wants_output: Whether to read the state too.

        Returns:
            [N, O] f32, or None.
        """

    def scan(
        self,
        state: Tensor,
        tokens: Tensor,
        *,
        rows_per_round: tuple[int, ...],
        snapshots: tuple[tuple[int, int], ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """Run several prompts piece by piece.

        Args:
            state: States before the first pieces, [R, ...] f32; overwritten with those after the
                last.
            tokens: Pieces, round by round, [X, g, I]; zeros where a piece is shorter.
            rows_per_round: Prompts that have a piece in each round.
            snapshots: (round, prompt) pairs after which a copy of the state is wanted.

        Returns:
            [X, g, O] f32, and the wanted states.
        """


def recur(
    tokens: Tensor, recurrence: Recurrence, pool: Tensor, ring: Tensor | None, plan: StatePlan
) -> Tensor:
    """Run one layer's recurrence over the packed tokens of a step and update its states.

    Args:
        tokens: [T, I] f32.
        recurrence: The arithmetic.
        pool: The layer's states, [S, ...]; overwritten at the plan's blocks.
        ring: The layer's ring of updates, [RB, R, U] f32, with the replay scheme.
        plan: The step's indices.

    Returns:
        Outputs of the real tokens, [num_tokens, O] f32.
    """
    parts = []
    if plan.verify is not None:
        assert plan.rows is not None
        rows = tokens.index_select(0, plan.rows.token_index).view(*plan.rows.shape, -1)
        if isinstance(plan.verify, ColumnsPlan):
            out = _step_columns(rows, recurrence, pool, plan.verify)
        else:
            assert ring is not None, "the replay scheme needs a ring"
            out = _step_replay(rows, recurrence, pool, ring, plan.verify)
        parts.append(out.index_select(0, plan.rows.places))
    if plan.known is not None:
        parts.append(_recur_known(tokens, recurrence, pool, plan.known))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _step_rows(
    rows: Tensor, recurrence: Recurrence, state: Tensor, columns: ColumnsPlan | None, pool: Tensor
) -> Tensor:
    """Step [N, Q, I] tokens; with columns, the state after token t goes to column t.

    Returns:
        [N * Q, O] f32.
    """
    outputs = []
    for t in range(rows.shape[1]):
        out = recurrence.step(state, rows[:, t], wants_output=True)
        assert out is not None
        outputs.append(out)
        if columns is not None:
            store_states(pool, columns.target_blocks[t], state, columns.is_valid[t])
    return outputs[0] if len(outputs) == 1 else torch.stack(outputs, 1).flatten(0, 1)


def _step_columns(
    rows: Tensor, recurrence: Recurrence, pool: Tensor, columns: ColumnsPlan
) -> Tensor:
    state = pool.index_select(0, columns.source_block).float()
    return _step_rows(rows, recurrence, state, columns, pool)


def _step_replay(
    rows: Tensor, recurrence: Recurrence, pool: Tensor, ring: Tensor, replay: ReplayPlan
) -> Tensor:
    """Bring the base up to date, step the generating rows, and put their updates in the ring."""
    width = recurrence.update_width
    entries = ring.view(-1, width)
    state = pool.index_select(0, replay.base_block).float()
    if replay.num_pending:
        base = _replay_pending(state, entries, recurrence, replay)
        store_states(pool, replay.write_block, base, replay.is_write)
    out = _step_rows(rows, recurrence, state, None, pool)
    updates = rows[..., :width].flatten(0, 1)
    entries.index_copy_(0, replay.ring_rows, updates.where(replay.is_valid, entries[:1]))
    return out


def _replay_pending(
    state: Tensor, entries: Tensor, recurrence: Recurrence, replay: ReplayPlan
) -> Tensor:
    """Apply the pending updates to the state in place.

    Returns:
        The state at the row's write position, where it has one, [N, ...].
    """
    pending = entries.index_select(0, replay.pending).view(*replay.is_pending.shape, -1)
    # Entries that are not pending may hold anything.
    pending = pending.where(replay.is_pending[..., None], pending.new_zeros(()))
    base = torch.zeros_like(state)
    ones = [1] * (state.dim() - 1)
    for i in range(replay.num_pending):
        recurrence.step(state, pending[:, i], wants_output=False)
        torch.where(replay.is_write_at[i].view(-1, *ones), state, base, out=base)
    return base


def _recur_known(tokens: Tensor, recurrence: Recurrence, pool: Tensor, plan: KnownPlan) -> Tensor:
    """Run the known rows.

    Returns:
        Outputs of their tokens in packed order, [tokens, O] f32.
    """
    states = pool.new_zeros(plan.num_rows, *pool.shape[1:], dtype=torch.float32)
    if plan.source_blocks is not None:
        stored = pool.index_select(0, plan.source_blocks)
        states.index_copy_(0, plan.sourced, stored.float())
    parts = []
    if plan.scan is not None:
        parts.append(_scan(tokens, recurrence, states, pool, plan.scan))
    for row, offset, length in plan.steps:
        own = tokens[offset : offset + length][None]
        parts.append(_step_rows(own, recurrence, states[row : row + 1], None, pool))
    pool.index_copy_(0, plan.target_blocks, states.to(pool.dtype))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.index_select(0, plan.places)


def _scan(
    tokens: Tensor, recurrence: Recurrence, states: Tensor, pool: Tensor, scan: ScanPlan
) -> Tensor:
    """Scan the prompt rows; their entries of `states` become the states after them.

    Returns:
        Outputs of all places, [X * g, O] f32.
    """
    pieces = sum(scan.rows_per_round)
    inputs = tokens.index_select(0, scan.tokens).view(pieces, -1, tokens.shape[1])
    if scan.is_real is not None:
        inputs = inputs.where(scan.is_real, inputs.new_zeros(()))
    carried = states.index_select(0, scan.rows)
    out, taken = recurrence.scan(
        carried, inputs, rows_per_round=scan.rows_per_round, snapshots=scan.snapshots
    )
    states.index_copy_(0, scan.rows, carried)
    for block, state in zip(scan.snapshot_blocks, taken, strict=True):
        pool[block].copy_(state)
    return out.reshape(-1, out.shape[-1])
