"""Streams and events: the only ordering there is.

An event is made by recording a stream and says which work of which streams comes before it. There
is no query: control flow that asks whether a value has arrived depends on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.rt.errors import RtError

if TYPE_CHECKING:
    from headrace.rt.runtime import Runtime


@dataclass(slots=True)
class Stats:
    """What a runtime has done so far.

    Attributes:
        steps: Frames taken from frame rings.
        launches: Ops launched, those inside graph replays included.
        copies: Copies between host and device enqueued.
        syncs: Times a host thread had to wait for the device.
        accesses: Checked effects, one per (operation, buffer, read or write); else 0.
    """

    steps: int = 0
    launches: int = 0
    copies: int = 0
    syncs: int = 0
    accesses: int = 0


_NO_CLOCK: list[int] = []
"""Clock of all events that were not recorded; never written to."""


class Event:
    """A point in the work of a stream.

    Attributes:
        stream: Where it was recorded last; None while it never was.
        sequence: Work of that stream that is done once the event has happened: a prefix.
        covers: Work of other streams that comes before it: stream to sequence number.
        clock: Vector clock at that point, in checked backends.
    """

    __slots__ = ("_runtime", "clock", "covers", "native", "sequence", "stream")

    def __init__(self, runtime: Runtime, stream: Stream | None = None) -> None:
        self._runtime = runtime
        self.stream = stream
        self.native: object | None = None
        self.clock = _NO_CLOCK
        if stream is not None:
            self.sequence: int = stream.sequence
            self.covers: dict[Stream, int] = stream.covers

    @property
    def is_recorded(self) -> bool:
        """Whether `Stream.record` was ever called on it: a host fact, not a query of the device."""
        return self.stream is not None

    @property
    def stream_name(self) -> str:
        """Where it was recorded last, for reports."""
        return "" if self.stream is None else self.stream.name

    def wait_host(self) -> None:
        """Block this host thread until the event has happened."""
        self._runtime.wait_host(self)

    def __repr__(self) -> str:
        if self.stream is None:
            return "Event(never recorded)"
        return f"Event({self.stream.name!r}, {self.sequence})"


class Stream:
    """A queue of device work, executed in order.

    Attributes:
        name: Given at creation.
        index: Place among the runtime's streams.
        sequence: Pieces of work enqueued so far: launches, copies, and waits for other streams.
            Recording an event is none: two events without work between them are one point.
        known: How many of them the host knows to be done, because it waited. A stream runs in
            order, so one number says it.
        covers: Work of other streams that comes before the next operation of this one. Replaced,
            never changed: events share it.
    """

    __slots__ = ("_runtime", "covers", "index", "known", "name", "native", "sequence")

    def __init__(self, runtime: Runtime, name: str, index: int) -> None:
        self._runtime = runtime
        self.name = name
        self.index = index
        self.sequence = 0
        self.known = 0
        self.covers: dict[Stream, int] = {}
        self.native: object | None = None

    def record(self, event: Event | None = None) -> Event:
        """Mark the end of the work enqueued so far.

        Args:
            event: An event to move here. It then stands for this point only, also for whoever
                waits on it later; a new one is made by default.

        Returns:
            The event.
        """
        if event is None:
            event = Event(self._runtime, self)
        else:
            event.stream = self
            event.sequence = self.sequence
            event.covers = self.covers
        self._runtime.record_native(self, event)
        return event

    def wait(self, event: Event) -> None:
        """Let later work of this stream start only after the event.

        Raises:
            RtError: The event was never recorded: CUDA would silently not wait.
        """
        other = event.stream
        if other is None:
            if not self._runtime.missing_event(event, f"stream {self.name!r}"):
                return
        elif other is not self and event.sequence > self.covers.get(other, 0):
            covers = {**self.covers, other: event.sequence}
            for stream, sequence in event.covers.items():
                if stream is not self and sequence > covers.get(stream, 0):
                    covers[stream] = sequence
            self.covers = covers
            # Known work of this stream must imply what it waited for before that work.
            self.sequence += 1
        self._runtime.wait_native(self, event)

    def __repr__(self) -> str:
        return f"Stream({self.name!r})"


def never_recorded(who: str) -> RtError:
    """The error for a wait without a record."""
    return RtError(
        f"{who} waits on an event that was never recorded; the device would not wait at all. "
        "Record the event on the producing stream first"
    )
