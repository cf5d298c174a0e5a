"""Per-step frames: everything that two steps in flight may not share.

A ring holds `depth` frames. Each has host staging, device inputs and device outputs of its own, so
a step may be prepared while earlier ones run. Depth 1 is legal: it waits, it does not corrupt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from headrace.rt.buffers import Bundle
from headrace.rt.errors import RtError, StageClosedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from torch import Tensor

    from headrace.rt.buffers import Buffer, Field, View
    from headrace.rt.runtime import Runtime
    from headrace.rt.streams import Event, Stream


MAX_COPIES = 1024
"""Copies of a field that a frame keeps for use again."""


class HostMemory(Protocol):
    """Host memory that copies start from or end in.

    Attributes:
        name: For reports.
        tensor: The memory as torch sees it, pinned where copies are asynchronous.
        array: What the engine writes to: a numpy array, or a checked wrapper of one.
    """

    name: str
    tensor: Tensor
    array: Any


class Stage:
    """A leased staging slot, writable inside its `with` block until its commit.

    `stage[name]` is the host array of a field. It is not zeroed: it holds what an earlier step left
    there, so every row that is committed must be written.
    """

    __slots__ = ("_frame", "_is_open")

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._is_open = False

    def __enter__(self) -> Stage:
        frame = self._frame
        if frame.commit_event is not None:
            frame.wait_for_commit()
        frame.runtime.stage_opened(frame)
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  a numpy array or its checked wrapper
        """The field's host array.

        Raises:
            StageClosedError: After the commit or outside the `with` block.
        """
        if not self._is_open and not self._frame.runtime.stage_misused(self._frame, name):
            raise StageClosedError(
                f"stage of frame {self._frame.name!r}: field {name!r} was used after commit; "
                "the copy may still be reading it. Take the next frame, or stage again"
            )
        return self._frame.arrays[name]

    def commit(self, stream: Stream, rows: Mapping[str, int] | None = None) -> None:
        """Copy leading rows to the frame's device inputs and close the stage.

        Args:
            stream: Stream of the copies. Later work of this stream sees the values; other streams
                must wait for an event recorded after this.
            rows: Leading rows of each field to copy; other fields keep their old device values.
                All fields in full by default.

        Raises:
            StageClosedError: It was committed before.
        """
        frame = self._frame
        if not self._is_open:
            raise StageClosedError(f"stage of frame {frame.name!r} was committed twice")
        self._is_open = False
        if rows is None:
            rows = frame.ring.all_rows
        known = frame.copies
        frame.runtime.copy_to_device(
            [known[name][count] for name, count in rows.items() if count], stream
        )
        frame.commit_event = stream.record()
        frame.streams[stream.index] = stream


Copy = tuple["View", HostMemory, int]


class FieldCopies(dict[int, Copy]):
    """The copies of one field by leading rows, each made once: slicing costs more than copying."""

    __slots__ = ("_source", "_target")

    def __init__(self, target: Buffer, source: HostMemory) -> None:
        super().__init__()
        self._target = target
        self._source = source

    def __missing__(self, count: int) -> Copy:
        if len(self) >= MAX_COPIES:
            self.clear()
        copy = self[count] = (self._target[:count], self._source, count)
        return copy


class Frame:
    """One step's memory.

    Attributes:
        name: Ring name and index.
        index: Place in the ring.
        inputs: Device arrays that `Stage.commit` fills.
        outputs: Device arrays for the step's results; `Runtime.fetch` copies them to the host.
        staging: Host side of the inputs. For the runtime; the engine writes through `stage`.
        arrays: What `stage` hands out.
        copies: By field and leading rows, what a commit enqueues.
        streams: Streams that used the frame since it was last sealed.
    """

    __slots__ = (
        "_last_use",
        "arrays",
        "commit_event",
        "copies",
        "index",
        "inputs",
        "name",
        "outputs",
        "ring",
        "runtime",
        "staging",
        "streams",
    )

    def __init__(
        self,
        ring: FrameRing,
        index: int,
        inputs: dict[str, Buffer],
        outputs: dict[str, Buffer],
        staging: dict[str, HostMemory],
    ) -> None:
        self.ring = ring
        self.runtime = ring.runtime
        self.name = f"{ring.name}[{index}]"
        self.index = index
        self.inputs = inputs
        self.outputs = outputs
        self.staging = staging
        self.arrays = {name: memory.array for name, memory in staging.items()}
        self.copies = {name: FieldCopies(inputs[name], staging[name]) for name in staging}
        self.streams: dict[int, Stream] = {}
        self.commit_event: Event | None = None
        self._last_use: list[Event] = []

    def stage(self) -> Stage:
        """Lease the staging side; waits on the host for an earlier commit of this frame."""
        return Stage(self)

    def wait_for_commit(self) -> None:
        """Wait until no copy reads the staging side."""
        if self.commit_event is not None:
            self.runtime.wait_host_unless_known(self.commit_event)
            self.commit_event = None

    def seal(self) -> None:
        """Record the end of what was enqueued on this frame so far."""
        for stream in self.streams.values():
            self._last_use.append(stream.record())
        self.streams.clear()

    def retire(self) -> None:
        """Wait until everything enqueued on this frame has run."""
        if self.streams:
            self.seal()
        for event in self._last_use:
            self.runtime.wait_host_unless_known(event)
        self._last_use.clear()


class FrameRing:
    """Frames taken in turn; made by `Runtime.frames`."""

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        depth: int,
        inputs: Mapping[str, Field],
        outputs: Mapping[str, Field],
    ) -> None:
        if depth < 1:
            raise RtError(f"frame ring {name!r} has depth {depth}; it needs at least 1")
        self.runtime = runtime
        self.name = name
        self.depth = depth
        self.input_fields = dict(inputs)
        self.output_fields = dict(outputs)
        self.all_rows = {name: field.shape[0] for name, field in inputs.items()}
        self._frames = [self._make(index) for index in range(depth)]
        self._current = depth - 1

    def next(self) -> Frame:
        """The next frame, once its last use has retired; waits on the host if it has not.

        All frames, those of other rings too, are sealed as they stand: sealed later, their last use
        would include work of the step that begins now. If the next step reads an earlier frame (the
        sampled tokens of the step before, say), a depth of the steps in flight plus one keeps this
        from waiting for a step that has just begun.
        """
        for frame in self.runtime.frames_made:
            if frame.streams:
                frame.seal()
        self._current = (self._current + 1) % self.depth
        frame = self._frames[self._current]
        frame.retire()
        self.runtime.stats.steps += 1
        return frame

    def _make(self, index: int) -> Frame:
        runtime = self.runtime
        prefix = f"{self.name}[{index}]"
        inputs: dict[str, Buffer] = {}
        outputs: dict[str, Buffer] = {}
        staging: dict[str, HostMemory] = {}
        for name, field in self.input_fields.items():
            inputs[name] = runtime.alloc(
                f"{prefix}.in.{name}", field.shape, field.dtype, kind=field.kind or "input", fill=0
            )
            staging[name] = runtime.host_memory(
                f"{prefix}.stage.{name}", field.shape, field.dtype, kind="staging_slot"
            )
        for name, field in self.output_fields.items():
            outputs[name] = runtime.alloc(
                f"{prefix}.out.{name}",
                field.shape,
                field.dtype,
                kind=field.kind or "output",
                fill=0,
            )
        frame = Frame(self, index, inputs, outputs, staging)
        for buffer in (*inputs.values(), *outputs.values()):
            buffer.belong_to(frame, rotates=self.depth > 1)
        frame.inputs, frame.outputs = Bundle(inputs), Bundle(outputs)
        runtime.frames_made.append(frame)
        return frame
