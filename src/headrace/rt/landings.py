"""Landings on lease: reused only once the host knows that their last copy is done.

Another thread may read a ticket than the one that leases. Its memory then comes back through a
queue: the next copy is enqueued after it was read, and not only by chance.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from headrace.rt.errors import RtError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.rt.frames import HostMemory
    from headrace.rt.queues import Queue
    from headrace.rt.streams import Event
    from headrace.rt.tickets import Array

    Key = tuple[tuple[int, ...], torch.dtype]

MAX_LANDINGS = 256
"""Landings that may be out at once; more means that tickets are neither read nor dropped."""


MAX_SHAPES = 4096
"""Asked shapes whose landings are remembered."""


class LandingPool:
    """Host memory for copies, by shape and dtype.

    Args:
        make: Makes memory of a name, shape and dtype.
        is_known: Whether the host knows an event to have happened. No query of the device: which
            memory is reused must not depend on timing.
        returns: From threads that read tickets to the one that leases.
    """

    def __init__(
        self,
        make: Callable[[str, tuple[int, ...], torch.dtype], HostMemory],
        is_known: Callable[[Event], bool],
        returns: Queue[tuple[list[HostMemory], HostMemory]],
    ) -> None:
        self._make = make
        self._is_known = is_known
        self._returns = returns
        self._thread = 0
        self._free: dict[Key, list[HostMemory]] = {}
        self._serving: dict[Key, tuple[Key, list[HostMemory]]] = {}
        self._waiting: list[tuple[Event, list[HostMemory], HostMemory]] = []
        self._made = 0

    def lease(self, shape: tuple[int, ...], dtype: torch.dtype) -> LeasedPart:
        """Memory of at least `shape[0]` rows: a power of two, so that few sizes serve all.

        numpy has no bfloat16: such values land as the same ones in float32.
        """
        dtype = torch.float32 if dtype is torch.bfloat16 else dtype
        asked = (shape, dtype)
        serving = self._serving.get(asked)
        if serving is None:
            if len(self._serving) >= MAX_SHAPES:
                self._serving.clear()
            size = 1 << max(shape[0] - 1, 0).bit_length()
            key = ((size, *shape[1:]), dtype)
            serving = self._serving[asked] = key, self._free.setdefault(key, [])
        key, free = serving
        if not free:
            self._thread = threading.get_ident()
            self._recycle()
        if free:
            return LeasedPart(self, free, free.pop(), shape[0])
        if self._made >= MAX_LANDINGS:
            raise RtError(
                f"all {self._made} landings are out when one of {key[0]} {dtype} is needed; "
                "read or drop every ticket"
            )
        self._made += 1
        return LeasedPart(self, free, self._make(f"landing{self._made}", *key), shape[0])

    def give(self, free: list[HostMemory], memory: HostMemory) -> None:
        """Take memory back whose values have been read; any thread may give it."""
        if threading.get_ident() == self._thread:
            free.append(memory)
        else:
            self._returns.put((free, memory))

    def give_after(self, event: Event, free: list[HostMemory], memory: HostMemory) -> None:
        """Take memory back whose copy may still be under way."""
        self._waiting.append((event, free, memory))

    def _recycle(self) -> None:
        for free, memory in self._returns.drain():
            free.append(memory)
        waiting = []
        for event, free, memory in self._waiting:
            if self._is_known(event):
                free.append(memory)
            else:
                waiting.append((event, free, memory))
        self._waiting = waiting


class LeasedPart:
    """One view's landing."""

    __slots__ = ("_free", "_pool", "count", "memory")

    def __init__(
        self, pool: LandingPool, free: list[HostMemory], memory: HostMemory, count: int
    ) -> None:
        self._pool = pool
        self._free = free
        self.memory = memory
        self.count = count

    def take(self) -> Array:
        """The landed rows as a private read-only array."""
        array: Array = self.memory.array[: self.count].copy()
        array.setflags(write=False)
        # The copy is done: whoever takes the values has waited.
        self._pool.give(self._free, self.memory)
        return array

    def abandon(self, event: Event) -> None:
        """Give the memory back unread."""
        self._pool.give_after(event, self._free, self.memory)


class LeasedLanding:
    """The landing of one ticket."""

    __slots__ = ("parts",)

    def __init__(self, parts: dict[str, LeasedPart]) -> None:
        self.parts = parts

    def take(self) -> Mapping[str, Array]:
        """All values."""
        return {name: part.take() for name, part in self.parts.items()}

    def abandon(self, event: Event) -> None:
        """Give all memory back unread."""
        for part in self.parts.values():
            part.abandon(event)
