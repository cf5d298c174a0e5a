"""How many drafts are worth proposing, from batch size and measured acceptance.

A verify step costs about one pass over the weights until its tokens outnumber the device's ridge
(floating-point operations per byte at which arithmetic takes over), and grows with them after it.
The policy compares, for each k, the tokens a row is expected to keep with that cost. It reads only
counts, never clocks, so the same results lead to the same choices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_FORGET = 0.98
_FIRST_GUESS = 0.7
_PROBE_EVERY = 64


class DraftPolicy:
    """Chooses k for each step.

    Args:
        max_drafts: Largest k.
        ridge_tokens: Tokens in a step at which arithmetic costs as much as reading the weights.
        drafter_cost: Cost of proposing one draft per row, in steps of the model.
    """

    def __init__(self, max_drafts: int, *, ridge_tokens: float, drafter_cost: float) -> None:
        self._max = max_drafts
        self._ridge = ridge_tokens
        self._drafter_cost = drafter_cost
        # Decayed counts per position: times a draft there was reached, times it was kept.
        self._reached = [1.0] * max_drafts
        self._kept = [_FIRST_GUESS] * max_drafts
        self._steps_below = 0

    def acceptance(self) -> list[float]:
        """Estimated chance, per position, that a draft is kept if those before it were."""
        return [kept / reached for kept, reached in zip(self._kept, self._reached, strict=True)]

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Take one row's verification in."""
        for position in range(min(num_drafts, num_accepted + 1)):
            self._reached[position] = self._reached[position] * _FORGET + 1.0
            self._kept[position] *= _FORGET
            if position < num_accepted:
                self._kept[position] += 1.0

    def observe_rows(self, num_drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        """Take a step's verifications in, [rows] each, as `observe` one row after another would."""
        for drafts, accepted in zip(num_drafts.tolist(), num_accepted.tolist(), strict=True):
            self.observe(drafts, accepted)

    def choose(self, num_rows: int) -> int:
        """Drafts per row for a step of this many generating rows."""
        best, best_value = 0, 1.0 / self._cost(num_rows, 0)
        kept, chance = 1.0, 1.0
        for drafts, accepted in enumerate(self.acceptance(), start=1):
            chance *= accepted
            kept += chance
            value = kept / self._cost(num_rows, drafts)
            if value > best_value:
                best, best_value = drafts, value
        if best == self._max:
            self._steps_below = 0
            return best
        self._steps_below += 1
        if self._steps_below >= _PROBE_EVERY:
            # Without drafts nothing is measured: look again from time to time.
            self._steps_below = 0
            return best + 1
        return best

    def _cost(self, num_rows: int, drafts: int) -> float:
        tokens = max(1, num_rows) * (1 + drafts)
        return max(1.0, tokens / self._ridge) + drafts * self._drafter_cost
