"""What checked backends check at this package's boundary: the effects of launches and copies.

Used by the simulated device and by the checked real one alike.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headrace.rt.buffers import Buffer, View, views_of
from headrace.rt.checked_array import CheckedArray
from headrace.rt.clocks import Clocks, Shadow
from headrace.rt.errors import EffectError

if TYPE_CHECKING:
    import numpy.typing as npt

    from headrace.rt.clocks import OpRecord, Rows
    from headrace.rt.effects import Op
    from headrace.rt.streams import Event, Stream

CONSTANT_TYPES = (
    *(int, float, complex, bool, str, bytes, type(None), enum.Enum, np.generic),
    *(torch.dtype, torch.device, torch.Generator),
)
MUTABLE_TYPES = (list, dict, set, bytearray, memoryview, np.ndarray, CheckedArray)


_EVERY_ROW = slice(None)


@dataclass(slots=True, eq=False)
class Touched:
    """One effect of a launch.

    Attributes:
        argument: Parameter of the op.
        view: What was passed.
        shadow: Its memory.
        read, write: Rows, or None for no such effect.
    """

    argument: str
    view: View
    shadow: Shadow
    read: Rows | None
    write: Rows | None


class Checker:
    """Checks everything that passes the boundary.

    Attributes:
        clocks: Order and findings.
        is_on: Off, nothing is checked; used to show a mutant's effect.
        shadows: All memories, in the order they were made.
    """

    def __init__(self, seed: int, policy: str, *, is_on: bool = True) -> None:
        self.clocks = Clocks(seed, policy)
        self.is_on = is_on
        self.shadows: list[Shadow] = []
        self._constants: dict[int, object] = {}
        self._bindings: dict[int, OpRecord] = {}

    def new_shadow(self, name: str, kind: str, rows: int, *, is_landing: bool = False) -> Shadow:
        """A shadow for new memory."""
        shadow = Shadow(name, kind, np.zeros(rows, dtype=np.int64))
        if is_landing:
            shadow.unread = np.zeros(rows, dtype=np.int64)
        self.shadows.append(shadow)
        return shadow

    # The host.

    def host_access(self, shadow: Shadow, rows: Rows, *, is_write: bool) -> None:
        """The current thread touches host memory."""
        if not self.is_on:
            return
        if is_write:
            record, clock = self.clocks.host_operation("host access")
            self.clocks.write(shadow, rows, record, clock)
        else:
            record, clock = self.clocks.host_operation("host access")
            self.clocks.read(shadow, rows, record, clock)
            if shadow.unread is not None:
                shadow.unread[rows] = 0

    def misuse(self, kind: str, buffer: str, detail: str, first: OpRecord | None = None) -> None:
        """A rule about one place in the host program was broken."""
        if self.is_on:
            record, _ = self.clocks.host_operation("host")
            self.clocks.report(kind, buffer, detail, first, record)

    # Launches.

    def launch(
        self, op: Op[Any], stream: Stream, arguments: dict[str, object]
    ) -> tuple[OpRecord, list[Touched]]:
        """Check a launch and note its effects.

        Raises:
            EffectError: An argument does not fit the declaration.
        """
        record, clock = self.clocks.enqueue(stream, op.name, op.role)
        touched: list[Touched] = []
        for name, value in arguments.items():
            if name not in op.effects:
                if self.is_on:
                    self._require_constant(op, name, value)
                continue
            touched += [self._effect_of(op, name, view, record) for view in views_of(value)]
        if self.is_on:
            self._note(op, touched, record, clock)
        return record, touched

    def _note(
        self, op: Op[Any], touched: list[Touched], record: OpRecord, clock: list[int]
    ) -> None:
        shadows = {id(part.shadow): part.shadow for part in touched}
        if len(shadows) < len(touched):
            self._find_aliases(op, touched, record)
        clocks = self.clocks
        for part in touched:
            if part.read is not None:
                clocks.read(part.shadow, part.read, record, clock)
        for part in touched:
            if part.write is not None:
                clocks.write(part.shadow, part.write, record, clock)
        if record.role:
            for shadow in shadows.values():
                clocks.cover(shadow, record)

    def _effect_of(self, op: Op[Any], name: str, view: View, record: OpRecord) -> Touched:
        buffer = view.buffer
        shadow = buffer.shadow
        if not isinstance(shadow, Shadow):
            raise EffectError(
                f"op {op.name}: buffer {buffer.name!r} of {name!r} is of another runtime"
            )
        if view.generation != buffer.generation and self.is_on:
            self.clocks.report(
                "STALE-GENERATION",
                buffer.name,
                f"{op.name} was given memory that a resize has replaced since (generation "
                f"{view.generation}, now {buffer.generation}); take the view again, or capture "
                "the graph again",
                self._bindings.get(id(buffer)),
                record,
            )
        if not view.by_row:
            rows: Rows = slice(view.start, view.stop) if buffer.row_dim == 0 else _EVERY_ROW
            return Touched(
                name,
                view,
                shadow,
                rows if op.reads[name] else None,
                rows if op.writes[name] else None,
            )
        return Touched(
            name,
            view,
            shadow,
            self._rows(op, name, view, record, is_write=False),
            self._rows(op, name, view, record, is_write=True),
        )

    def _rows(
        self, op: Op[Any], name: str, view: View, record: OpRecord, *, is_write: bool
    ) -> npt.NDArray[np.int64] | None:
        rows = view.write if is_write else view.read
        if rows is None or not rows.size:
            return None
        buffer = view.buffer
        if not (op.writes if is_write else op.reads)[name]:
            raise EffectError(
                f"op {op.name} declares {op.effects[name].name} on {name!r}, but it was given "
                f"rows of {buffer.name!r} to {'write' if is_write else 'read'}"
            )
        if rows.min() < 0 or rows.max() >= buffer.num_rows:
            raise EffectError(
                f"op {op.name}: rows {int(rows.min())}..{int(rows.max())} of {name!r} are outside "
                f"the {buffer.num_rows} rows of {buffer.name!r}"
            )
        if buffer.null_row is not None:
            rows = rows[rows != buffer.null_row]
        if is_write and self.is_on:
            seen = rows.tolist()
            if len(set(seen)) != len(seen):
                twice = sorted({row for row in seen if seen.count(row) > 1})
                self.clocks.report(
                    "DUPLICATE-ROWS",
                    buffer.name,
                    f"one launch of {op.name} writes these rows more than once through {name!r}; "
                    "its programs are unordered, so give each row one writer",
                    record,
                    record,
                    rows=twice,
                )
        return rows

    def _find_aliases(self, op: Op[Any], touched: list[Touched], record: OpRecord) -> None:
        for index, one in enumerate(touched):
            for other in touched[:index]:
                if one.shadow is not other.shadow:
                    continue
                for mine, theirs in (
                    (one.write, other.write),
                    (one.write, other.read),
                    (one.read, other.write),
                ):
                    if mine is None or theirs is None:
                        continue
                    common = np.intersect1d(
                        _row_numbers(one.shadow, mine), _row_numbers(one.shadow, theirs)
                    )
                    if common.size and not _are_disjoint(one.view, other.view):
                        self.clocks.report(
                            "ALIASED-ARGUMENTS",
                            one.view.buffer.name,
                            f"one launch of {op.name} gets these rows as {other.argument!r} and "
                            f"as {one.argument!r} and writes them; its programs are unordered, so "
                            "pass them once as ReadWrite, or use another buffer",
                            record,
                            record,
                            rows=common.tolist(),
                        )
                        break

    def _require_constant(self, op: Op[Any], name: str, value: object) -> None:
        """Refuse values that the host could change while the launch is queued."""
        if isinstance(value, CONSTANT_TYPES):
            return
        if isinstance(value, (Buffer, View)):
            raise EffectError(
                f"op {op.name}: {name!r} was given {value!r} but has no declared effect; "
                "declare rt.Read, rt.Write or rt.ReadWrite for it"
            )
        if isinstance(value, MUTABLE_TYPES):
            raise EffectError(
                f"op {op.name}: {name!r} is a {type(value).__name__}, which the host may change "
                "while the launch is queued; pass a tuple, or stage it as a frame input"
            )
        if isinstance(value, (tuple, frozenset)):
            for item in value:
                self._require_constant(op, name, item)
            return
        if isinstance(value, Tensor) or id(value) in self._constants:
            return
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            self._require_constant_fields(op, name, value)
        # Kept alive, so that the id stays this object's.
        self._constants[id(value)] = value

    def _require_constant_fields(self, op: Op[Any], name: str, value: Any) -> None:  # noqa: ANN401
        if not value.__dataclass_params__.frozen:
            raise EffectError(
                f"op {op.name}: {name!r} is the mutable dataclass {type(value).__name__}; "
                "make it frozen"
            )
        for part in dataclasses.fields(value):
            content = getattr(value, part.name)
            # Dicts of weights are constant by agreement, like the weights themselves.
            if not isinstance(content, dict):
                self._require_constant(op, name, content)

    # Copies.

    def copy_to_device(self, view: View, source: Shadow, count: int, stream: Stream) -> OpRecord:
        """A copy from the leading rows of host memory."""
        record, clock = self.clocks.enqueue(stream, "copy to device", "input copy")
        if self.is_on:
            target = self._effect_of_copy(view)
            self.clocks.read(source, slice(0, count), record, clock)
            self.clocks.write(target, _view_rows(view), record, clock)
            self.clocks.cover(source, record)
            self.clocks.cover(target, record)
        return record

    def copy_to_host(self, view: View, target: Shadow, stream: Stream) -> OpRecord:
        """A copy to the leading rows of host memory."""
        record, clock = self.clocks.enqueue(stream, "copy to host", "read-back")
        if self.is_on:
            source = self._effect_of_copy(view)
            rows = slice(0, len(view))
            self.clocks.read(source, _view_rows(view), record, clock)
            self.clocks.write(target, rows, record, clock)
            self.clocks.cover(source, record)
            self.clocks.cover(target, record)
            if target.unread is not None:
                self._find_unread(target, rows, record)
        return record

    def _find_unread(self, target: Shadow, rows: slice, record: OpRecord) -> None:
        unread = target.unread
        assert unread is not None
        for sequence in np.unique(unread[rows]).tolist():
            if sequence:
                self.clocks.report(
                    "OVERWRITES-UNREAD",
                    target.name,
                    "a value landed here that nobody has read; even in order, it is lost. Give "
                    "each step in flight a landing of its own",
                    self.clocks.ops[sequence],
                    record,
                    rows=np.flatnonzero(unread == sequence).tolist(),
                )
        unread[rows] = record.sequence

    @staticmethod
    def _effect_of_copy(view: View) -> Shadow:
        shadow = view.buffer.shadow
        if not isinstance(shadow, Shadow):
            raise EffectError(f"buffer {view.buffer.name!r} is of another runtime")
        return shadow

    # Order.

    def record(self, stream: Stream, event: Event) -> None:
        """An event was recorded."""
        self.clocks.record(stream, event)

    def rebound(self, buffer: Buffer) -> None:
        """A buffer's memory was replaced: remember where."""
        record, _ = self.clocks.host_operation("resize")
        self._bindings[id(buffer)] = record


def _view_rows(view: View) -> slice:
    return slice(view.start, view.stop) if view.buffer.row_dim == 0 else slice(None)


def _row_numbers(shadow: Shadow, rows: Rows) -> npt.NDArray[np.int64]:
    return np.arange(len(shadow.writes), dtype=np.int64)[rows] if isinstance(rows, slice) else rows


def _are_disjoint(one: View, other: View) -> bool:
    """Whether two views differ in dimension 0, where that is not the row dimension."""
    if one.buffer is not other.buffer or one.buffer.row_dim == 0:
        return False
    return one.stop <= other.start or other.stop <= one.start
