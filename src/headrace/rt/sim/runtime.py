"""The simulated device behind the runtime's interface."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

import torch

from headrace.rt.buffers import (
    Buffer,
    View,
    snapshot_argument,
    tensors_of,
    views_of,
)
from headrace.rt.checking import Checker
from headrace.rt.errors import RtError
from headrace.rt.landings import LandingPool, LeasedLanding, LeasedPart
from headrace.rt.runtime import Runtime, mark_frames
from headrace.rt.sim.device import Device, Mark, Wait, Work
from headrace.rt.sim.guard import EffectGuard
from headrace.rt.sim.memory import CheckedHostMemory, poison, same_bits
from headrace.rt.sim.threads import Baton, SimQueue, SimThread
from headrace.rt.tickets import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from torch import Tensor

    from headrace.rt.clocks import OpRecord, Shadow
    from headrace.rt.effects import Op
    from headrace.rt.frames import Frame, HostMemory
    from headrace.rt.graphs import Graph, Rows
    from headrace.rt.queues import Queue
    from headrace.rt.reports import Report
    from headrace.rt.runtime import Policy, Thread
    from headrace.rt.sim.device import WorkQueue
    from headrace.rt.slots import SlotPool
    from headrace.rt.streams import Event, Stream
    from headrace.rt.tickets import Landing


class SimRuntime(Runtime):
    """Runs the engine's code on a device whose schedule is drawn from a seed, and checks it.

    Attributes:
        checker: Clocks and findings.
        policy: When work runs.
    """

    backend = "sim"

    def __init__(self, *, seed: int, policy: Policy, checks: bool) -> None:
        super().__init__(torch.device("cpu"))
        if policy not in ("eager", "lazy", "random"):
            raise RtError(f"policy {policy!r} is unknown; choose eager, lazy or random")
        self.policy = policy
        self.checker = Checker(seed, policy, is_on=checks)
        self._clocks = self.checker.clocks
        self._device = Device(seed, policy, self._clocks)
        self._guard = EffectGuard(self.checker)
        self._baton = Baton(seed, policy, self.checker)
        self._landings = LandingPool(self._make_landing, self.is_known, self.queue())
        self._tickets: dict[Ticket, OpRecord] = {}
        self._commits: dict[Frame, OpRecord] = {}
        self._freed: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[Tensor, Shadow]]] = {}
        self._reused: Shadow | None = None

    # Work.

    def launch(self, op: Op[Any], stream: Stream, **arguments: Any) -> None:  # noqa: ANN401
        """Enqueue one op; see `Runtime.launch`."""
        # Containers are copied: the caller may go on editing them.
        kept = {
            name: snapshot_argument(value) if name in op.effects else value
            for name, value in arguments.items()
        }
        if self._capturing is not None:
            super().launch(op, stream, **kept)
            return
        self.stats.launches += 1
        self._sync_step()
        values = {
            name: tensors_of(name, value) if name in op.effects else value
            for name, value in kept.items()
        }
        record, touched = self.checker.launch(op, stream, kept)
        self.stats.accesses = self._clocks.accesses
        mark_frames((part.view for part in touched), stream)
        constants: list[tuple[str, Tensor, int]] = [
            (name, value, value._version)  # noqa: SLF001  torch's own count of in-place writes
            for name, value in kept.items()
            if name not in op.effects and isinstance(value, torch.Tensor)
        ]

        def call() -> None:
            if op.fn(**values) is not None:
                raise RtError(f"op {op.name} returned a value; results go to declared outputs")

        def run() -> None:
            if not self.checker.is_on:
                call()
                return
            for name, tensor, version in constants:
                if tensor._version != version:  # noqa: SLF001
                    self._clocks.report(
                        "MUTATED-ARGUMENT",
                        name,
                        f"plain tensor {name!r} of {op.name} changed between launch and run; "
                        "only constants may be passed without a declared effect",
                        None,
                        record,
                    )
            self._guard.run(op, call, touched, record)

        self._device.add(_queue(stream), Work(record, [run]))

    def run_op(self, op: Op[Any], stream: Stream, arguments: dict[str, Any]) -> None:
        """Not used: `launch` defers."""
        raise NotImplementedError

    def copy_to_device(self, copies: list[tuple[View, HostMemory, int]], stream: Stream) -> None:
        """Enqueue copies that read the host's memory when they run, in pieces."""
        self.stats.copies += len(copies)
        self._sync_step()
        for view, memory, count in copies:
            source = _checked(memory)
            record = self.checker.copy_to_device(view, source.shadow, count, stream)
            mark_frames((view,), stream)
            self._device.add(_queue(stream), Work(record, self._copy_in(view, source, record)))
            if view.buffer.frame is not None:
                self._commits[view.buffer.frame] = record
        self.stats.accesses = self._clocks.accesses

    def _copy_in(
        self, view: View, source: CheckedHostMemory, record: OpRecord
    ) -> list[Callable[[], None]]:
        count = len(view)
        tensor = view.device_tensor
        snapshot = source.values[:count].copy() if self.checker.is_on else None

        def piece(start: int, stop: int) -> Callable[[], None]:
            def run() -> None:
                tensor[start:stop].copy_(source.memory_tensor[start:stop])
                self._guard.note_write(view.buffer)
                if snapshot is not None and not same_bits(
                    snapshot[start:stop], source.values[start:stop]
                ):
                    self._canary(
                        "CANARY-SOURCE",
                        source.name,
                        "the host memory that this copy reads changed after the copy was enqueued",
                        record,
                    )

            return run

        return [piece(start, stop) for start, stop in self._device.pieces_of(count)]

    def land(self, parts: Mapping[str, View], stream: Stream) -> Landing:
        """Enqueue copies to leased landings."""
        self._sync_step()
        leased: dict[str, LeasedPart] = {}
        for name, view in parts.items():
            part = self._landings.lease(view.shape, view.dtype)
            self._enqueue_landing(_checked(part.memory), view, stream)
            leased[name] = part
        return LeasedLanding(leased)

    def copy_to_host(self, target: HostMemory, source: View, stream: Stream) -> None:
        """Enqueue a copy to host memory of the caller's choice."""
        self._sync_step()
        self._enqueue_landing(_checked(target), source, stream)

    def _enqueue_landing(self, target: CheckedHostMemory, view: View, stream: Stream) -> None:
        record = self.checker.copy_to_host(view, target.shadow, stream)
        self.stats.accesses = self._clocks.accesses
        count = len(view)
        tensor = view.device_tensor
        if self.checker.is_on:
            target.values[:count] = poison(target.memory_tensor.dtype)
        mine = target.values[:count].copy() if self.checker.is_on else None

        def piece(start: int, stop: int) -> Callable[[], None]:
            def run() -> None:
                if mine is not None and not same_bits(mine[start:stop], target.values[start:stop]):
                    self._canary(
                        "CANARY-LANDING",
                        target.name,
                        "the host memory that this copy lands in was written after the copy was "
                        "enqueued",
                        record,
                    )
                target.memory_tensor[start:stop].copy_(tensor[start:stop])

            return run

        pieces = [piece(start, stop) for start, stop in self._device.pieces_of(count)]
        self._device.add(_queue(stream), Work(record, pieces))

    def _canary(self, kind: str, name: str, detail: str, record: OpRecord) -> None:
        self._clocks.report(kind, name, detail, None, record)

    def make_ticket(self, event: Event, landing: Landing, rows: Hashable) -> Ticket:
        """A ticket that must be read or dropped before the end."""
        try:
            hash(rows)
        except TypeError:
            raise RtError(
                f"row map of a fetch is a {type(rows).__name__}, which can change; pass a tuple"
            ) from None
        ticket = Ticket(event, landing, rows, self._ticket_closed)
        self._tickets[ticket] = self._clocks.ops[-1]
        return ticket

    def _ticket_closed(self, ticket: Ticket, *, is_dropped: bool) -> None:
        self._tickets.pop(ticket, None)
        landing = ticket.landing
        if is_dropped and isinstance(landing, LeasedLanding):
            for part in landing.parts.values():
                unread = _checked(part.memory).shadow.unread
                if unread is not None:
                    unread[:] = 0

    # Order.

    def record_native(self, stream: Stream, event: Event) -> None:
        """Record a fresh mark: whoever waited for the old one still waits for that."""
        self.checker.record(stream, event)
        mark = Mark(_queue(stream))
        event.native = mark
        self._device.add(mark.queue, mark)

    def wait_native(self, stream: Stream, event: Event) -> None:
        """Wait for the mark as it is now."""
        self._clocks.wait(stream, event)
        self._device.add(_queue(stream), Wait(cast("Mark", event.native)))

    def block_on(self, event: Event) -> None:
        """Run the device until the mark."""
        mark = cast("Mark", event.native)
        if not mark.is_done:
            self._device.finish(mark)
        self._clocks.wait_host(event)

    def is_known(self, event: Event) -> bool:
        """Whether this thread comes after the event; a fact of clocks, not of time."""
        return self._clocks.host_knows(event)

    def missing_event(self, event: Event, who: str) -> bool:  # noqa: ARG002  nothing to name
        """A finding; the wait does nothing, as on the device."""
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
        self._device.pass_time()
        mark = cast("Mark | None", event.native)
        return mark is None or mark.is_done

    # Memory.

    def device_memory(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: float | None
    ) -> Tensor:
        """New memory, or freed memory with its clocks."""
        freed = self._freed.get((shape, dtype))
        if freed:
            tensor, self._reused = freed.pop()
            if fill is not None:
                tensor.fill_(fill)
            return tensor
        self._reused = None
        # Inference tensors count no versions, and the guard lives by them.
        with torch.inference_mode(mode=False):
            return torch.full(shape, 0 if fill is None else fill, dtype=dtype)

    def buffer_created(self, buffer: Buffer) -> None:
        """Give the buffer clocks: new ones, or those of the memory it got again."""
        if buffer.generation:
            self.checker.rebound(buffer)
        if self._reused is not None:
            buffer.shadow = self._reused
            self._reused = None
        else:
            buffer.shadow = self.checker.new_shadow(buffer.name, buffer.kind, buffer.num_rows)
        self._guard.add(buffer)

    def free(self, buffer: Buffer) -> None:
        """Give memory back; see `Runtime.free`."""
        super().free(buffer)
        self.release_memory(buffer)

    def release_memory(self, buffer: Buffer) -> None:
        """Offer a buffer's memory to the next allocation of its shape, clocks included."""
        self._buffers.pop(buffer.name, None)
        self._guard.remove(buffer)
        key = (buffer.shape, buffer.dtype)
        shadow = cast("Shadow", buffer.shadow)
        self._freed.setdefault(key, []).append((buffer.device_tensor, shadow))

    def host_memory(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str
    ) -> HostMemory:
        """Memory with a shadow."""
        shadow = self.checker.new_shadow(name, kind, shape[0], is_landing=kind == "landing_slot")
        return cast(
            "HostMemory",
            CheckedHostMemory(
                name,
                torch.zeros(shape, dtype=dtype),
                shadow,
                self.checker,
                checks=self.checker.is_on,
            ),
        )

    def _make_landing(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> HostMemory:
        return self.host_memory(name, shape, dtype, "landing_slot")

    def mapped_buffer(self, memory: HostMemory) -> Buffer:
        """The host's memory as a buffer with the same clocks."""
        checked = _checked(memory)
        return Buffer(memory.name, checked.memory_tensor, kind="mapped", shadow=checked.shadow)

    def read(self, source: Buffer | View) -> Tensor:
        """A copy, after everything has run."""
        self.synchronize()
        return source.device_tensor.clone()

    def write(self, target: Buffer | View, value: Tensor) -> None:
        """Fill, after everything has run."""
        self.synchronize()
        target.device_tensor.copy_(value)
        self._guard.note_write(target if isinstance(target, Buffer) else target.buffer)

    # The rest.

    def stream_created(self, stream: Stream) -> None:
        """A work queue and a clock."""
        stream.native = self._device.new_queue(stream.name)
        self._clocks.new_stream(stream)

    def replay_graph(self, graph: Graph, stream: Stream, rows: Rows) -> None:
        """Enqueue the captured launches again, with this replay's rows."""
        for captured in graph.launches:
            arguments = captured.replayed(rows)
            if self.checker.is_on:
                for name in captured.op.effects:
                    self._find_rotating(graph, captured.arguments.get(name))
            self.launch(captured.op, stream, **arguments)

    def _find_rotating(self, graph: Graph, argument: object) -> None:
        for view in views_of(argument):
            if view.buffer.rotates:
                self.checker.misuse(
                    "ROTATING-IN-GRAPH",
                    view.buffer.name,
                    f"graph {graph.key!r} captured memory of a rotating frame; every replay would "
                    "use that one frame. Copy to static inputs, and outputs to the frame",
                )

    def stage_misused(self, frame: Frame, name: str) -> bool:
        """A finding, and an error unless checks are off."""
        self.checker.misuse(
            "USE-AFTER-COMMIT",
            f"{frame.name}.stage.{name}",
            "a staging field was used after its commit, when the copy may still read it; take the "
            "next frame, or stage again",
            self._commits.get(frame),
        )
        return not self.checker.is_on

    def queue(self, maxsize: int = 0) -> Queue[Any]:
        """A queue that carries clocks."""
        return SimQueue(self._baton, maxsize)

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """A thread that runs when others hand over."""
        return SimThread(self._baton, target, name)

    def watch(self, name: str, target: Any) -> Any:  # noqa: ANN401
        """A stand-in that records accesses to an object's attributes."""
        return _Watched(target, name, self.checker) if self.checker.is_on else target

    @contextlib.contextmanager
    def doing(self, role: str) -> Iterator[None]:
        """Name a host activity for the coverage report."""
        host = self._clocks.host()
        host.roles.append(role)
        self._clocks.cover_all(self.checker.shadows, role)
        try:
            yield
        finally:
            host.roles.pop()

    def slot_reused(self, pool: SlotPool, event: Event) -> None:
        """Count a slot taken while its last use may still be in flight."""
        if pool.kind and not self._clocks.host_knows(event):
            self._clocks.pairs.add((pool.kind, "forward with slot reuse"))

    def _sync_step(self) -> None:
        self._clocks.step = self.stats.steps

    @property
    def reports(self) -> tuple[Report, ...]:
        """Findings so far."""
        return self._clocks.reports

    @property
    def pairs(self) -> frozenset[tuple[str, str]]:
        """(state kind, overlap) exercised so far."""
        return frozenset(self._clocks.pairs)

    @property
    def operations(self) -> Sequence[OpRecord]:
        """Everything done so far, for the timeline."""
        return self._clocks.ops[1:]

    @property
    def actors(self) -> Sequence[str]:
        """Names of host threads and streams, for the timeline."""
        return self._clocks.actors

    def finish(self) -> tuple[Report, ...]:
        """Run everything and look for lost tickets and writes outside launches."""
        self.synchronize()
        if self.checker.is_on:
            self._guard.find_outside_writes(None)
            for record in self._tickets.values():
                self._clocks.report(
                    "LOST-TICKET",
                    record.name,
                    "the result of this fetch was neither read nor dropped",
                    None,
                    record,
                )
        return self.reports


class _Watched:
    """Records reads and writes of attributes, one row for each name."""

    def __init__(self, target: object, name: str, checker: Checker) -> None:
        object.__setattr__(self, "_rt", (target, name, checker, {}))

    def __getattr__(self, attribute: str) -> Any:  # noqa: ANN401
        target, name, checker, shadows = object.__getattribute__(self, "_rt")
        value = getattr(target, attribute)
        if not callable(value):
            checker.host_access(
                _field(shadows, checker, name, attribute), slice(0, 1), is_write=False
            )
        return value

    def __setattr__(self, attribute: str, value: object) -> None:
        target, name, checker, shadows = object.__getattribute__(self, "_rt")
        checker.host_access(_field(shadows, checker, name, attribute), slice(0, 1), is_write=True)
        setattr(target, attribute, value)


def _field(shadows: dict[str, Shadow], checker: Checker, name: str, attribute: str) -> Shadow:
    shadow = shadows.get(attribute)
    if shadow is None:
        shadow = shadows[attribute] = checker.new_shadow(f"{name}.{attribute}", "host object", 1)
    return shadow


def _queue(stream: Stream) -> WorkQueue:
    return cast("WorkQueue", stream.native)


def _checked(memory: HostMemory) -> CheckedHostMemory:
    return cast("CheckedHostMemory", memory)
