"""Which programs and lanes touched each byte of one storage.

A byte needs no set of programs: the first one and any other one decide every question. So the
shadow has constant size and misses nothing. Bytes are kept in units as wide as the narrowest
access.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Ints: TypeAlias = NDArray[np.int64]
Index: TypeAlias = Ints | slice
"""Units of an access: a slice where they are consecutive, which makes everything cheaper."""

Lane: TypeAlias = Ints | int
"""Lane of each unit of an access, or one number for all."""

SITE_BITS = 16
"""A key is a program id and, in these low bits, a source line."""

SITE_MASK = (1 << SITE_BITS) - 1
EMPTY = -1
ACCESSES = ("R", "W", "A")

EVERY_LANE = -2
"""A scalar is loaded by every thread (and stored by one of them, lane 0)."""


def as_array(index: Index) -> Ints:
    """The units as an array."""
    return np.arange(index.start, index.stop) if isinstance(index, slice) else index


def bounds(index: Index) -> tuple[int, int]:
    """First unit and the one after the last."""
    if isinstance(index, slice):
        return index.start, index.stop
    return int(index.min()), int(index.max()) + 1


class Shadow:
    """What is known of one storage during one run of a launch.

    Attributes:
        start, end: Addresses of the storage.
        unit: Bytes for each entry of the arrays.
        memory: The storage itself, as bytes.
        first, other: By access: key of the first program and of any other one, or EMPTY.
        changed: Units that some store changed.
        differs: Units to which two programs stored different values.
        atomic_ops: Bits of the atomic operations done.
        used: Units of atomics whose result was looked at.
        history: Accesses of the running segment that are not in `lanes` yet.
        low, high: Range of the segment's accesses.
        has_stores: Whether the segment stored anything.
    """

    __slots__ = (
        "atomic_ops", "changed", "differs", "end", "first", "has_stores", "high", "history",
        "lanes", "low", "memory", "other", "start", "storage", "unit", "used",
    )  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage, unit: int) -> None:
        self.storage = storage
        self.start = storage.data_ptr()
        size = storage.nbytes()
        self.end = self.start + size
        self.unit = unit
        buffer = (ctypes.c_uint8 * size).from_address(self.start)
        self.memory: NDArray[np.uint8] = np.ctypeslib.as_array(buffer)
        self.reset()

    def reset(self) -> None:
        """Forget everything; another order of the same launch begins."""
        self.first: dict[str, Ints | None] = dict.fromkeys(ACCESSES)
        self.other: dict[str, Ints | None] = dict.fromkeys(ACCESSES)
        self.changed: NDArray[np.bool_] | None = None
        self.differs: NDArray[np.bool_] | None = None
        self.atomic_ops: Ints | None = None
        self.used: list[Ints] = []
        self.lanes: LaneShadow | None = None
        self.new_segment()

    def new_segment(self) -> None:
        """Forget the lanes: a barrier, or the next program."""
        self.history: list[tuple[str, Index, Lane, int]] = []
        self.has_stores = False
        self.low, self.high = self.num_units, -1

    @property
    def num_units(self) -> int:
        """Entries of the arrays; the last one may reach past the storage."""
        return -(-(self.end - self.start) // self.unit)

    def refine(self, unit: int) -> None:
        """Go over to smaller units because an access is narrower than any before."""
        factor = self.unit // unit
        self.unit = unit

        def spread(array: NDArray[Any] | None) -> Any:  # noqa: ANN401  keeps the array's type
            return None if array is None else np.repeat(array, factor)[: self.num_units]

        for access in ACCESSES:
            self.first[access] = spread(self.first[access])
            self.other[access] = spread(self.other[access])
        self.changed, self.differs = spread(self.changed), spread(self.differs)
        self.atomic_ops = spread(self.atomic_ops)
        self.used = [widen(index, factor) for index in self.used]
        self.history = [
            (access, widen(index, factor), _repeat(lane, factor), site)
            for access, index, lane, site in self.history
        ]
        self.low, self.high = self.low * factor, self.high * factor
        if self.lanes is not None:
            self.lanes.spread(factor, self.num_units)

    def mark(self, access: str, index: Index, key: int) -> Ints | None:
        """Note an access; return the units already touched in this way by another program."""
        first, other = self.first[access], self.other[access]
        if first is None or other is None:
            first = self.first[access] = np.full(self.num_units, EMPTY, dtype=np.int64)
            other = self.other[access] = np.full(self.num_units, EMPTY, dtype=np.int64)
        seen = first[index]
        fresh = seen == EMPTY
        if fresh.all():
            first[index] = key
            return None
        foreign = (seen >> SITE_BITS) != (key >> SITE_BITS)
        if fresh.any():
            foreign &= ~fresh
            first[index] = np.where(fresh, key, seen)
        if not foreign.any():
            return None
        units = as_array(index)[foreign]
        other[units] = key
        return units


def widen(index: Index, factor: int) -> Ints:
    """The same bytes in units smaller by a factor."""
    wide: Ints = (as_array(index)[:, None] * factor + np.arange(factor)).ravel()
    return wide


def _repeat(lane: Lane, factor: int) -> Lane:
    return lane if isinstance(lane, int) else np.repeat(lane, factor)


class LaneShadow:
    """Which lane touched a unit last, within one segment of one program.

    Attributes:
        stamp, lane, site: By access ("R", "W"): segment, lane and source line of the last one.
    """

    __slots__ = ("lane", "site", "stamp")

    def __init__(self, num_units: int) -> None:
        self.stamp = {access: np.zeros(num_units, dtype=np.int64) for access in "RW"}
        self.lane = {access: np.zeros(num_units, dtype=np.int64) for access in "RW"}
        self.site = {access: np.zeros(num_units, dtype=np.int64) for access in "RW"}

    def spread(self, factor: int, num_units: int) -> None:
        """Go over to smaller units."""
        for arrays in (self.stamp, self.lane, self.site):
            for access in "RW":
                arrays[access] = np.repeat(arrays[access], factor)[:num_units]

    def note(self, access: str, index: Index, lane: Lane, site: int, *, stamp: int) -> None:
        """Remember an access. A unit loaded by several lanes counts as loaded by all of them."""
        if access == "R":
            same = self.stamp["R"][index] == stamp
            lane = np.where(same & (self.lane["R"][index] != lane), EVERY_LANE, lane)
        self.stamp[access][index] = stamp
        self.lane[access][index] = lane
        self.site[access][index] = site

    def clash(self, access: str, index: Index, lane: Lane, *, stamp: int) -> Ints | None:
        """Units last touched so, in this segment, by a lane other than the given ones."""
        apart = (self.lane[access][index] != lane) | (np.asarray(lane) == EVERY_LANE)
        hit = (self.stamp[access][index] == stamp) & apart
        return as_array(index)[hit] if hit.any() else None


def lanes_of(chosen: Ints | None, part: Ints | None, num_lanes: int, per_item: int) -> Lane:
    """Lane of each unit; lanes of operations of different size are never the same thread.

    Args:
        chosen: Lanes that are not masked, or None for all.
        part: Those of them that are in the storage at hand, or None for all.
        num_lanes: Lanes of the operation.
        per_item: Units for each lane.
    """
    if num_lanes == 1:
        return 0
    lane = np.arange(num_lanes) if chosen is None else chosen
    if part is not None:
        lane = lane[part]
    lane = lane + (num_lanes << 32)
    return lane if per_item == 1 else np.repeat(lane, per_item)
