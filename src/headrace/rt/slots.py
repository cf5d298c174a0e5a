"""Numbered slots that remember the event of their last use."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from headrace.rt.errors import RtError

if TYPE_CHECKING:
    from headrace.rt.runtime import Runtime
    from headrace.rt.streams import Event, Stream


class SlotPool:
    """Hands out slots 0..n-1, each ordered after its last use.

    First in, first out: the choice must not depend on which event happened to be done.
    """

    def __init__(self, runtime: Runtime, num_slots: int, kind: str = "") -> None:
        self.num_slots = num_slots
        self.kind = kind
        self._runtime = runtime
        self._free: deque[tuple[int, Event | None]] = deque(
            (slot, None) for slot in range(num_slots)
        )
        self._taken: set[int] = set()

    def __len__(self) -> int:
        """Free slots."""
        return len(self._free)

    def take(self, on: Stream | None = None) -> int:
        """Take the slot that was given back first.

        Args:
            on: Stream of the next use, which then waits for the last use. Without it this host
                thread waits.

        Raises:
            RtError: No slot is free.
        """
        if not self._free:
            raise RtError(f"all {self.num_slots} slots are taken; give one back or size for more")
        slot, event = self._free.popleft()
        self._taken.add(slot)
        if event is not None:
            self._runtime.slot_reused(self, event)
            if on is None:
                self._runtime.wait_host_unless_known(event)
            else:
                on.wait(event)
        return slot

    def give(self, slot: int, after: Event | None) -> None:
        """Give a slot back.

        Args:
            slot: A taken slot.
            after: Event recorded after its last use on the device; None only if no device work
                ever touched it.

        Raises:
            RtError: The slot is not taken.
        """
        if slot not in self._taken:
            raise RtError(f"slot {slot} was given back but is not taken")
        self._taken.remove(slot)
        self._free.append((slot, after))
