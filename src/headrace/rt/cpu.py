"""Backend `cpu`: every operation at once, in call order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from headrace.rt.buffers import Buffer, Bundle, View, tensors_for
from headrace.rt.host import PlainHostMemory
from headrace.rt.runtime import Runtime
from headrace.rt.streams import Event
from headrace.rt.tickets import Ticket

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torch import Tensor

    from headrace.rt.effects import Op
    from headrace.rt.frames import HostMemory
    from headrace.rt.streams import Stream
    from headrace.rt.tickets import Array


class _Landed(dict[str, "Array"]):
    """Values that were copied when the ticket was made."""

    __slots__ = ()

    def take(self) -> Mapping[str, Array]:
        return self

    def abandon(self, event: Event) -> None:
        """Nothing to free: the memory is this ticket's own."""


class CpuRuntime(Runtime):
    """Immediate execution. Waits find everything done, but are counted like anywhere else."""

    backend = "cpu"

    def device_memory(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: float | None
    ) -> Tensor:
        """A tensor."""
        if fill is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.full(shape, fill, dtype=dtype, device=self.device)

    def host_memory(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str
    ) -> HostMemory:
        """Plain memory."""
        del kind
        return PlainHostMemory(name, torch.zeros(shape, dtype=dtype))

    def mapped_buffer(self, memory: HostMemory) -> Buffer:
        """The same memory as a buffer."""
        return Buffer(memory.name, memory.tensor)

    def launch(self, op: Op[Any], stream: Stream, **arguments: Any) -> None:  # noqa: ANN401
        """Call it; see `Runtime.launch`."""
        if self._capturing is not None:
            super().launch(op, stream, **arguments)
            return
        self.stats.launches += 1
        stream.sequence += 1
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
        op.fn(**arguments)

    def run_op(self, op: Op[Any], stream: Stream, arguments: dict[str, Any]) -> None:
        """Call it."""
        stream.sequence += 1
        op.fn(**arguments)

    def copy_to_device(self, copies: list[tuple[View, HostMemory, int]], stream: Stream) -> None:
        """Copy now."""
        stream.sequence += 1
        self.stats.copies += len(copies)
        for view, memory, count in copies:
            view.device_tensor.copy_(cast("PlainHostMemory", memory).leading[count])

    def land(self, parts: Mapping[str, View], stream: Stream) -> _Landed:
        """Copy now, into memory of the ticket's own."""
        stream.sequence += 1
        landed = _Landed()
        for name, view in parts.items():
            landed[name] = array = _copied(view)
            array.setflags(write=False)
        return landed

    def fetch(
        self,
        views: Mapping[str, View | Buffer],
        *,
        on: Stream,
        after: Event | None = None,
        rows: Hashable = None,
    ) -> Ticket:
        """Copy now; see `Runtime.fetch`."""
        if after is not None:
            on.wait(after)
        on.sequence += 1
        landed = _Landed()
        for name, source in views.items():
            view = source.whole if type(source) is Buffer else source
            landed[name] = array = _copied(view)  # type: ignore[arg-type]
            array.setflags(write=False)
            if source.frame is not None:
                source.frame.streams[on.index] = on
        self.stats.copies += len(landed)
        return Ticket(Event(self, on), landed, rows)

    def copy_to_host(self, target: HostMemory, source: View, stream: Stream) -> None:
        """Copy now."""
        stream.sequence += 1
        target.tensor[: len(source)].copy_(source.device_tensor)

    def block_on(self, event: Event) -> None:
        """Everything is done already."""

    def poll_native(self, event: Event) -> bool:
        """Everything recorded is done already."""
        return event.is_recorded


def _copied(view: View) -> Array:
    """A copy of a view; numpy has no bfloat16, so such values come as the same ones in float32."""
    if view.dtype is torch.bfloat16:
        return view.device_tensor.float().numpy()
    return view.array.copy()
