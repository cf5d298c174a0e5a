"""Backend `cuda`: thin calls into torch."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import torch

from headrace.rt.buffers import Buffer, tensors_of
from headrace.rt.errors import RtError
from headrace.rt.host import PlainHostMemory
from headrace.rt.landings import LandingPool, LeasedLanding, LeasedPart
from headrace.rt.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from headrace.rt.buffers import View
    from headrace.rt.effects import Op
    from headrace.rt.frames import HostMemory
    from headrace.rt.graphs import Graph, Rows
    from headrace.rt.streams import Event, Stream


SPARE_BYTES = 2 << 30
"""Free device memory below which a capture gives cached memory back first."""


class CudaRuntime(Runtime):
    """Release mode. Nothing is checked; everything is asynchronous."""

    backend = "cuda"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._landings = LandingPool(self._make_landing, self.is_known, self.queue())
        # Graphs never run at the same time and leave nothing in it: they share its memory.
        self._graph_memory: Any = None
        self._reservations: list[torch.cuda.CUDAGraph] = []
        # torch's current stream is a fact of the thread.
        self._thread = threading.local()

    def use(self, stream: Stream) -> None:
        """Make a stream torch's current one on this thread, for a piece of work."""
        stream.sequence += 1
        if getattr(self._thread, "current", None) is not stream:
            torch.cuda.set_stream(cast("torch.cuda.Stream", stream.native))
            self._thread.current = stream

    def device_memory(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: float | None
    ) -> Tensor:
        """Device memory; a fill is done before any stream can see it."""
        if fill is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        tensor = torch.full(shape, fill, dtype=dtype, device=self.device)
        torch.cuda.synchronize(self.device)
        return tensor

    def host_memory(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str
    ) -> HostMemory:
        """Pinned memory."""
        del kind
        return PlainHostMemory(name, torch.zeros(shape, dtype=dtype, pin_memory=True))

    def mapped_buffer(self, memory: HostMemory) -> Buffer:
        """Not offered here: reading pinned memory from a kernel needs a device pointer of it."""
        raise RtError(f"host array {memory.name!r} cannot be mapped on the cuda backend")

    def run_op(self, op: Op[Any], stream: Stream, arguments: dict[str, Any]) -> None:
        """Call it with its stream current."""
        self.use(stream)
        op.fn(**arguments)

    def copy_to_device(self, copies: list[tuple[View, HostMemory, int]], stream: Stream) -> None:
        """Enqueue the copies."""
        self.use(stream)
        self.stats.copies += len(copies)
        for view, memory, count in copies:
            view.device_tensor.copy_(
                cast("PlainHostMemory", memory).leading[count], non_blocking=True
            )

    def land(self, parts: Mapping[str, View], stream: Stream) -> LeasedLanding:
        """Enqueue the copies to leased pinned memory."""
        self.use(stream)
        leased: dict[str, LeasedPart] = {}
        for name, view in parts.items():
            tensor = view.device_tensor
            part = self._landings.lease(tensor.shape, tensor.dtype)
            memory = cast("PlainHostMemory", part.memory)
            memory.leading[part.count].copy_(tensor, non_blocking=True)
            leased[name] = part
        return LeasedLanding(leased)

    def _make_landing(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> HostMemory:
        return self.host_memory(name, shape, dtype, "landing_slot")

    def copy_to_host(self, target: HostMemory, source: View, stream: Stream) -> None:
        """Enqueue the copy."""
        self.use(stream)
        target.tensor[: len(source)].copy_(source.device_tensor, non_blocking=True)

    def block_on(self, event: Event) -> None:
        """Block in the driver."""
        cast("torch.cuda.Event", event.native).synchronize()

    def poll_native(self, event: Event) -> bool:
        """Ask the driver."""
        return bool(cast("torch.cuda.Event", event.native).query())

    def stream_created(self, stream: Stream) -> None:
        """A stream that starts after what the default stream was given so far."""
        native = torch.cuda.Stream(self.device)
        native.wait_stream(torch.cuda.default_stream(self.device))
        stream.native = native

    def record_native(self, stream: Stream, event: Event) -> None:
        """Record a fresh CUDA event: moving an old one would move it for earlier waiters too."""
        native = torch.cuda.Event()
        native.record(cast("torch.cuda.Stream", stream.native))
        event.native = native

    def wait_native(self, stream: Stream, event: Event) -> None:
        """Wait on the device."""
        cast("torch.cuda.Stream", stream.native).wait_event(cast("torch.cuda.Event", event.native))

    def graph_captured(self, graph: Graph) -> None:
        """Capture the launches into a CUDA graph."""
        native = torch.cuda.CUDAGraph()
        with self._capture(native, graph.stream):
            for launch in graph.launches:
                arguments = {
                    name: tensors_of(name, value) if name in launch.op.effects else value
                    for name, value in launch.arguments.items()
                }
                launch.op.fn(**arguments)
        graph.native = native

    def reserve_for_graphs(self, num_bytes: int, stream: Stream) -> None:
        """Let a graph that is never replayed allocate the memory; see `Runtime`."""
        native = torch.cuda.CUDAGraph()
        with self._capture(native, stream):
            torch.empty(num_bytes, dtype=torch.uint8, device=self.device).zero_()
        self._reservations.append(native)

    @contextmanager
    def _capture(self, native: torch.cuda.CUDAGraph, stream: Stream) -> Iterator[None]:
        """Everything of this thread that is enqueued inside goes into the graph.

        `torch.cuda.graph` would wait for the device and give all cached memory back each time. The
        device may go on with what it has meanwhile, and only where memory is short is it given
        back: inside a capture the allocator cannot.
        """
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        if torch.cuda.mem_get_info(self.device)[0] < SPARE_BYTES:
            torch.cuda.empty_cache()
        self.use(stream)
        native.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            # What went wrong inside is the error, not that the capture cannot be ended after it.
            with suppress(RuntimeError):
                native.capture_end()
            raise
        native.capture_end()

    def replay_graph(self, graph: Graph, stream: Stream, rows: Rows) -> None:
        """Replay the CUDA graph."""
        del rows
        self.use(stream)
        self.stats.launches += len(graph.launches)
        cast("torch.cuda.CUDAGraph", graph.native).replay()

    def read(self, source: Buffer | View) -> Tensor:
        """A host copy; the default stream's view of memory is synchronised first."""
        torch.cuda.synchronize(self.device)
        self.stats.syncs += 1
        return source.device_tensor.detach().to("cpu", copy=True)

    def write(self, target: Buffer | View, value: Tensor) -> None:
        """Fill device memory, synchronised on both sides."""
        torch.cuda.synchronize(self.device)
        self.stats.syncs += 1
        target.device_tensor.copy_(value)
        torch.cuda.synchronize(self.device)
