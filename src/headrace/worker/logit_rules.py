"""What requests do to their logits before a token is chosen: bias, penalties, masks.

In this order: logit_bias is added; repetition, frequency and presence penalties look at the tokens
before the chosen one; then allowed_token_ids, bad_words and min_tokens mask entries with -inf.

The tokens before a position are read from the token pool through the row's KV table. It holds what
the forward was fed, drafts included: a draft counts for the drafts after it, and those are kept
only if it is. So nothing has to be counted, undone or moved with rows, and a sequence that comes
back after a preemption or starts on a cached prefix finds its history where its KV is.

Rules live on the host, by slot. A step stages those of its own sample positions only; a step
without any pays nothing. No host synchronisation. R sample positions, A of them under rules,
V vocabulary, B blocks in the pool, P tokens per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace import rt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from headrace.worker.step import NewSequence

ALWAYS = 2**62
"""A position that no sequence reaches."""
_NOTHING = -1
_PENALISED_AT_ONCE = 32
"""Rows whose tokens are counted together: bounds the [rows, V] counts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitRules:
    """Rules of one sequence.

    Attributes:
        num_prompt_tokens: Where its output begins.
        repetition_penalty, frequency_penalty, presence_penalty: As in SamplingParams.
        token_ids: Entries with a rule of their own, ascending, [E] i64.
        biases: Added to their logits, [E] f32.
        banned_until: They may not be chosen for positions before this, [E] i64.
        is_allow_list: Entries that are not in token_ids may never be chosen.
        bad_words: Token runs of two or more of which the last may not follow the others.
    """

    num_prompt_tokens: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    token_ids: np.ndarray
    biases: np.ndarray
    banned_until: np.ndarray
    is_allow_list: bool
    bad_words: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, new: NewSequence) -> LogitRules | None:
        """Rules of a sequence, or None if its logits stay as they are."""
        params = new.params
        bias = params.logit_bias or {}
        allowed = params.allowed_token_ids
        stops = set(new.stop_ids) if params.min_tokens else set()
        banned = {word[0] for word in new.bad_words if len(word) == 1}
        words = tuple(word for word in new.bad_words if len(word) > 1)
        ids = sorted({*bias, *(allowed or ()), *stops, *banned})
        penalties = (
            params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        )
        if not ids and not words and penalties == (1.0, 0.0, 0.0):
            return None
        permitted = set(ids if allowed is None else allowed) - banned
        first_stop = new.num_prompt_tokens + params.min_tokens
        until = [
            ALWAYS if token not in permitted else first_stop if token in stops else 0
            for token in ids
        ]
        return cls(
            num_prompt_tokens=new.num_prompt_tokens,
            repetition_penalty=penalties[0],
            frequency_penalty=penalties[1],
            presence_penalty=penalties[2],
            token_ids=np.array(ids, dtype=np.int64),
            biases=np.array([bias.get(token, 0.0) for token in ids], dtype=np.float32),
            banned_until=np.array(until, dtype=np.int64),
            is_allow_list=allowed is not None,
            bad_words=words,
        )

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change logits."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (
            1.0, 0.0, 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledRow:
    """One row of a step whose sequence has rules.

    Attributes:
        rules: Its rules.
        first_sample: Its first sample position.
        num_samples: Its sample positions, which are neighbours.
        table_start, table_width: Where its KV table lies in the step's flat tables.
    """

    rules: LogitRules
    first_sample: int
    num_samples: int
    table_start: int
    table_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesShape:
    """What the host knows about the rules of a step.

    Attributes:
        num_samples: A.
        num_penalised: The first so many of them have penalties.
        table_width: Widest KV table among those.
        num_entries: Entries with a rule, over all A positions.
        has_allow_lists: Whether any position has one.
        num_words: Bad words of two or more tokens, over all A positions.
        word_width: Tokens before the last one in the longest of them.
    """

    num_samples: int
    num_penalised: int
    table_width: int
    num_entries: int
    has_allow_lists: bool
    num_words: int
    word_width: int


class RulesStage:
    """Frames that carry rules to the device.

    They are allocated when a request first has rules, and replaced by wider ones when a step has
    more entries; together the outgrown ones are smaller than the last.

    Args:
        runtime: The way to the device.
        depth: Steps in flight.
        max_samples: Sample positions of a step.
        vocab_size: V.
    """

    def __init__(
        self, runtime: rt.Runtime, *, depth: int, max_samples: int, vocab_size: int
    ) -> None:
        self._runtime = runtime
        self._depth = depth
        self._max_samples = max_samples
        self._vocab_size = vocab_size
        self._capacity = (0, 0)
        self._ring: rt.FrameRing | None = None
        self._num_rings = 0

    def stage(
        self, rows: Sequence[RuledRow], stream: rt.Stream
    ) -> tuple[dict[str, rt.Buffer], RulesShape]:
        """Copy the rules of a step's rows to the device.

        Args:
            rows: At least one.
            stream: Of the copies.

        Returns:
            Device arrays for `apply_rules`, and what the host knows about them.
        """
        ordered = sorted(rows, key=lambda row: not row.rules.has_penalties)
        values, shape = pack_rules(ordered, self._vocab_size)
        frame = self._frame(shape)
        with frame.stage() as w:
            for name, array in values.items():
                w[name][: len(array)] = array
            w.commit(stream, rows={name: len(array) for name, array in values.items()})
        return frame.inputs, shape

    def _frame(self, shape: RulesShape) -> rt.Frame:
        needed = (shape.num_entries, shape.num_words * max(1, shape.word_width))
        if self._ring is None or any(map(int.__gt__, needed, self._capacity)):
            self._capacity = tuple(
                max(64, have, 1 << (need - 1).bit_length() if need else 0)
                for need, have in zip(needed, self._capacity, strict=True)
            )  # type: ignore[assignment]
            self._ring = self._runtime.frames(
                f"rules{self._num_rings}", depth=self._depth, inputs=self._fields(), outputs={}
            )
            self._num_rings += 1
        return self._ring.next()

    def _fields(self) -> dict[str, rt.Field]:
        samples, (entries, words) = self._max_samples, self._capacity
        i64, f32 = torch.int64, torch.float32
        return {
            "sample": rt.Field((samples,), i64),
            "table_start": rt.Field((samples,), i64),
            "table_width": rt.Field((samples,), i64),
            "num_prompt": rt.Field((samples,), i64),
            "penalties": rt.Field((samples * 3,), f32),  # repetition, frequency, presence
            "is_allow_list": rt.Field((samples,), torch.bool),
            "entry": rt.Field((entries,), i64),  # place in the flat [A, V]
            "entry_bias": rt.Field((entries,), f32),
            "entry_until": rt.Field((entries,), i64),
            "word_sample": rt.Field((words,), i64),  # place in A
            "word_last": rt.Field((words,), i64),
            "word_prefix": rt.Field((words,), i64),  # newest token first, -1 where it is shorter
        }


def pack_rules(
    rows: Sequence[RuledRow], vocab_size: int
) -> tuple[dict[str, np.ndarray], RulesShape]:
    """Lay out the rules of rows for the device.

    Args:
        rows: Those with penalties first.
        vocab_size: V.

    Returns:
        Arrays by the names of RulesStage's fields, and their shape.
    """
    counts = np.array([row.num_samples for row in rows], dtype=np.int64)
    starts = np.cumsum(counts) - counts

    def spread(values: Iterable[Any], dtype: type) -> np.ndarray:
        return np.repeat(np.array(list(values), dtype=dtype), counts, axis=0)

    sample = np.concatenate(
        [np.arange(row.first_sample, row.first_sample + row.num_samples) for row in rows]
    )
    penalties = spread(
        (
            (r.rules.repetition_penalty, r.rules.frequency_penalty, r.rules.presence_penalty)
            for r in rows
        ),
        np.float32,
    )
    entry, bias, until = [], [], []
    words: list[tuple[int, tuple[int, ...]]] = []
    for row, start in zip(rows, starts.tolist(), strict=True):
        rules = row.rules
        places = np.arange(start, start + row.num_samples)
        entry.append((places[:, None] * vocab_size + rules.token_ids).reshape(-1))
        bias.append(np.tile(rules.biases, row.num_samples))
        until.append(np.tile(rules.banned_until, row.num_samples))
        words.extend((place, word) for place in places.tolist() for word in rules.bad_words)
    width = max((len(word) - 1 for _, word in words), default=0)
    prefix = [
        (*word[-2::-1], *(_NOTHING,) * (width - len(word) + 1)) for _, word in words
    ]
    values = {
        "sample": sample,
        "table_start": spread((row.table_start for row in rows), np.int64),
        "table_width": spread((row.table_width for row in rows), np.int64),
        "num_prompt": spread((row.rules.num_prompt_tokens for row in rows), np.int64),
        "penalties": penalties.reshape(-1),
        "is_allow_list": spread((row.rules.is_allow_list for row in rows), np.bool_),
        "entry": np.concatenate(entry),
        "entry_bias": np.concatenate(bias),
        "entry_until": np.concatenate(until),
        "word_sample": np.array([place for place, _ in words], dtype=np.int64),
        "word_last": np.array([word[-1] for _, word in words], dtype=np.int64),
        "word_prefix": np.array(prefix, dtype=np.int64).reshape(-1),
    }
    penalised = [row for row in rows if row.rules.has_penalties]
    shape = RulesShape(
        num_samples=len(sample),
        num_penalised=sum(row.num_samples for row in penalised),
        table_width=max((row.table_width for row in penalised), default=0),
        num_entries=len(values["entry"]),
        has_allow_lists=any(row.rules.is_allow_list for row in rows),
        num_words=len(words),
        word_width=width,
    )
    return values, shape


def apply_rules(
    logits: Tensor,
    position: Tensor,
    tokens: Tensor,
    tables: Tensor,
    rules: dict[str, Tensor],
    shape: RulesShape,
) -> Tensor:
    """Process the logits of the positions that have rules.

    Args:
        logits: Raw, [R, V] f32. Not changed.
        position: Of the token that is chosen at each, [R] i64.
        tokens: Token pool, [B, P] i64.
        tables: The step's flat KV tables, i32.
        rules: Arrays of RulesStage.
        shape: Their shape.

    Returns:
        Processed logits, [R, V] f32; rows without rules are the same bits.
    """
    vocab_size = logits.shape[1]
    count, entries = shape.num_samples, shape.num_entries
    samples = rules["sample"][:count]
    mine = logits[samples]
    flat = mine.view(-1)
    position = position[samples]
    entry = rules["entry"][:entries]
    if entries:
        flat.index_copy_(0, entry, flat[entry] + rules["entry_bias"][:entries])
    for start in range(0, shape.num_penalised, _PENALISED_AT_ONCE):
        stop = min(start + _PENALISED_AT_ONCE, shape.num_penalised)
        history = _history(tokens, tables, rules, start, stop, shape.table_width)
        mine[start:stop] = penalise(
            mine[start:stop],
            history,
            rules["num_prompt"][start:stop],
            position[start:stop],
            rules["penalties"][3 * start : 3 * stop].view(-1, 3),
        )
    listed = flat[entry]
    if shape.has_allow_lists:
        mine.masked_fill_(rules["is_allow_list"][:count, None], -torch.inf)
    if entries:
        owner = torch.div(entry, vocab_size, rounding_mode="floor")
        is_banned = position[owner] < rules["entry_until"][:entries]
        flat.index_copy_(0, entry, listed.masked_fill(is_banned, -torch.inf))
    if shape.num_words:
        _ban_words(flat, position, tokens, tables, rules, shape, vocab_size)
    out = logits.clone()
    out.index_copy_(0, samples, mine)
    return out


def penalise(
    logits: Tensor, history: Tensor, num_prompt: Tensor, position: Tensor, penalties: Tensor
) -> Tensor:
    """Apply penalties: repetition for every token before, the others for generated ones.

    Args:
        logits: [A, V] f32.
        history: Token at each position, [A, length] i64; those at `position` and after are noise.
        num_prompt: Where each row's output begins, [A] i64.
        position: Of the chosen token, [A] i64.
        penalties: Repetition, frequency, presence, [A, 3] f32.

    Returns:
        [A, V] f32.

    Source: Keskar et al., arXiv:1909.05858 (repetition); the OpenAI API (the others).
    """
    places = torch.arange(history.shape[1], device=history.device)
    is_before = places < position[:, None]
    is_output = is_before & (places >= num_prompt[:, None])
    zeros = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    num_seen = zeros.scatter_add(1, history, is_before.to(torch.int32))
    num_generated = zeros.scatter_add(1, history, is_output.to(torch.int32))
    repetition = torch.where(num_seen > 0, penalties[:, :1], 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - penalties[:, 1:2] * num_generated
    return logits - penalties[:, 2:] * (num_generated > 0)


def _history(
    tokens: Tensor, tables: Tensor, rules: dict[str, Tensor], start: int, stop: int, width: int
) -> Tensor:
    """Tokens of rows start..stop by position, [stop-start, width * P] i64."""
    column = torch.arange(width, device=tables.device)
    # Narrow rows repeat their first block: what lies behind their last one belongs to others.
    column = torch.where(column < rules["table_width"][start:stop, None], column, 0)
    block = tables[rules["table_start"][start:stop, None] + column].to(torch.int64)
    return tokens[block].view(stop - start, width * tokens.shape[1])


def _ban_words(
    flat: Tensor,
    position: Tensor,
    tokens: Tensor,
    tables: Tensor,
    rules: dict[str, Tensor],
    shape: RulesShape,
    vocab_size: int,
) -> None:
    """Mask the last token of each bad word whose other tokens were generated just before."""
    count, width = shape.num_words, shape.word_width
    owner = rules["word_sample"][:count]
    prefix = rules["word_prefix"][: count * width].view(count, width)
    back = position[owner][:, None] - 1 - torch.arange(width, device=flat.device)
    place = back.clamp(min=0)
    column = torch.div(place, tokens.shape[1], rounding_mode="floor")
    column = torch.minimum(column, rules["table_width"][owner][:, None] - 1)
    block = tables[rules["table_start"][owner][:, None] + column].to(torch.int64)
    is_equal = (tokens[block, place % tokens.shape[1]] == prefix) & (
        back >= rules["num_prompt"][owner][:, None]
    )
    is_match = (is_equal | (prefix == _NOTHING)).all(dim=1)
    bans = torch.where(is_match, -torch.inf, torch.inf)
    # Several words may end in one token: the minimum does not depend on their order.
    flat.scatter_reduce_(0, owner * vocab_size + rules["word_last"][:count], bans, "amin")
