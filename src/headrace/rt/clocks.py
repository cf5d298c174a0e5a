"""Vector clocks: happens-before between host threads and streams.

Clocks advance when work is enqueued, in the order of the host program, so a verdict does not depend
on when the device runs anything: one clean run stands for every schedule.

Each memory has a shadow that keeps, per row, the last write and each actor's last read. A new
access must be ordered after the last write, and a write after every last read.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from headrace.rt.reports import Access, Report, capture_stack, format_rows, format_stack, site_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from headrace.rt.reports import Stack
    from headrace.rt.streams import Event, Stream

    Rows = slice | npt.NDArray[np.int64]

FORWARD_ROLES = frozenset({"forward", "step", "sample", "draft"})
ROLE_NAMES = {
    **dict.fromkeys(FORWARD_ROLES, "forward"),
    "zero": "zero or restore",
    "restore": "zero or restore",
}
"""How op roles are named in the coverage report; others keep their own name."""


@dataclass(slots=True, eq=False)
class OpRecord:
    """One operation of the run: a launch, a copy, or an access by the host.

    Attributes:
        sequence: Place in the run, from 1.
        actor: Who does it.
        epoch: The actor's own clock then.
        name, role: Of the op or access.
        step: Frames taken so far.
        stack: Where it was enqueued.
        begun, ended: Ticks of the simulated device, for the timeline; 0 while it has not run.
        enqueued: Tick at which it was enqueued.
    """

    sequence: int
    actor: int
    epoch: int
    name: str
    role: str
    step: int
    stack: Stack
    enqueued: int = 0
    begun: int = 0
    ended: int = 0


@dataclass(slots=True, eq=False)
class Shadow:
    """Clocks of one memory. They stay with the memory when it is handed out again.

    Attributes:
        name, kind: Of the memory.
        writes: Sequence of each row's last write, [rows] i64; 0 for none.
        reads: The same for last reads, per actor.
        last_write, last_read: Largest epoch per actor, over all rows: the quick test.
        roles: Last operation of each role, for the coverage report.
        unread: Sequence of a landed copy that nobody has read, [rows] i64; None if not a landing.
    """

    name: str
    kind: str
    writes: npt.NDArray[np.int64]
    reads: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)
    last_write: dict[int, int] = field(default_factory=dict)
    last_read: dict[int, int] = field(default_factory=dict)
    roles: dict[str, tuple[int, int]] = field(default_factory=dict)
    unread: npt.NDArray[np.int64] | None = None


class HostActor:
    """A host thread's clock."""

    __slots__ = ("actor", "clock", "name", "roles")

    def __init__(self, actor: int, name: str, clock: list[int]) -> None:
        self.actor = actor
        self.name = name
        self.clock = clock
        self.roles: list[str] = []


class Clocks:
    """The clocks of one run, and its findings.

    Attributes:
        ops: Every operation, by sequence; entry 0 stands for what was there at the start.
        accesses: Effects checked.
        pairs: (state kind, overlap) seen while the earlier side was not known to be done.
        step: Frames taken; set by the runtime.
        tick: The simulated device's time; set by it.
    """

    def __init__(self, seed: int, policy: str) -> None:
        self.seed = seed
        self.policy = policy
        self.actors: list[str] = []
        self.ops: list[OpRecord] = [OpRecord(0, 0, 0, "initial value", "", 0, ())]
        self.accesses = 0
        self.pairs: set[tuple[str, str]] = set()
        self.step = 0
        self.tick = 0
        self._found: dict[tuple[str, ...], Report] = {}
        self._streams: dict[int, tuple[int, list[int]]] = {}
        self._local = threading.local()
        self._main = self.new_host("host main", None)
        self._local.host = self._main

    # Actors.

    def new_host(self, name: str, parent: HostActor | None) -> HostActor:
        """A host thread; what its parent did so far comes before it."""
        clock = parent.clock.copy() if parent is not None else []
        self.actors.append(name)
        actor = HostActor(len(self.actors) - 1, name, clock)
        _grow(clock, len(self.actors))
        clock[actor.actor] = 1
        if parent is not None:
            parent.clock[parent.actor] += 1
        return actor

    def enter_thread(self, actor: HostActor) -> None:
        """Make an actor the current thread's."""
        self._local.host = actor

    def host(self) -> HostActor:
        """The current thread's actor. A thread nobody announced is ordered after nothing."""
        host: HostActor | None = getattr(self._local, "host", None)
        if host is None:
            host = self.new_host(f"host {threading.current_thread().name}", None)
            self._local.host = host
        return host

    def new_stream(self, stream: Stream) -> None:
        """Give a stream its clock."""
        self.actors.append(f"stream {stream.name}")
        clock = [0] * len(self.actors)
        self._streams[stream.index] = (len(self.actors) - 1, clock)

    # Edges.

    def send(self) -> list[int]:
        """What the current thread passes on, for example with a queue item."""
        host = self.host()
        clock = host.clock.copy()
        host.clock[host.actor] += 1
        return clock

    def receive(self, clock: list[int]) -> None:
        """Order the current thread after a passed clock."""
        _join(self.host().clock, clock)

    def record(self, stream: Stream, event: Event) -> None:
        """The event comes after the stream's work so far, and after the host's."""
        # The host's clock is not joined: recording orders device work, not host accesses.
        event.clock = self._streams[stream.index][1].copy()

    def wait(self, stream: Stream, event: Event) -> None:
        """Later work of the stream comes after the event."""
        _join(self._streams[stream.index][1], event.clock)

    def wait_host(self, event: Event) -> None:
        """Later accesses of this thread come after the event."""
        _join(self.host().clock, event.clock)

    def host_knows(self, event: Event) -> bool:
        """Whether this thread comes after the event already."""
        known = self.host().clock
        size = len(known)
        return all(
            epoch <= (known[actor] if actor < size else 0)
            for actor, epoch in enumerate(event.clock)
        )

    # Operations.

    def enqueue(self, stream: Stream, name: str, role: str) -> tuple[OpRecord, list[int]]:
        """A device operation; its effects are checked with the returned clock."""
        host = self.host()
        actor, clock = self._streams[stream.index]
        _join(clock, host.clock)
        clock[actor] += 1
        host.clock[host.actor] += 1
        return self._operation(actor, clock[actor], name, role), clock

    def host_operation(self, name: str, role: str = "") -> tuple[OpRecord, list[int]]:
        """An access by the current thread."""
        host = self.host()
        if host.roles:
            role = host.roles[-1]
        return self._operation(host.actor, host.clock[host.actor], name, role), host.clock

    def _operation(self, actor: int, epoch: int, name: str, role: str) -> OpRecord:
        record = OpRecord(
            len(self.ops), actor, epoch, name, role, self.step, capture_stack(3), self.tick
        )
        self.ops.append(record)
        return record

    def read(self, shadow: Shadow, rows: Rows, record: OpRecord, clock: list[int]) -> None:
        """Check and note a read."""
        self.accesses += 1
        actor = record.actor
        for other, epoch in shadow.last_write.items():
            if other != actor and epoch > (clock[other] if other < len(clock) else 0):
                self._find_unordered(shadow, rows, record, clock, "READ")
                break
        reads = shadow.reads.get(actor)
        if reads is None:
            reads = shadow.reads[actor] = np.zeros_like(shadow.writes)
        reads[rows] = record.sequence
        shadow.last_read[actor] = record.epoch

    def write(self, shadow: Shadow, rows: Rows, record: OpRecord, clock: list[int]) -> None:
        """Check and note a write."""
        self.accesses += 1
        actor = record.actor
        known = len(clock)
        for last in (shadow.last_write, shadow.last_read):
            for other, epoch in last.items():
                if other != actor and epoch > (clock[other] if other < known else 0):
                    self._find_unordered(shadow, rows, record, clock, "WRITE")
                    break
        shadow.writes[rows] = record.sequence
        shadow.last_write[actor] = record.epoch

    def _find_unordered(
        self, shadow: Shadow, rows: Rows, record: OpRecord, clock: list[int], what: str
    ) -> None:
        """The row-by-row test, after the quick one was not enough."""
        kind = f"UNORDERED-WRITE-{what}"
        self._match(shadow, shadow.writes, rows, record, clock, kind=kind)
        if what == "WRITE":
            for actor, reads in shadow.reads.items():
                if actor != record.actor:
                    kind = "UNORDERED-READ-WRITE"
                    self._match(shadow, reads, rows, record, clock, kind=kind)

    def _match(
        self,
        shadow: Shadow,
        last: npt.NDArray[np.int64],
        rows: Rows,
        record: OpRecord,
        clock: list[int],
        *,
        kind: str,
    ) -> None:
        touched = last[rows]
        for sequence in np.unique(touched).tolist():
            earlier = self.ops[sequence]
            known = clock[earlier.actor] if earlier.actor < len(clock) else 0
            if sequence == 0 or earlier.actor == record.actor or earlier.epoch <= known:
                continue
            where = np.arange(len(last), dtype=np.int64)[rows][touched == sequence].tolist()
            self.report(
                kind,
                shadow.name,
                "no event, wait or queue orders these two accesses; record an event after the "
                f"first and wait for it on {self.actors[record.actor]} before the second",
                earlier,
                record,
                rows=where,
            )

    def cover(self, shadow: Shadow, record: OpRecord) -> None:
        """Note what an operation overlaps on a memory, and remember it for those after it."""
        role = record.role
        if not role:
            return
        roles = shadow.roles
        if roles:
            known = self.host().clock
            size = len(known)
            for other, (actor, epoch) in roles.items():
                if epoch > (known[actor] if actor < size else 0):
                    self.pairs.add((shadow.kind, overlap(other, role)))
        roles[role] = (record.actor, record.epoch)

    def cover_all(self, shadows: Iterable[Shadow], role: str) -> None:
        """Note that a host activity overlaps whatever is in flight."""
        known = self.host().clock
        for shadow in shadows:
            for other, (actor, epoch) in shadow.roles.items():
                if epoch > (known[actor] if actor < len(known) else 0):
                    self.pairs.add((shadow.kind, overlap(other, role)))

    # Findings.

    @property
    def reports(self) -> tuple[Report, ...]:
        """What was found, in order."""
        return tuple(self._found.values())

    def report(
        self,
        kind: str,
        buffer: str,
        detail: str,
        first: OpRecord | None,
        second: OpRecord,
        *,
        rows: list[int] | None = None,
    ) -> None:
        """Keep a finding; the same kind at the same two sites is counted, not repeated."""
        key = (kind, site_of(first.stack) if first is not None else "", site_of(second.stack))
        known = self._found.get(key)
        if known is not None:
            self._found[key] = _counted(known)
            return
        kinds = kind.removeprefix("UNORDERED-").lower().split("-")
        unordered = kind.startswith("UNORDERED-")
        self._found[key] = Report(
            kind,
            buffer,
            format_rows(rows) if rows is not None else "",
            detail,
            None if first is None else self._access(first, kinds[0] if unordered else "access"),
            self._access(second, kinds[1] if unordered else "access"),
            self.seed,
            self.policy,
        )

    def _access(self, record: OpRecord, kind: str) -> Access:
        return Access(
            self.actors[record.actor],
            record.name,
            kind,
            record.step,
            record.sequence,
            format_stack(record.stack),
        )


@functools.cache
def overlap(one: str, other: str) -> str:
    """Name of two overlapping roles, "forward" first."""
    a, b = ROLE_NAMES.get(one, one), ROLE_NAMES.get(other, other)
    first, second = (a, b) if a == "forward" or (b != "forward" and a <= b) else (b, a)
    return f"{first} with {second}"


def _counted(report: Report) -> Report:
    fields = {name: getattr(report, name) for name in Report.__slots__}
    fields["count"] = report.count + 1
    return Report(**fields)


def _grow(clock: list[int], size: int) -> None:
    if len(clock) < size:
        clock.extend([0] * (size - len(clock)))


def _join(into: list[int], clock: list[int]) -> None:
    size = len(clock)
    if len(into) < size:
        _grow(into, size)
    for actor in range(size):
        epoch = clock[actor]
        if epoch > into[actor]:  # noqa: PLR1730  max() costs twice as much
            into[actor] = epoch
