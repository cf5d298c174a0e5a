"""One run of a launch in one order: its accesses as they happen."""

from __future__ import annotations

import random
import sys
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from headrace.rt.detector.shadow import (
    EVERY_LANE,
    SITE_BITS,
    Index,
    Ints,
    Lane,
    LaneShadow,
    Shadow,
    as_array,
    bounds,
    lanes_of,
)
from headrace.rt.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from headrace.rt.detector.report import Order

COMMUTATIVE = ("ADD", "MIN", "UMIN", "MAX", "UMAX", "AND", "OR", "XOR")
OPERATION_BITS = {
    name: 1 << place
    for place, name in enumerate((*COMMUTATIVE, "FADD", "XCHG", "CAS", "LOAD", "STORE"))
}
_HAZARDS = {"RW": "LANE-WAR", "WR": "LANE-RAW", "WW": "LANE-WAW"}
_FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneHazard:
    """A warning whose region has no name yet.

    Attributes:
        kind: For example "LANE-WAR".
        shadow: Storage.
        units: Units hit, in units of `unit` bytes.
        unit: Size at the time; the shadow may be refined later.
        key_a, key_b: Program and line of the earlier and the later access.
    """

    kind: str
    shadow: Shadow
    units: Ints
    unit: int
    key_a: int
    key_b: int


class Launch:
    """One run of a launch in one order.

    Args:
        name: Kernel.
        tensors: Tensors by argument name.
        shadows: Shadows of their storages, in the order of their addresses.
        order: Order of the programs.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        shadows: Sequence[Shadow],
        order: Order,
    ) -> None:
        self.name, self.tensors, self.shadows, self.order = name, tensors, shadows, order
        self.grid = (0, 0, 0)
        self.num_accesses = 0
        self.sites: list[str] = []
        self.hazards: list[LaneHazard] = []
        self._starts = [shadow.start for shadow in shadows]
        self._programs: Iterator[int] = iter(())
        self._program = 0
        self._segment = 0
        self._site_ids: dict[tuple[str, int], int] = {}
        self._last_atomic: list[tuple[Shadow, Ints]] = []

    def begin(self, grid: tuple[int, int, int]) -> None:
        """Learn the grid; the programs follow."""
        self.grid = grid
        programs = list(range(grid[0] * grid[1] * grid[2]))
        if self.order == "reverse":
            programs.reverse()
        elif self.order != "forward":
            random.Random(self.order).shuffle(programs)  # noqa: S311  an order, no secret
        self._programs = iter(programs)

    def next_program(self) -> tuple[int, int, int]:
        """Indices of the program that runs next in this order."""
        self._program = next(self._programs)
        self.new_segment()
        return self.indices(self._program)

    def new_segment(self) -> None:
        """Lanes are in step again: a barrier, or another program."""
        self._segment += 1
        for shadow in self.shadows:
            if shadow.history:
                shadow.new_segment()

    def indices(self, program: int) -> tuple[int, int, int]:
        """Grid indices of a program."""
        rest, z = divmod(program, self.grid[2])
        x, y = divmod(rest, self.grid[1])
        return x, y, z

    def access(
        self,
        access: str,
        pointers: NDArray[np.uint64],
        mask: NDArray[np.bool_] | None,
        itemsize: int,
        operation: int = 0,
    ) -> None:
        """Note a load ("R") or an atomic ("A") before it happens.

        Args:
            access: "R" or "A".
            pointers: Addresses, any shape.
            mask: Lanes that take part, the same shape, or None.
            itemsize: Bytes for each lane.
            operation: Bit of an atomic operation.
        """
        site = self._begin_access(access)
        for shadow, _, index, lane, _ in self._parts(pointers, mask, itemsize):
            shadow.mark(access, index, self._key(site))
            if access == "R":
                # Every thread loads a scalar.
                load_lane = EVERY_LANE if isinstance(lane, int) else lane
                self._check_lanes("R", shadow, index, load_lane, site)
                continue
            if shadow.atomic_ops is None:
                shadow.atomic_ops = np.zeros(shadow.num_units, dtype=np.int64)
            shadow.atomic_ops[index] |= operation
            self._last_atomic.append((shadow, as_array(index)))

    def store(
        self,
        pointers: NDArray[np.uint64],
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None,
    ) -> list[Callable[[], None]]:
        """Note a store before it happens.

        Args:
            pointers: Addresses, any shape.
            values: What is stored, the same shape.
            mask: Lanes that take part, the same shape, or None.

        Returns:
            What must be called once it has happened.
        """
        site = self._begin_access("W")
        checks = []
        for shadow, addresses, index, lane, lanes in self._parts(pointers, mask, values.itemsize):
            foreign = shadow.mark("W", index, self._key(site))
            self._check_lanes("W", shadow, index, lane, site)
            raw = values.reshape(-1)
            raw = raw if lanes is None else raw[lanes]
            new = np.ascontiguousarray(raw).view(np.uint8).reshape(len(addresses), -1)
            place = _Place(shadow, addresses, index)
            _note_values(place, new, foreign)
            checks.append(self._check_result(place, new, site))
        return checks

    def on_result(self) -> Callable[[], None]:
        """What to call when the result of the latest atomic is looked at."""
        atomic = self._last_atomic

        def used() -> None:
            for shadow, index in atomic:
                shadow.used.append(index)

        return used

    def _begin_access(self, access: str) -> int:
        self.num_accesses += 1
        if access == "A":
            self._last_atomic = []
        return self._site()

    def _key(self, site: int) -> int:
        return self._program << SITE_BITS | site

    def _parts(
        self, pointers: NDArray[np.uint64], mask: NDArray[np.bool_] | None, itemsize: int
    ) -> Iterator[tuple[Shadow, NDArray[np.uint64], Index, Lane, Ints | None]]:
        """Split an operation by storage.

        Yields:
            Shadow, addresses, units, lane of each unit, and lanes (None for all).
        """
        flat = pointers.reshape(-1)
        chosen: Ints | None = None
        if mask is not None and not mask.all():
            chosen = np.flatnonzero(mask)
            if chosen.size == 0:
                return
            flat = flat[chosen]
        for shadow, part in self._storages(flat, itemsize):
            addresses = flat if part is None else flat[part]
            index = self._units(shadow, addresses, itemsize)
            lane = lanes_of(chosen, part, pointers.size, itemsize // shadow.unit)
            lanes = chosen
            if part is not None:
                lanes = part if chosen is None else chosen[part]
            yield shadow, addresses, index, lane, lanes

    def _storages(
        self, addresses: NDArray[np.uint64], itemsize: int
    ) -> Iterator[tuple[Shadow, Ints | None]]:
        """Storages that the addresses hit, each with their places (None for all)."""
        shadow = self._find(int(addresses.min()))
        if int(addresses.max()) + itemsize <= shadow.end:
            yield shadow, None
            return
        left = np.arange(len(addresses))
        while left.size:
            rest = addresses[left]
            shadow = self._find(int(rest.min()))
            inside = rest < np.uint64(shadow.end)
            last = int(rest[inside].max())
            if last + itemsize > shadow.end:
                self._refuse(last)
            yield shadow, left[inside]
            left = left[~inside]

    def _find(self, address: int) -> Shadow:
        place = bisect_right(self._starts, address) - 1
        if place < 0 or address >= self.shadows[place].end:
            self._refuse(address)
        return self.shadows[place]

    def _refuse(self, address: int) -> NoReturn:
        known = ", ".join(
            f"{name} {t.data_ptr():#x}+{t.numel() * t.element_size():#x}"
            for name, t in self.tensors.items()
        )
        raise RefusedError(
            f"program {self.indices(self._program)} of {self.name} accesses address {address:#x} "
            f"at {self.sites[self._site()]}, which lies in no tensor of the launch ({known}); fix "
            "the bounds, or name a tensor that is reached through an address with Detector.track"
        )

    def _units(self, shadow: Shadow, addresses: NDArray[np.uint64], itemsize: int) -> Index:
        """Units that the addresses cover; refines the shadow where they are too wide."""
        offsets = (addresses - np.uint64(shadow.start)).astype(np.int64)
        unit = shadow.unit
        while itemsize % unit or (offsets % unit).any():
            unit //= 2
        if unit != shadow.unit:
            shadow.refine(unit)
        per_item = itemsize // unit
        first, count = int(offsets[0]), len(offsets)
        if int(offsets[-1]) - first == (count - 1) * itemsize and (
            count == 1 or bool((np.diff(offsets) == itemsize).all())
        ):
            return slice(first // unit, first // unit + count * per_item)
        index = offsets // unit
        if per_item > 1:
            index = (index[:, None] + np.arange(per_item)).ravel()
        return index

    def _check_lanes(
        self, access: str, shadow: Shadow, index: Index, lane: Lane, site: int
    ) -> None:
        """Compare with what other lanes did in this segment; loads alone cannot clash."""
        low, high = bounds(index)
        clear = high <= shadow.low or low >= shadow.high
        clear |= access == "R" and not shadow.has_stores
        shadow.low, shadow.high = min(low, shadow.low), max(high, shadow.high)
        shadow.has_stores |= access == "W"
        shadow.history.append((access, index, lane, site))
        if clear:
            return
        if shadow.lanes is None:
            shadow.lanes = LaneShadow(shadow.num_units)
        for entry in shadow.history[:-1]:
            shadow.lanes.note(*entry, stamp=self._segment)
        # The last entry stays for `new_segment`, which looks at segments with a history.
        del shadow.history[:-1]
        for earlier in "W" if access == "R" else "RW":
            units = shadow.lanes.clash(earlier, index, lane, stamp=self._segment)
            if units is not None:
                first = int(shadow.lanes.site[earlier][units[0]])
                self._warn(_HAZARDS[earlier + access], shadow, units, first, site)

    def _warn(self, kind: str, shadow: Shadow, units: Ints, first: int, second: int) -> None:
        self.hazards.append(
            LaneHazard(
                kind=kind,
                shadow=shadow,
                units=units,
                unit=shadow.unit,
                key_a=self._key(first),
                key_b=self._key(second),
            )
        )

    def _check_result(self, place: _Place, new: NDArray[np.uint8], site: int) -> Callable[[], None]:
        """After a store, what a lane put there must be there: else another lane put more."""

        def check() -> None:
            lost = place.bytes_now(new.shape) != new
            if lost.any():
                units = place.units_of(lost)
                self._warn("LANE-DUP-STORE", place.shadow, units, site, site)

        return check

    def _site(self) -> int:
        """The kernel's line that is running: the nearest frame outside Triton and the detector."""
        frame = sys._getframe(1)  # noqa: SLF001  the only way to one frame without the whole stack
        while frame.f_back is not None:
            name = frame.f_code.co_filename
            if not name.startswith((_FOLDER, _triton_folder())) or "/test_" in name:
                break
            frame = frame.f_back
        place = (frame.f_code.co_filename, frame.f_lineno)
        known = self._site_ids.get(place)
        if known is None:
            known = self._site_ids[place] = len(self.sites)
            if known >= 1 << SITE_BITS:
                raise RefusedError(
                    f"{self.name} touches memory at more than {1 << SITE_BITS} source lines"
                )
            self.sites.append(f"{Path(place[0]).name}:{place[1]}")
        return known


def _note_values(place: _Place, new: NDArray[np.uint8], foreign: Ints | None) -> None:
    """Note where a store changes what is there, and what another program put there."""
    changes = place.bytes_now(new.shape) != new
    if not changes.any():
        return
    shadow = place.shadow
    if shadow.changed is None or shadow.differs is None:
        shadow.changed = np.zeros(shadow.num_units, dtype=np.bool_)
        shadow.differs = np.zeros(shadow.num_units, dtype=np.bool_)
    if foreign is None and changes.all():
        shadow.changed[place.index] = True
        return
    units = place.units_of(changes)
    shadow.changed[units] = True
    if foreign is not None:
        shadow.differs[np.intersect1d(units, foreign)] = True


class _Place:
    """The bytes of a store, [lanes, bytes for each lane]."""

    __slots__ = ("_first", "index", "shadow")

    def __init__(self, shadow: Shadow, addresses: NDArray[np.uint64], index: Index) -> None:
        self.shadow, self.index = shadow, index
        self._first = addresses

    def bytes_now(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """What is stored there."""
        if isinstance(self.index, slice):
            begin = self.index.start * self.shadow.unit
            return self.shadow.memory[begin : begin + shape[0] * shape[1]].reshape(shape)
        return self.shadow.memory[self._offsets(shape[1])]

    def units_of(self, flags: NDArray[np.bool_]) -> Ints:
        """Units of the flagged bytes."""
        units: Ints = self._offsets(flags.shape[1])[flags] // self.shadow.unit
        return units

    def _offsets(self, itemsize: int) -> Ints:
        first = (self._first - np.uint64(self.shadow.start)).astype(np.int64)
        offsets: Ints = first[:, None] + np.arange(itemsize)
        return offsets


_folder: list[str] = []


def _triton_folder() -> str:
    if not _folder:
        # Not at the top: Triton must be imported after TRITON_INTERPRET is set.
        import triton  # noqa: PLC0415

        assert triton.__file__ is not None
        _folder.append(str(Path(triton.__file__).parent))
    return _folder[0]
