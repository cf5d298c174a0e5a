"""Host memory of checked backends: an array that records every access, or refuses it.

A subclass of ndarray would leak: `fill`, `tolist`, `np.asarray(x)[0] = 9`, `memoryview` and
`torch.from_numpy` all reach the memory unseen. This wrapper holds the array instead, forwards an
allow-list of attributes, and hands out copies only. Anything else is refused. Each entry of the
list has a test that its access is recorded.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from headrace.rt.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from headrace.rt.clocks import Rows

READING_METHODS = frozenset(
    {"all", "any", "argmax", "argmin", "astype", "copy", "item", "max", "mean", "min", "nonzero"}
    | {"sum", "tobytes", "tolist"}
)
"""Methods that read everything and return values or copies."""

PLAIN_ATTRIBUTES = frozenset({"dtype", "itemsize", "nbytes", "ndim", "shape", "size"})
"""Attributes that say nothing of the values."""


class Recorder(Protocol):
    """Told of every access before it happens."""

    def host_read(self, rows: Rows) -> None:
        """Rows are read."""
        ...

    def host_write(self, rows: Rows) -> None:
        """Rows are written."""
        ...


class CheckedArray(NDArrayOperatorsMixin):
    """An array, or a part of one, whose accesses are recorded by row of the whole array."""

    __slots__ = ("_array", "_has_row_axis", "_recorder", "_rows")

    def __init__(
        self,
        recorder: Recorder,
        array: npt.NDArray[Any],
        rows: npt.NDArray[np.int64] | None = None,
        *,
        has_row_axis: bool = True,
    ) -> None:
        self._recorder = recorder
        self._array = array
        self._rows = np.arange(len(array), dtype=np.int64) if rows is None else rows
        self._has_row_axis = has_row_axis

    # Indexing.

    def _part_rows(self, key: object) -> tuple[npt.NDArray[np.int64], bool]:
        """Rows that an index touches, and whether the part still has them along its axis 0."""
        if not self._has_row_axis:
            return self._rows, False
        first: Any = key[0] if isinstance(key, tuple) and key else key
        if first is None or first is Ellipsis or (isinstance(key, tuple) and not key):
            return self._rows, False
        if isinstance(first, CheckedArray):
            raise RefusedError("index checked arrays by plain arrays: copy() the index first")
        picked = self._rows[first]
        # A boolean mask over several axes picks rows more than one-dimensionally; be coarse then.
        if np.ndim(picked) == 1 and isinstance(first, slice):
            return picked, True
        return np.asarray(picked, dtype=np.int64).reshape(-1), False

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401  numpy's own signature
        """A scalar or a copy, read now; for slices a part that is read when used."""
        plain = _plain_key(key)
        if isinstance(key, np.ndarray) and key.dtype == bool and key.ndim > 1:
            rows, has_axis = self._rows, False
        else:
            rows, has_axis = self._part_rows(key)
        part = self._array[plain]
        if isinstance(part, np.ndarray) and np.shares_memory(part, self._array):
            return CheckedArray(self._recorder, part, rows, has_row_axis=has_axis)
        self._recorder.host_read(rows)
        return part

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401
        """Write now."""
        if isinstance(key, np.ndarray) and key.dtype == bool and key.ndim > 1:
            rows = self._rows
        else:
            rows, _ = self._part_rows(key)
        value = _read(value)
        self._recorder.host_write(rows)
        self._array[_plain_key(key)] = value

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[Any]:
        self._recorder.host_read(self._rows)
        return iter(self._array.copy())

    def __contains__(self, value: object) -> bool:
        self._recorder.host_read(self._rows)
        return bool(value in self._array)

    def __bool__(self) -> bool:
        self._recorder.host_read(self._rows)
        return bool(self._array)

    def __int__(self) -> int:
        self._recorder.host_read(self._rows)
        return int(self._array)

    def __float__(self) -> float:
        self._recorder.host_read(self._rows)
        return float(self._array)

    def __index__(self) -> int:
        self._recorder.host_read(self._rows)
        return int(self._array.__index__())

    # numpy's protocols.

    def __array__(
        self,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,  # noqa: FBT001  numpy's protocol
    ) -> npt.NDArray[Any]:
        """A read-only copy: writing through it would not be seen."""
        if copy is False:
            raise RefusedError("a checked host array gives no view of its memory; copy() it")
        self._recorder.host_read(self._rows)
        array = np.array(self._array, dtype=dtype)
        array.flags.writeable = False
        return array

    def __array_ufunc__(
        self,
        ufunc: np.ufunc,
        method: str,
        *inputs: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Reads of the inputs, writes of `out`."""
        if method == "at":
            target = inputs[0]
            if isinstance(target, CheckedArray):
                rest = [_read(value) for value in inputs[1:]]
                getattr(ufunc, method)(_write(target), *rest, **kwargs)
                return None
        outputs = kwargs.pop("out", ())
        values = [_read(value) for value in inputs]
        options = {name: _read(value) for name, value in kwargs.items()}
        if outputs:
            options["out"] = tuple(_write(value) for value in outputs)
        result = getattr(ufunc, method)(*values, **options)
        return outputs[0] if len(outputs) == 1 else (outputs or result)

    def __array_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Reads of all arguments but the targets: `out=` and the first one of `np.copyto`.

        Other functions that write to an argument (`np.put`, `np.place`, ...) meet a read-only copy
        and raise.
        """
        del types
        if func is np.shares_memory or func is np.may_share_memory:
            raise RefusedError(f"np.{func.__name__} would look at the memory itself")
        if func is np.copyto:
            target, *rest = args
            values = [_read(value) for value in rest]
            options = {name: _read(value) for name, value in kwargs.items()}
            np.copyto(_write(target), *values, **options)
            return None
        output = kwargs.pop("out", None)
        values = [_read(value) for value in args]
        options = {name: _read(value) for name, value in kwargs.items()}
        if output is None:
            return func(*values, **options)
        if isinstance(output, tuple):
            options["out"] = tuple(_write(value) for value in output)
        else:
            options["out"] = _write(output)
        func(*values, **options)
        return output

    # The allow-list.

    def fill(self, value: object) -> None:
        """Write one value everywhere."""
        self._recorder.host_write(self._rows)
        self._array.fill(value)

    def sort(self) -> None:
        """Sort in place along the last axis."""
        self._recorder.host_read(self._rows)
        self._recorder.host_write(self._rows)
        self._array.sort()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        self._recorder.host_read(self._rows)
        return getattr(self._array.copy(), name)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Listed attributes; numpy's and torch's probes for raw memory find nothing."""
        if name in PLAIN_ATTRIBUTES:
            return getattr(self._array, name)
        if name in READING_METHODS:
            return functools.partial(self._call, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise RefusedError(
            f"host array attribute {name!r} is not on the checked list; use indexing, ufuncs, "
            f"fill, sort or one of {', '.join(sorted(READING_METHODS))}"
        )

    def __repr__(self) -> str:
        return f"CheckedArray(shape={self._array.shape}, dtype={self._array.dtype})"

    def __reduce__(self) -> str:
        raise RefusedError("a checked host array cannot be pickled or copied whole; copy() it")


def _plain_key(key: object) -> Any:  # noqa: ANN401
    if isinstance(key, tuple):
        return tuple(_read(part) for part in key)
    return _read(key)


def _read(value: object) -> Any:  # noqa: ANN401
    """A plain, read-only value for numpy, with the read recorded; looks into lists and tuples."""
    if isinstance(value, CheckedArray):
        return value.__array__()
    if isinstance(value, (list, tuple)) and any(_holds_checked(item) for item in value):
        return type(value)(_read(item) for item in value)
    return value


def _holds_checked(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_checked(item) for item in value)
    return isinstance(value, CheckedArray)


def _write(value: object) -> Any:  # noqa: ANN401
    """The memory itself, with a read and a write recorded: in-place operations do both."""
    if isinstance(value, CheckedArray):
        value._recorder.host_read(value._rows)  # noqa: SLF001  same class, outside its body
        value._recorder.host_write(value._rows)  # noqa: SLF001  same class, outside its body
        return value._array  # noqa: SLF001
    return value
