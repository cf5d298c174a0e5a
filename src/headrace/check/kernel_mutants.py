"""Mutants inside a launch: what programs and lanes of one kernel do to each other.

Each runs in Triton's interpreter under the kernel race detector. A mutant is killed if every order
of the programs gives a report that names the mutated memory and both source lines; its effect is
shown if some order gives another result than the correct twin. Lanes have no order in the
interpreter: their effect is shown by the same code with one lane a program.

The interpreter must be on before Triton is imported. Where it is not, the mutants run in a process
of their own: ``TRITON_INTERPRET=1 python -m headrace.check.kernel_mutants SEED``.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from headrace.check.mutants import Mutant, Outcome, register
from headrace.rt.detector import ALL_ORDERS, Detector
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from headrace.rt.detector import Order, Report

Kernels: TypeAlias = Any
"""The module `racy_kernels`, imported only where the interpreter is on."""

_ROWS, _SIZE = 6, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMutant:
    """One fault and how to see it.

    Attributes:
        name: In words with dashes.
        kinds: Kinds of report that kill it.
        tensor: Argument that the report must name.
        lines: Parts of the two source lines that the report must name, in any order.
        run: Runs the mutant (True) or its twin (False) on inputs from a seed; returns the results
            that must be equal.
        show: Runs the faulty code so that some order of programs shows its effect, where `run`
            does not; returns the results.
    """

    name: str
    kinds: tuple[str, ...]
    tensor: str
    lines: tuple[str, str]
    summary: str
    run: Callable[[Kernels, bool, int], Sequence[Tensor]]
    show: Callable[[Kernels, int], Sequence[Tensor]] | None = None


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _floats(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=_random(seed))


def _permutation(seed: int, size: int) -> Tensor:
    """A random cycle through all places: no place stays."""
    order = torch.randperm(size, generator=_random(seed))
    cycle = torch.empty_like(order)
    cycle[order] = order.roll(1)
    return cycle.to(torch.int32)


def _reset_count(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    accepted = torch.randint(2, 5, (_ROWS,), generator=_random(seed), dtype=torch.int32)
    state = torch.randint(0, 99, (_ROWS, 4), generator=_random(seed), dtype=torch.int32)
    out = torch.zeros_like(state)
    launch_kernel(
        kernels.save_and_reset_kernel, (_ROWS, 4), accepted, accepted.clone(), state, out, 4, fault
    )
    return out, accepted


def _step_state(
    kernels: Kernels, slots: Sequence[int], lengths: Sequence[int], seed: int
) -> Sequence[Tensor]:
    state, x = _floats(seed, _ROWS + 1, _SIZE), _floats(seed + 1, _ROWS, _SIZE)
    launch_kernel(
        kernels.step_state_kernel,
        (len(slots),),
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        x,
        state,
        _SIZE,
    )
    return (state,)


def _shared_slot(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    return _step_state(kernels, [1, 2, 2 if fault else 3, 4], [1] * 4, seed)


def _padding_slot(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    # Two rows, padded to four. Padded rows must have no length; the id of a live slot is the worst
    # that they can be given besides.
    return _step_state(kernels, [1, 2, 2, 2], [1, 1, int(fault), int(fault)], seed)


def _permute(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    rows = _floats(seed, _ROWS, _SIZE)
    out = torch.empty_like(rows)
    order = _permutation(seed, _ROWS)
    launch_kernel(kernels.permute_rows_kernel, (_ROWS,), order, rows, out, _SIZE, fault)
    return (rows if fault else out,)


def _copy_chain(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    pool = _floats(seed, _ROWS + 2, _SIZE)
    source = torch.arange(1, _ROWS + 1, dtype=torch.int32)
    launch_kernel(
        kernels.copy_blocks_kernel,
        (_ROWS,),
        source,
        source + 1,
        pool,
        pool.clone(),
        _SIZE,
        fault,
    )
    return (pool,)


def _shift(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    window = _floats(seed, _SIZE)
    launch_kernel(kernels.shift_window_kernel, (1,), window, 2, _SIZE, fault)
    return (window,)


def _shift_by_lane(kernels: Kernels, seed: int) -> Sequence[Tensor]:
    window = _floats(seed, _SIZE)
    launch_kernel(kernels.shift_window_lane_kernel, (_SIZE,), window, 2, _SIZE)
    return (window,)


def _twice(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = torch.arange(_SIZE)
    return slots, _floats(seed, _SIZE), torch.zeros(_SIZE)


def _scatter(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    slots, x, out = _twice(seed)
    slots[5] = 2 if fault else 5
    launch_kernel(kernels.scatter_kernel, (1,), slots, x, out, _SIZE)
    return (out,)


def _scatter_by_lane(kernels: Kernels, seed: int) -> Sequence[Tensor]:
    slots, x, out = _twice(seed)
    slots[5] = 2
    launch_kernel(kernels.scatter_lane_kernel, (_SIZE,), slots, x, out)
    return (out,)


def _flag(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    x, out = _floats(seed, _SIZE), torch.zeros(4)
    flag, total = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    for part in (0,) if fault else (1, 2):
        launch_kernel(kernels.flag_kernel, (4,), x, flag, total, out, _SIZE, part)
    return (out,)


def _float_atomics(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    # The first two tiles cancel: added first they leave the others' sum exact, added last they have
    # rounded it to a multiple of 8, whatever the seed.
    tiles = 32
    x = _floats(seed, tiles, _SIZE)
    x[:2] = torch.tensor([1e8, -1e8])[:, None] / _SIZE
    partial = torch.zeros(1 if fault else tiles)
    launch_kernel(kernels.reduce_kernel, (tiles,), x, partial, _SIZE, fault)
    if not fault:
        launch_kernel(kernels.add_partials_kernel, (1,), partial, tiles)
    return (partial[:1].clone(),)


def _remap(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    rows = _permutation(seed, _ROWS)
    x, out = _floats(seed, _ROWS), torch.zeros(_ROWS)
    launch_kernel(kernels.remap_kernel, (_ROWS,), rows, rows.clone(), x, out, _ROWS, fault)
    return (out,)


def _count_once(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    x = _floats(seed, 3, 2, 4, _SIZE)
    count, out = torch.zeros(3, dtype=torch.int32), torch.zeros_like(x)
    launch_kernel(kernels.count_once_kernel, (3, 2, 4), count, x, out, _SIZE, fault)
    return count, out


def _take_slot(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    x, out = _floats(seed, _ROWS), torch.zeros(_ROWS)
    taken = torch.zeros(1, dtype=torch.int32)
    slots = torch.arange(_ROWS, dtype=torch.int32)
    launch_kernel(kernels.take_slot_kernel, (_ROWS,), taken, slots, x, out, fault)
    return (out,)


def _last_tile(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    x = _floats(seed, 20)
    launch_kernel(kernels.last_tile_kernel, (3,), x, 20, _SIZE, fault)
    return (x,)


def _ring(kernels: Kernels, fault: bool, seed: int) -> Sequence[Tensor]:  # noqa: FBT001
    ring = torch.randint(0, 99, (3, 4 if fault else 8), generator=_random(seed))
    ring[:, :4] = torch.randint(0, 99, (3, 4), generator=_random(seed))
    keys, out = torch.arange(1000, 1003), torch.zeros(3, 2, dtype=torch.int64)
    launch_kernel(kernels.ring_kernel, (3, 2), ring, keys, out, ring.shape[1], 2)
    return (out,)


KERNEL_MUTANTS = (
    KernelMutant(
        name="kernel-resets-a-count-that-siblings-read",
        kinds=("READ-WRITE",),
        tensor="accepted_ptr",
        lines=("tl.store(accepted_ptr + row, 1)", "accepted = tl.load(accepted_ptr + row)"),
        summary="The second founding fault: layer 0 resets the row's count, other layers read it.",
        run=_reset_count,
    ),
    KernelMutant(
        name="kernel-two-rows-share-a-state-slot",
        kinds=("WRITE-WRITE",),
        tensor="state_ptr",
        lines=("tl.store(state_ptr + slot", "tl.store(state_ptr + slot"),
        summary="Two rows of a launch are given one state block.",
        run=_shared_slot,
    ),
    KernelMutant(
        name="kernel-padding-rows-write-a-live-slot",
        kinds=("WRITE-WRITE",),
        tensor="state_ptr",
        lines=("tl.store(state_ptr + slot", "tl.store(state_ptr + slot"),
        summary="Rows that pad a captured batch have a length and the id of a live block.",
        run=_padding_slot,
    ),
    KernelMutant(
        name="kernel-permutes-rows-in-place",
        kinds=("READ-WRITE",),
        tensor="rows_ptr",
        lines=("tl.store(rows_ptr + row", "values = tl.load(rows_ptr + source"),
        summary="Rows are reordered in the memory that they are read from.",
        run=_permute,
    ),
    KernelMutant(
        name="kernel-copies-a-chain-of-blocks",
        kinds=("READ-WRITE",),
        tensor="pool_ptr",
        lines=("tl.store(pool_ptr + target", "block = tl.load(pool_ptr + source"),
        summary="Block i goes to i+1 while i+1 goes to i+2.",
        run=_copy_chain,
    ),
    KernelMutant(
        name="kernel-shifts-a-window-without-a-barrier",
        kinds=("LANE-WAR",),
        tensor="window_ptr",
        lines=("tl.store(window_ptr + i, values", "values = tl.load(window_ptr + i"),
        summary="One lane stores what another lane has not loaded yet.",
        run=_shift,
        show=_shift_by_lane,
    ),
    KernelMutant(
        name="kernel-stores-one-target-twice",
        kinds=("LANE-DUP-STORE",),
        tensor="out_ptr",
        lines=("tl.store(out_ptr + tl.load(slots_ptr + i)", "tl.store(out_ptr + tl.load(slots_"),
        summary="One store names an address twice with different values.",
        run=_scatter,
        show=_scatter_by_lane,
    ),
    KernelMutant(
        name="kernel-waits-for-a-hand-made-flag",
        kinds=("READ-WRITE",),
        tensor="flag_ptr",
        lines=("tl.store(flag_ptr, 1)", "ready = tl.load(flag_ptr)"),
        summary="A plain store tells other programs that a value is there.",
        run=_flag,
    ),
    KernelMutant(
        name="kernel-adds-floats-atomically",
        kinds=("ATOMIC-ORDER",),
        tensor="partial_ptr",
        lines=("tl.atomic_add(partial_ptr, part)", "tl.atomic_add(partial_ptr, part)"),
        summary="A sum that must be the same bits is added in any order.",
        run=_float_atomics,
    ),
    KernelMutant(
        name="kernel-writes-the-row-map-its-siblings-use",
        kinds=("READ-WRITE",),
        tensor="map_ptr",
        lines=("tl.store(map_ptr + following", "source = tl.load(map_ptr + row)"),
        summary="The map of the next step overwrites the map of this one.",
        run=_remap,
    ),
    KernelMutant(
        name="kernel-single-writer-guard-forgets-the-tile",
        kinds=("WRITE-WRITE",),
        tensor="count_ptr",
        lines=("tl.store(count_ptr + row", "tl.store(count_ptr + row"),
        summary="The guard names row and layer, but the row was split into tiles.",
        run=_count_once,
    ),
    KernelMutant(
        name="kernel-takes-slots-by-a-shared-counter",
        kinds=("ATOMIC-ORDER",),
        tensor="next_ptr",
        lines=("slot = tl.atomic_add(next_ptr", "slot = tl.atomic_add(next_ptr"),
        summary="The result of an atomic decides where a row goes.",
        run=_take_slot,
    ),
    KernelMutant(
        name="kernel-last-tile-overlaps-its-neighbour",
        kinds=("WRITE-WRITE",),
        tensor="x_ptr",
        lines=("tl.store(x_ptr + i", "tl.store(x_ptr + i"),
        summary="The last tile is moved back to be full, and updates elements a second time.",
        run=_last_tile,
    ),
    KernelMutant(
        name="kernel-ring-has-no-room-for-the-new-entry",
        kinds=("READ-WRITE",),
        tensor="ring_ptr",
        lines=("tl.store(ring_ptr + row", "total += tl.load(ring_ptr + row"),
        summary="A replay ring of the size of what is pending: the new key lands on a pending one.",
        run=_ring,
    ),
)


def run_mutant(mutant: KernelMutant, seed: int) -> Outcome:
    """Run a mutant, its twin and what shows its effect; needs the interpreter."""
    from headrace.check import racy_kernels  # noqa: PLC0415  imports Triton

    twin_results, twin_clean = _run(racy_kernels, mutant, seed, fault=False, orders=ALL_ORDERS)
    found: list[Report] = []
    effect = False
    for order in ALL_ORDERS:
        results, detector = _run(racy_kernels, mutant, seed, fault=True, orders=(order,))
        found += [report for report in detector.reports if _names_it(mutant, report)][:1]
        effect |= not _equal(results, twin_results)
        if mutant.show is not None:
            with Detector(orders=(order,)):
                effect |= not _equal(mutant.show(racy_kernels, seed), twin_results)
    report = found[0] if found else None
    return Outcome(
        killed=len(found) == len(ALL_ORDERS),
        kind=report.kind if report else "",
        site_a=f"{report.site_a} in {report.kernel}" if report else "",
        site_b=f"{report.site_b} in {report.kernel}" if report else "",
        seed=seed,
        twin_clean=not twin_clean.reports and not twin_clean.differences,
        effect_shown=effect,
        report=str(report) if report else "",
    )


def _run(
    kernels: Kernels, mutant: KernelMutant, seed: int, *, fault: bool, orders: Sequence[Order]
) -> tuple[Sequence[Tensor], Detector]:
    with Detector(orders=orders) as detector:
        results = mutant.run(kernels, fault, seed)
    return results, detector


def _equal(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _names_it(mutant: KernelMutant, report: Report) -> bool:
    """Whether a report is of the right kind and names the mutated memory and both lines."""
    if report.kind not in mutant.kinds or report.tensor != mutant.tensor:
        return False
    a, b = _source_line(report.site_a), _source_line(report.site_b)
    one, two = mutant.lines
    return (one in a and two in b) or (one in b and two in a)


@functools.cache
def _source_line(site: str) -> str:
    from headrace.check import racy_kernels  # noqa: PLC0415  imports Triton

    name, _, line = site.rpartition(":")
    if name != "racy_kernels.py":
        return ""
    return inspect.getsource(racy_kernels).splitlines()[int(line) - 1]


def _is_interpreting() -> bool:
    """Whether Triton is or will be imported with the interpreter on."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.lru_cache(maxsize=4)
def _outcomes_of_a_process(seed: int) -> dict[str, Outcome]:
    """All outcomes, from a process whose Triton interprets."""
    command = [sys.executable, "-m", "headrace.check.kernel_mutants", str(seed)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(  # noqa: S603  our own module
        command, env=environment, check=True, capture_output=True, text=True
    )
    return {name: Outcome(**fields) for name, fields in json.loads(done.stdout).items()}


def _outcome(mutant: KernelMutant, seed: int) -> Outcome:
    if _is_interpreting():
        return run_mutant(mutant, seed)
    return _outcomes_of_a_process(seed)[mutant.name]


def _main() -> None:
    outcomes = {
        mutant.name: asdict(run_mutant(mutant, int(sys.argv[1]))) for mutant in KERNEL_MUTANTS
    }
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    _main()
else:
    for _mutant in KERNEL_MUTANTS:
        register(
            Mutant(
                name=_mutant.name,
                letter="K",
                run=functools.partial(_outcome, _mutant),
                summary=_mutant.summary,
            )
        )
