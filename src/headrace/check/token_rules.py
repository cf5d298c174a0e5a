"""A grammar of token ids, for models whose tokens have no text.

What may come next depends on every token so far, and some outputs end early: a state that is one
token behind, ahead or another sequence's allows other tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.grammar.state import MatcherJob

_MODULUS = 65521
_END_EVERY = 23


class TokenRules:
    """State of one sequence.

    Args:
        key: Which grammar.
        vocab_size: V.
        history: What the tokens so far come to.
    """

    def __init__(self, key: int, vocab_size: int, history: int = 0) -> None:
        self._key = key
        self._vocab_size = vocab_size
        self._history = history
        self.error: str | None = None

    def start(self) -> TokenRules:
        """A state of its own for a new sequence."""
        return TokenRules(self._key, self._vocab_size)

    def copy(self) -> TokenRules:
        """See `GrammarState`."""
        return TokenRules(self._key, self._vocab_size, self._history)

    def allowed(self) -> np.ndarray:
        """What may come next, [V] bool."""
        places = np.arange(self._vocab_size)
        mixed = (places + 1) * 40503 + (self._history + self._key) * 10007
        may = mixed // 128 % 3 > 0
        may[self._history % self._vocab_size] = True
        return may

    def advance(self, token: int) -> bool:
        """See `GrammarState`."""
        if not self.allowed()[token]:
            self.error = f"token {token} is not allowed after {self._history}"
            return True
        self._history = (self._history * 31 + token + 1) % _MODULUS
        return self._history % _END_EVERY == 0

    def num_usable(self, drafts: Sequence[int]) -> int:
        """See `GrammarState`."""
        state = self.copy()
        for place, token in enumerate(drafts):
            if token < 0 or not state.allowed()[token]:
                return place
            if state.advance(token):
                return place + 1
        return len(drafts)

    def prepare(self, bits: np.ndarray, line: int, drafts: Sequence[int]) -> list[MatcherJob]:
        """See `GrammarState`."""
        state = self.copy()
        bits[line : line + 1 + len(drafts)] = 0
        for place in range(1 + len(drafts)):
            packed = np.packbits(state.allowed(), bitorder="little")
            bits[line + place].view(np.uint8)[: len(packed)] = packed
            if place < len(drafts):
                state.advance(drafts[place])
        return []
