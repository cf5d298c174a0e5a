"""The verdict over one run of a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from headrace.rt.detector.launch import COMMUTATIVE, OPERATION_BITS
from headrace.rt.detector.report import LaunchRecord, Report, Touched, name_byte, thin_out
from headrace.rt.detector.shadow import ACCESSES, EMPTY, SITE_BITS, SITE_MASK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.rt.detector.launch import LaneHazard, Launch
    from headrace.rt.detector.shadow import Ints, Shadow

Pair: TypeAlias = tuple[tuple[int, str], tuple[int, str]]
"""Key and access of both sides."""

_MAX_REPORTS = 64
# A single commuting operation, or loads alone.
_ORDER_FREE = np.array([0, *(OPERATION_BITS[name] for name in (*COMMUTATIVE, "LOAD"))])


def judge(launch: Launch) -> tuple[LaunchRecord, list[Report]]:
    """Report every region on which the result may depend on an order."""
    reports: list[Report] = []
    for shadow in launch.shadows:
        reports += _judge_stores(launch, shadow)
        reports += _judge_atomics(launch, shadow)
    reports += [_judge_lanes(launch, hazard) for hazard in launch.hazards]
    record = LaunchRecord(
        kernel=launch.name,
        grid=launch.grid,
        tensors=launch.tensors,
        num_accesses=launch.num_accesses,
        storages=[_touched(shadow) for shadow in launch.shadows],
    )
    return record, thin_out(reports, _MAX_REPORTS)


def _touched(shadow: Shadow) -> Touched:
    units = {}
    for access in ACCESSES:
        first = shadow.first[access]
        units[access] = None if first is None else first != EMPTY
    return Touched(start=shadow.start, unit=shadow.unit, units=units)


def _judge_stores(launch: Launch, shadow: Shadow) -> Iterator[Report]:
    first, other = shadow.first["W"], shadow.other["W"]
    if first is None or other is None:
        return
    for region in _regions(np.flatnonzero(other != EMPTY)):
        at = region[0]
        different = shadow.differs is not None and bool(shadow.differs[region].any())
        value_class = "different-value" if different else "same-value"
        pair = (int(first[at]), "W"), (int(other[at]), "W")
        yield _report(launch, ("WRITE-WRITE", value_class), shadow, region, pair)
    for region, pair in _conflicts(shadow, "W", "R"):
        changing = shadow.changed is not None and bool(shadow.changed[region].any())
        value_class = "value-changing" if changing else "silent"
        yield _report(launch, ("READ-WRITE", value_class), shadow, region, pair)


def _judge_atomics(launch: Launch, shadow: Shadow) -> Iterator[Report]:
    first, other = shadow.first["A"], shadow.other["A"]
    if first is None or other is None:
        return
    for plain in "WR":
        for region, pair in _conflicts(shadow, "A", plain):
            yield _report(launch, ("ATOMIC-PLAIN", ""), shadow, region, pair)
    assert shadow.atomic_ops is not None
    ordered = ~np.isin(shadow.atomic_ops, _ORDER_FREE)
    for index in shadow.used:
        # Loads alone are looked at in any order.
        ordered[index] |= shadow.atomic_ops[index] != OPERATION_BITS["LOAD"]
    for region in _regions(np.flatnonzero((other != EMPTY) & ordered)):
        at = region[0]
        pair = (int(first[at]), "A"), (int(other[at]), "A")
        yield _report(launch, ("ATOMIC-ORDER", ""), shadow, region, pair)


def _judge_lanes(launch: Launch, hazard: LaneHazard) -> Report:
    units = np.unique(hazard.units) * (hazard.unit // hazard.shadow.unit)
    later = "R" if hazard.kind == "LANE-RAW" else "W"
    earlier = "R" if hazard.kind == "LANE-WAR" else "W"
    pair = (hazard.key_a, earlier), (hazard.key_b, later)
    return _report(launch, (hazard.kind, ""), hazard.shadow, units, pair)


def _conflicts(shadow: Shadow, a: str, b: str) -> Iterator[tuple[Ints, Pair]]:
    """Regions that one program touched in way `a` and another one in way `b`, with both keys."""
    first_a, other_a = shadow.first[a], shadow.other[a]
    first_b, other_b = shadow.first[b], shadow.other[b]
    if first_a is None or first_b is None or other_a is None or other_b is None:
        return
    both = (first_a != EMPTY) & (first_b != EMPTY)
    several = (other_a != EMPTY) | (other_b != EMPTY)
    apart = first_a >> SITE_BITS != first_b >> SITE_BITS
    for region in _regions(np.flatnonzero(both & (several | apart))):
        at = region[0]
        one, two = int(first_a[at]), int(first_b[at])
        if one >> SITE_BITS == two >> SITE_BITS:
            if other_b[at] != EMPTY:
                two = int(other_b[at])
            else:
                one = int(other_a[at])
        yield region, ((one, a), (two, b))


def _regions(units: Ints) -> list[Ints]:
    """Runs of consecutive units."""
    if units.size == 0:
        return []
    return np.split(units, np.flatnonzero(np.diff(units) != 1) + 1)


def _report(
    launch: Launch,
    kind: tuple[str, str],
    shadow: Shadow,
    region: Ints,
    pair: Pair,
) -> Report:
    one, two = pair
    name, index, size = name_byte(launch.tensors, shadow.start, int(region[0]) * shadow.unit)
    return Report(
        kind=kind[0],
        value_class=kind[1],
        kernel=launch.name,
        tensor=name,
        index=index,
        num_elements=max(1, len(region) * shadow.unit // size),
        program_a=_label(launch, one[0] >> SITE_BITS),
        access_a=one[1],
        site_a=launch.sites[one[0] & SITE_MASK],
        program_b=_label(launch, two[0] >> SITE_BITS),
        access_b=two[1],
        site_b=launch.sites[two[0] & SITE_MASK],
    )


def _label(launch: Launch, program: int) -> str:
    """A program as a number, or as its indices if the grid has several directions."""
    x, y, z = launch.indices(program)
    if launch.grid[2] > 1:
        return f"({x}, {y}, {z})"
    return f"({x}, {y})" if launch.grid[1] > 1 else f"{x}"
