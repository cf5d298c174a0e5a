"""Which sequences compute which tokens in the next step, and who owns which block.

One pass a step, oldest sequence first: generating rows, chunks of prompts that have begun, then
admissions, all under one token budget. Generating rows are many and alike: their numbers are the
columns of one table (`Cell`), those that stay in their blocks are planned and taken in as whole
arrays, and only the others one by one. What makes it safe to run ahead of the device:

* A sequence's length is known only within bounds while verify rows are in flight; blocks are
  allocated for the upper bound and released by the confirmed one.
* A block that is given up waits in the retire queue until the newest step that named it retired.
* A waiting sequence owns nothing. Hit blocks are pinned before anything else is allocated.
* Prompt tokens are computed by the scan and generated ones by the step, also after a preemption.
* A row whose grammar must see the tokens of the last step waits for them; the others go on. Its
  masks are made here, for every draft that the grammar allows; the other drafts are not verified.
* Rungs are checkpoints that nobody has asked for. They are placed last, in blocks that nobody who
  runs or waits can need, and never enter a sequence's tables.
* A sequence whose prefix comes from the state store owns its blocks from the start, and has no row
  before the step after the last of them was filled.
* Of a request with several completions one sequence computes the prompt. Where it ends the others
  fork off: they share its full KV blocks, get copies of the last one and of the states, and sample
  their own first token in that very step. Those that find no room lead or follow later.

Progress: the oldest running sequence can preempt all younger ones, and a pool holds one sequence
of max_model_len tokens (checked at start). A prompt that found no budget goes first in the next
step, so generating rows cannot starve it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from headrace.engine.block_pool import NULL_BLOCK, BlockPool, RetireQueue
from headrace.engine.prefix_cache import Match, PrefixCache, last_reusable_boundary
from headrace.engine.sequence import Cell, Sequence, Status
from headrace.engine.state_store.prefixes import StoredHit
from headrace.grammar.state import fill_masks
from headrace.models.batch import KnownState
from headrace.worker.step import (
    BlockCopies,
    ForkPlan,
    KnownPlan,
    NewSequence,
    SchedulerOutput,
    TokenMasks,
    VerifyPlan,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace.engine.draft_policy import DraftPolicy
    from headrace.engine.sequence import Family
    from headrace.engine.state_store.prefixes import StoredPrefixes
    from headrace.grammar import GrammarState
    from headrace.outputs import FinishReason
    from headrace.worker.state_scheme import StateScheme
    from headrace.worker.step import PieceLoad, PieceSave, SampledTokens

_MAX_RECOMPUTE = 64
"""Generated tokens recomputed for one sequence in one step: they go through the step one by one."""

_RUNG_RATIO = 4
"""From one rung to the next: 2 would find more of a prefix, but of half as many prompts."""

_CHECKPOINTS_OF_A_PROMPT = 2
"""That are asked for by most prompts: the junction and one at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Sizes the scheduler works under.

    Attributes:
        max_model_len: Most tokens of a sequence.
        max_num_seqs: Most running sequences.
        max_num_batched_tokens: Token budget of a step.
        block_size: Tokens per KV block.
        grid: Tokens between scan points.
        retention: latest, all, or every:N.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    grid: int
    retention: str = "latest"


@dataclass(frozen=True, slots=True)
class KnownRow:
    """What the scheduler remembers of a known row in flight."""

    seq: Sequence
    life: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True, eq=False)
class VerifyRows:
    """The generating rows of a step, for whole arrays at once.

    Attributes:
        seqs: Whose they are.
        seq_ids: Their ids.
        slots: Their slots, [n] i64.
        lives: What `Sequence.life` was, [n] i64.
        num_drafts: Drafts verified, [n] i64.
    """

    seqs: tuple[Sequence, ...]
    seq_ids: tuple[int, ...]
    slots: np.ndarray
    lives: np.ndarray
    num_drafts: np.ndarray


@dataclass(slots=True)
class _Pass:
    """What one scheduling pass has decided so far.

    Attributes:
        rungs: Places among the known rows, and boundaries that each may export if there is room.
        num_wanted: Checkpoints that prompts of this step will still leave in later ones.
        checkpoints: Keys of the KV blocks before each checkpoint that this step completes.
        loads, loading: Pieces from the state store, and the sequences that they are for.
        loads_left: Pieces of each kind that may be added to them.
    """

    step_id: int
    budget: int
    scheduled: set[int] = field(default_factory=set)
    publish: list[Publication] = field(default_factory=list)
    publish_rungs: list[Publication] = field(default_factory=list)
    rungs: list[tuple[int, list[int]]] = field(default_factory=list)
    num_wanted: int = 0
    admitted: list[NewSequence] = field(default_factory=list)
    known: list[KnownPlan] = field(default_factory=list)
    rows: list[KnownRow] = field(default_factory=list)
    forks: list[KnownRow] = field(default_factory=list)
    deferred: list[Sequence] = field(default_factory=list)
    promised: int = 0
    verify: VerifyRows | None = None
    max_seq_len: int = 0
    may_cross: bool = False
    checkpoints: list[list[bytes]] = field(default_factory=list)
    loads: list[PieceLoad] = field(default_factory=list)
    loading: list[Sequence] = field(default_factory=list)
    loads_left: dict[str, int] = field(default_factory=dict)

    def take(self, seq: Sequence, plan: KnownPlan) -> None:
        """Add a known row."""
        num_tokens = len(plan.token_ids)
        self.scheduled.add(seq.seq_id)
        self.known.append(plan)
        self.rows.append(KnownRow(seq, seq.life, num_tokens, plan.samples))
        self.budget -= num_tokens


Publication = tuple[BlockPool, int, bytes]
"""A block that a step completes, and the key it will be found under."""


@dataclass(slots=True)
class InFlightStep:
    """A step that has been handed to the worker.

    Attributes:
        verify: Its generating rows, or None; they come first.
        known: Its known rows, in order, then its forks.
        publish, publish_rungs: What is found once it has been enqueued.
        checkpoints: Keys of the KV blocks before each checkpoint among those.
        loaded: Sequences, and their lives, whose last pieces from the state store it loads.
    """

    output: SchedulerOutput
    verify: VerifyRows | None
    known: list[KnownRow]
    publish: list[Publication]
    publish_rungs: list[Publication]
    checkpoints: list[list[bytes]] = field(default_factory=list)
    loaded: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        """Whose the rows are, in row order."""
        generating = self.verify.seqs if self.verify is not None else ()
        return [*generating, *(row.seq for row in self.known)]


class SequenceUpdate(NamedTuple):
    """What one step brought to one sequence.

    Attributes:
        token_ids: Newly confirmed output tokens; those after a stop are already cut off.
        row: Row in the step's SampledTokens.
        num_drafts, num_accepted: Drafts verified in this row, and drafts kept.
    """

    seq: Sequence
    token_ids: list[int]
    row: int
    num_drafts: int
    num_accepted: int


class Scheduler:
    """Owner of sequences, tables and pools.

    Args:
        limits: Sizes.
        scheme: Where recurrent state sits.
        kv_pool: Attention's blocks, or None.
        state_pools: One per state group.
        cache: Prefix cache over those pools.
        num_draft_tokens: Most drafts for each generating row, k.
        policy: Chooses fewer where they are not worth it; None always proposes k.
        vocab_size: Tokens that a mask covers.
        rewrites_last: The drafter writes the KV of a prompt's last token again for each fork, so
            that its block is copied even if it is full.
        stored: What a state store adds to the cache, or None.
    """

    def __init__(
        self,
        *,
        limits: SchedulerLimits,
        scheme: StateScheme,
        kv_pool: BlockPool | None,
        state_pools: tuple[BlockPool, ...],
        cache: PrefixCache,
        num_draft_tokens: int = 0,
        policy: DraftPolicy | None = None,
        vocab_size: int = 0,
        rewrites_last: bool = False,
        stored: StoredPrefixes | None = None,
    ) -> None:
        self.limits = limits
        self.scheme = scheme
        self.kv_pool = kv_pool
        self.state_pools = state_pools
        self.cache = cache
        self.num_draft_tokens = num_draft_tokens
        self.policy = policy
        self.vocab_size = vocab_size
        self._num_grammars = 0
        self.rewrites_last = rewrites_last
        self.stored = stored
        self.draft_policy: Callable[[Sequence], int] | None = None
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.retired_step = 0
        self.num_preemptions = 0
        self.num_wasted_tokens = 0
        self.num_computed_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        """Prompt tokens taken from the cache. Like those computed, each counts once."""
        self.num_deferred = 0
        """Waiting sequences that the last pass left to wait for another one's prompt."""
        self.num_forks = 0
        self._families: list[Family] = []
        """Those whose leader is in its prompt."""
        self._step_id = 0
        self._retire = RetireQueue()
        self._free_slots: deque[int] = deque(range(limits.max_num_seqs))
        self._retiring_slots: deque[tuple[int, int]] = deque()
        self._left: list[int] = []
        self._slot_copies: list[tuple[int, int]] = []
        self._fork_pairs: list[tuple[int, int]] = []
        self._kv_copies: list[tuple[int, int]] = []
        self._state_copies: list[list[tuple[int, int]]] = [[] for _ in state_pools]
        self._forked: list[Sequence] = []
        self._prefill_starved = False
        self._pending_keys: Counter[bytes] = Counter()
        self._waiting_keys: Counter[bytes] = Counter()
        # Drafters write up to k tokens past a sequence's end.
        width = -(-(limits.max_model_len + num_draft_tokens) // limits.block_size) + 1
        self._kv_table = np.zeros((limits.max_num_seqs, width), dtype=np.int32)
        self._cells = np.zeros((len(Cell), limits.max_num_seqs), dtype=np.int64)
        self._lines = list(self._cells)  # One view a line: an index less.
        self._stops = np.full((limits.max_num_seqs, 1), -1, dtype=np.int64)
        self._num_lives = 0
        self._everyone: VerifyRows | None = None  # All that run, with no drafts and no lives.
        # Verify rows' state columns by slot: first column, number of columns (0 if the copy of the
        # sequence's tables is out of date), their blocks.
        self._base_of = np.zeros(limits.max_num_seqs, dtype=np.int64)
        self._width_of = np.zeros(limits.max_num_seqs, dtype=np.int64)
        columns = (len(state_pools), limits.max_num_seqs, scheme.max_blocks())
        self._columns_of = np.zeros(columns, dtype=np.int32)

    # Life of a sequence ---------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; it owns nothing yet."""
        seq.status = Status.WAITING
        self._num_grammars += seq.grammar is not None
        self.waiting.append(seq)
        self._count_waiting(seq, 1)

    def has_work(self) -> bool:
        """Whether any sequence waits or runs, or a piece is to be saved."""
        has_saves = self.stored is not None and self.stored.has_saves()
        return bool(self.waiting or self.running) or has_saves

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state; idempotent. Its blocks return when no step needs them."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
            self._count_waiting(seq, -1)
        else:
            self._note_passed(seq)
            self._exit(seq)
            self._release_all(seq)
        self._num_grammars -= seq.grammar is not None
        seq.fetch = None
        seq.status = Status.FINISHED
        seq.finish_reason = reason

    def preempt(self, seq: Sequence) -> None:
        """Take everything from a running sequence and queue it first; its tokens stay.

        Results of steps in flight still arrive and are appended: they are exact. The sequence is
        not admitted again before they have.
        """
        assert seq.status is Status.RUNNING, f"{seq.seq_id=} is {seq.status}, not running"
        self._note_passed(seq)
        self._exit(seq)
        self._release_all(seq)
        seq.reset(len(self.state_pools))
        seq.num_preemptions += 1
        seq.status = Status.WAITING
        self.num_preemptions += 1
        self.waiting.appendleft(seq)
        self._count_waiting(seq, 1)

    def reset_prefix_cache(self) -> None:
        """Preempt everything that runs and forget every cached block."""
        for seq in reversed(list(self.running)):
            self.preempt(seq)
        self.cache.clear()

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let `child` go on from where `parent` is: full KV blocks shared, the rest copied.

        The parent generates and has no step in flight. The copies run at the start of the next
        step, before anything writes.

        Returns:
            False, and nothing changed, if slots or blocks are short.
        """
        assert parent.status is Status.RUNNING, f"{parent.seq_id=} is {parent.status}"
        in_flight = parent.num_in_flight + parent.num_known_in_flight
        assert in_flight == 0, f"{parent.seq_id=} has a step in flight"
        assert parent.num_computed_tokens >= parent.known_end, f"{parent.seq_id=} is in its prompt"
        if not self._free_slots:
            return False
        block_size = self.limits.block_size
        num_full = parent.num_computed_tokens // block_size
        tail = parent.kv_blocks[num_full:] if self.kv_pool is not None else []
        columns = [
            [column for column, block in enumerate(table) if block != NULL_BLOCK]
            for table in parent.state_tables
        ]
        fits = self.kv_pool is None or len(tail) <= self.kv_pool.num_available
        fits = fits and all(
            len(need) <= pool.num_available
            for need, pool in zip(columns, self.state_pools, strict=True)
        )
        if not fits:
            return False
        child.reset(len(self.state_pools))
        self._enter(child)
        child.token_ids = list(parent.token_ids)
        child.num_prompt_tokens = parent.num_prompt_tokens
        child.num_computed_tokens = parent.num_computed_tokens
        child.reach_in_prompt(parent.num_computed_tokens)
        child.known_end = parent.known_end
        child.num_drafts_ready = parent.num_drafts_ready
        child.drafts = list(parent.drafts)
        if parent.grammar is not None:
            child.grammar = parent.grammar.copy()
            self._num_grammars += 1
        child.num_published = parent.num_published
        child.num_cached_tokens = parent.num_cached_tokens
        child.first_column = parent.first_column
        child.last_column = parent.last_column
        if self.kv_pool is not None:
            shared = parent.kv_blocks[:num_full]
            self.kv_pool.fork(*shared)
            fresh = self.kv_pool.allocate(len(tail)) or []
            self._kv_copies.extend(zip(tail, fresh, strict=True))
            child.kv_blocks = shared + fresh
            self._kv_table[child.slot, :] = 0
            self._kv_table[child.slot, : len(child.kv_blocks)] = child.kv_blocks
        for group, pool in enumerate(self.state_pools):
            table = [NULL_BLOCK] * len(parent.state_tables[group])
            fresh = pool.allocate(len(columns[group])) or []
            for column, block in zip(columns[group], fresh, strict=True):
                table[column] = block
                self._state_copies[group].append((parent.state_tables[group][column], block))
            child.state_tables[group] = table
        self._forked.append(child)
        self._slot_copies.append((parent.slot, child.slot))
        self._fork_pairs.append((parent.seq_id, child.seq_id))
        return True

    def _enter(self, seq: Sequence, place: int | None = None) -> None:
        """Give a sequence a slot, a column of the table, and a place among the running."""
        seq.slot = self._free_slots.popleft()
        self._num_lives += 1
        seq.move_cells(self._cells[:, seq.slot])
        seq.life = self._num_lives
        self._width_of[seq.slot] = 0
        stops = tuple(seq.stop_ids)
        if len(stops) > self._stops.shape[1]:
            wider = ((0, 0), (0, len(stops) - self._stops.shape[1]))
            self._stops = np.pad(self._stops, wider, constant_values=-1)
        self._stops[seq.slot] = -1
        self._stops[seq.slot, : len(stops)] = stops
        seq.status = Status.RUNNING
        self.running.insert(len(self.running) if place is None else place, seq)
        self._everyone = None

    def _exit(self, seq: Sequence) -> None:
        """Take a sequence's column away; what becomes of its slot is the caller's."""
        self.running.remove(seq)
        seq.move_cells(np.zeros(len(Cell), dtype=np.int64))[:] = 0
        seq.life = 0
        self._everyone = None

    # One step ------------------------------------------------------------------------------

    def schedule(self) -> InFlightStep | None:
        """Plan the next step, or None if nothing can be computed now."""
        now = _Pass(step_id=self._step_id + 1, budget=self.limits.max_num_batched_tokens)
        stored = self.stored
        if stored is not None:
            stored.store.hear_all()
            now.loads_left = dict(zip(("kv", "state"), stored.max_pieces, strict=True))
        copies = self._take_copies()
        self._schedule_known(now, self._schedule_verify(now))
        if now.verify is None and not now.known:
            # Budget that was kept for prompts found no blocks: the rows that will free them run.
            self._schedule_verify(now)
        self._admit(now)
        self._place_rungs(now)
        saves: tuple[PieceSave, ...] = ()
        if stored is not None:
            saves = stored.plan_saves(now.step_id, self._retire, self.retired_step)
        rows = now.verify
        if rows is None and not (now.known or copies or now.loads or saves):
            return None
        # Only now: the pass may have preempted a fork that was to enter.
        now.admitted[:0] = [self._describe(seq) for seq in self._forked]
        self._forked.clear()
        self._step_id = now.step_id
        num_drafts = self.num_draft_tokens
        if self.policy is not None:
            generating = 0 if rows is None else len(rows.seqs)
            ending = sum(row.ends_known for row in now.known)
            num_drafts = self.policy.choose(generating + ending + len(now.forks))
        verify_plan = None if rows is None else self._verify_plan(now, rows)
        if rows is not None:
            lines, slots, drafts = self._lines, rows.slots, rows.num_drafts
            lines[Cell.LAST_STEP][slots] = now.step_id
            lines[Cell.NUM_STEPS][slots] += 1
            lines[Cell.IN_FLIGHT][slots] += 1 + drafts
            lines[Cell.IN_FLIGHT_DRAFTS][slots] += drafts
            lines[Cell.KNOWN_IN_FLIGHT][slots] += 1
            lines[Cell.DRAFTS_READY][slots] = num_drafts
        for seq in now.loading:
            seq.last_step = now.step_id
        known = [*now.rows, *now.forks]
        for row in known:
            seq = row.seq
            seq.last_step = now.step_id
            seq.num_steps += 1
            seq.num_in_flight += row.num_tokens
            seq.num_known_in_flight += row.samples
            if row.samples or seq.high >= seq.known_end:
                seq.num_drafts_ready = num_drafts
        step_seqs = [*(rows.seqs if rows is not None else ()), *(row.seq for row in known)]
        has_grammar = bool(self._num_grammars) and any(
            seq.grammar is not None for seq in step_seqs
        )
        output = SchedulerOutput(
            step_id=now.step_id,
            admitted=tuple(now.admitted),
            left=tuple(self._left),
            verify=verify_plan,
            known=tuple(now.known),
            copies=copies,
            num_draft_tokens=num_drafts,
            masks=self._masks(now) if has_grammar else None,
            lands_drafts=has_grammar and num_drafts > 0,
            saves=saves,
            loads=tuple(now.loads),
        )
        self._left.clear()
        return InFlightStep(
            output, rows, known, now.publish, now.publish_rungs, now.checkpoints,
            [(seq, seq.life) for seq in now.loading if not seq.loads],
        )

    def _take_copies(self) -> BlockCopies:
        """The copies of forks since the last step; a step with copies is always planned."""
        copies = BlockCopies(
            kv=tuple(self._kv_copies),
            states=tuple(tuple(pairs) for pairs in self._state_copies),
            slots=tuple(self._slot_copies),
            sequences=tuple(self._fork_pairs),
        )
        self._slot_copies.clear()
        self._fork_pairs.clear()
        self._kv_copies.clear()
        for pairs in self._state_copies:
            pairs.clear()
        return copies

    def _schedule_verify(self, now: _Pass) -> list[Sequence]:
        """Choose generating rows, oldest first, and how many drafts each verifies.

        Most rows of most steps stay in their blocks and columns: they are settled all at once.

        Returns:
            The running sequences that do not generate yet.
        """
        in_prompt: list[Sequence] = []
        reserve = min(self.limits.grid, now.budget) if self._prefill_starved else 0
        self._prefill_starved = False
        if not self.running:
            return in_prompt
        budget, preemptions = now.budget - reserve, self.num_preemptions
        everyone, lines = self._all_rows(), self._lines
        seqs, slots = everyone.seqs, everyone.slots
        high = lines[Cell.COMPUTED][slots] + lines[Cell.IN_FLIGHT][slots]
        low = high - lines[Cell.IN_FLIGHT_DRAFTS][slots]
        drafts = lines[Cell.DRAFTS_READY][slots]
        generates = high >= lines[Cell.KNOWN_END][slots]
        chosen = (high + drafts < lines[Cell.STEADY_UNTIL][slots]) & (
            low <= lines[Cell.BASE_UNTIL][slots]
        )
        if self.draft_policy is not None or int((1 + drafts)[generates].sum()) > budget:
            chosen[:] = False  # One by one, as long as the budget lasts.
        left = budget
        for index in np.flatnonzero(~chosen).tolist():
            seq = seqs[index]
            if seq.status is not Status.RUNNING:
                continue
            if not generates[index]:
                in_prompt.append(seq)
                continue
            count = min(self._verify_drafts(seq), left - 1)
            if count < 0:
                continue
            columns = self._reserve_verify(seq, count, now.scheduled)
            if columns is None:
                continue
            self._settle(seq, columns, int(high[index]) + 1 + count)
            left -= 1 + count
            drafts[index] = count
            chosen[index] = True
            now.scheduled.add(seq.seq_id)
        if self.num_preemptions != preemptions:
            # An older row may have taken the blocks of a younger one that was settled at once.
            chosen &= np.array([seq.status is Status.RUNNING for seq in seqs])
        if chosen.any():
            now.verify = rows = _chosen(everyone, chosen, lines[Cell.LIFE][slots], drafts)
            now.scheduled.update(rows.seq_ids)
            now.max_seq_len = int((high + drafts)[chosen].max()) + 1
            now.may_cross = bool(lines[Cell.CROSSES][rows.slots].any())
            now.budget -= len(rows.seqs) + int(rows.num_drafts.sum())
        return in_prompt

    def _all_rows(self) -> VerifyRows:
        if self._everyone is None:
            seqs = tuple(self.running)
            slots = np.array([seq.slot for seq in seqs], dtype=np.int64)
            slots.flags.writeable = False  # Steps in flight share it.
            none = np.zeros(0, dtype=np.int64)
            self._everyone = VerifyRows(seqs, tuple(seq.seq_id for seq in seqs), slots, none, none)
        return self._everyone

    def _schedule_known(self, now: _Pass, in_prompt: list[Sequence]) -> None:
        """Chunks of sequences whose known tokens are not all computed."""
        for seq in in_prompt:
            if seq.status is not Status.RUNNING:
                continue
            if seq.loads:
                self._plan_loads(seq, now)
                continue
            if self._chunk_end(seq, seq.high, now.budget) <= seq.high:
                # Not for want of blocks: rows that gave way would not free any.
                self._prefill_starved = True
                continue
            plan = self._plan_known(seq, now)
            if plan is not None:
                now.take(seq, plan)

    def on_enqueued(self, step: InFlightStep) -> None:
        """Publish what lies inside known tokens: the whole step has been enqueued without error.

        Later steps on the same stream need no wait. A step that failed publishes nothing.
        """
        for pool, block, key in step.publish:
            pool.publish(block, key, is_generated=False)
        for pool, block, key in step.publish_rungs:
            pool.publish_rung(block, key)
        for row in step.known:
            seq = row.seq
            if row.life == seq.life:
                self._drop_pending(seq, seq.high)
                self._publish_kv(seq, min(seq.high, seq.num_prompt_tokens))
        for seq, life in step.loaded:
            if life == seq.life:
                self._publish_loaded(seq)
        if self.stored is not None:
            for keys in step.checkpoints:
                self.stored.want(keys)

    def update(self, step: InFlightStep, sampled: SampledTokens) -> list[SequenceUpdate]:
        """Take a step's results in: confirm lengths, append tokens, finish, release.

        Results of sequences that have left are dropped whole. Results of a sequence that was
        preempted meanwhile are appended: it will recompute their state.
        """
        self.retired_step = step.output.step_id
        updates: list[SequenceUpdate] = []
        first_known = 0
        if step.verify is not None:
            first_known = len(step.verify.seqs)
            kept, tokens = sampled.num_sampled[:first_known], sampled.token_ids[:first_known]
            landed = np.array(kept), np.array(tokens)
            self._update_verify(step.verify, *landed, sampled.drafts, updates)
        for index, row in enumerate(step.known, start=first_known):
            seq = row.seq
            seq.num_in_flight -= row.num_tokens
            seq.num_known_in_flight -= row.samples
            if seq.status is Status.FINISHED:
                self.num_wasted_tokens += row.num_tokens
                continue
            before = seq.num_computed_tokens
            if row.life == seq.life:
                seq.num_computed_tokens = before + row.num_tokens
                self.num_computed_prompt_tokens += seq.reach_in_prompt(before + row.num_tokens)
                if sampled.drafts is not None:
                    seq.drafts = sampled.drafts[index].tolist()
            count = int(sampled.num_sampled[index])
            if count:
                fresh = self._append(seq, sampled.token_ids[index, :count].tolist())
                updates.append(SequenceUpdate(seq, fresh, index, 0, 0))
                self._finish_if_due(seq, before)
        self._retire.retire(self.retired_step)
        while self._retiring_slots and self._retiring_slots[0][0] <= self.retired_step:
            self._free_slots.append(self._retiring_slots.popleft()[1])
        return updates

    def _update_verify(
        self,
        rows: VerifyRows,
        landed: np.ndarray,
        tokens: np.ndarray,
        next_drafts: np.ndarray | None,
        updates: list[SequenceUpdate],
    ) -> None:
        """Take generating rows in; one that only goes on costs the extension of a list.

        Args:
            rows: Whose they are.
            landed: Tokens each row sampled, [n].
            tokens: Which, [n, 1+s].
            next_drafts: What was drafted after them, [n or more, s], where a grammar must know.
            updates: Appended to.
        """
        lines, drafts = self._lines, rows.num_drafts
        here = lines[Cell.LIFE][rows.slots] == rows.lives
        slots, kept = rows.slots[here], landed[here]
        lines[Cell.IN_FLIGHT][slots] -= 1 + drafts[here]
        lines[Cell.IN_FLIGHT_DRAFTS][slots] -= drafts[here]
        lines[Cell.KNOWN_IN_FLIGHT][slots] -= 1
        computed = lines[Cell.COMPUTED][slots] + kept
        lines[Cell.COMPUTED][slots] = computed
        drafted = here & (drafts > 0)
        self.num_wasted_tokens += int((1 + drafts - landed)[drafted].sum())
        if self.policy is not None:
            self.policy.observe_rows(drafts[drafted], landed[drafted] - 1)
        # Some stop token, perhaps behind those that were kept.
        stops = (tokens[here][:, :, None] == self._stops[slots][:, None, :]).any(axis=(1, 2))
        # A generating sequence's known tokens are one more than its computed ones.
        goes_on = np.zeros(len(here), dtype=bool)
        goes_on[here] = (
            (kept > 0)
            & (computed + 1 < lines[Cell.END_AT][slots])
            & (computed <= lines[Cell.RELEASE_AT][slots])
            & (computed < lines[Cell.NOTE_AT][slots])
            & ~stops
        )
        counts = landed.tolist()
        width = max(counts, default=0)
        fresh = tokens[:, :width].tolist()
        if width > 1:
            fresh = [line[:count] for line, count in zip(fresh, counts, strict=True)]
        places, accepted = range(len(counts)), (landed - 1).tolist()
        every = list(
            map(SequenceUpdate._make, zip(rows.seqs, fresh, places, drafts.tolist(), accepted,
                                          strict=True))
        )
        plain = every if goes_on.all() else list(compress(every, goes_on.tolist()))
        for update in plain:
            update.seq.token_ids.extend(update.token_ids)
        updates.extend(plain)
        for place in np.flatnonzero(~goes_on).tolist():
            is_here = bool(here[place])
            if is_here and next_drafts is not None:
                rows.seqs[place].drafts = next_drafts[place].tolist()
            self._update_one(every[place], updates, is_here=is_here)

    def _update_one(
        self, update: SequenceUpdate, updates: list[SequenceUpdate], *, is_here: bool
    ) -> None:
        """Take one generating row in: it may end, passes a boundary, or its sequence has left.

        Args:
            update: What it sampled, to be cut off where the sequence ends.
            updates: Appended to.
            is_here: Whether the sequence has kept its slot since.
        """
        seq, fresh, num_drafts = update.seq, update.token_ids, update.num_drafts
        if not is_here:
            seq.num_in_flight -= 1 + num_drafts
            seq.num_in_flight_drafts -= num_drafts
            seq.num_known_in_flight -= 1
            if seq.status is Status.FINISHED:
                self.num_wasted_tokens += 1 + num_drafts
                return
            if num_drafts:
                self.num_wasted_tokens += 1 + num_drafts - len(fresh)
                if self.policy is not None:
                    self.policy.observe(num_drafts, len(fresh) - 1)
        before = seq.num_computed_tokens - (len(fresh) if is_here else 0)
        if fresh:
            updates.append(update._replace(token_ids=self._append(seq, fresh)))
        if self._finish_if_due(seq, before) or not is_here:
            return
        computed = seq.num_computed_tokens
        if computed >= seq.note_at:
            self._note_generated(seq, before)
        if computed > seq.release_at:
            self._release_columns(seq, self.scheme.last_released(computed), seq.last_step)

    def _finish_if_due(self, seq: Sequence, before: int) -> bool:
        """Finish a sequence whose newest token was its last."""
        if seq.finish_reason is None:
            return False
        reason, seq.finish_reason = seq.finish_reason, None
        self._note_generated(seq, before)
        self.finish(seq, reason)
        return True

    # Invariants ------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that pools balance, owners are single and lengths are possible."""
        pools = [*([self.kv_pool] if self.kv_pool is not None else []), *self.state_pools]
        for pool in pools:
            owned: dict[int, int] = {}
            self._retire.owned(pool, owned)
            if self.stored is not None:
                self.stored.owned(pool, owned)
            for seq in self.running:
                for block in self._blocks_of(seq, pool):
                    owned[block] = owned.get(block, 0) + 1
            pool.check(owned)
        slots = [seq.slot for seq in self.running]
        slots += [slot for _, slot in self._retiring_slots] + list(self._free_slots)
        assert sorted(slots) == list(range(self.limits.max_num_seqs)), f"slots {sorted(slots)}"
        for seq in self.running:
            assert seq.status is Status.RUNNING
            assert 0 <= seq.num_in_flight_drafts <= seq.num_in_flight, f"{seq.seq_id=}"
            assert seq.num_computed_tokens <= seq.num_tokens, (
                f"{seq.seq_id=} computed {seq.num_computed_tokens} of {seq.num_tokens} known tokens"
            )
            for group, table in enumerate(seq.state_tables):
                mine = [block for block in table if block != NULL_BLOCK]
                assert len(mine) == len(set(mine)), f"{seq.seq_id=} {group=} names a block twice"
        for seq in self.waiting:
            assert not seq.kv_blocks, f"{seq.seq_id=} waits and owns KV blocks"
            assert not any(seq.state_tables), f"{seq.seq_id=} waits and owns state blocks"
            assert seq.slot == -1, f"{seq.seq_id=} waits and has slot {seq.slot}"

    # Planning ----------------------------------------------------------------------------------

    def _verify_drafts(self, seq: Sequence) -> int:
        """Drafts for a generating row, or -1 if it need not run."""
        limit = self.limits.max_model_len
        max_tokens = seq.params.max_tokens
        certain = seq.num_output_tokens + seq.num_known_in_flight
        assert max_tokens is not None
        if certain >= max_tokens or seq.low + 1 >= limit or certain == 0:
            return -1
        most = seq.num_drafts_ready
        if seq.grammar is not None:
            if seq.num_in_flight or seq.num_known_in_flight:
                return -1
            most = seq.grammar.num_usable(seq.drafts[:most])
        if self.draft_policy is not None:
            most = min(most, self.draft_policy(seq))
        return max(0, min(most, max_tokens - certain - 1, limit - seq.high - 2))

    def _reserve_verify(
        self, seq: Sequence, num_drafts: int, scheduled: set[int]
    ) -> tuple[int, int] | None:
        """Own every block the row may touch; preempts younger sequences if need be.

        Returns:
            First and last column it may touch, or None if blocks are short.
        """
        num_tokens = 1 + num_drafts
        high = seq.high
        kv_need = 0
        if self.kv_pool is not None:
            ahead = high + num_tokens + self.num_draft_tokens
            kv_need = -(-ahead // self.limits.block_size) - len(seq.kv_blocks)
        base, top = self._columns(seq, num_tokens)
        needs = [_missing(table, base, top) for table in seq.state_tables]
        if kv_need <= 0 and not any(needs):
            return base, top
        kv_need = max(kv_need, 0)
        counts = [len(need) for need in needs]
        while not self._fits(kv_need, counts):
            if not self._preempt_for(seq, scheduled, kv_need, counts):
                return None
        if kv_need:
            self._grow_kv(seq, kv_need)
        for group, need in enumerate(needs):
            if need:
                self._grow_state(seq, group, need)
        return base, top

    def _columns(self, seq: Sequence, num_tokens: int) -> tuple[int, int]:
        """First and last column that a verify row of so many tokens may touch."""
        base, top = self.scheme.columns_needed(max(seq.low, 1), seq.high, num_tokens)
        # What lies left of the first column has been given up, or was never there: the state that
        # a known row left is newer.
        return max(base, seq.first_column), top

    def _fits(self, kv_need: int, state_needs: list[int]) -> bool:
        if self.kv_pool is not None and kv_need > self.kv_pool.num_available:
            return False
        return all(
            need <= pool.num_available
            for need, pool in zip(state_needs, self.state_pools, strict=True)
        )

    def _preempt_for(
        self, seq: Sequence, scheduled: set[int], kv_need: int, state_needs: list[int]
    ) -> bool:
        """Preempt the youngest sequence that this step does not need; False if none may be."""
        waiting = self._num_returning
        if (
            self.kv_pool is None or kv_need <= self.kv_pool.num_available + waiting(self.kv_pool)
        ) and all(
            need <= pool.num_available + waiting(pool)
            for need, pool in zip(state_needs, self.state_pools, strict=True)
        ):
            return False  # Blocks on their way back are enough: wait for their step.
        victim = self.running[-1]
        if victim is seq or victim.seq_id in scheduled:
            return False
        self.preempt(victim)
        return True

    def _num_returning(self, pool: BlockPool) -> int:
        """References that come back by themselves: steps in flight hold them, or pieces to save."""
        pinned = 0 if self.stored is None else self.stored.num_pinned(pool)
        return self._retire.num_waiting(pool) + pinned

    def _grow_kv(self, seq: Sequence, count: int) -> None:
        assert self.kv_pool is not None
        fresh = self.kv_pool.allocate(count)
        assert fresh is not None, f"{seq.seq_id=} needs {count} KV blocks that were promised"
        have = len(seq.kv_blocks)
        seq.kv_blocks.extend(fresh)
        self._kv_table[seq.slot, have : have + count] = fresh

    def _grow_state(self, seq: Sequence, group: int, columns: Iterable[int]) -> None:
        columns = list(columns)
        fresh = self.state_pools[group].allocate(len(columns))
        assert fresh is not None, f"{seq.seq_id=} needs state blocks that were promised"
        table = seq.state_tables[group]
        self._width_of[seq.slot] = 0
        for column, block in zip(columns, fresh, strict=True):
            if column >= len(table):
                table.extend([NULL_BLOCK] * (column + 1 - len(table)))
            table[column] = block

    def _settle(self, seq: Sequence, columns: tuple[int, int], end: int) -> None:
        """Note a verify row's columns, and up to which length nothing about them changes.

        Args:
            seq: Whose row it is.
            columns: First and last column that the row may touch.
            end: Tokens after the row, at most.
        """
        base, top = columns
        slot, width, unit = seq.slot, top - base + 1, self.scheme.unit
        if self._base_of[slot] != base or self._width_of[slot] != width:
            self._put_columns(seq, base, width)
        max_tokens = seq.params.max_tokens
        assert max_tokens is not None
        seq.end_at = min(self.limits.max_model_len, seq.num_prompt_tokens + max_tokens)
        if seq.grammar is not None:
            seq.end_at = 0  # Any token may be its last, and each row waits for the one before.
        until = min(self.scheme.steady_until(base, top), seq.end_at - 1)
        if self.kv_pool is not None:
            owned = len(seq.kv_blocks) * self.limits.block_size
            until = min(until, owned - self.num_draft_tokens)
        # Kept tokens may end exactly on the column's boundary: the next column counts then.
        may_leave = end // unit != base
        came = seq.last_column != base
        if came and not may_leave:
            until = 0  # Only this step's states move.
        elif not may_leave:
            until = min(until, (base + 1) * unit - 1)
        seq.crosses = may_leave or came
        seq.steady_until, seq.base_until = until, self.scheme.base_until(base)
        seq.last_column = (end - 1) // unit

    def _put_columns(self, seq: Sequence, base: int, width: int) -> None:
        """Copy a part of a sequence's state tables to where plans take them from."""
        if width > self._columns_of.shape[2]:
            wider = ((0, 0), (0, 0), (0, width - self._columns_of.shape[2]))
            self._columns_of = np.pad(self._columns_of, wider)
        slot = seq.slot
        self._base_of[slot], self._width_of[slot] = base, width
        for lines, table in zip(self._columns_of, seq.state_tables, strict=True):
            lines[slot, :width] = table[base : base + width]
            lines[slot, width:] = NULL_BLOCK

    def _verify_plan(self, now: _Pass, rows: VerifyRows) -> VerifyPlan:
        """Frozen plan of the chosen rows; lines of the per-slot tables are copied."""
        slots = rows.slots
        width = -(-(now.max_seq_len + self.num_draft_tokens) // self.limits.block_size)
        num_columns = int(self._width_of[slots].max())
        return VerifyPlan(
            seq_ids=rows.seq_ids,
            slots=slots,
            num_drafts=rows.num_drafts,
            kv_table=self._kv_table[slots, :width],
            state_tables=tuple(lines[slots, :num_columns] for lines in self._columns_of),
            state_base=self._base_of[slots],
            max_seq_len=now.max_seq_len,
            may_cross=now.may_cross,
        )

    def _masks(self, now: _Pass) -> TokenMasks | None:
        """What the grammars of this step's sampling rows allow."""
        rows: list[int] = []
        wanted: list[tuple[GrammarState, list[int]]] = []
        first_known = 0
        if now.verify is not None:
            first_known = len(now.verify.seqs)
            for index, seq in enumerate(now.verify.seqs):
                if seq.grammar is not None:
                    rows.append(index)
                    wanted.append((seq.grammar, seq.drafts[: now.verify.num_drafts[index]]))
        for index, row in enumerate((*now.rows, *now.forks), first_known):
            if row.samples and row.seq.grammar is not None:
                rows.append(index)
                wanted.append((row.seq.grammar, []))
        if not rows:
            return None
        return TokenMasks(
            rows=tuple(rows),
            num_lines=tuple(1 + len(drafts) for _, drafts in wanted),
            bits=fill_masks(wanted, self.vocab_size),
        )

    def _plan_known(self, seq: Sequence, now: _Pass) -> KnownPlan | None:
        """Plan the next chunk of known tokens, or None if budget or blocks are short."""
        start = seq.high
        path: Literal["scan", "step"] = "scan" if start < seq.num_prompt_tokens else "step"
        end = self._chunk_end(seq, start, now.budget)
        if end <= start:
            return None
        unit, size = self.scheme.unit, self.limits.block_size
        wanted = [b for b in seq.wanted if start < b <= end] if path == "scan" else []
        rungs = [b for b in seq.rungs if start < b <= end] if path == "scan" else []
        target = (end - 1) // unit
        exports = self._reserve_known(
            seq, end, target, [b for b in wanted if b // unit - 1 != target], now.scheduled
        )
        if exports is None:
            return None
        source_column = (start - 1) // unit
        states: list[KnownState] = []
        for table in seq.state_tables:
            source = table[source_column] if start else None
            assert source != NULL_BLOCK, f"{seq.seq_id=} has no state after {start} tokens"
            states.append(
                KnownState(
                    source_block=source,
                    target_block=table[target],
                    exports=tuple((b, table[b // unit - 1]) for b in exports),
                )
            )
        for boundary in [*exports, *([end] if end in wanted else [])]:
            keys = seq.keys(size, boundary)
            key = keys[-1]
            now.checkpoints.append(keys)
            for table, pool in zip(seq.state_tables, self.state_pools, strict=True):
                now.publish.append((pool, table[boundary // unit - 1], key))
        if rungs and rungs[-1] == end:
            # The running column holds it already, and the next chunk goes on in another.
            key = seq.keys(size, rungs.pop())[-1]
            for table, pool in zip(seq.state_tables, self.state_pools, strict=True):
                now.publish_rungs.append((pool, table[target], key))
        if rungs:
            now.rungs.append((len(now.known), rungs))
        now.num_wanted += sum(b > end for b in seq.wanted)
        seq.last_column = target
        self._release_columns(seq, target, now.step_id)
        return KnownPlan(
            seq_id=seq.seq_id,
            slot=seq.slot,
            path=path,
            start=start,
            token_ids=np.array(seq.token_ids[start:end], dtype=np.int64),
            next_token=seq.token_ids[end] if end < seq.num_tokens else -1,
            samples=end == seq.num_tokens,
            ends_known=end == seq.known_end,
            kv_table=self._kv_table[seq.slot, : len(seq.kv_blocks)].copy(),
            states=tuple(states),
            forks=self._fork_family(seq, now) if end == seq.num_tokens else (),
        )

    def _fork_family(self, leader: Sequence, now: _Pass) -> tuple[ForkPlan, ...]:
        """Let waiting members of a family begin where this step ends their common prompt.

        As many as find slots and blocks, now and for their next steps; the others wait and lead
        or follow later.
        """
        family = leader.family
        if family is None:
            return ()
        self._end_lead(leader)
        end, size = leader.num_prompt_tokens, self.limits.block_size
        num_shared = (end - self.rewrites_last) // size if self.kv_pool is not None else 0
        num_own = len(leader.kv_blocks) - num_shared
        deferred = {member.seq_id for member in now.deferred}
        followers = [member for member in family.followers() if member.seq_id not in deferred]
        room = len(self._free_slots)
        if self.kv_pool is not None:
            room = min(room, self.kv_pool.num_available // (num_own + 1))
        for pool in self.state_pools:
            room = min(room, pool.num_available // self.scheme.max_blocks())
        place = self.running.index(leader)
        plans: list[ForkPlan] = []
        for child in followers[:room]:
            self.waiting.remove(child)
            self._count_waiting(child, -1)
            child.reset(len(self.state_pools))
            # By age, between its leader and what came later.
            self._enter(child, place + 1 + len(plans))
            child.known_end = child.num_computed_tokens = end
            child.note_at = leader.note_at
            child.reach_in_prompt(end)
            child.num_cached_tokens, child.missed = leader.num_cached_tokens, leader.missed
            child.first_column, child.last_column = leader.first_column, leader.last_column
            child.num_published = end // size
            if self.cache.is_enabled:
                child.take_keys(leader, size)
            copies: tuple[tuple[int, int], ...] = ()
            self._kv_table[child.slot, :] = 0
            if self.kv_pool is not None:
                self.kv_pool.fork(*leader.kv_blocks[:num_shared])
                child.kv_blocks = leader.kv_blocks[:num_shared]
                self._kv_table[child.slot, :num_shared] = child.kv_blocks
                self._grow_kv(child, num_own)
                written = slice(num_shared, -(-end // size))
                copies = tuple(
                    zip(leader.kv_blocks[written], child.kv_blocks[written], strict=True)
                )
            for group in range(len(self.state_pools)):
                self._grow_state(child, group, (leader.last_column,))
            now.scheduled.add(child.seq_id)
            now.forks.append(KnownRow(child, child.life, 0, samples=True))
            now.admitted.append(self._describe(child))
            plans.append(
                ForkPlan(
                    seq_id=child.seq_id,
                    slot=child.slot,
                    kv_table=self._kv_table[child.slot, : len(child.kv_blocks)].copy(),
                    state_blocks=tuple(table[-1] for table in child.state_tables),
                    kv_copies=copies,
                )
            )
        self.num_forks += len(plans)
        return tuple(plans)

    def _end_lead(self, seq: Sequence) -> None:
        """The sequence leads its family no longer."""
        family = seq.family
        if family is not None and family.leader is seq:
            family.leader = None
            self._families.remove(family)

    def _chunk_end(self, seq: Sequence, start: int, budget: int) -> int:
        """Where the next chunk ends: on the grid, or where its path of origin ends."""
        if start >= seq.num_prompt_tokens:
            return min(seq.known_end, start + min(budget, _MAX_RECOMPUTE))
        stop = min(seq.num_prompt_tokens, seq.known_end)
        end = min(stop, start + budget)
        return end if end == stop else end // self.limits.grid * self.limits.grid

    def _reserve_known(
        self, seq: Sequence, end: int, target: int, exports: list[int], scheduled: set[int]
    ) -> list[int] | None:
        """Own the chunk's blocks; exports are left out, not preempted for, if blocks are short.

        Returns:
            The boundaries that will be exported, or None if not even the chunk fits.
        """
        unit = self.scheme.unit
        kv_need = 0
        if self.kv_pool is not None:
            ahead = end + (self.num_draft_tokens if end == seq.known_end else 0)
            kv_need = max(0, -(-ahead // self.limits.block_size) - len(seq.kv_blocks))

        def missing(boundaries: list[int]) -> list[list[int]]:
            columns = sorted({target, *(b // unit - 1 for b in boundaries)})
            return [
                [c for c in columns if c >= len(table) or not table[c]]
                for table in seq.state_tables
            ]

        needs = missing(exports)
        if exports and not self._fits(kv_need, [len(need) for need in needs]):
            exports = []
            needs = missing(exports)
        counts = [len(need) for need in needs]
        while not self._fits(kv_need, counts):
            if not self._preempt_for(seq, scheduled, kv_need, counts):
                return None
        if kv_need:
            self._grow_kv(seq, kv_need)
        for group, need in enumerate(needs):
            if need:
                self._grow_state(seq, group, need)
        return exports

    def _place_rungs(self, now: _Pass) -> None:
        """Let this step's chunks export rungs too, as far as there are blocks to spare."""
        if not now.rungs:
            return
        room, size = self._rung_room(now), self.limits.block_size
        for place, boundaries in now.rungs:
            # The shortest ones first: each later prompt that shares a longer one shares those too.
            chosen = boundaries[:room]
            if not chosen:
                return
            room -= len(chosen)
            row, plan = now.rows[place], now.known[place]
            keys = row.seq.keys(size, chosen[-1])
            states: list[KnownState] = []
            for state, pool in zip(plan.states, self.state_pools, strict=True):
                blocks = pool.allocate_for_rungs(len(chosen))
                exports = sorted((*state.exports, *zip(chosen, blocks, strict=True)))
                states.append(replace(state, exports=tuple(exports)))
                now.publish_rungs.extend(
                    (pool, block, keys[boundary // size - 1])
                    for boundary, block in zip(chosen, blocks, strict=True)
                )
                # Last one first, like KV blocks: without those of its end it is of no use.
                self._retire.release(
                    pool, blocks[::-1], last_step=now.step_id, retired=self.retired_step
                )
            now.known[place] = replace(plan, states=tuple(states))

    def _rung_room(self, now: _Pass) -> int:
        """Blocks of each group that rungs may take.

        What those who run, those who wait and find a slot, and one who may come can own at most is
        left to them, and the checkpoints that were asked for.
        """
        coming = min(len(self.waiting) + 1, len(self._free_slots))
        need = (len(self.running) + coming) * self.scheme.max_blocks()
        need += now.num_wanted + _CHECKPOINTS_OF_A_PROMPT * coming
        rooms: list[int] = []
        for pool in self.state_pools:
            retiring = self._num_returning(pool)
            owned = pool.num_usable - pool.num_available - pool.num_kept - retiring
            rooms.append(pool.room_for_rungs(max(0, need - owned)))
        return min(rooms, default=0)

    def _admit(self, now: _Pass) -> None:
        """Let waiting sequences in, first come first served, as far as slots and blocks reach."""
        size = self.limits.block_size
        # Slots are kept for sequences that will fork off prompts that are being computed.
        now.promised = sum(len(family.followers()) for family in self._families)
        while self.waiting and self._free_slots and now.budget > 0:
            seq = self.waiting[0]
            if seq.is_led:
                now.deferred.append(self.waiting.popleft())
                continue
            if seq.num_in_flight or seq.num_known_in_flight:
                break  # Preempted; its last results are still to come.
            if len(self._free_slots) <= now.promised:
                break
            limit = last_reusable_boundary(
                seq.num_prompt_tokens, self.scheme.unit, self.cache.lookahead
            )
            keys = seq.keys(size, limit) if self.cache.is_enabled else []
            match = self.cache.match(
                keys,
                seq.num_prompt_tokens,
                unsalted_keys=seq.unsalted_keys(size),
                pending=self._pending_keys,
                wants_prompt_logprobs=seq.prompt_logprobs is not None,
            )
            if match.missed.get("in_flight") and self._is_pending(keys, match.num_tokens, limit):
                # A running sequence is about to publish a longer prefix of this prompt: one step's
                # wait saves computing it twice.
                now.deferred.append(self.waiting.popleft())
                continue
            stored = self._look_up_stored(seq, match, keys, now)
            if stored == "reading":
                now.deferred.append(self.waiting.popleft())
                continue
            if not self._admit_one(seq, match, keys, limit, now, stored):
                break
        self.waiting.extendleft(reversed(now.deferred))
        self.num_deferred = len(now.deferred)

    def _look_up_stored(
        self, seq: Sequence, match: Match, keys: list[bytes], now: _Pass
    ) -> StoredHit | Literal["reading"] | None:
        """Ask the state store for a longer prefix, if there is room for the sequence at all."""
        if self.stored is None or not keys or seq.prompt_logprobs is not None:
            return None
        if not self._has_room(_known_end(seq), match, now.promised):
            return None
        found = self.stored.look_up(seq, match, keys)
        if isinstance(found, StoredHit) and not all(now.loads_left.values()):
            return "reading"  # Its turn comes in a later step.
        return found

    def _admit_one(
        self,
        seq: Sequence,
        match: Match,
        keys: list[bytes],
        limit: int,
        now: _Pass,
        stored: StoredHit | None,
    ) -> bool:
        """Admit a sequence with its first chunk or loads, or leave everything as it was."""
        if stored is not None:
            match = self.cache.extended(
                match, stored.num_columns * self.scheme.unit, keys, seq.num_prompt_tokens,
                unsalted_keys=seq.unsalted_keys(self.limits.block_size),
                pending=self._pending_keys,
            )
            stored.keep_whole_columns(match.kv_blocks)
        if seq.has_met_damage:
            match.blame_damage()
        num_shared = len(match.kv_blocks)
        self.cache.pin(match)
        if not self._has_room(_known_end(seq), match, now.promised) or (
            stored is not None and not self._allocate_stored(match)
        ):
            self.cache.unpin(match)
            return False
        self._begin(seq, match, num_shared)
        if seq.family is not None and seq.num_tokens == seq.num_prompt_tokens:
            seq.family.leader = seq
            self._families.append(seq.family)
        seq.checkpoint_marks = self._shared_boundaries(seq, keys, limit)
        seq.wanted = self._wanted(seq)
        seq.rungs = self._rungs(seq)
        plan = None
        if stored is not None:
            seq.loads = stored.loads(match.kv_blocks, match.state_blocks, num_shared)
            self._plan_loads(seq, now)
        elif (plan := self._plan_known(seq, now)) is None:
            # Not even one chunk fits: give everything back, wait for budget or blocks.
            self._exit(seq)
            self._end_lead(seq)
            self.cache.unpin(match)
            self._free_slots.appendleft(seq.slot)
            seq.reset(len(self.state_pools))
            seq.status = Status.WAITING
            self.waiting.appendleft(seq)
            self._count_waiting(seq, 1)
            return False
        self._take_hit(seq, match, keys, is_stored=stored is not None)
        size = self.limits.block_size
        pending = seq.wanted if stored is None else (match.num_tokens, *seq.wanted)
        if seq.rungs and self._rung_room(now):
            pending += seq.rungs
        prompt_keys = seq.keys(size, max(pending, default=0))
        seq.pending_keys = {b: prompt_keys[b // size - 1] for b in pending}
        self._pending_keys.update(seq.pending_keys.values())
        now.admitted.append(self._describe(seq))
        if plan is not None:
            now.take(seq, plan)
        if seq.family is not None and seq.family.leader is seq:
            now.promised += len(seq.family.followers())
        return True

    def _allocate_stored(self, match: Match) -> bool:
        """Give a match from the state store blocks for what the cache has not.

        Returns:
            False, and nothing was taken, if there are not enough.
        """
        num_blocks = match.num_tokens // self.limits.block_size
        need = max(0, num_blocks - len(match.kv_blocks))
        if not self._fits(need, [1] * len(self.state_pools)):
            return False
        if self.kv_pool is not None:
            match.kv_blocks += self.kv_pool.allocate(need) or []
        for pool in self.state_pools:
            match.state_blocks += pool.allocate(1) or []
        return True

    def _plan_loads(self, seq: Sequence, now: _Pass) -> None:
        """Let the step fill some of a sequence's blocks from the state store, as far as it may."""
        while seq.loads and now.loads_left[seq.loads[0].kind]:
            load = seq.loads.popleft()
            now.loads_left[load.kind] -= 1
            now.loads.append(load)
        now.loading.append(seq)
        now.scheduled.add(seq.seq_id)

    def _publish_loaded(self, seq: Sequence) -> None:
        """Let others find a prefix from the state store: its last pieces have been enqueued."""
        boundary = seq.cached_boundary
        key = seq.keys(self.limits.block_size, boundary)[-1]
        for table, pool in zip(seq.state_tables, self.state_pools, strict=True):
            pool.publish(table[boundary // self.scheme.unit - 1], key, is_generated=False)
        self._drop_pending(seq, boundary)
        self._publish_kv(seq, boundary)

    def _begin(self, seq: Sequence, match: Match, num_shared: int) -> None:
        """Let a waiting sequence run, with the blocks of a match.

        Args:
            seq: The first that waits.
            match: Its hit, which is pinned.
            num_shared: KV blocks of it that others find too.
        """
        self.waiting.popleft()
        self._count_waiting(seq, -1)
        known_end = _known_end(seq)
        self._enter(seq)
        seq.known_end = known_end
        seq.note_at = (known_end // self.scheme.unit + 1) * self.scheme.unit
        seq.num_computed_tokens = match.num_tokens
        seq.kv_blocks = list(match.kv_blocks)
        seq.num_published = num_shared
        seq.cached_boundary = match.num_tokens
        seq.junction = match.junction
        self._kv_table[seq.slot, :] = 0
        self._kv_table[seq.slot, : len(seq.kv_blocks)] = seq.kv_blocks
        column = match.num_tokens // self.scheme.unit - 1
        seq.first_column = max(column, 0)
        for group, block in enumerate(match.state_blocks):
            seq.state_tables[group] = [NULL_BLOCK] * column + [block]

    def _take_hit(
        self, seq: Sequence, match: Match, keys: list[bytes], *, is_stored: bool
    ) -> None:
        """Count what an admitted sequence found; a rung that was asked for is one no longer."""
        self.cache.record(match, seq.num_prompt_tokens)
        hit, size = match.num_tokens, self.limits.block_size
        self.num_cached_prompt_tokens += seq.reach_in_prompt(hit)
        if hit:
            marks = [mark for mark in self._marks(seq) if 0 < mark < hit]
            self.cache.promote([keys[boundary // size - 1] for boundary in (*marks, hit)])
            if self.stored is not None and not is_stored:
                self.stored.want(keys[: hit // size])
        if self.stored is not None and is_stored:
            self.stored.count_hit(hit)
            seq.fetch = None
        if not seq.num_preemptions:
            seq.num_cached_tokens = hit
            seq.missed = match.missed

    def _drop_pending(self, seq: Sequence, up_to: int) -> None:
        """The sequence is past these boundaries: published or skipped, none waits for them."""
        for boundary in [b for b in seq.pending_keys if b <= up_to]:
            key = seq.pending_keys.pop(boundary)
            self._pending_keys[key] -= 1
            if not self._pending_keys[key]:
                del self._pending_keys[key]

    def _has_room(self, known_end: int, match: Match, promised: int) -> bool:
        """Whether the whole prompt fits beside what runs; a lone sequence always does."""
        if not self.running:
            return True
        if self.kv_pool is not None:
            need = -(-(known_end + 1) // self.limits.block_size) - len(match.kv_blocks)
            if need > self.kv_pool.num_available:
                return False
        need = self.scheme.max_blocks() * (1 + promised)
        return all(need <= pool.num_available for pool in self.state_pools)

    def _is_pending(self, keys: list[bytes], hit: int, limit: int) -> bool:
        unit, size = self.scheme.unit, self.limits.block_size
        return any(
            self._pending_keys.get(keys[b // size - 1], 0) > 0
            for b in range(hit + unit, limit + 1, unit)
        )

    def _wanted(self, seq: Sequence) -> tuple[int, ...]:
        """Boundaries of the prompt at which this sequence leaves a checkpoint, ascending."""
        if not self.cache.is_enabled:
            return ()
        unit = self.scheme.unit
        last = seq.num_prompt_tokens // unit * unit
        retention = self.limits.retention
        wanted = {*self._ends(seq), *self._marks(seq), seq.junction, *seq.checkpoint_marks}
        if retention == "all":
            wanted.update(range(unit, last + 1, unit))
        elif retention.startswith("every:"):
            every = int(retention.removeprefix("every:"))
            wanted.update(-(-n // unit) * unit for n in range(every, last + 1, every))
        return tuple(sorted(b for b in wanted if seq.cached_boundary < b <= last))

    def _rungs(self, seq: Sequence) -> tuple[int, ...]:
        """Boundaries at which this sequence leaves a checkpoint if there is room, ascending.

        Each is four times the one before: a prompt that shares n tokens, one unit or more, finds
        more than a quarter of them, and the number of rungs is a logarithm of the prompt's length.
        """
        if not self.cache.is_enabled:
            return ()
        rungs, boundary = [], self.scheme.unit
        while boundary < seq.num_prompt_tokens:
            if boundary > seq.cached_boundary and boundary not in seq.wanted:
                rungs.append(boundary)
            boundary *= _RUNG_RATIO
        return tuple(rungs)

    def _ends(self, seq: Sequence) -> tuple[int, int]:
        """The last boundary that this prompt itself can resume from, and that its continuation can.

        They differ where the prompt ends on a boundary: it must compute its last token again.
        """
        unit, count = self.scheme.unit, seq.num_prompt_tokens
        return last_reusable_boundary(count, unit, self.cache.lookahead), count // unit * unit

    def _marks(self, seq: Sequence) -> set[int]:
        """The client's marks, floored: whoever shares a prompt up to the mark shares that much."""
        unit, marks = self.scheme.unit, seq.params.cache_checkpoint
        assert isinstance(marks, tuple), f"{marks=} were made so"
        return {mark // unit * unit for mark in marks}

    def hold_keys(self, seq: Sequence) -> tuple[list[bytes], list[bytes]]:
        """KV keys and checkpoint keys that `cache_pin` holds for a prompt.

        They are those of its marks, or of its ends if it has none, and the KV before them.
        """
        boundaries = sorted({*(self._marks(seq) or self._ends(seq))} - {0})
        size = self.limits.block_size
        return (
            seq.keys(size, max(boundaries, default=0)),
            [seq.keys(size, boundary)[-1] for boundary in boundaries],
        )

    def _shared_boundaries(self, seq: Sequence, keys: list[bytes], limit: int) -> tuple[int, ...]:
        """Boundaries of this prompt that waiting sequences share: the longest, the most shared."""
        if not self._waiting_keys:
            return ()
        unit, size = self.scheme.unit, self.limits.block_size
        counts = [
            (b, self._waiting_keys.get(keys[b // size - 1], 0))
            for b in range(seq.num_computed_tokens + unit, limit + 1, unit)
        ]
        shared = [(b, count) for b, count in counts if count > 0]
        if not shared:
            return ()
        longest = shared[-1][0]
        most = max(shared, key=lambda pair: (pair[1], pair[0]))[0]
        return (longest,) if longest == most else (most, longest)

    def _count_waiting(self, seq: Sequence, sign: int) -> None:
        """Keep count of the boundary keys of waiting prompts; a family counts once."""
        if not self.cache.is_enabled:
            return
        if seq.family is not None and seq.family.members[0] is not seq:
            return
        unit, size = self.scheme.unit, self.limits.block_size
        limit = last_reusable_boundary(seq.num_prompt_tokens, unit, self.cache.lookahead)
        keys = seq.keys(size, limit)
        counts, step = self._waiting_keys, unit // size
        for key in keys[step - 1 : limit // size : step]:
            count = counts.get(key, 0) + sign
            if count > 0:
                counts[key] = count
            else:
                del counts[key]

    def _describe(self, seq: Sequence) -> NewSequence:
        return NewSequence(
            seq_id=seq.seq_id,
            slot=seq.slot,
            params=seq.params,
            seed=seq.seed,
            stop_ids=tuple(sorted(seq.stop_ids)),
            num_prompt_tokens=seq.num_prompt_tokens,
            token_ids=np.array(seq.token_ids, dtype=np.int64),
            bad_words=seq.bad_words,
            prompt_logprobs=seq.prompt_logprobs,
        )

    # Results and releases ------------------------------------------------------------------------

    def _append(self, seq: Sequence, tokens: list[int]) -> list[int]:
        """Append sampled tokens up to the first end; sets finish_reason for the caller."""
        max_tokens = seq.params.max_tokens
        assert max_tokens is not None
        min_tokens = seq.params.min_tokens
        num_output = seq.num_output_tokens
        room = self.limits.max_model_len - seq.num_tokens
        kept: list[int] = []
        grammar = seq.grammar
        for token in tokens:
            is_complete = grammar is not None and grammar.advance(token)
            if grammar is not None and grammar.error is not None:
                seq.finish_reason, seq.stop_reason = "error", grammar.error
                break
            kept.append(token)
            num_output += 1
            room -= 1
            if token in seq.stop_ids and num_output >= min_tokens:
                seq.finish_reason = "stop"
                seq.stop_reason = token if token in seq.params.stop_token_ids else None
                seq.ends_in_stop_token = True
                break
            if is_complete:
                # The grammar allows nothing more: no step is spent on an end of sequence.
                seq.finish_reason = "stop"
                break
            if num_output >= max_tokens or room <= 0:
                seq.finish_reason = "length"
                break
        seq.token_ids.extend(kept)
        return kept

    def _publish_kv(self, seq: Sequence, num_tokens: int) -> None:
        """Publish full KV blocks whose tokens were all computed by the scan."""
        if self.kv_pool is None or not self.cache.is_enabled:
            return
        size = self.limits.block_size
        count = num_tokens // size
        if count <= seq.num_published:
            return
        fresh = slice(seq.num_published, count)
        self.kv_pool.publish_run(seq.kv_blocks[fresh], seq.keys(size, count * size)[fresh])
        seq.num_published = count

    def _note_generated(self, seq: Sequence, before: int) -> None:
        """Register checkpoints that lie inside generated tokens, now that those are known."""
        if seq.slot == -1:
            return
        unit, size = self.scheme.unit, self.limits.block_size
        if not self.cache.is_enabled or self.cache.is_bitwise:
            seq.note_at = self.limits.max_model_len + 1
            return
        after = min(seq.num_computed_tokens, seq.num_tokens)
        seq.note_at = self.scheme.next_completed(before, after)
        for boundary in self.scheme.completed(before, after):
            # Boundaries up to known_end were passed by known rows: no generated state is there.
            if boundary <= max(seq.known_end, seq.generated_boundary):
                continue
            keys = seq.keys(size, boundary)
            seq.generated_boundary = boundary
            for group, pool in enumerate(self.state_pools):
                table = seq.state_tables[group]
                column = boundary // unit - 1
                if column < len(table) and table[column]:
                    pool.publish(table[column], keys[-1], is_generated=True)
            if self.kv_pool is not None:
                for index in range(seq.num_published, boundary // size):
                    self.kv_pool.publish(seq.kv_blocks[index], keys[index], is_generated=True)
                seq.num_published = boundary // size

    def _note_passed(self, seq: Sequence) -> None:
        """Where bits are promised: remember the boundaries that this sequence's output passed.

        All at once, when it stops running: a prompt that continues it comes later anyway.
        """
        if not (self.cache.is_enabled and self.cache.is_bitwise):
            return
        unit, size = self.scheme.unit, self.limits.block_size
        last = min(seq.num_computed_tokens, seq.num_tokens) // unit * unit
        first = (seq.known_end // unit + 1) * unit
        if first <= last:
            keys = seq.keys(size, last)
            for boundary in range(first, last + 1, unit):
                self.cache.note_generated(keys[boundary // size - 1])

    def _release_columns(self, seq: Sequence, keep_from: int, last_step: int) -> None:
        """Give up the columns left of `keep_from`; published ones stay cached."""
        first_column = max(keep_from, seq.first_column)
        seq.release_at = self.scheme.base_until(first_column)
        if keep_from <= seq.first_column:
            return
        for group, pool in enumerate(self.state_pools):
            table = seq.state_tables[group]
            gone = [block for block in table[seq.first_column : keep_from] if block != NULL_BLOCK]
            stop = min(keep_from, len(table))
            table[seq.first_column : stop] = [NULL_BLOCK] * max(0, stop - seq.first_column)
            self._retire.release(pool, gone, last_step=last_step, retired=self.retired_step)
        seq.first_column = keep_from

    def _release_all(self, seq: Sequence) -> None:
        """Give up everything a running sequence owns, once no step in flight needs it."""
        self._end_lead(seq)
        self._drop_pending(seq, self.limits.max_model_len)
        # A fork that has not been executed names blocks of both ends: they stay until the step
        # that copies, which is the next one.
        last_step = max(seq.last_step, self._step_id + 1 if self._slot_copies else 0)
        if self.kv_pool is not None:
            # Last block first: the ends of chains are evicted before their beginnings.
            self._retire.release(
                self.kv_pool, seq.kv_blocks[::-1], last_step=last_step, retired=self.retired_step
            )
        for group, pool in enumerate(self.state_pools):
            gone = [block for block in seq.state_tables[group] if block != NULL_BLOCK]
            self._retire.release(pool, gone, last_step=last_step, retired=self.retired_step)
        if last_step <= self.retired_step:
            self._free_slots.append(seq.slot)
        else:
            self._retiring_slots.append((last_step, seq.slot))
        self._left.append(seq.seq_id)
        if seq in self._forked:
            self._forked.remove(seq)
        seq.kv_blocks = []
        seq.state_tables = [[] for _ in self.state_pools]
        seq.slot = -1

    def _blocks_of(self, seq: Sequence, pool: BlockPool) -> list[int]:
        if pool is self.kv_pool:
            return seq.kv_blocks
        group = self.state_pools.index(pool)
        return [block for block in seq.state_tables[group] if block != NULL_BLOCK]


def _known_end(seq: Sequence) -> int:
    """Tokens of a waiting sequence that known rows will compute."""
    return max(seq.num_prompt_tokens, seq.num_tokens - 1)


def _missing(table: list[int], base: int, top: int) -> list[int]:
    """Columns base .. top of a state table that have no block."""
    if len(table) > top and NULL_BLOCK not in table[base : top + 1]:
        return []
    return [column for column in range(base, top + 1) if column >= len(table) or not table[column]]


def _chosen(
    everyone: VerifyRows, chosen: np.ndarray, lives: np.ndarray, drafts: np.ndarray
) -> VerifyRows:
    if chosen.all():
        return VerifyRows(everyone.seqs, everyone.seq_ids, everyone.slots, lives, drafts)
    places = np.flatnonzero(chosen)
    seqs = tuple([everyone.seqs[place] for place in places.tolist()])
    ids = tuple([seq.seq_id for seq in seqs])
    return VerifyRows(seqs, ids, everyone.slots[places], lives[places], drafts[places])
