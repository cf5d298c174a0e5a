"""The unsafe calls that the safe ones are made from.

Nothing in the engine may use them: the lint rule refuses `.raw` outside `headrace.rt` and
`headrace.check`. They exist so that a fault can be written down: a mutant takes back, by these
calls, what the safe interface would not let it do. The checker sees all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.rt.buffers import Buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from headrace.rt.buffers import View
    from headrace.rt.frames import HostMemory
    from headrace.rt.runtime import Runtime
    from headrace.rt.streams import Event, Stream


class Raw:
    """Host memory with a life of its own, copies without tickets, and polling."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def host_array(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, kind: str = "landing_slot"
    ) -> HostMemory:
        """Host memory that copies may use at any time; `.array` is open to the host all along."""
        return self._runtime.host_memory(name, tuple(shape), dtype, kind)

    def copy_to_host(self, target: HostMemory, source: View | Buffer, on: Stream) -> None:
        """Enqueue a copy to the leading rows of host memory."""
        self._runtime.stats.copies += 1
        view = source.whole if isinstance(source, Buffer) else source
        self._runtime.copy_to_host(target, view, on)

    def copy_to_device(
        self, target: View | Buffer, source: HostMemory, on: Stream, rows: int | None = None
    ) -> None:
        """Enqueue a copy from the leading rows of host memory (as many as the target has)."""
        view = target.whole if isinstance(target, Buffer) else target
        count = len(view) if rows is None else rows
        self._runtime.copy_to_device([(view[:count], source, count)], on)

    def mapped(self, memory: HostMemory) -> Buffer:
        """A buffer that *is* host memory: a launch given it reads the host's memory directly."""
        return self._runtime.mapped_buffer(memory)

    def free(self, buffer: Buffer) -> None:
        """Give memory back at once, whatever the device still does with it."""
        self._runtime.release_memory(buffer)

    def poll(self, event: Event) -> bool:
        """Whether an event has happened. The answer depends on timing."""
        return self._runtime.poll_native(event)
