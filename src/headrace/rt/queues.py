"""The only path between host threads."""

from __future__ import annotations

import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class Queue(Generic[T]):
    """A first-in first-out queue; what the sender did before `put` comes before `get` returns.

    Args:
        maxsize: Items it holds before `put` blocks; 0 for no limit.
    """

    def __init__(self, maxsize: int = 0) -> None:
        self._items: queue.Queue[T] = queue.Queue(maxsize)

    def put(self, item: T) -> None:
        """Add an item; blocks while the queue is full."""
        self._items.put(item)

    def get(self, timeout_s: float | None = None) -> T:
        """Take the oldest item; blocks while the queue is empty.

        Raises:
            queue.Empty: Nothing came within `timeout_s` seconds.
        """
        return self._items.get(timeout=timeout_s)

    def drain(self) -> list[T]:
        """Take everything that is there now, without blocking; may be nothing."""
        items: list[T] = []
        try:
            while True:
                items.append(self._items.get_nowait())
        except queue.Empty:
            return items
