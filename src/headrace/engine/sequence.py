"""One token stream being extended: the scheduler's own, mutable view of it.

The numbers that change in every step are cells: of a running sequence they are a column of the
scheduler's table, so that one array operation treats all rows of a step, and otherwise its own.
There is one place for each number at any time, whichever way it is reached.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.prefix_cache import chain_keys, root_key

if TYPE_CHECKING:
    from headrace.engine.state_store.store import Fetch
    from headrace.grammar import GrammarState
    from headrace.outputs import FinishReason
    from headrace.sampling_params import SamplingParams
    from headrace.worker.step import PieceLoad


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Family:
    """The sequences of one request with several completions: one prompt, noise of their own.

    Attributes:
        members: By index of the completion.
        leader: The member that computes the prompt for all, while it does.
    """

    __slots__ = ("leader", "members")

    def __init__(self, members: list[Sequence]) -> None:
        self.members = members
        self.leader: Sequence | None = None
        for member in members:
            member.family = self

    def followers(self) -> list[Sequence]:
        """Members that wait without output, so that they may fork off the end of the prompt."""
        return [member for member in self.members if member.can_follow]


class Cell(IntEnum):
    """Lines of the scheduler's table; for each see the attribute of `Sequence` of that name."""

    COMPUTED = 0
    IN_FLIGHT = auto()
    IN_FLIGHT_DRAFTS = auto()
    KNOWN_IN_FLIGHT = auto()
    KNOWN_END = auto()
    DRAFTS_READY = auto()
    STEADY_UNTIL = auto()
    BASE_UNTIL = auto()
    CROSSES = auto()
    END_AT = auto()
    NOTE_AT = auto()
    RELEASE_AT = auto()
    LAST_STEP = auto()
    NUM_STEPS = auto()
    LIFE = auto()


_RESET = [
    cell for cell in Cell
    # Results of a preempted sequence's steps still arrive.
    if cell not in {
        Cell.IN_FLIGHT, Cell.IN_FLIGHT_DRAFTS, Cell.KNOWN_IN_FLIGHT, Cell.LAST_STEP, Cell.NUM_STEPS
    }
]


def _cell(cell: Cell) -> property:
    index = int(cell)

    def get(self: Sequence) -> int:
        return self._cells.item(index)

    def put(self: Sequence, value: int) -> None:
        self._cells[index] = value

    return property(get, put)


class Sequence:
    """A prompt and what was generated after it.

    Attributes:
        seq_id: Unique in the life of the engine; ids of clients are never used as keys.
        num_prompt_tokens: Tokens of the prompt; they are computed by the scan, later ones by the
            step, whenever they are computed.
        token_ids: Tokens the host knows: the prompt and confirmed output.
        num_computed_tokens: Confirmed tokens whose KV and state are in the caches.
        known_end: Tokens to compute as known rows before the sequence generates (again).
        num_reached_in_prompt: Most tokens of the prompt that ever were in the caches.
        num_in_flight: Tokens of steps whose results have not been read, drafts included.
        num_in_flight_drafts: The drafts among them.
        num_known_in_flight: Steps in flight that bring at least one token.
        last_step: Newest step that has a row of this sequence.
        life: Which stay among the running sequences this is, counted over all of them; else 0.
        kv_blocks: The block table.
        state_tables: Per state group, blocks by column; null (0) where there is none.
        slot: Place in the per-sequence arrays while running, else -1.
        steady_until, base_until: Verify rows that end at or before `steady_until` tokens and begin
            after at most `base_until` need no new block, stay in their columns and meet no limit;
            0 if that is not known.
        crosses: Whether states may have to move in such a row.
        end_at: Tokens at which the sequence ends at the latest; 0 if that is not known.
        note_at, release_at: Computed tokens from which on a boundary may be complete, or a column
            may be given up.
        bad_words: Token runs of which the last may not follow the others in the output.
        prompt_logprobs: Likeliest tokens wanted at each prompt position, or None. Of the sequences
            of one request only the first computes them.
        grammar: Where its confirmed output stands in its grammar, or None if it has none. Such a
            sequence has at most one generating row in flight: the masks of the next one follow
            from that one's tokens.
        drafts: Drafts that its next row verifies, where it has a grammar; negative ones are none.
        wanted, rungs: Boundaries of its prompt at which it leaves a checkpoint, and those at which
            it leaves one if there is room to spare; ascending.
        ends_in_stop_token: Whether its last token is a stop token, whose text is not wanted.
        family: Its request's sequences, if they are several.
        fetch: A prefix that the state store is gathering for it, or has gathered.
        has_asked_store: Whether the store has been asked since it began to wait.
        has_met_damage: Whether the store had something of its prompt that was not as it should be.
        loads: Pieces from the store that its first chunk waits for.
    """

    __slots__ = (
        "_cells", "_keys", "_unsalted", "arrival", "bad_words", "cached_boundary",
        "checkpoint_marks", "drafts", "ends_in_stop_token", "family", "fetch",
        "finish_reason", "first_column", "generated_boundary", "grammar", "has_asked_store",
        "has_met_damage", "is_aborted", "junction", "kv_blocks", "last_column", "loads", "missed",
        "num_cached_tokens", "num_preemptions", "num_prompt_tokens", "num_published",
        "num_reached_in_prompt", "params", "pending_keys", "prompt_logprobs", "rungs", "seed",
        "seq_id", "slot", "state_tables", "status", "stop_ids", "stop_reason", "token_ids",
        "wanted",
    )

    num_computed_tokens = _cell(Cell.COMPUTED)
    num_in_flight = _cell(Cell.IN_FLIGHT)
    num_in_flight_drafts = _cell(Cell.IN_FLIGHT_DRAFTS)
    num_known_in_flight = _cell(Cell.KNOWN_IN_FLIGHT)
    known_end = _cell(Cell.KNOWN_END)
    num_drafts_ready = _cell(Cell.DRAFTS_READY)
    steady_until = _cell(Cell.STEADY_UNTIL)
    base_until = _cell(Cell.BASE_UNTIL)
    crosses = _cell(Cell.CROSSES)
    end_at = _cell(Cell.END_AT)
    note_at = _cell(Cell.NOTE_AT)
    release_at = _cell(Cell.RELEASE_AT)
    last_step = _cell(Cell.LAST_STEP)
    num_steps = _cell(Cell.NUM_STEPS)
    life = _cell(Cell.LIFE)

    def __init__(
        self,
        *,
        seq_id: int,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        num_groups: int,
        eos_token_ids: tuple[int, ...] = (),
        arrival: float = 0.0,
        bad_words: tuple[tuple[int, ...], ...] = (),
        prompt_logprobs: int | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.params = params
        self.seed = seed
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.arrival = arrival
        self._cells = np.zeros(len(Cell), dtype=np.int64)
        self.bad_words = bad_words
        self.prompt_logprobs = prompt_logprobs
        self.grammar = grammar
        self.ends_in_stop_token = False
        self.family: Family | None = None
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.is_aborted = False
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_reached_in_prompt = 0
        self.missed: dict[str, int] = {}
        self.checkpoint_marks: tuple[int, ...] = ()
        self._keys: list[bytes] = []
        self._unsalted: list[bytes] | None = None
        self.reset(num_groups)

    def move_cells(self, to: np.ndarray) -> np.ndarray:
        """Keep the cells in another place from now on.

        Args:
            to: A column of the scheduler's table, or an array of the sequence's own, [cells] i64.

        Returns:
            The place they were in.
        """
        old = self._cells
        to[:] = old
        self._cells = to
        return old

    def reset(self, num_groups: int) -> None:
        """Forget everything that is in the caches; tokens stay."""
        self._cells[_RESET] = 0
        self.kv_blocks: list[int] = []
        self.state_tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.slot = -1
        self.drafts: list[int] = []
        self.junction = 0
        self.cached_boundary = 0
        self.generated_boundary = 0
        self.num_published = 0
        self.pending_keys: dict[int, bytes] = {}
        self.wanted: tuple[int, ...] = ()
        self.rungs: tuple[int, ...] = ()
        self.first_column = 0
        self.last_column = 0
        self.fetch: Fetch | None = None
        self.has_asked_store = False
        self.has_met_damage = False
        self.loads: deque[PieceLoad] = deque()

    @property
    def num_tokens(self) -> int:
        """Tokens the host knows."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Confirmed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Confirmed output tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def can_follow(self) -> bool:
        """Whether it waits for nothing but its prompt, which another member may compute."""
        return (
            self.status is Status.WAITING
            and self.num_tokens == self.num_prompt_tokens
            and not self.num_known_in_flight
            and not self.num_in_flight
            and self.prompt_logprobs is None
        )

    @property
    def is_led(self) -> bool:
        """Whether a member of its family is computing the prompt for it."""
        return self.family is not None and self.family.leader is not None and self.can_follow

    @property
    def low(self) -> int:
        """Fewest tokens that are computed once all steps in flight are done."""
        return self.num_computed_tokens + self.num_in_flight - self.num_in_flight_drafts

    @property
    def high(self) -> int:
        """Most tokens that are computed once all steps in flight are done."""
        return self.num_computed_tokens + self.num_in_flight

    def reach_in_prompt(self, num_tokens: int) -> int:
        """Note that so many tokens are in the caches.

        Returns:
            Tokens of the prompt that never were before: what a preemption takes is not new again.
        """
        reached = min(num_tokens, self.num_prompt_tokens)
        fresh = max(0, reached - self.num_reached_in_prompt)
        self.num_reached_in_prompt += fresh
        return fresh

    def keys(self, block_size: int, num_tokens: int) -> list[bytes]:
        """Chain keys of the full blocks among the first `num_tokens` known tokens."""
        count = num_tokens // block_size
        have = len(self._keys)
        if have < count:
            parent = self._keys[-1] if have else root_key(self.params.cache_salt)
            fresh = self.token_ids[have * block_size : count * block_size]
            self._keys.extend(chain_keys(parent, fresh, block_size))
        return self._keys[:count]

    def hash_prompt(self, token_ids: np.ndarray, block_size: int) -> None:
        """Make the prompt's keys of its tokens as an array, [n] of integers, which is quicker."""
        self._keys = chain_keys(root_key(self.params.cache_salt), token_ids, block_size)

    def take_keys(self, other: Sequence, block_size: int) -> None:
        """Take over the prompt's keys from a sequence with the same prompt and salt."""
        self._keys = other.keys(block_size, self.num_prompt_tokens)

    def unsalted_keys(self, block_size: int) -> list[bytes] | None:
        """The prompt's keys without its salt, or None if it has none."""
        if self.params.cache_salt is None:
            return None
        if self._unsalted is None:
            prompt = self.token_ids[: self.num_prompt_tokens]
            self._unsalted = chain_keys(root_key(None), prompt, block_size)
        return self._unsalted
