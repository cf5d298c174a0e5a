"""Backend `cuda_checked`: the real device, with clocks and canaries at this package's boundary.

Verdicts come from the clocks, as in the simulation; the device shows the values. Delays drawn from
the seed are put before copies and after events, so that landings are late where nobody waits. Host
waits, events and copies are the release backend's own.

Not checked here: what a launch does beyond its declared effects, and host threads that are not
announced by a queue (`Runtime.queue` carries clocks on this backend too).
"""

from __future__ import annotations

import random
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from headrace.rt.checking import Checker
from headrace.rt.cuda import CudaRuntime
from headrace.rt.errors import RtError
from headrace.rt.landings import LeasedLanding, LeasedPart
from headrace.rt.queues import Queue
from headrace.rt.runtime import Thread
from headrace.rt.sim.memory import CheckedHostMemory, poison, same_bits
from headrace.rt.tickets import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from headrace.rt.buffers import Buffer, View
    from headrace.rt.clocks import OpRecord, Shadow
    from headrace.rt.effects import Op
    from headrace.rt.frames import Frame, HostMemory
    from headrace.rt.graphs import Graph, Rows
    from headrace.rt.reports import Report
    from headrace.rt.streams import Event, Stream
    from headrace.rt.tickets import Array

T = TypeVar("T")

DELAY_CYCLES = (0, 0, 20_000, 200_000, 2_000_000)
"""Device cycles slept at a point: mostly nothing, at times about a millisecond."""


class CudaCheckedRuntime(CudaRuntime):
    """The release backend with a checker beside it.

    Attributes:
        checker: Clocks and findings.
    """

    backend = "cuda_checked"

    def __init__(self, device: torch.device, *, seed: int) -> None:
        self.checker = Checker(seed, "device")
        self._clocks = self.checker.clocks
        self._random = random.Random(seed)  # noqa: S311  delays, not a secret
        self._tickets: dict[Ticket, OpRecord] = {}
        self._sources: dict[str, tuple[CheckedHostMemory, int, Array, OpRecord]] = {}
        self._commits: dict[Frame, OpRecord] = {}
        super().__init__(device)

    def _delay(self, stream: Stream) -> None:
        cycles = self._random.choice(DELAY_CYCLES)
        if cycles:
            self.use(stream)
            # Private but stable, and the only way to keep a stream busy without a kernel.
            torch.cuda._sleep(cycles)  # noqa: SLF001

    # Work.

    def launch(self, op: Op[Any], stream: Stream, **arguments: Any) -> None:  # noqa: ANN401
        """Check the effects, then launch."""
        if self._capturing is None:
            self._clocks.step = self.stats.steps
            self.checker.launch(op, stream, arguments)
            self.stats.accesses = self._clocks.accesses
        super().launch(op, stream, **arguments)

    def replay_graph(self, graph: Graph, stream: Stream, rows: Rows) -> None:
        """Evaluate the captured ops' effects for this replay, then replay."""
        for captured in graph.launches:
            self.checker.launch(captured.op, stream, captured.replayed(rows))
        super().replay_graph(graph, stream, rows)

    def copy_to_device(self, copies: list[tuple[View, HostMemory, int]], stream: Stream) -> None:
        """Check, delay, copy."""
        self._clocks.step = self.stats.steps
        self._delay(stream)
        self.use(stream)
        self.stats.copies += len(copies)
        for view, memory, count in copies:
            source = cast("CheckedHostMemory", memory)
            record = self.checker.copy_to_device(view, source.shadow, count, stream)
            view.device_tensor.copy_(source.memory_tensor[:count], non_blocking=True)
            self._sources[source.name] = (source, count, source.values[:count].copy(), record)
            if view.buffer.frame is not None:
                self._commits[view.buffer.frame] = record

    def stage_opened(self, frame: Frame) -> None:
        """The copies of the last commit are done: their sources must be as they were."""
        for memory in frame.staging.values():
            known = self._sources.pop(memory.name, None)
            if known is None:
                continue
            source, count, values, record = known
            if not same_bits(values, source.values[:count]):
                self._clocks.report(
                    "CANARY-SOURCE",
                    source.name,
                    "the host memory that this copy reads changed after the copy was enqueued",
                    None,
                    record,
                )

    def stage_misused(self, frame: Frame, name: str) -> bool:
        """A finding, and an error."""
        self.checker.misuse(
            "USE-AFTER-COMMIT",
            f"{frame.name}.stage.{name}",
            "a staging field was used after its commit, when the copy may still read it; take the "
            "next frame, or stage again",
            self._commits.get(frame),
        )
        return False

    def land(self, parts: Mapping[str, View], stream: Stream) -> LeasedLanding:
        """Check, delay, copy to leased landings."""
        self._clocks.step = self.stats.steps
        self._delay(stream)
        leased: dict[str, LeasedPart] = {}
        for name, view in parts.items():
            part = self._landings.lease(view.shape, view.dtype)
            self.copy_to_host(part.memory, view, stream)
            leased[name] = part
        return LeasedLanding(leased)

    def copy_to_host(self, target: HostMemory, source: View, stream: Stream) -> None:
        """Check, poison the landing, copy."""
        memory = cast("CheckedHostMemory", target)
        self.checker.copy_to_host(source, memory.shadow, stream)
        self.stats.accesses = self._clocks.accesses
        count = len(source)
        # Written before the copy is enqueued. A value that still stands after the event means that
        # the copy did not come.
        memory.values[:count] = poison(memory.memory_tensor.dtype)
        self.use(stream)
        memory.memory_tensor[:count].copy_(source.device_tensor, non_blocking=True)

    def make_ticket(self, event: Event, landing: object, rows: Hashable) -> Ticket:
        """A ticket that must be read or dropped before the end."""
        leased = cast("LeasedLanding", landing)
        ticket = Ticket(event, leased, rows, self._ticket_closed)
        self._tickets[ticket] = self._clocks.ops[-1]
        return ticket

    def _ticket_closed(self, ticket: Ticket, *, is_dropped: bool) -> None:
        self._tickets.pop(ticket, None)
        if is_dropped and isinstance(ticket.landing, LeasedLanding):
            for part in ticket.landing.parts.values():
                unread = cast("CheckedHostMemory", part.memory).shadow.unread
                if unread is not None:
                    unread[:] = 0

    # Order.

    def record_native(self, stream: Stream, event: Event) -> None:
        """Record, then delay what comes after."""
        self.checker.record(stream, event)
        super().record_native(stream, event)
        self._delay(stream)

    def wait_native(self, stream: Stream, event: Event) -> None:
        """Wait, on clocks and device."""
        self._clocks.wait(stream, event)
        super().wait_native(stream, event)

    def block_on(self, event: Event) -> None:
        """Wait, on clocks and device."""
        super().block_on(event)
        self._clocks.wait_host(event)

    def is_known(self, event: Event) -> bool:
        """Whether this thread comes after the event."""
        return self._clocks.host_knows(event)

    def missing_event(self, event: Event, who: str) -> bool:  # noqa: ARG002  nothing to name
        """A finding; the device would not wait."""
        self.checker.misuse(
            "NEVER-RECORDED",
            "event",
            f"{who} waits on an event that was never recorded, so it does not wait at all; "
            "record it on the producing stream first",
        )
        return False

    def poll_native(self, event: Event) -> bool:
        """A finding: the answer depends on timing."""
        self.checker.misuse(
            "TIMING-BRANCH",
            f"event of {event.stream_name}",
            "the host asks whether an event has happened; what follows depends on timing. Wait "
            "for it instead",
        )
        return super().poll_native(event)

    # Memory and threads.

    def stream_created(self, stream: Stream) -> None:
        """A stream with a clock."""
        super().stream_created(stream)
        self._clocks.new_stream(stream)

    def buffer_created(self, buffer: Buffer) -> None:
        """Clocks for new memory."""
        if buffer.generation:
            self.checker.rebound(buffer)
        buffer.shadow = self.checker.new_shadow(buffer.name, buffer.kind, buffer.num_rows)

    def host_memory(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str
    ) -> HostMemory:
        """Pinned memory behind the checked array."""
        if dtype is torch.bfloat16:
            raise RtError(f"host array {name!r} is bfloat16, which numpy lacks; use float32")
        shadow: Shadow = self.checker.new_shadow(
            name, kind, shape[0], is_landing=kind == "landing_slot"
        )
        tensor = torch.zeros(shape, dtype=dtype, pin_memory=True)
        memory = CheckedHostMemory(name, tensor, shadow, self.checker, checks=True)
        return cast("HostMemory", memory)

    def queue(self, maxsize: int = 0) -> Queue[Any]:
        """A queue that carries clocks."""
        return _ClockQueue(self.checker, maxsize)

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """A thread ordered after its start and before its join."""
        return _ClockThread(self.checker, target, name)

    @property
    def reports(self) -> tuple[Report, ...]:
        """Findings so far."""
        return self._clocks.reports

    def finish(self) -> tuple[Report, ...]:
        """Wait for everything and look for lost tickets."""
        self.synchronize()
        for record in self._tickets.values():
            self._clocks.report(
                "LOST-TICKET",
                record.name,
                "the result of this fetch was neither read nor dropped",
                None,
                record,
            )
        return self.reports


class _ClockQueue(Queue[T]):
    """A queue whose items carry the sender's clock."""

    def __init__(self, checker: Checker, maxsize: int) -> None:
        super().__init__(maxsize)
        self._checker = checker
        self._clocks: deque[list[int]] = deque()
        self._lock = threading.Lock()

    def put(self, item: T) -> None:
        with self._lock:
            self._clocks.append(self._checker.clocks.send())
        super().put(item)

    def get(self, timeout_s: float | None = None) -> T:
        item = super().get(timeout_s)
        self._receive(1)
        return item

    def drain(self) -> list[T]:
        items = super().drain()
        self._receive(len(items))
        return items

    def _receive(self, count: int) -> None:
        # With several senders the clock taken may be another's; all of them were sent before.
        with self._lock:
            for _ in range(count):
                self._checker.clocks.receive(self._clocks.popleft())


class _ClockThread(Thread):
    """A thread with a clock of its own."""

    def __init__(self, checker: Checker, target: Callable[[], None], name: str) -> None:
        self._checker = checker
        self._target = target
        super().__init__(self._run, name)

    def start(self) -> None:
        clocks = self._checker.clocks
        self._actor = clocks.new_host(f"host {self.name}", clocks.host())
        super().start()

    def join(self, timeout_s: float | None = None) -> None:
        super().join(timeout_s)
        if not self.is_alive:
            self._checker.clocks.receive(self._actor.clock)

    def _run(self) -> None:
        self._checker.clocks.enter_thread(self._actor)
        self._target()
