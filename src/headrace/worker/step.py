"""The frozen values that pass between the scheduler and the worker.

`SchedulerOutput` says what one step computes; `SampledTokens` says what came of it, in the
producer's row order. Both are complete when built and are never changed afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

    from headrace.models.batch import KnownState
    from headrace.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence that is (re)admitted in this step.

    Attributes:
        seq_id: Its id, unique in the life of the engine.
        slot: Its place in the per-sequence arrays until it leaves; also its ring block minus one.
        params: How to sample.
        seed: Key of its noise, resolved, as an unsigned 64-bit number.
        stop_ids: Token ids that may not be sampled before params.min_tokens.
        num_prompt_tokens: Tokens of the prompt.
        token_ids: Prompt and output tokens known to the host, [n] i64.
        bad_words: Token runs of which the last may not follow the others in the output.
        prompt_logprobs: As in params, None for all but one sequence of a request.
    """

    seq_id: int
    slot: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    num_prompt_tokens: int
    token_ids: np.ndarray
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyPlan:
    """Rows that extend generating sequences.

    Attributes:
        seq_ids: [N].
        slots: [N] i64.
        num_drafts: Drafts each row verifies, [N] i64; the row has 1 + that many tokens.
        kv_table: KV blocks, [N, M] i32.
        state_tables: Per state group, the blocks of columns base .. base+width-1, [N, width] i32.
        state_base: First column of state_tables, [N] i64.
        max_seq_len: Upper bound of the rows' lengths after this step.
        may_cross: Some row may leave its state column or complete one, so states may have to move.
    """

    seq_ids: tuple[int, ...]
    slots: np.ndarray
    num_drafts: np.ndarray
    kv_table: np.ndarray
    state_tables: tuple[np.ndarray, ...]
    state_base: np.ndarray
    max_seq_len: int
    may_cross: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForkPlan:
    """A sequence that begins where a known row ends: it samples there too, with its own noise.

    Its blocks are filled from the row's after the forward of the same step.

    Attributes:
        seq_id, slot: Whose.
        kv_table: Its KV blocks, [M] i32; those before the copied ones are shared with the row.
        state_blocks: Per state group, its block for the state after the row.
        kv_copies: (source, target): blocks that both go on writing.
    """

    seq_id: int
    slot: int
    kv_table: np.ndarray
    state_blocks: tuple[int, ...]
    kv_copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownPlan:
    """A row whose tokens the host knows: a chunk of a prompt, or recomputed output.

    Attributes:
        path: "scan" for prompt tokens, "step" for generated ones.
        start: Tokens before the row.
        token_ids: The row's tokens, [n] i64.
        next_token: The token after the row if the host knows it, else -1.
        samples: Whether the row's last position is sampled: it ends the prompt of a sequence
            without output.
        ends_known: Whether the sequence generates after this row (sampled, or next_token is its
            next input).
        kv_table: [M] i32.
        states: Per state group.
        forks: Sequences that begin after the row; only if it samples.
    """

    seq_id: int
    slot: int
    path: Literal["scan", "step"]
    start: int
    token_ids: np.ndarray
    next_token: int
    samples: bool
    ends_known: bool
    kv_table: np.ndarray
    states: tuple[KnownState, ...]
    forks: tuple[ForkPlan, ...] = ()

    @property
    def end(self) -> int:
        """Tokens in the sequence after the row."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopies:
    """What forks copy before anything else of the step, as (source, target) pairs.

    Attributes:
        kv: KV blocks.
        states: Per state group, state blocks.
        slots: Slots: rings, and in the `slots` layout the carry arrays.
        sequences: Sequence ids, one pair for each of `slots`; either end may have left since.
    """

    kv: tuple[tuple[int, int], ...] = ()
    states: tuple[tuple[tuple[int, int], ...], ...] = ()
    slots: tuple[tuple[int, int], ...] = ()
    sequences: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.kv or any(self.states) or self.slots)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenMasks:
    """What grammars allow at the sample positions of some rows.

    Attributes:
        rows: Places in the step's rows: verify rows, known rows, then forks.
        num_lines: Sample positions of each: 1 + the drafts of a verify row, 1 of the others.
        bits: [sum of num_lines, W] i32; bit i of word w is set if token 32 w + i may be chosen.
    """

    rows: tuple[int, ...]
    num_lines: tuple[int, ...]
    bits: np.ndarray


PieceKind = Literal["kv", "state"]
"""The KV blocks of one state column, or the states of all groups after one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSave:
    """A piece of a cached prefix that the state store is to have.

    Attributes:
        key: The prefix cache's, of the column's last block.
        column: Which column that is; of a state, the number of columns before it.
        blocks: KV blocks of the column in order, or the block of each state table.
    """

    kind: PieceKind
    key: bytes
    column: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceLoad:
    """A piece from the state store for fresh blocks.

    Attributes:
        blocks: As of a `PieceSave`.
        data: Its bytes, [layout.num_bytes] u8.
    """

    kind: PieceKind
    blocks: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SchedulerOutput:
    """One step's work.

    Attributes:
        step_id: Counts from 1.
        admitted: Sequences that enter, in order.
        left: Sequences that left since the last step: finished, aborted or preempted.
        verify: Generating rows, or None.
        known: Known rows, in order.
        copies: Forks' block copies.
        num_draft_tokens: Drafts to propose after this step for each row that generates; 0: none.
        masks: Of rows with a grammar, or None.
        lands_drafts: Hand the drafts to the host: rows with a grammar are planned with them.
        saves: Pieces to copy to the host after the step's launches.
        loads: Pieces to bring to blocks that rows of later steps read.
    """

    step_id: int
    admitted: tuple[NewSequence, ...]
    left: tuple[int, ...]
    verify: VerifyPlan | None
    known: tuple[KnownPlan, ...]
    copies: BlockCopies
    num_draft_tokens: int
    masks: TokenMasks | None = None
    lands_drafts: bool = False
    saves: tuple[PieceSave, ...] = ()
    loads: tuple[PieceLoad, ...] = ()

    @property
    def forks(self) -> tuple[tuple[KnownPlan, ForkPlan], ...]:
        """Forks of all known rows, in order, each with the row it begins after."""
        return tuple((row, fork) for row in self.known for fork in row.forks)

    @property
    def num_tokens(self) -> int:
        """Tokens through the forward, padding excluded."""
        known = sum(len(row.token_ids) for row in self.known)
        if self.verify is None:
            return known
        return known + len(self.verify.seq_ids) + int(self.verify.num_drafts.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of neighbouring tokens of one prompt.

    Attributes:
        seq_id: Whose prompt.
        start: Position of the first of them; at least 1, as the first token has none.
        token_ids: The tokens, [n] i64.
        own, rank: Of those, [n].
        values, ids: Likeliest tokens, [n, 20] or the vocabulary, if that is smaller.
        logits: Raw logits, [n, V], if all were asked for.
    """

    seq_id: int
    start: int
    token_ids: np.ndarray
    own: np.ndarray
    rank: np.ndarray
    values: np.ndarray
    ids: np.ndarray
    logits: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTokens:
    """Results of one step, rows in the order verify rows, known rows, then forks.

    Attributes:
        step_id: The producing step.
        token_ids: [rows, 1+s] i64; only the first num_sampled of a row mean anything.
        num_sampled: [rows] i64; 0 for rows that sampled nothing.
        logprobs: Log-probabilities if a row asked for them, a worker value the engine reads.
        prompt_logprobs: Parts of prompts whose log-probabilities were asked for.
        drafts: Drafts proposed after the step, [rows, s] i64, -1 where there is none; None if the
            plan did not ask for them.
    """

    step_id: int
    token_ids: np.ndarray
    num_sampled: np.ndarray
    logprobs: Any = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    drafts: np.ndarray | None = None
