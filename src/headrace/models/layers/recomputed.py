"""Generated tokens that are computed again, through the kernels that computed them first.

With kernels "fixed" such a row gives the bits that its tokens had: it is cut into runs of as many
tokens as the kernels of generated tokens take. Attention takes all runs at once, each as a row of
its own. A state needs one run after the other: rows are brought to scratch blocks, which have room
in their windows for a run, go through the runs there, all rows together, and back to the pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace.models.batch import ColumnsMetadata

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import KnownRow, StepBatch, VerifyRows

RUN = 8
"""Tokens of a row that the kernels of generated tokens take at most; what rows are filled up to."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeRows:
    """Rows that the kernel of generated tokens attends from.

    Attributes:
        token_index: Packed index of each row's tokens, [N, Q] i64.
        query_lens: [N] i64.
        seq_lens: Tokens in each sequence up to the row's last one, [N] i64.
        max_seq_len: Host-known upper bound of them.
        block_table: KV blocks, [N, M] i32.
    """

    token_index: Tensor
    query_lens: Tensor
    seq_lens: Tensor
    max_seq_len: int
    block_table: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateRun:
    """One run of each row.

    Attributes:
        token_index: [R, RUN] i64.
        query_lens: [R] i64; 0 for rows that have ended.
        states: Their scratch blocks.
    """

    token_index: Tensor
    query_lens: Tensor
    states: ColumnsMetadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecomputedStates:
    """The rows' states of one group.

    Attributes:
        num_rows: R; row r has scratch block r + 1.
        sources: Blocks of the states before the rows that have one, [..] i64.
        sourced: Scratch blocks of those rows, [..] i64.
        targets: Blocks that get the states after the rows, [R] i64.
        runs: In order.
        last_run: Tokens of each row's last run, [R] i64.
    """

    num_rows: int
    sources: Tensor
    sourced: Tensor
    targets: Tensor
    runs: tuple[StateRun, ...]
    last_run: Tensor


def filled_up(rows: VerifyRows) -> DecodeRows:
    """Return generating rows with room for RUN tokens each, whatever the drafts of the longest."""
    missing = RUN - rows.token_index.shape[1]
    return DecodeRows(
        token_index=functional.pad(rows.token_index, (0, missing)),
        query_lens=rows.query_lens,
        seq_lens=rows.seq_lens,
        max_seq_len=rows.max_seq_len,
        block_table=rows.block_table,
    )


def recomputed_rows(batch: StepBatch) -> tuple[KnownRow, ...]:
    """Return the rows of generated tokens that a step computes again."""
    return tuple(row for row in batch.known if row.path == "step")


def plan_recomputed_attention(batch: StepBatch) -> DecodeRows | None:
    """List all runs of a step's recomputed rows; None without such rows."""
    rows = recomputed_rows(batch)
    if not rows:
        return None
    runs = [(row, done, count) for row in rows for done, count in _runs(row)]
    numbers: list[int] = []
    for row, done, count in runs:
        numbers += _places(row, done, count)
    numbers += [count for _, _, count in runs]
    ends = [row.start + done + count for row, done, count in runs]
    packed = torch.tensor(numbers + ends, device=batch.token_ids.device)
    index, lengths, seq_lens = packed.split_with_sizes((RUN * len(runs), len(runs), len(runs)))
    width = max(len(row.block_table) for row in rows)
    wide = [functional.pad(row.block_table, (0, width - len(row.block_table))) for row in rows]
    return DecodeRows(
        token_index=index.view(-1, RUN),
        query_lens=lengths,
        seq_lens=seq_lens,
        max_seq_len=max(ends),
        block_table=torch.stack(
            [table for row, table in zip(rows, wide, strict=True) for _ in _runs(row)]
        ),
    )


def plan_recomputed_states(batch: StepBatch, group: int) -> RecomputedStates | None:
    """List a step's recomputed rows of one group, run by run; None without such rows.

    Args:
        batch: The step.
        group: Place of the state group in the model's list.
    """
    rows = recomputed_rows(batch)
    if not rows:
        return None
    device = batch.token_ids.device

    def on_device(values: list[int], dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    states = [row.states[group] for row in rows]
    with_state = [r for r, state in enumerate(states) if state.source_block is not None]
    blocks = on_device([r + 1 for r in range(len(rows))], torch.int32)[:, None]
    cut = [_runs(row) for row in rows]
    runs = []
    for at in range(max(map(len, cut))):
        own = [parts[at] if at < len(parts) else (0, 0) for parts in cut]
        places: list[int] = []
        for row, (done, count) in zip(rows, own, strict=True):
            places += _places(row, done, count)
        accepted = torch.full((len(rows),), RUN if at else 1, dtype=torch.int32, device=device)
        runs.append(
            StateRun(
                token_index=on_device(places).view(-1, RUN),
                query_lens=on_device([count for _, count in own]),
                states=ColumnsMetadata(
                    window_blocks=blocks.expand(-1, RUN).contiguous(), accepted=accepted
                ),
            )
        )
    return RecomputedStates(
        num_rows=len(rows),
        sources=on_device([states[r].source_block or 0 for r in with_state]),
        sourced=on_device([r + 1 for r in with_state]),
        targets=on_device([state.target_block for state in states]),
        runs=tuple(runs),
        last_run=on_device([parts[-1][1] for parts in cut]),
    )


def _runs(row: KnownRow) -> list[tuple[int, int]]:
    """Tokens of the row before each run, and in it."""
    return [(done, min(RUN, row.length - done)) for done in range(0, row.length, RUN)]


def _places(row: KnownRow, done: int, count: int) -> list[int]:
    """Packed places of a run, filled up with 0."""
    first = row.token_offset + done
    return [*range(first, first + count), *[0] * (RUN - count)]
