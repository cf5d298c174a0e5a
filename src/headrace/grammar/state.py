"""Where one sequence stands in its grammar, and which tokens that allows.

A state holds confirmed tokens only. Drafts are tried on the library's matcher and rolled back in
the same call, so rejected ones leave no trace, whatever the device decides about them.

V vocabulary, W mask words of 32 tokens each.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.structured_outputs import FreeBeginning

MatcherJob = tuple[Any, int, list[int]]
"""A matcher, the line of its first mask, and drafts: one line more for each."""


def num_mask_words(vocab_size: int) -> int:
    """W for V tokens."""
    return (vocab_size + 31) // 32


class GrammarState(Protocol):
    """What the scheduler needs of a grammar.

    Attributes:
        error: Why the grammar can go no further, or None. The sequence then ends.
    """

    error: str | None

    def advance(self, token: int) -> bool:
        """Take a confirmed token in; returns whether the output is complete with it."""
        ...

    def num_usable(self, drafts: Sequence[int]) -> int:
        """Leading drafts that the grammar allows; a negative one is no draft."""
        ...

    def prepare(self, bits: np.ndarray, line: int, drafts: Sequence[int]) -> list[MatcherJob]:
        """Fill in masks after 0, 1, ... of the drafts, all of them usable.

        Args:
            bits: [lines, W] i32, bit i of word w for token 32 w + i.
            line: Of the first mask.
            drafts: Usable drafts.

        Returns:
            Work left for the library's matchers, which is done for many sequences at once.
        """
        ...

    def copy(self) -> GrammarState:
        """A state of its own for a sequence that goes on from the same tokens."""
        ...


class Grammar(Protocol):
    """What a sequence's state begins from."""

    def start(self) -> GrammarState:
        """State of a new sequence."""
        ...


class MatcherState:
    """A state on the library's matcher.

    Args:
        matcher: An LLMatcher of its own.
        stops: What may be chosen where the output is complete, [W] i32.
        free: What may be chosen in free text, [W] i32: everything but the ends of sequences.
        beginning: Free text before the constrained part, or None.
    """

    def __init__(
        self, matcher: Any, *, stops: np.ndarray, free: np.ndarray,  # noqa: ANN401
        beginning: FreeBeginning | None,
    ) -> None:
        self._matcher = matcher
        self._stops = stops
        self._free = free
        self._beginning = beginning
        self._is_free = beginning is not None and beginning.opens is None
        self._may_open = beginning is not None and beginning.opens is not None
        self.error: str | None = None

    def advance(self, token: int) -> bool:
        """See `GrammarState`."""
        if self.error is not None:
            return True
        if self._is_free:
            self._is_free = not self._closes(token)
            return False
        if self._may_open:
            self._may_open = False
            if self._opens(token):
                self._is_free = True
                return False
        if not self._matcher.consume_token(token):
            self.error = self._matcher.get_error() or f"token {token} does not fit the grammar"
            return True
        if not self._matcher.is_stopped():
            return False
        if not self._matcher.is_accepting():
            # A vocabulary without all bytes: half a character may be chosen that none completes.
            self.error = "no token can follow the output in its grammar"
        return True

    def num_usable(self, drafts: Sequence[int]) -> int:
        """See `GrammarState`."""
        known = next((n for n, token in enumerate(drafts) if token < 0), len(drafts))
        num_free = self._num_free(drafts[:known])
        if self._may_open and num_free != 0:
            # One that opens and closes free text at once is cut: a matcher gives masks of one
            # stretch of lines.
            return known if num_free is None else num_free - 1
        if num_free is None:
            return known
        if self.error is not None or num_free == known:
            return num_free
        return num_free + int(self._matcher.validate_tokens(list(drafts[num_free:known])))

    def prepare(self, bits: np.ndarray, line: int, drafts: Sequence[int]) -> list[MatcherJob]:
        """See `GrammarState`."""
        # Lines after an end that the drafts reach are not sampled from.
        bits[line : line + 1 + len(drafts)] = self._stops
        if self.error is not None:
            return []
        num_free = self._num_free(drafts)
        is_undecided = self._may_open and num_free != 0
        bits[line + is_undecided : line + (len(drafts) + 1 if num_free is None else num_free)] = (
            self._free
        )
        if is_undecided:
            return [(self._matcher, line, [])]
        if num_free is None:
            return []
        return [(self._matcher, line + num_free, list(drafts[num_free:]))]

    def complete(self, bits: np.ndarray, line: int, num_drafts: int) -> None:
        """Allow the token that begins free text; notice that the grammar got too complex."""
        if self.error is None and self._matcher.is_error():
            self.error = self._matcher.get_error()
            bits[line : line + 1 + num_drafts] = self._stops
        if self._may_open:
            assert self._beginning is not None
            assert self._beginning.opens is not None
            word, bit = divmod(self._beginning.opens, 32)
            bits[line, word] |= np.uint32(1 << bit).view(np.int32)

    def copy(self) -> Self:
        """See `GrammarState`."""
        twin = type(self)(
            self._matcher.deep_copy(), stops=self._stops, free=self._free,
            beginning=self._beginning,
        )
        twin._is_free = self._is_free  # noqa: SLF001 - of this very class
        twin._may_open = self._may_open  # noqa: SLF001
        twin.error = self.error
        return twin

    def _num_free(self, drafts: Sequence[int]) -> int | None:
        """Drafts before the constrained part; None if it is not reached."""
        is_free = self._is_free
        start = 0
        if self._may_open and drafts and self._opens(drafts[0]):
            is_free, start = True, 1
        if not is_free:
            return 0
        for place in range(start, len(drafts)):
            if self._closes(drafts[place]):
                return place + 1
        return None

    def _opens(self, token: int) -> bool:
        return self._beginning is not None and token == self._beginning.opens

    def _closes(self, token: int) -> bool:
        return self._beginning is not None and token == self._beginning.closes


@cache
def _executor() -> Any:  # noqa: ANN401 - the library's pool of threads
    import llguidance  # noqa: PLC0415 - only where a request has a grammar

    return llguidance.LLExecutor()


def fill_masks(
    rows: Sequence[tuple[GrammarState, Sequence[int]]], vocab_size: int
) -> np.ndarray:
    """Say which tokens may come next in many sequences, after each of their drafts.

    Args:
        rows: State and usable drafts of each sequence.
        vocab_size: V.

    Returns:
        [lines, W] i32; a sequence has 1 + its drafts lines, one after the other.
    """
    total = sum(1 + len(drafts) for _, drafts in rows)
    bits = np.empty((total, num_mask_words(vocab_size)), dtype=np.int32)
    jobs: list[MatcherJob] = []
    line = 0
    for state, drafts in rows:
        jobs += state.prepare(bits, line, drafts)
        line += 1 + len(drafts)
    where = bits.ctypes.data, bits.shape[1] * bits.itemsize, total
    if drafted := [job for job in jobs if job[2]]:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
    if single := [job[:2] for job in jobs if not job[2]]:
        _executor().unsafe_compute_mask_ptr(single, *where)
    line = 0
    for state, drafts in rows:
        if isinstance(state, MatcherState):
            state.complete(bits, line, len(drafts))
        line += 1 + len(drafts)
    return bits
