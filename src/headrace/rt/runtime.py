"""The runtime: one object that owns every way to the device.

`Runtime.create` picks a backend; the engine's code is the same on all of them:

* `cpu`: everything at once, in call order. For unit tests and for reading the engine.
* `cuda`: thin calls into torch. Release mode.
* `sim`: a seeded simulated device on the CPU that reports every race (`headrace.rt.sim`).
* `cuda_checked`: the real device with the same clocks at this boundary.

Methods whose names begin with a backend verb (`host_memory`, `copy_to_host`, `wait_native`, ...)
are for the other files of this package; the lint rule keeps the engine from them.
"""

from __future__ import annotations

import abc
import importlib
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch

from headrace.rt.buffers import Buffer, Bundle, View, snapshot_argument, tensors_for
from headrace.rt.errors import RtError
from headrace.rt.frames import FrameRing
from headrace.rt.graphs import CapturedLaunch, Graph
from headrace.rt.queues import Queue
from headrace.rt.raw import Raw
from headrace.rt.slots import SlotPool
from headrace.rt.streams import Event, Stats, Stream, never_recorded
from headrace.rt.tickets import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from headrace.rt.buffers import Field
    from headrace.rt.effects import Op
    from headrace.rt.frames import Frame, HostMemory
    from headrace.rt.graphs import Rows
    from headrace.rt.reports import Report
    from headrace.rt.tickets import Landing

Policy = Literal["eager", "lazy", "random"]
BACKENDS = ("cpu", "cuda", "sim", "cuda_checked")


class Thread:
    """A host thread whose start and join order what is done before and after them."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=target, name=name, daemon=True)
        self.name = name

    def start(self) -> None:
        """Start it."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end."""
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._thread.is_alive()


class Runtime(abc.ABC):
    """Streams, buffers, launches and copies of one device.

    Attributes:
        backend: Name of the backend.
        device: Where buffers live.
        stats: Counters.
        frames_made: All frames of all rings.
        raw: The unsafe calls that everything here is made from. For tests and mutants only.
    """

    backend = ""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stats = Stats()
        self.raw = Raw(self)
        self.frames_made: list[Frame] = []
        self._streams: dict[str, Stream] = {}
        self._buffers: dict[str, Buffer] = {}
        self._graphs: dict[Hashable, Graph] = {}
        self._capturing: Graph | None = None

    @staticmethod
    def create(
        backend: str = "cpu",
        *,
        device: str | torch.device = "cpu",
        seed: int = 0,
        policy: Policy = "lazy",
        checks: bool = True,
    ) -> Runtime:
        """Make a runtime.

        Args:
            backend: "cpu", "cuda", "sim" or "cuda_checked".
            device: torch device of the buffers.
            seed: Seed of the schedule (`sim`) or of the injected delays (`cuda_checked`).
            policy: When the simulated device runs its work: "eager" at once, "lazy" as late as
                possible, "random" by the seed.
            checks: Off, the simulated device only schedules: how a mutant shows its wrong token.

        Raises:
            RtError: Unknown backend.
        """
        # Imported here: the release backends must not pay for the simulator's import.
        where = torch.device(device)
        runtime: Runtime
        if backend == "cpu":
            runtime = _load("headrace.rt.cpu").CpuRuntime(where)
        elif backend == "cuda":
            runtime = _load("headrace.rt.cuda").CudaRuntime(where)
        elif backend == "sim":
            simulated = _load("headrace.rt.sim.runtime").SimRuntime
            runtime = simulated(seed=seed, policy=policy, checks=checks)
        elif backend == "cuda_checked":
            runtime = _load("headrace.rt.cuda_checked").CudaCheckedRuntime(where, seed=seed)
        else:
            raise RtError(f"backend {backend!r} is unknown; choose one of {', '.join(BACKENDS)}")
        return runtime

    # Streams and events.

    def stream(self, name: str) -> Stream:
        """The stream of that name, made at first use."""
        stream = self._streams.get(name)
        if stream is None:
            stream = Stream(self, name, len(self._streams))
            self._streams[name] = stream
            self.stream_created(stream)
        return stream

    def event(self) -> Event:
        """An event that `Stream.record` can be given, time and again."""
        return Event(self)

    def wait_host(self, event: Event) -> None:
        """Block this host thread until the event has happened; counted in `stats.syncs`."""
        stream = event.stream
        if stream is None and not self.missing_event(event, "the host"):
            return
        self.stats.syncs += 1
        self.block_on(event)
        if stream is None:
            return
        if event.sequence > stream.known:  # noqa: PLR1730  max() costs twice as much
            stream.known = event.sequence
        for other, sequence in event.covers.items():
            if sequence > other.known:  # noqa: PLR1730  as above
                other.known = sequence

    def is_known(self, event: Event) -> bool:
        """Whether earlier waits of the host imply that the event has happened.

        A comparison of two numbers, not a query of the device: the answer does not depend on
        timing.
        """
        stream = event.stream
        return stream is None or event.sequence <= stream.known

    def wait_host_unless_known(self, event: Event) -> None:
        """Wait only if no earlier wait of the host implies this one."""
        if not self.is_known(event):
            self.wait_host(event)

    def synchronize(self) -> None:
        """Wait for everything enqueued so far."""
        for stream in list(self._streams.values()):
            self.wait_host_unless_known(stream.record())

    # Memory.

    def alloc(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        kind: str = "other",
        row_dim: int = 0,
        fill: float | None = 0,
        null_row: int | None = None,
    ) -> Buffer:
        """Allocate device memory, at start-up.

        Args:
            name: Unique name.
            shape: Shape.
            dtype: Element type.
            kind: State kind for the coverage report ("kv_block", "recurrent_state", ...).
            row_dim: Dimension whose indices are rows.
            fill: Initial value; None leaves the memory as it is.
            null_row: Row that padding may name any number of times.

        Raises:
            RtError: The name is taken.
        """
        if name in self._buffers:
            raise RtError(f"buffer {name!r} exists already; names are unique in a runtime")
        tensor = self.device_memory(tuple(shape), dtype, fill)
        buffer = Buffer(name, tensor, kind=kind, row_dim=row_dim, null_row=null_row)
        self._buffers[name] = buffer
        self.buffer_created(buffer)
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Give memory back. Waits for the device: not for the hot path.

        Raises:
            RtError: The buffer is not of this runtime.
        """
        if self._buffers.pop(buffer.name, None) is not buffer:
            raise RtError(f"buffer {buffer.name!r} is not allocated in this runtime")
        self.synchronize()

    def resize(self, buffer: Buffer, shape: Sequence[int], fill: float | None = 0) -> None:
        """Replace a buffer's memory by another, contents not kept. Waits for the device.

        Graphs that captured the old memory must not be replayed any more.
        """
        self.synchronize()
        buffer.generation += 1
        buffer.bind(self.device_memory(tuple(shape), buffer.dtype, fill))
        if buffer.frame is not None:
            for copies in buffer.frame.copies.values():
                copies.clear()
        self.buffer_created(buffer)

    def read(self, source: Buffer | View) -> Tensor:
        """A host copy of device memory; waits for everything. For tests and debugging."""
        self.synchronize()
        return source.device_tensor.detach().to("cpu", copy=True)

    def write(self, target: Buffer | View, value: Tensor) -> None:
        """Fill device memory from the host; waits for everything. For tests and set-up."""
        self.synchronize()
        target.device_tensor.copy_(value)
        self.synchronize()

    # Work.

    def launch(self, op: Op[Any], stream: Stream, **arguments: Any) -> None:  # noqa: ANN401
        """Enqueue one op.

        Args:
            op: What to run.
            stream: Where.
            **arguments: Buffers and views (nested in tuples, lists, dicts too) for the parameters
                with a declared effect; immutable values for the others.

        Raises:
            EffectError: A declared parameter was given something else.
        """
        if self._capturing is not None:
            kept = {
                name: snapshot_argument(value) if name in op.effects else value
                for name, value in arguments.items()
            }
            self._capturing.launches.append(CapturedLaunch(op, kept))
            return
        self.stats.launches += 1
        for name in op.effects:
            value: Any = arguments.get(name)
            kind = type(value)
            if kind is Buffer or kind is Bundle or kind is View:
                arguments[name] = value.device_tensor
                frame = value.frame
                if frame is not None:
                    frame.streams[stream.index] = stream
            elif value is not None:
                arguments[name] = tensors_for(name, value, stream)
        self.run_op(op, stream, arguments)

    def fetch(
        self,
        views: Mapping[str, View | Buffer],
        *,
        on: Stream,
        after: Event | None = None,
        rows: Hashable = None,
    ) -> Ticket:
        """Copy device values to the host.

        Args:
            views: What to copy, by the name it gets in the result.
            on: Stream of the copies.
            after: Event that they wait for; None only if `on` itself made the values.
            rows: The producing step's row map: an immutable value, handed back with the result.

        Returns:
            The claim on the values; read or drop it.
        """
        if after is not None:
            on.wait(after)
        parts = {name: v.whole if type(v) is Buffer else v for name, v in views.items()}
        landing = self.land(parts, on)  # type: ignore[arg-type]
        self.stats.copies += len(parts)
        mark_frames(parts.values(), on)  # type: ignore[arg-type]
        return self.make_ticket(on.record(), landing, rows)

    def make_ticket(self, event: Event, landing: Landing, rows: Hashable) -> Ticket:
        """A ticket; checked backends keep track of it."""
        return Ticket(event, landing, rows)

    def frames(
        self, name: str, *, depth: int, inputs: Mapping[str, Field], outputs: Mapping[str, Field]
    ) -> FrameRing:
        """A ring of per-step frames.

        Args:
            name: Unique name.
            depth: Steps that may be in flight.
            inputs: Arrays that the host fills each step.
            outputs: Arrays that the step fills for the host.
        """
        return FrameRing(self, name, depth, inputs, outputs)

    def queue(self, maxsize: int = 0) -> Queue[Any]:
        """A queue between host threads; 0 for no limit."""
        return Queue(maxsize)

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """A host thread that may use this runtime; start it, join it."""
        return Thread(target, name)

    def slot_pool(self, num_slots: int, kind: str = "") -> SlotPool:
        """Slots 0..num_slots-1 that keep the event of their last use.

        Args:
            num_slots: How many.
            kind: State kind for the coverage report.
        """
        return SlotPool(self, num_slots, kind)

    def watch(self, name: str, target: Any) -> Any:  # noqa: ANN401
        """A stand-in for a host object that several threads use.

        Checked backends record accesses to its attributes; release backends return the object.
        """
        del name
        return target

    def doing(self, role: str) -> AbstractContextManager[None]:
        """Name a host activity, such as "row compaction", for the coverage report."""
        del role
        return nullcontext()

    def graph(
        self,
        key: Hashable,
        capture: Callable[[Stream], None],
        *,
        inputs: Mapping[str, Buffer] | None = None,
        outputs: Mapping[str, Buffer] | None = None,
        on: Stream | None = None,
    ) -> Graph:
        """The graph of that key, captured at first use.

        Args:
            key: What the graph depends on, for example a batch size.
            capture: Makes the launches, all on the stream it is given. They do not run now; launch
                them once beforehand if they allocate or compile at first use.
            inputs: Static buffers filled before each replay.
            outputs: Static buffers read after one.
            on: What to capture on: best the stream that the launches ran on before, where
                libraries have their workspaces already. A stream of its own by default.
        """
        graph = self._graphs.get(key)
        if graph is None:
            if self._capturing is not None:
                raise RtError(f"graph {key!r} is captured inside another capture")
            stream = self.stream("graph capture") if on is None else on
            graph = Graph(self, key, inputs or {}, outputs or {}, stream)
            self._capturing = graph
            try:
                capture(stream)
            finally:
                self._capturing = None
            self.graph_captured(graph)
            self._graphs[key] = graph
        return graph

    def reserve_for_graphs(self, num_bytes: int, stream: Stream) -> None:  # noqa: B027  optional
        """Set memory aside that all graphs share for what they allocate, at start-up.

        Without it a graph that is captured after a smaller one adds to the memory of that.

        Args:
            num_bytes: Of the largest values that a graph holds at a time.
            stream: What graphs are captured on.
        """

    def replay_graph(self, graph: Graph, stream: Stream, rows: Rows) -> None:  # noqa: ARG002
        """Run a graph's launches again. For `Graph.replay`."""
        for captured in graph.launches:
            self.launch(captured.op, stream, **captured.arguments)

    # Reports.

    @property
    def reports(self) -> tuple[Report, ...]:
        """What the checker found so far; always empty in release backends."""
        return ()

    def finish(self) -> tuple[Report, ...]:
        """Run everything to the end and make the last checks; returns all reports."""
        self.synchronize()
        return self.reports

    # What a backend provides.

    @abc.abstractmethod
    def device_memory(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: float | None
    ) -> Tensor:
        """Memory of the device."""

    @abc.abstractmethod
    def host_memory(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str
    ) -> HostMemory:
        """Host memory that copies may start from or end in."""

    @abc.abstractmethod
    def mapped_buffer(self, memory: HostMemory) -> Buffer:
        """A buffer that is host memory. For `raw`."""

    @abc.abstractmethod
    def run_op(self, op: Op[Any], stream: Stream, arguments: dict[str, Any]) -> None:
        """Run an op whose buffers were replaced by tensors."""

    @abc.abstractmethod
    def copy_to_device(self, copies: list[tuple[View, HostMemory, int]], stream: Stream) -> None:
        """Copy the leading rows of host memories to views."""

    @abc.abstractmethod
    def land(self, parts: Mapping[str, View], stream: Stream) -> Landing:
        """Copy views to leased landings."""

    @abc.abstractmethod
    def copy_to_host(self, target: HostMemory, source: View, stream: Stream) -> None:
        """Copy a view to the leading rows of host memory. For `raw`."""

    @abc.abstractmethod
    def block_on(self, event: Event) -> None:
        """Block until a recorded event has happened."""

    @abc.abstractmethod
    def poll_native(self, event: Event) -> bool:
        """Whether an event has happened. For `raw`."""

    def missing_event(self, event: Event, who: str) -> bool:  # noqa: ARG002
        """A wait on an event that was never recorded; returns whether to go on with the wait."""
        raise never_recorded(who)

    def stream_created(self, stream: Stream) -> None:  # noqa: B027  optional
        """Give the stream its native part."""

    def buffer_created(self, buffer: Buffer) -> None:  # noqa: B027  optional
        """Give the buffer its shadow."""

    def graph_captured(self, graph: Graph) -> None:  # noqa: B027  optional
        """Make the backend's own graph."""

    def record_native(self, stream: Stream, event: Event) -> None:  # noqa: B027  optional
        """Record the event on the device."""

    def wait_native(self, stream: Stream, event: Event) -> None:  # noqa: B027  optional
        """Make the device's stream wait."""

    def slot_reused(self, pool: SlotPool, event: Event) -> None:  # noqa: B027  optional
        """A slot was taken whose last use ends with an event."""

    def release_memory(self, buffer: Buffer) -> None:
        """Give memory back without waiting. For `raw`."""
        self._buffers.pop(buffer.name, None)

    def stage_opened(self, frame: Frame) -> None:  # noqa: B027  optional
        """A staging slot was leased."""

    def stage_misused(self, frame: Frame, name: str) -> bool:  # noqa: ARG002
        """A closed stage was used; returns whether to let it through."""
        return False


def _load(module: str) -> Any:  # noqa: ANN401  a module that is imported late
    return importlib.import_module(module)


def mark_frames(views: Iterable[View], stream: Stream) -> None:
    """Note the stream on every frame that the views belong to."""
    for view in views:
        frame = view.frame
        if frame is not None:
            frame.streams[stream.index] = stream
