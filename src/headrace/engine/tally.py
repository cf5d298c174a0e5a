"""Counts of values by size: what a histogram shows."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any


class Tally:
    """Values counted by the smallest limit that is not below them.

    Args:
        limits: Ascending; values above the last one are counted too.
    """

    def __init__(self, limits: tuple[float, ...]) -> None:
        self._limits = limits
        self._counts = [0] * (len(limits) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, as often as it occurred."""
        self._counts[bisect_left(self._limits, value)] += count
        self._sum += value * count

    def figures(self) -> dict[str, Any]:
        """The limits, a count for each and one for what is above, and the sum, as JSON values."""
        return {"limits": self._limits, "counts": list(self._counts), "sum": self._sum}
