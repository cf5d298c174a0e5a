"""Device memory as the engine sees it: buffers and views, never tensors.

The tensor behind a buffer is only handed to ops, inside a launch. Everything else names memory by
views, which carry the row range (and, for pools, the rows) that a launch may touch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from headrace.rt.errors import EffectError, RtError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    import torch
    from torch import Tensor

    from headrace.rt.frames import Frame
    from headrace.rt.streams import Stream

    RowIds = Sequence[int] | npt.NDArray[np.integer]
    Argument = "Buffer | View | tuple[Argument, ...] | list[Argument] | dict[str, Argument] | None"


MAX_VIEWS = 1024
"""Views that a buffer keeps for use again."""


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a frame.

    Attributes:
        shape: With the row dimension first; commits and fetches take leading rows.
        dtype: A dtype that numpy has too (no bfloat16).
        kind: State kind for the coverage report, for example "accepted_counts".
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = ""


class Buffer:
    """Device memory with a name, allocated once.

    Attributes:
        name: Unique in its runtime; used in reports.
        kind: State kind for the coverage report.
        row_dim: Dimension whose indices are the rows of `rows`.
        null_row: Row that padding names; effects on it are not tracked, nobody may rely on it.
        generation: Counts replacements of the memory by `Runtime.resize`.
        device_tensor: The memory. For `headrace.rt` alone; the lint rule refuses it elsewhere.
        shadow: Checker's state of this memory, None in release backends.
        frame: The frame it belongs to, if any.
        rotates: That frame's ring has a depth over 1.
    """

    __slots__ = (
        "_bundles",
        "_leading",
        "device_tensor",
        "dtype",
        "frame",
        "generation",
        "kind",
        "name",
        "null_row",
        "rotates",
        "row_dim",
        "shadow",
        "shape",
        "whole",
    )

    def __init__(
        self,
        name: str,
        tensor: Tensor,
        *,
        kind: str = "other",
        row_dim: int = 0,
        null_row: int | None = None,
        shadow: object | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.row_dim = row_dim
        self.null_row = null_row
        self.generation = 0
        self.shadow = shadow
        self.frame: Frame | None = None
        self.rotates = False
        self._bundles: list[Bundle] = []
        self.bind(tensor)

    def belong_to(self, frame: Frame, *, rotates: bool) -> None:
        """Make the buffer a part of a frame. For the frame's ring, before any view is taken."""
        self.frame = frame
        self.rotates = rotates
        self.whole.frame = frame

    def bind(self, tensor: Tensor) -> None:
        """Point the buffer at memory. For the runtime."""
        self.device_tensor = tensor
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.dtype: torch.dtype = tensor.dtype
        self.whole = View(self, tensor, 0, tensor.shape[0] if tensor.dim() else 1)
        self._leading: dict[int, View] = {}
        for bundle in self._bundles:
            bundle.resolve()

    def join(self, bundle: Bundle) -> None:
        """Let a bundle follow the buffer to other memory."""
        self._bundles.append(bundle)

    @property
    def num_rows(self) -> int:
        """Length of `row_dim`."""
        return self.shape[self.row_dim] if self.shape else 1

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice) -> View:
        """A view of a range of dimension 0.

        Raises:
            RtError: The key is not a slice without step.
        """
        # Leading rows are taken every step; making the view costs more than a launch.
        if _is_leading(key):
            view = self._leading.get(key.stop)
            if view is not None:
                return view
        start, stop = _range(key, self.shape[0], self.name)
        view = View(self, self.device_tensor.narrow(0, start, stop - start), start, stop)
        if start == 0:
            if len(self._leading) >= MAX_VIEWS:
                self._leading.clear()
            self._leading[stop] = view
        return view

    def rows(self, read: RowIds | None = None, write: RowIds | None = None) -> View:
        """The whole memory, with effects only on some rows of `row_dim`.

        Args:
            read: Rows that the launch may read: the host-known superset.
            write: Rows that the launch may write. Distinct: two programs of one launch that write
                one row are a race; rows named `null_row` do not count.

        Returns:
            A view for one launch.
        """
        if self.shadow is None:
            return self.whole
        view = View(self, self.device_tensor, 0, self.shape[0])
        view.by_row = True
        # Copied: the caller may go on editing its arrays while the launch is queued.
        view.read = row_array(read)
        view.write = row_array(write)
        return view

    def __repr__(self) -> str:
        return f"Buffer({self.name!r}, {self.shape}, {self.dtype})"


class View:
    """Part of a buffer, named for one use.

    Attributes:
        buffer: Where the memory belongs.
        device_tensor: The part. For `headrace.rt` alone.
        start, stop: Range of dimension 0.
        by_row: The effects are `read` and `write` instead of the whole part.
        read, write: Row ids, or None for no row.
        generation: The buffer's generation when the view was made.
        frame: The buffer's frame.
    """

    __slots__ = (
        "_array",
        "buffer",
        "by_row",
        "device_tensor",
        "frame",
        "generation",
        "read",
        "start",
        "stop",
        "write",
    )

    def __init__(self, buffer: Buffer, tensor: Tensor, start: int, stop: int) -> None:
        self.buffer = buffer
        self.device_tensor = tensor
        self.start = start
        self.stop = stop
        self.by_row = False
        self.read: npt.NDArray[np.int64] | None = None
        self.write: npt.NDArray[np.int64] | None = None
        self.generation = buffer.generation
        self.frame = buffer.frame
        self._array: npt.NDArray[np.generic] | None = None

    @property
    def array(self) -> npt.NDArray[np.generic]:
        """The part as a numpy array, made once. For `headrace.rt` alone, on the CPU."""
        array = self._array
        if array is None:
            array = self._array = self.device_tensor.numpy()
        return array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(self.device_tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self.device_tensor.dtype

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, key: slice) -> View:
        """A range of the range."""
        start, stop = _range(key, self.stop - self.start, self.buffer.name)
        tensor = self.device_tensor.narrow(0, start, stop - start)
        return View(self.buffer, tensor, self.start + start, self.start + stop)

    def __repr__(self) -> str:
        return f"View({self.buffer.name!r}[{self.start}:{self.stop}])"


class Bundle(dict[str, Buffer]):
    """Buffers that launches are handed together: a dict whose tensors are looked up once.

    It never changes; it follows its buffers when they are resized.

    Attributes:
        device_tensor: What ops get for it, a dict. For `headrace.rt` alone.
        frame: The frame of those that belong to one, or None.
    """

    __slots__ = ("device_tensor", "frame")

    def __init__(self, buffers: Mapping[str, Buffer]) -> None:
        """Take the buffers.

        Raises:
            RtError: They belong to different frames.
        """
        super().__init__(buffers)
        frames = {id(buffer.frame): buffer.frame for buffer in self.values() if buffer.frame}
        if len(frames) > 1:
            names = ", ".join(frame.name for frame in frames.values())
            raise RtError(f"a bundle holds buffers of the frames {names}; make one for each frame")
        self.frame: Frame | None = next(iter(frames.values()), None)
        self.resolve()
        for buffer in self.values():
            buffer.join(self)

    def resolve(self) -> None:
        """Look the tensors up again. For the runtime."""
        self.device_tensor = {name: buffer.device_tensor for name, buffer in self.items()}

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RtError("a bundle of buffers does not change; make another one")

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = pop = popitem = clear = setdefault = _refuse


def row_array(ids: RowIds | None) -> npt.NDArray[np.int64] | None:
    """A private copy of row ids, [n] i64; None stays None."""
    return None if ids is None else np.array(ids, dtype=np.int64).reshape(-1)


def tensors_of(name: str, argument: object) -> object:
    """Replace buffers and views by their tensors, inside tuples, lists and dicts too.

    Raises:
        EffectError: Something else is among them.
    """
    if type(argument) is View or type(argument) is Buffer:
        return argument.device_tensor
    if argument is None:
        return None
    if isinstance(argument, tuple):
        return tuple(tensors_of(name, item) for item in argument)
    if isinstance(argument, list):
        return [tensors_of(name, item) for item in argument]
    if isinstance(argument, dict):
        return {key: tensors_of(name, item) for key, item in argument.items()}
    raise EffectError(
        f"argument {name!r} has a declared effect but holds a {type(argument).__name__}; "
        "pass runtime buffers or views (weights and host values go to undeclared parameters)"
    )


def tensors_for(name: str, argument: object, stream: Stream) -> object:
    """`tensors_of`, and note the stream on every frame that the memory belongs to, in one pass."""
    kind = type(argument)
    if kind is View or kind is Buffer:
        frame = argument.frame  # type: ignore[attr-defined]
        if frame is not None:
            frame.streams[stream.index] = stream
        return argument.device_tensor  # type: ignore[attr-defined]
    if kind is Bundle:
        frame = argument.frame  # type: ignore[attr-defined]
        if frame is not None:
            frame.streams[stream.index] = stream
        return argument.device_tensor  # type: ignore[attr-defined]
    if kind is dict:
        items = argument.items()  # type: ignore[attr-defined]
        return {key: tensors_for(name, item, stream) for key, item in items}
    if kind is tuple or kind is list:
        parts = [tensors_for(name, item, stream) for item in argument]  # type: ignore[attr-defined]
        return parts if kind is list else tuple(parts)
    for view in views_of(argument):
        if view.frame is not None:
            view.frame.streams[stream.index] = stream
    return tensors_of(name, argument)


def views_of(argument: object) -> list[View]:
    """The views in a declared argument, in order."""
    if type(argument) is View:
        return [argument]
    if type(argument) is Buffer:
        return [argument.whole]
    if isinstance(argument, (tuple, list)):
        return [view for item in argument for view in views_of(item)]
    if isinstance(argument, dict):
        return [view for item in argument.values() for view in views_of(item)]
    return []


def _is_leading(key: object) -> bool:
    return isinstance(key, slice) and key.start is None and key.step is None


def _range(key: object, length: int, name: str) -> tuple[int, int]:
    if not isinstance(key, slice) or key.step not in (None, 1):
        raise RtError(
            f"buffer {name!r} was indexed by {key!r}; views are slices of dimension 0 without step"
        )
    start, stop, _ = key.indices(length)
    if key.stop is not None and key.stop > length:
        raise RtError(f"slice {key!r} reaches past the {length} rows of buffer {name!r}")
    return start, max(start, stop)


def snapshot_argument(argument: object) -> object:
    """A declared argument as it is now: later edits or a resize do not reach it."""
    if type(argument) is Buffer:
        return argument.whole
    if isinstance(argument, tuple):
        return tuple(snapshot_argument(item) for item in argument)
    if isinstance(argument, list):
        return [snapshot_argument(item) for item in argument]
    if isinstance(argument, dict):
        return {key: snapshot_argument(item) for key, item in argument.items()}
    return argument
