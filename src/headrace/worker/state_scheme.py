"""Where a sequence's recurrent state sits: the host's arithmetic of both schemes.

Columns of a state table: column p holds the state after exactly (p+1)*bs tokens once complete, and
an earlier state of the same sequence before (align.md, sections 2 to 6 and 16). Both schemes use
the same table; they differ in scratch columns and in when a boundary is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


class StateScheme(Protocol):
    """The host's questions to a scheme."""

    @property
    def name(self) -> Literal["columns", "replay"]:
        """Its name on the command line."""

    @property
    def unit(self) -> int:
        """Tokens per column, bs."""

    @property
    def max_drafts(self) -> int:
        """Most drafts in a step, s."""

    def columns_needed(self, low: int, high: int, num_scheduled: int) -> tuple[int, int]:
        """First and last column that a verify row may touch.

        Args:
            low: Fewest tokens computed before the row.
            high: Most of them.
            num_scheduled: Tokens of the row, drafts included.
        """

    def steady_until(self, base: int, top: int) -> int:
        """Most tokens after a row whose columns are no others than these."""

    def base_until(self, base: int) -> int:
        """Fewest tokens before a row, at most, for which `base` is its first column."""

    def last_released(self, confirmed: int) -> int:
        """Columns below this one are not needed by a sequence with `confirmed` computed tokens."""

    def completed(self, before: int, after: int) -> range:
        """Boundaries whose column is complete once a step from `before` to `after` tokens is."""

    def next_completed(self, before: int, after: int) -> int:
        """Computed tokens at which the first boundary beyond those of `completed` may be."""

    def max_blocks(self) -> int:
        """Most blocks of one group that a running sequence owns, checkpoints excluded."""


@dataclass(frozen=True, slots=True)
class Columns:
    """One running column and s scratch columns; the state of every draft is kept for a step."""

    unit: int
    max_drafts: int
    name: Literal["columns", "replay"] = "columns"

    def __post_init__(self) -> None:
        assert self.unit > self.max_drafts, f"bs {self.unit} must exceed s {self.max_drafts}"

    def columns_needed(self, low: int, high: int, num_scheduled: int) -> tuple[int, int]:
        """The column of the state before the row, to the last scratch column after it."""
        return (low - 1) // self.unit, (high + num_scheduled - 1) // self.unit + self.max_drafts

    def steady_until(self, base: int, top: int) -> int:
        """The boundary of the last column but the scratch ones."""
        del base
        return (top - self.max_drafts + 1) * self.unit

    def base_until(self, base: int) -> int:
        """The state after so many tokens still sits in the column."""
        return (base + 1) * self.unit

    def last_released(self, confirmed: int) -> int:
        """The state after `confirmed` tokens may sit in the column before its own."""
        return (confirmed - 1) // self.unit

    def completed(self, before: int, after: int) -> range:
        """The save puts the boundary's state into its column in the step that accepts it."""
        return range((before // self.unit + 1) * self.unit, after + 1, self.unit)

    def next_completed(self, before: int, after: int) -> int:
        """The next boundary itself."""
        del before
        return (after // self.unit + 1) * self.unit

    def max_blocks(self) -> int:
        """The running column, the one before it, s scratch ones, and one of uncertainty."""
        return 3 + self.max_drafts


@dataclass(frozen=True, slots=True)
class Replay:
    """A base state and a ring of the inputs since; rollback is a length."""

    unit: int
    max_drafts: int
    interval: int
    name: Literal["columns", "replay"] = "replay"

    def __post_init__(self) -> None:
        assert self.interval > self.max_drafts, (
            f"replay interval {self.interval} must exceed the drafts {self.max_drafts}: otherwise "
            "two base writes could fall into one step"
        )
        assert self.unit % self.interval == 0, f"{self.interval=} must divide {self.unit=}"

    @property
    def ring_size(self) -> int:
        """Ring entries: at least L + 2s + 1, a power of two (align.md, section 16)."""
        size = 1
        while size < self.interval + 2 * self.max_drafts + 1:
            size *= 2
        return size

    @property
    def max_pending(self) -> int:
        """Most committed tokens that are not in the base when a step starts."""
        return self.interval + self.max_drafts

    def columns_needed(self, low: int, high: int, num_scheduled: int) -> tuple[int, int]:
        """The base's column, to that of the row's end: a write there comes a step later at most."""
        base = (max(low - self.max_pending, 1) - 1) // self.unit
        return base, (high + num_scheduled - 1) // self.unit

    def steady_until(self, base: int, top: int) -> int:
        """The boundary of the last column."""
        del base
        return (top + 1) * self.unit

    def base_until(self, base: int) -> int:
        """A base of the column may be max_pending tokens back."""
        return (base + 1) * self.unit + self.max_pending

    def last_released(self, confirmed: int) -> int:
        """A step in flight may still read a base max_pending tokens back."""
        return (max(confirmed - self.max_pending, 1) - 1) // self.unit

    def completed(self, before: int, after: int) -> range:
        """The base write at a boundary happens in the step that starts at or after it."""
        del after
        first = max(before - self.max_pending, 0) // self.unit * self.unit + self.unit
        return range(first, before + 1, self.unit)

    def next_completed(self, before: int, after: int) -> int:
        """A step that starts on the boundary has one token more when it is done."""
        del after
        return (before // self.unit + 1) * self.unit + 1

    def max_blocks(self) -> int:
        """The base, and the next column across a boundary."""
        return 3
