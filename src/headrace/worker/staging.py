"""From a SchedulerOutput to a frame's inputs: everything ragged becomes a host-known integer.

The stager also keeps what the sampler needs of each sequence, by slot: it is gathered for the rows
of a step and staged with them, so that it follows a row wherever the layout puts it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.models.batch import ROW_TILE
from headrace.ops.gated_delta_prefill import PromptRow, number_rows
from headrace.ops.paged_prefill import Span
from headrace.worker.buffers import MAX_LOGPROBS, WorkerSizes
from headrace.worker.launches import KnownShape, StepShape
from headrace.worker.rows import COUNT_NAMES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from headrace import rt
    from headrace.ops.gated_delta_prefill import PrefillLayout
    from headrace.ops.paged_prefill import TileLayout, Tiling
    from headrace.worker.graphs import Padding
    from headrace.worker.rows import CompactRows
    from headrace.worker.step import (
        ForkPlan,
        KnownPlan,
        NewSequence,
        SchedulerOutput,
        VerifyPlan,
    )

_NO_LOGPROBS = -2
_ALL_LOGPROBS = -1
_LEAST_TEMPERATURE = 1e-10
"""Logits divided by less could overflow. At this the noise is far below the distance of two float32
logits, so the likeliest token wins as at any temperature below."""
_LEAST_TOP_P = float(np.finfo(np.float32).tiny)


class _Put:
    """Writes fields of an open stage and notes how many leading rows of each must be copied."""

    def __init__(self, stage: rt.Stage) -> None:
        self._stage = stage
        self.rows: dict[str, int] = {}

    def __call__(self, name: str, values: Sequence[Any] | np.ndarray, at: int = 0) -> None:
        """Write values from place `at` on."""
        end = at + len(values)
        if end > at:
            self._stage[name][at:end] = values
            self.rows[name] = max(self.rows.get(name, 0), end)


@dataclass(slots=True)
class _Ragged:
    """What has been laid out so far.

    Attributes:
        num_tokens: Packed tokens.
        table_end: Entries of the flat KV tables.
        tables: Of each known row: (offset, width).
        slots: Of each sampling row, [rows] i64.
        first: First sample position of each row.
    """

    num_tokens: int
    table_end: int
    tables: list[tuple[int, int]]
    slots: np.ndarray
    first: list[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedStep:
    """What was staged.

    Attributes:
        shape: The step's shape.
        padded: Its shape with padding, or None if it has none.
        first: First sample position of each row; padding comes after all of them.
        rows: Leading rows that were copied of each field.
    """

    shape: StepShape
    padded: StepShape | None
    first: tuple[int, ...]
    rows: dict[str, int]


class Stager:
    """Writes and commits the inputs of one step after another.

    Args:
        sizes: The worker's.
        num_tables: State tables.
        drafter: Which fields a drafter reads.
        tilings: How known rows are cut into tiles, by the field that gets a model's list.
        prompt_grid: Tokens between scan points where kernels take a list of prompts, else None.
    """

    def __init__(
        self,
        sizes: WorkerSizes,
        *,
        num_tables: int,
        drafter: str,
        tilings: Mapping[str, Tiling | None],
        prompt_grid: int | None,
    ) -> None:
        self._sizes = sizes
        self._tilings = tilings
        self._prompt_grid = prompt_grid
        self._num_tables = num_tables
        self._drafter = drafter
        slots = sizes.max_num_seqs
        self._floats = np.zeros((slots, 3), dtype=np.float32)
        self._ints = np.zeros((slots, 2), dtype=np.int64)
        self._logprobs = np.full(slots, _NO_LOGPROBS, dtype=np.int64)
        # Most steps have the row lengths of the one before.
        self._last: (
            tuple[np.ndarray, tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] | None
        ) = None

    def admit(self, new: NewSequence) -> None:
        """Note how a sequence samples."""
        params, vocab = new.params, self._sizes.vocab_size
        # Rounding must not drop a tail that top_p 1 keeps, nor make 0 of a small one: that would
        # keep no token at all.
        top_p = 2.0 if params.top_p >= 1.0 else max(params.top_p, _LEAST_TOP_P)
        temperature = 0.0 if params.is_greedy else max(params.temperature, _LEAST_TEMPERATURE)
        self._floats[new.slot] = (temperature, top_p, params.min_p)
        top_k = params.top_k if params.top_k > 0 else vocab
        seed = new.seed % 2**64
        signed = seed - 2**64 if seed >= 2**63 else seed
        self._ints[new.slot] = (min(top_k, vocab), signed)
        self._logprobs[new.slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs

    def is_plain(self, slots: np.ndarray) -> bool:
        """Whether all of these sequences are greedy and want no log-probabilities."""
        is_greedy, asks = self._floats[slots, 0] == 0.0, self._logprobs[slots] > _NO_LOGPROBS
        return bool(is_greedy.all() and not asks.any())

    def wants_all(self, output: SchedulerOutput) -> bool:
        """Whether a sampling row asks for the log-probabilities of the whole vocabulary."""
        slots = [row.slot for row in output.known if row.samples]
        slots.extend(fork.slot for _, fork in output.forks)
        if output.verify is not None:
            slots.extend(output.verify.slots.tolist())
        return bool((self._logprobs[slots] == _ALL_LOGPROBS).any())

    def stage(
        self,
        frame: rt.Frame,
        stream: rt.Stream,
        output: SchedulerOutput,
        rows: CompactRows | None,
        *,
        scored: Collection[int],
        padding: Padding | None = None,
    ) -> StagedStep:
        """Write and commit a step's inputs.

        Args:
            frame: Where to.
            stream: Of the copies.
            output: The step.
            rows: Batch rows of the compact layout, None for slots.
            scored: Slots whose prompt gets log-probabilities.
            padding: What to fill it up to; only for generating rows alone.
        """
        verify = output.verify
        lengths = np.zeros(0, dtype=np.int64) if verify is None else verify.num_drafts + 1
        num_verify_tokens = int(lengths.sum())
        layout = _Ragged(num_verify_tokens, 0, [], np.zeros(0, dtype=np.int64), [])
        draft_width = 0
        with frame.stage() as opened:
            put = _Put(opened)
            if verify is not None:
                layout.table_end = verify.kv_table.size
                self._put_verify(put, verify, lengths, rows, padding)
            for row in output.known:
                self._put_known(put, row, layout, with_next=row.slot in scored)
            tiles = self._put_tiles(put, output.known, num_verify_tokens, layout.tables)
            prompts = self._put_prompts(put, output.known, num_verify_tokens)
            num_samples, num_ending = self._put_samples(
                put, output, lengths, rows, layout, padding
            )
            if self._drafter != "none":
                draft_width = self._put_drafts(put, output, rows, padding)
            if rows is not None:
                for index, name in enumerate(COUNT_NAMES):
                    put("counts", rows.counts[name], index * (self._sizes.max_num_seqs + 1))
                put("row_map", rows.prev_positions())
            opened.commit(stream, rows=put.rows)
        slots = layout.slots
        floats, ints = self._floats[slots], self._ints[slots]
        asks = bool((self._logprobs[slots] > _NO_LOGPROBS).any())
        shape = StepShape(
            num_verify=len(lengths),
            num_verify_tokens=num_verify_tokens,
            max_query_len=int(lengths.max(initial=0)),
            num_tokens=layout.num_tokens,
            num_padded=-(-layout.num_tokens // ROW_TILE) * ROW_TILE,
            kv_width=0 if verify is None else verify.kv_table.shape[1],
            state_width=_state_width(verify),
            may_cross=verify is not None and verify.may_cross,
            max_seq_len=0 if verify is None else verify.max_seq_len,
            known=tuple(
                KnownShape(
                    path=row.path,
                    start=row.start,
                    length=len(row.token_ids),
                    samples=row.samples,
                    table=table,
                    states=row.states,
                )
                for row, table in zip(output.known, layout.tables, strict=True)
            ),
            num_ending=num_ending,
            num_forked=sum(len(row.forks) for row in output.known),
            num_samples=num_samples,
            is_all_greedy=bool((floats[:, 0] == 0.0).all()),
            filters=bool(
                (floats[:, 1] < 1.0).any()
                or (floats[:, 2] > 0.0).any()
                or (ints[:, 0] < self._sizes.vocab_size).any()
            ),
            # Always as many, so that ties do not depend on what batch mates ask for.
            num_logprobs=min(MAX_LOGPROBS, self._sizes.vocab_size) if asks else -1,
            num_drafts=output.num_draft_tokens,
            draft_width=draft_width,
            tiles=tiles,
            prompts=prompts,
        )
        padded = None if padding is None else _padded(shape, padding)
        return StagedStep(shape=shape, padded=padded, first=tuple(layout.first), rows=put.rows)

    def _put_verify(
        self,
        put: _Put,
        verify: VerifyPlan,
        lengths: np.ndarray,
        rows: CompactRows | None,
        padding: Padding | None,
    ) -> None:
        token_row, token_column, token_index = self._ragged(lengths, padding)
        carry = verify.slots if rows is None else rows.rows_of(verify.seq_ids)
        kv_table, state_tables = verify.kv_table, verify.state_tables
        put("rows", carry)
        put("slots", verify.slots)
        put("lengths", lengths)
        put("state_base", verify.state_base)
        if padding is not None:
            n = len(lengths)
            missing = padding.num_rows - n
            for name, value in (
                ("rows", padding.null_row), ("slots", -1), ("lengths", 0), ("state_base", 0)
            ):  # fmt: skip
                put(name, np.full(missing, value, dtype=np.int64), n)
            kv_table = _widened(kv_table, padding.num_rows, padding.kv_width)
            state_tables = tuple(
                _widened(table, padding.num_rows, padding.state_width) for table in state_tables
            )
        put("token_row", token_row)
        put("token_column", token_column)
        put("token_index", token_index)
        put("tables", kv_table.reshape(-1))
        for group, table in enumerate(state_tables):
            put("state_tables", table.reshape(-1), group * table.size)

    def _ragged(
        self, lengths: np.ndarray, padding: Padding | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row and place of each packed token, and the packed place of each (row, place).

        Tokens of padding have place -1, and places of rows of padding the last such token, which is
        no row's: there is one, since such a row stands for as many tokens as the longest one has.
        """
        filled = (0, 0) if padding is None else (padding.num_rows, padding.query_len)
        last = self._last
        if last is not None and last[1] == filled and np.array_equal(last[0], lengths):
            return last[2]
        num_rows = filled[0]
        n, query = len(lengths), filled[1] or int(lengths.max())
        ends = np.cumsum(lengths)
        starts = ends - lengths
        column = np.arange(query)
        index = np.where(column < lengths[:, None], starts[:, None] + column, 0)
        row = np.repeat(np.arange(n), lengths)
        places = np.arange(int(ends[-1])) - np.repeat(starts, lengths)
        if num_rows:
            total = num_rows * query
            missing = total - len(row)
            row = np.concatenate((row, np.zeros(missing, dtype=np.int64)))
            places = np.concatenate((places, np.full(missing, -1)))
            index = np.concatenate((index, np.full((num_rows - n, query), total - 1)))
        made = (row, places, index.reshape(-1))
        self._last = (lengths, filled, made)
        return made

    def _put_known(self, put: _Put, row: KnownPlan, layout: _Ragged, *, with_next: bool) -> None:
        block_size, offset, length = self._sizes.block_size, layout.num_tokens, len(row.token_ids)
        positions = np.arange(row.start, row.start + length)
        blocks = row.kv_table[positions // block_size].astype(np.int64)
        put("token_ids", row.token_ids, offset)
        put("positions", positions, offset)
        put("kv_slots", blocks * block_size + positions % block_size, offset)
        if with_next or self._drafter == "mtp":
            put("next_tokens", row.token_ids[1:], offset)
            put("next_tokens", (row.next_token,), offset + length - 1)
        put("tables", row.kv_table, layout.table_end)
        layout.tables.append((layout.table_end, len(row.kv_table)))
        layout.table_end += len(row.kv_table)
        layout.num_tokens += length

    def _put_tiles(
        self,
        put: _Put,
        known: Sequence[KnownPlan],
        first_token: int,
        tables: Sequence[tuple[int, int]],
    ) -> dict[str, TileLayout]:
        """List the tiles of the known rows for each model whose kernel takes them."""
        if not known:
            return {}
        spans = []
        for row, (table, _) in zip(known, tables, strict=True):
            length = len(row.token_ids)
            spans.append(Span(token=first_token, start=row.start, length=length, table=table))
            first_token += length
        # Tokens computed again attend as they did when they were generated, if bits must be fixed.
        in_prompt = [
            span for span, row in zip(spans, known, strict=True) if row.path == "scan"
        ]
        layouts = {}
        for name, tiling in self._tilings.items():
            own = spans if tiling is None or not tiling.is_fixed else in_prompt
            if tiling is None or not own:
                continue
            layouts[name], records = tiling.list_tiles(own)
            put(name, records)
        return layouts

    def _put_prompts(
        self, put: _Put, known: Sequence[KnownPlan], first_token: int
    ) -> tuple[PrefillLayout, ...]:
        """List the prompts for each state table, where a model's kernel takes them."""
        if self._prompt_grid is None:
            return ()
        prompts = []
        for row in known:
            if row.path == "scan":
                prompts.append((row, first_token))
            first_token += len(row.token_ids)
        if not prompts:
            return ()
        layouts, at = [], 0
        for table in range(self._num_tables):
            layout, numbers = number_rows(
                [_prompt_row(row, first, table) for row, first in prompts], self._prompt_grid
            )
            put("prompts", numbers, at)
            layouts.append(layout)
            at += len(numbers)
        return tuple(layouts)

    def _put_samples(
        self,
        put: _Put,
        output: SchedulerOutput,
        lengths: np.ndarray,
        rows: CompactRows | None,
        layout: _Ragged,
        padding: Padding | None,
    ) -> tuple[int, int]:
        """Sample positions, and the carry rows of known rows that end, then of their forks.

        Returns:
            How many there are of each.
        """
        num_verify_tokens = offset = int(lengths.sum())
        num_rows = len(lengths)
        if output.verify is not None:
            # Every token of a verify row is a sample position: no list has to be made of them.
            layout.slots = output.verify.slots
            layout.first.extend((np.cumsum(lengths) - lengths).tolist())
            sample_row = self._ragged(lengths, padding)[0]
            put("sample_index", np.arange(len(sample_row)))
            put("sample_row", sample_row)
        index: list[int] = []
        slots: list[int] = []
        ending: list[tuple[int, ...]] = []
        forks: list[tuple[ForkPlan, int, int]] = []
        for row in output.known:
            offset += len(row.token_ids)
            forks.extend((fork, row.end, offset - 1) for fork in row.forks)
            layout.first.append(num_verify_tokens + len(index))
            sample = 0
            if row.samples:
                sample = num_verify_tokens + len(index)
                index.append(offset - 1)
                slots.append(row.slot)
            if row.ends_known:
                place = _carry_row(row.seq_id, row.slot, rows)
                ending.append((place, row.slot, row.end, row.next_token, sample, offset - 1))
        for fork, end, last in forks:
            sample = num_verify_tokens + len(index)
            layout.first.append(sample)
            index.append(last)
            slots.append(fork.slot)
            place = _carry_row(fork.seq_id, fork.slot, rows)
            ending.append((place, fork.slot, end, -1, sample, last))
        if slots:
            put("sample_index", index, num_verify_tokens)
            put("sample_row", np.arange(num_rows, num_rows + len(slots)), num_verify_tokens)
            layout.slots = np.concatenate((layout.slots, np.array(slots, dtype=np.int64)))
        if self._drafter == "draft":
            ends = [
                tuple(state.target_block for state in row.states)
                for row in output.known if row.ends_known
            ]
            ends.extend(fork.state_blocks for fork, _, _ in forks)
            tables = range(self._num_tables)
            put("known_blocks", [blocks[table] for table in tables for blocks in ends])
        names = ("known_rows", "known_slots", "known_ends", "known_next", "known_sample")
        for name, values in zip((*names, "known_last"), zip(*ending, strict=True), strict=False):
            put(name, values)
        put("row_float", self._floats[layout.slots].reshape(-1))
        put("row_int", self._ints[layout.slots].reshape(-1))
        return num_verify_tokens + len(index), len(ending)

    def _put_drafts(
        self,
        put: _Put,
        output: SchedulerOutput,
        rows: CompactRows | None,
        padding: Padding | None,
    ) -> int:
        """Rows that get drafts: every verify row, every known row that ends, then every fork."""
        plan = output.verify
        known: list[KnownPlan | ForkPlan] = [row for row in output.known if row.ends_known]
        known.extend(fork for _, fork in output.forks)
        count = 0 if plan is None else len(plan.seq_ids)
        if not count + len(known):
            return 0
        widths = [len(row.kv_table) for row in known]
        width = max(widths, default=0)
        if plan is not None:
            width = max(width, plan.kv_table.shape[1])
        wide = np.zeros((count + len(known), width), dtype=np.int32)
        if plan is not None:
            wide[:count, : plan.kv_table.shape[1]] = plan.kv_table
            put("draft_rows", plan.slots if rows is None else rows.rows_of(plan.seq_ids))
        for line, row, used in zip(wide[count:], known, widths, strict=True):
            line[:used] = row.kv_table
        put("draft_rows", [_carry_row(row.seq_id, row.slot, rows) for row in known], count)
        if padding is not None:
            put("draft_rows", np.full(padding.num_rows - count, padding.null_row), count)
            wide = _widened(wide, padding.num_rows, padding.kv_width)
        put("draft_tables", wide.reshape(-1))
        return width


def _prompt_row(row: KnownPlan, first: int, table: int) -> PromptRow:
    """One prompt row as a state table has it."""
    state = row.states[table]
    return PromptRow(
        first=first,
        start=row.start,
        length=len(row.token_ids),
        source=state.source_block,
        target=state.target_block,
        exports=state.exports,
    )


def _padded(shape: StepShape, padding: Padding) -> StepShape:
    """Give the shape of a step of generating rows alone as it is launched with padding."""
    tokens = padding.num_rows * padding.query_len
    return replace(
        shape,
        num_verify=padding.num_rows,
        num_verify_tokens=tokens,
        max_query_len=padding.query_len,
        num_tokens=tokens,
        num_padded=-(-tokens // ROW_TILE) * ROW_TILE,
        kv_width=padding.kv_width,
        # One graph for steps in which states move and in which none does.
        may_cross=True,
        state_width=padding.state_width,
        max_seq_len=padding.max_seq_len,
        num_samples=tokens,
        draft_width=padding.kv_width if shape.draft_width else 0,
        is_padded=True,
    )


def _widened(table: np.ndarray, num_rows: int, width: int) -> np.ndarray:
    """Fill a table up with null blocks, [num_rows, width]."""
    wide = np.zeros((num_rows, width), dtype=table.dtype)
    wide[: table.shape[0], : table.shape[1]] = table
    return wide


def _carry_row(seq_id: int, slot: int, rows: CompactRows | None) -> int:
    return slot if rows is None else rows.row(seq_id)


def _state_width(verify: VerifyPlan | None) -> int:
    if verify is None or not verify.state_tables:
        return 0
    return int(verify.state_tables[0].shape[1])
