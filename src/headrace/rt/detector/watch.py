"""The hooks into Triton's interpreter."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from headrace.rt.detector.launch import OPERATION_BITS, Launch
from headrace.rt.detector.report import Difference, LaunchRecord, Order, Report, name_byte
from headrace.rt.detector.shadow import Shadow
from headrace.rt.detector.verdict import judge
from headrace.rt.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

Untyped: TypeAlias = Any
"""An object of Triton's interpreter, which has no types."""

ALL_ORDERS: tuple[Order, ...] = ("forward", "reverse", 1, 2, 3)


class Detector:
    """Watches every launch made inside its `with` block.

    Args:
        orders: Orders in which each launch runs, each from the same memory. The forward result is
            the one that stays. With more than one, results are compared byte for byte.
        tracked: Tensors that kernels reach through an address in memory instead of an argument.

    Attributes:
        reports: Everything found. Of several orders, the forward one speaks first and the others
            add only pairs of lines that are new.
        differences: What depended on the order, with several orders.
        launches: What each launch did, one record for each order.
        num_accesses: Load, store and atomic operations of all launches.
    """

    def __init__(
        self,
        *,
        orders: Sequence[Order] = ("forward",),
        tracked: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.orders = tuple(orders)
        self.tracked = dict(tracked or {})
        self.reports: list[Report] = []
        self.differences: list[Difference] = []
        self.launches: list[LaunchRecord] = []
        self.num_accesses = 0
        self.launch: Launch | None = None
        self.in_atomic = False
        self._exit = contextlib.ExitStack()

    def track(self, **tensors: torch.Tensor) -> None:
        """Name tensors that kernels reach through an address in memory."""
        self.tracked.update(tensors)

    @property
    def races(self) -> list[Report]:
        """Reports that are not warnings about lanes."""
        return [report for report in self.reports if not report.is_warning]

    @property
    def warnings(self) -> list[Report]:
        """Reports about lanes."""
        return [report for report in self.reports if report.is_warning]

    def assert_clean(self, *, lanes: bool = True) -> None:
        """Fail if anything was reported.

        Args:
            lanes: Whether warnings about lanes count.

        Raises:
            AssertionError: With every report in a line of its own.
        """
        found = [*(self.reports if lanes else self.races), *self.differences]
        if found:
            lines = "\n".join(f"  {report}" for report in found)
            raise AssertionError(f"the kernel race detector reports {len(found)}:\n{lines}")

    def __enter__(self) -> Detector:
        """Start watching."""
        # Not at the top: Triton must be imported after TRITON_INTERPRET is set.
        from triton.runtime import interpreter  # noqa: PLC0415

        if _active:
            raise RefusedError("a kernel race detector is already active; use that one")
        _active.append(self)
        self._exit.callback(_active.remove, self)
        self._patch(interpreter)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop watching."""
        self._exit.close()

    def _patch(self, interpreter: Untyped) -> None:
        builder = interpreter.InterpreterBuilder
        swap = self._swap
        swap(interpreter, "_interpreter", MemoryProxy(interpreter.__dict__["_interpreter"], self))
        swap(interpreter.GridExecutor, "__call__", self._wrap_launch(interpreter.GridExecutor))
        swap(builder, "set_grid_dim", self._wrap_grid_dim(builder.set_grid_dim))
        swap(builder, "set_grid_idx", self._wrap_grid_idx(builder.set_grid_idx))
        swap(builder, "create_barrier", self._wrap_barrier(builder.create_barrier))
        for name in ("create_atomic_load", "create_atomic_store", "create_atomic_poll"):
            # Triton 3.6 has none of the three. They load and store, but atomically.
            if hasattr(builder, name):
                swap(builder, name, self._wrap_atomic(getattr(builder, name)))
        watched = _watched_handle(interpreter.TensorHandle)
        for name in ("create_atomic_rmw", "create_atomic_cas"):
            swap(builder, name, self._wrap_result(getattr(builder, name), watched))

    def _swap(self, owner: Untyped, name: str, new: Untyped) -> None:
        self._exit.callback(setattr, owner, name, owner.__dict__[name])
        setattr(owner, name, new)

    def _wrap_launch(self, executor_class: Untyped) -> Callable[..., None]:
        original = executor_class.__call__

        def call(executor: Untyped, *args: object, **kwargs: object) -> None:
            if self.launch is not None:
                raise RefusedError("a launch inside a launch cannot be judged")
            tensors = _tensors(executor, args, kwargs, self.tracked)
            name = getattr(executor.fn, "__name__", "kernel")
            self._run(name, tensors, lambda: original(executor, *args, **kwargs))

        return call

    def _wrap_grid_dim(self, original: Callable[..., None]) -> Callable[..., None]:
        def set_grid_dim(builder: Untyped, nx: int, ny: int, nz: int) -> None:
            original(builder, nx, ny, nz)
            if self.launch is not None:
                self.launch.begin((nx, ny, nz))

        return set_grid_dim

    def _wrap_grid_idx(self, original: Callable[..., None]) -> Callable[..., None]:
        def set_grid_idx(builder: Untyped, x: int, y: int, z: int) -> None:
            if self.launch is not None:
                # The executor counts forward; which program that is, is the order's choice.
                x, y, z = self.launch.next_program()
            original(builder, x, y, z)

        return set_grid_idx

    def _wrap_barrier(self, original: Callable[..., None]) -> Callable[..., None]:
        def create_barrier(builder: Untyped, *args: object, **kwargs: object) -> None:
            if self.launch is not None:
                self.launch.new_segment()
            return original(builder, *args, **kwargs)

        return create_barrier

    def _wrap_atomic(self, original: Callable[..., Untyped]) -> Callable[..., Untyped]:
        def atomic(builder: Untyped, *args: object, **kwargs: object) -> Untyped:
            self.in_atomic = True
            try:
                return original(builder, *args, **kwargs)
            finally:
                self.in_atomic = False

        return atomic

    def _wrap_result(
        self, original: Callable[..., Untyped], watched: type
    ) -> Callable[..., Untyped]:
        def atomic(builder: Untyped, *args: object, **kwargs: object) -> Untyped:
            result = original(builder, *args, **kwargs)
            return result if self.launch is None else watched(result, self.launch.on_result())

        return atomic

    def _run(self, name: str, tensors: Mapping[str, torch.Tensor], run: Callable[[], None]) -> None:
        """Run one launch in every order and judge each run."""
        shadows = _shadows(tensors)
        several = len(self.orders) > 1
        before = [shadow.memory.copy() for shadow in shadows] if several else []
        results: dict[Order, list[NDArray[np.uint8]]] = {}
        found: list[Report] = []
        # The forward run comes last, so that its result stays.
        for order in sorted(self.orders, key=lambda order: order == "forward"):
            for shadow, memory in zip(shadows, before, strict=False):
                shadow.reset()
                shadow.memory[:] = memory
            self.launch = Launch(name, tensors, shadows, order)
            try:
                run()
                record, reports = judge(self.launch)
            except Exception as error:
                # Triton wraps what a kernel raises; a refusal must arrive as itself.
                refusal = _refusal(error)
                if refusal is None:
                    raise
                raise refusal from None
            finally:
                self.launch = None
            self.num_accesses += record.num_accesses
            self.launches.append(record)
            found = [*reports, *found]
            if several:
                results[order] = [shadow.memory.copy() for shadow in shadows]
        if several:
            found = list({report.place: report for report in reversed(found)}.values())
            self.differences += _compare(name, tensors, shadows, results, self.orders)
        self.reports += found


_active: list[Detector] = []


def active() -> Detector | None:
    """The detector that watches launches now, if any."""
    return _active[-1] if _active else None


def explore(run: Callable[[], object], *, orders: Sequence[Order] = ALL_ORDERS) -> Detector:
    """Run launches in several program orders, each from the same memory, and compare.

    Finds what depends on the order without being a race, such as float atomics. It does not replace
    the verdict: many races change no value in any order.

    Args:
        run: Makes the launches; called once, every launch in it runs len(orders) times.
        orders: Orders to try.

    Returns:
        The detector, with its reports of every order and the differences.
    """
    with Detector(orders=orders) as detector:
        run()
    return detector


def _refusal(error: BaseException | None) -> RefusedError | None:
    while error is not None and not isinstance(error, RefusedError):
        error = error.__cause__ or error.__context__
    return error


def _shadows(tensors: Mapping[str, torch.Tensor]) -> list[Shadow]:
    """One shadow for each storage, in the order of addresses."""
    storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for tensor in tensors.values():
        storage, size = tensor.untyped_storage(), tensor.element_size()
        start = storage.data_ptr()
        if start:
            unit = min(size, storages[start][1]) if start in storages else size
            storages[start] = (storage, unit)
    return [Shadow(*storages[start]) for start in sorted(storages)]


def _compare(
    kernel: str,
    tensors: Mapping[str, torch.Tensor],
    shadows: Sequence[Shadow],
    results: Mapping[Order, Sequence[NDArray[np.uint8]]],
    orders: Sequence[Order],
) -> Iterator[Difference]:
    """Differences of every order from the forward one (or the first, without a forward one)."""
    base = results.get("forward", results[orders[0]])
    for order, memories in results.items():
        for shadow, expected, memory in zip(shadows, base, memories, strict=True):
            unequal = np.flatnonzero(expected != memory)
            if unequal.size:
                name, index, size = name_byte(tensors, shadow.start, int(unequal[0]))
                yield Difference(
                    kernel=kernel,
                    tensor=name,
                    index=index,
                    num_elements=len(np.unique(unequal // size)),
                    order=order,
                )


def _tensors(
    executor: Untyped,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    tracked: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """All tensors of a launch by name."""
    signature = inspect.signature(executor.fn)
    known = {name: value for name, value in kwargs.items() if name in signature.parameters}
    bound = signature.bind_partial(*args, **known).arguments
    found: dict[str, torch.Tensor] = {}

    def collect(name: str, value: Untyped) -> None:
        if isinstance(value, tuple | list):
            for place, member in enumerate(value):
                collect(f"{name}[{place}]", member)
        elif isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                raise RefusedError(
                    f"{name} is on {value.device}; the interpreter would work on a copy that the "
                    "detector cannot name; pass CPU tensors"
                )
            found[name] = value
        elif isinstance(getattr(value, "base", None), torch.Tensor):
            # A tensor descriptor, or a tensor reinterpreted as another type.
            collect(name, value.base)
        elif hasattr(value, "data_ptr"):
            raise RefusedError(f"{name} is a {type(value).__name__}, whose memory is unknown")

    for name, value in {**bound, **tracked}.items():
        collect(name, value)
    return found


class MemoryProxy:
    """Stands in for the interpreter's native module, through which all memory is reached.

    Args:
        native: The module.
        detector: Who is told.
    """

    _harmless = frozenset({"fma_fp32", "fma_fp64", "MEM_SEMANTIC", "RMW_OP"})

    def __init__(self, native: Untyped, detector: Detector) -> None:
        self._native, self._detector = native, detector

    def __getattr__(self, name: str) -> Untyped:
        """Pass on what is known to touch no memory."""
        if name in self._harmless or name.startswith("__"):
            return getattr(self._native, name)
        raise RefusedError(
            f"the interpreter's native function {name} is unknown to the race detector, which "
            "might miss accesses; teach it or use a tested version of Triton (3.6 to 3.9)"
        )

    def load(
        self,
        pointers: NDArray[np.uint64],
        mask: NDArray[np.bool_],
        other: Untyped,
        dtype: np.dtype[Any],
    ) -> Untyped:
        """Load; inside an atomic operation, atomically."""
        launch = self._detector.launch
        if launch is not None:
            access = "A" if self._detector.in_atomic else "R"
            launch.access(access, pointers, mask, dtype.itemsize, OPERATION_BITS["LOAD"])
        return self._native.load(pointers, mask, other, dtype)

    def store(
        self, pointers: NDArray[np.uint64], value: NDArray[Any], mask: NDArray[np.bool_]
    ) -> Untyped:
        """Store; inside an atomic operation, atomically."""
        launch = self._detector.launch
        if launch is None:
            return self._native.store(pointers, value, mask)
        if self._detector.in_atomic:
            launch.access("A", pointers, mask, value.itemsize, OPERATION_BITS["STORE"])
            return self._native.store(pointers, value, mask)
        checks = launch.store(pointers, np.broadcast_to(value, pointers.shape), mask)
        result = self._native.store(pointers, value, mask)
        for check in checks:
            check()
        return result

    def atomic_rmw(
        self,
        operation: Untyped,
        pointers: NDArray[np.uint64],
        value: NDArray[Any],
        mask: NDArray[np.bool_],
        order: Untyped,
    ) -> Untyped:
        """Read, modify and write in one."""
        launch = self._detector.launch
        if launch is not None:
            is_float_add = operation.name.endswith("ADD") and value.dtype.kind == "f"
            bit = OPERATION_BITS["FADD" if is_float_add else operation.name]
            launch.access("A", pointers, mask, value.itemsize, bit)
        return self._native.atomic_rmw(operation, pointers, value, mask, order)

    def atomic_cas(
        self,
        pointers: NDArray[np.uint64],
        expected: NDArray[Any],
        value: NDArray[Any],
        order: Untyped,
    ) -> Untyped:
        """Compare and swap."""
        launch = self._detector.launch
        if launch is not None:
            launch.access("A", pointers, None, value.itemsize, OPERATION_BITS["CAS"])
        return self._native.atomic_cas(pointers, expected, value, order)


def _watched_handle(handle: type) -> type:
    """A tensor handle that tells when its data is looked at."""

    class Watched(handle):  # type: ignore[misc]
        def __init__(self, inner: Untyped, used: Callable[[], None]) -> None:
            self._inner, self._used = inner, used
            self.dtype, self.attr = inner.dtype, inner.attr

        @property
        def data(self) -> Untyped:
            self._used()
            return self._inner.data

    return Watched
