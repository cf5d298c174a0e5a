"""Whether a launch did what it declared: recorded effects must be among the declared ones.

Writes are seen by torch's version counters for every buffer, in every launch. In sampled launches
more is looked at: which memories torch operations touch, which bytes outside the declared rows
changed, and whether rows outside them can change the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.rt.sim.memory import poison

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from headrace.rt.buffers import Buffer
    from headrace.rt.checking import Checker, Touched
    from headrace.rt.clocks import OpRecord
    from headrace.rt.effects import Op

EVERY = 128
"""The first launch of each op is looked at closely, then one in so many, shifted by the seed."""
MAX_COMPARED_BYTES = 1 << 20
"""Memories above this size are not compared byte for byte."""


class EffectGuard:
    """Compares what launches do with what they declared."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._buffers: dict[str, Buffer] = {}
        self._versions: dict[str, int] = {}
        self._launches: dict[str, int] = {}

    def add(self, buffer: Buffer) -> None:
        """Watch a buffer."""
        self._buffers[buffer.name] = buffer
        self._versions[buffer.name] = _version(buffer.device_tensor)

    def remove(self, buffer: Buffer) -> None:
        """Watch it no more."""
        self._buffers.pop(buffer.name, None)

    def note_write(self, buffer: Buffer) -> None:
        """The runtime itself wrote to a buffer."""
        self._versions[buffer.name] = _version(buffer.device_tensor)

    def run(
        self,
        op: Op[Any],
        call: Callable[[], None],
        touched: list[Touched],
        record: OpRecord,
    ) -> None:
        """Run a launch and look at what it did."""
        self.find_outside_writes(record)
        count = self._launches.get(op.name, 0)
        self._launches[op.name] = count + 1
        if count == 0 or count % EVERY == self._checker.clocks.seed % EVERY:
            self._run_closely(op, call, touched, record)
        else:
            call()
            self._find_undeclared_writes(op, touched, record)

    def _find_undeclared_writes(
        self, op: Op[Any], touched: list[Touched], record: OpRecord
    ) -> None:
        # Also with no row declared: writing to an empty selection counts as a version. Which rows
        # were written is compared byte by byte.
        written = {part.view.buffer.name for part in touched if op.writes[part.argument]}
        versions = self._versions
        for name, buffer in self._buffers.items():
            version = buffer.device_tensor._version  # noqa: SLF001  torch's own count of writes
            if version != versions[name]:
                versions[name] = version
                if name not in written:
                    self._report(
                        "UNDECLARED-WRITE",
                        name,
                        f"{op.name} wrote to memory that it does not declare as written; declare "
                        "rt.Write or rt.ReadWrite for it",
                        record,
                    )

    def find_outside_writes(self, record: OpRecord | None) -> None:
        """Report buffers that changed although no operation of the runtime changed them."""
        versions = self._versions
        for name, buffer in self._buffers.items():
            version = buffer.device_tensor._version  # noqa: SLF001  torch's own count of writes
            if version != versions[name]:
                versions[name] = version
                where = record
                if where is None:
                    where, _ = self._checker.clocks.host_operation("host")
                self._report(
                    "OUTSIDE-LAUNCH",
                    name,
                    "a torch operation outside any launch wrote to this buffer before this "
                    "operation; tensors of buffers must not leave their launch",
                    where,
                )

    def _run_closely(
        self, op: Op[Any], call: Callable[[], None], touched: list[Touched], record: OpRecord
    ) -> None:
        uses = _uses(touched)
        before = {name: use.tensor.clone() for name, use in uses.items() if use.is_small}
        owners = {
            buffer.device_tensor.untyped_storage().data_ptr(): name
            for name, buffer in self._buffers.items()
            # Without memory it has the address of every empty tensor.
            if buffer.device_tensor.numel()
        }
        for part in touched:
            owners.pop(part.view.device_tensor.untyped_storage().data_ptr(), None)
        with _Watch(owners) as watch:
            call()
        self._find_undeclared_writes(op, touched, record)
        for name in sorted(watch.found):
            self._report(
                "UNDECLARED-READ",
                name,
                f"{op.name} touched memory that is none of its arguments; pass it, with a "
                "declared effect",
                record,
            )
        for name, value in before.items():
            changed = uses[name].changed_rows(value)
            if changed:
                self._report(
                    "UNDECLARED-WRITE",
                    name,
                    f"{op.name} wrote rows that its launch does not declare as written",
                    record,
                    rows=changed,
                )
        # Larger memories cannot be put back, so a launch that has any is not run twice.
        if len(before) == len(uses) and not all(use.may_touch.all() for use in uses.values()):
            self._run_poisoned(op, call, uses, before=before, record=record)

    def _run_poisoned(
        self,
        op: Op[Any],
        call: Callable[[], None],
        uses: dict[str, Use],
        *,
        before: dict[str, Tensor],
        record: OpRecord,
    ) -> None:
        """Run again with other values in rows that may not be touched: nothing may come of it."""
        hidden = [use for use in uses.values() if not use.may_touch.all()]
        after = {name: use.tensor.clone() for name, use in uses.items()}
        for name, use in uses.items():
            use.tensor.copy_(before[name])
        for use in hidden:
            use.put_poison()
        what = ""
        try:
            call()
        except Exception as error:  # any failure: the poison was read
            what = f"failed ({type(error).__name__})"
        for name, use in uses.items():
            if not what and not _same_bits(use.written(use.tensor), use.written(after[name])):
                what = f"wrote other values to {name!r}"
        for name, use in uses.items():
            use.tensor.copy_(after[name])
            self.note_write(use.buffer)
        if what:
            names = ", ".join(repr(use.buffer.name) for use in hidden)
            self._report(
                "UNDECLARED-ROW-READ",
                hidden[0].buffer.name,
                f"{op.name} {what} when rows of {names} that its launch does not declare held "
                "other values; declare the superset that it may read",
                record,
            )

    def _report(
        self,
        kind: str,
        buffer: str,
        detail: str,
        record: OpRecord,
        *,
        rows: list[int] | None = None,
    ) -> None:
        self._checker.clocks.report(kind, buffer, detail, None, record, rows=rows)


class Use:
    """Everything one launch may do with one buffer.

    Attributes:
        buffer: The buffer.
        tensor: Its memory, whole.
        may_touch, may_write: By row, [rows] bool. Padding's null row may be written by anybody.
        is_small: Small enough to be compared.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.tensor = buffer.device_tensor
        self.may_touch = np.zeros(buffer.num_rows, dtype=bool)
        self.may_write = np.zeros(buffer.num_rows, dtype=bool)
        self.is_small = self.tensor.nbytes <= MAX_COMPARED_BYTES
        if buffer.null_row is not None:
            self.may_touch[buffer.null_row] = True
            self.may_write[buffer.null_row] = True

    def rows(self, mask: npt.NDArray[np.bool_], source: Tensor | None = None) -> Tensor:
        """A copy of some rows."""
        index = torch.from_numpy(np.flatnonzero(mask))
        tensor = self.tensor if source is None else source
        return tensor.index_select(self.buffer.row_dim, index)

    def written(self, source: Tensor) -> Tensor:
        """A copy of the rows that may be written."""
        return self.rows(self.may_write, source)

    def put_poison(self) -> None:
        """Overwrite the rows that may not be touched."""
        index = torch.from_numpy(np.flatnonzero(~self.may_touch))
        self.tensor.index_fill_(self.buffer.row_dim, index, poison(self.tensor.dtype))

    def changed_rows(self, before: Tensor) -> list[int]:
        """Rows that changed but may not be written."""
        if self.may_write.all():
            return []
        numbers = np.flatnonzero(~self.may_write)
        old, new = self.rows(~self.may_write, before), self.rows(~self.may_write)
        if _same_bits(old, new):
            return []
        return [
            int(row)
            for place, row in enumerate(numbers)
            if not _same_bits(
                old.select(self.buffer.row_dim, place), new.select(self.buffer.row_dim, place)
            )
        ]


class _Watch(TorchDispatchMode):
    """Notes torch operations on memory that was not passed."""

    def __init__(self, owners: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self._owners = owners

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Newer versions wrap the method below for torch.compile, at 30 us a call.
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        del types
        kwargs = kwargs or {}
        for value in args:
            self._note(value)
        for value in kwargs.values():
            self._note(value)
        return func(*args, **kwargs)

    def _note(self, value: object) -> None:
        if isinstance(value, Tensor):
            name = self._owners.get(value.untyped_storage().data_ptr())
            if name is not None:
                self.found.add(name)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._note(item)


def _uses(touched: list[Touched]) -> dict[str, Use]:
    uses: dict[str, Use] = {}
    for part in touched:
        buffer = part.view.buffer
        use = uses.get(buffer.name)
        if use is None:
            use = uses[buffer.name] = Use(buffer)
        if part.read is not None:
            use.may_touch[part.read] = True
        if part.write is not None:
            use.may_touch[part.write] = True
            use.may_write[part.write] = True
    return uses


def _same_bits(one: Tensor, other: Tensor) -> bool:
    one, other = one.contiguous(), other.contiguous()
    if one.dim() == 0:
        one, other = one.reshape(1), other.reshape(1)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _version(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001  torch's own count of in-place writes
