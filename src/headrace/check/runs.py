"""Runs of a target on the simulated device, and what they add up to."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from headrace import rt
from headrace.rt.reports import hide_driver, is_inside, site_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.check.target import Target
    from headrace.rt.sim.runtime import SimRuntime

# How the runs are spread must not show in a report: one seed is one report, byte for byte.
hide_driver(__file__)
hide_driver(str(Path(__file__).with_name("__init__.py")))

A = TypeVar("A")
B = TypeVar("B")
SEEDS_PER_CHUNK = 16
SCHEDULE_SEED = 1_000_003
"""Workload seeds and schedule seeds are apart: schedule = seed * this, modulo 2**31."""


@dataclass(slots=True)
class Exercise:
    """What checked runs went through.

    Attributes:
        seeds: Seeds run.
        steps, launches, accesses, syncs: Sums over all runs.
        pairs: (state kind, overlap) seen.
        reports: Findings, in the order of the seeds.
        wrong: Requests whose tokens differ from the reference.
        ended: Runs that an error ended, and where it was raised.
        steady_steps, early_steps: Steps right after another one, and those among them that were
            enqueued before that one's results were read.
        thin_seeds: Seeds with fewer checked accesses per step than the target's floor.
    """

    seeds: list[int] = field(default_factory=list)
    steps: int = 0
    launches: int = 0
    accesses: int = 0
    syncs: int = 0
    pairs: set[tuple[str, str]] = field(default_factory=set)
    reports: list[rt.Report] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    thin_seeds: list[int] = field(default_factory=list)
    steady_steps: int = 0
    early_steps: int = 0

    def add(self, other: Exercise) -> None:
        """Add what other runs went through."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.launches += other.launches
        self.accesses += other.accesses
        self.syncs += other.syncs
        self.pairs |= other.pairs
        self.reports += other.reports
        self.wrong += other.wrong
        self.ended += other.ended
        self.thin_seeds += other.thin_seeds
        self.steady_steps += other.steady_steps
        self.early_steps += other.early_steps

    @property
    def is_clean(self) -> bool:
        """No report, no wrong token, no error, nothing out of sight."""
        return not (self.reports or self.wrong or self.ended or self.thin_seeds)


def policy_of(seed: int) -> rt.Policy:
    """Mostly random schedules; some as late, some as early as possible."""
    return {3: "lazy", 7: "eager"}.get(seed % 8, "random")  # type: ignore[return-value]


def schedule_seed(seed: int) -> int:
    """Seed of the schedule of a run."""
    return seed * SCHEDULE_SEED % 2**31


def run_seed(target: Target, seed: int, exercise: Exercise) -> SimRuntime:
    """Run one seed and add what it did; returns its runtime for the timeline."""
    runtime = rt.Runtime.create("sim", seed=schedule_seed(seed), policy=policy_of(seed))
    simulated = cast("SimRuntime", runtime)
    try:
        exercise.wrong += target.run(runtime, seed)
    except Exception as error:
        # Whatever a race has broken ends the run, not the check: an index out of range in a launch
        # says less than the reports that were made before it.
        exercise.ended.append(f"seed {seed}: {type(error).__name__} at {_site(error)}: {error}")
    exercise.seeds.append(seed)
    exercise.steady_steps += target.num_steady_steps
    exercise.early_steps += target.num_early_steps
    exercise.steps += runtime.stats.steps
    exercise.launches += runtime.stats.launches
    exercise.accesses += runtime.stats.accesses
    exercise.syncs += runtime.stats.syncs
    exercise.pairs |= simulated.pairs
    exercise.reports += runtime.reports
    if runtime.stats.accesses < target.min_accesses_per_step * runtime.stats.steps:
        exercise.thin_seeds.append(seed)
    return simulated


def _site(error: Exception) -> str:
    """Innermost frame of ours that an error went through."""
    frames = [(f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__)][::-1]
    return site_of(tuple(frame for frame in frames if not is_inside(frame[0])))


def run_seeds(target: Target, seeds: Sequence[int]) -> Exercise:
    """Run seeds, on all processors if there are many; the result is the same either way."""
    exercise = Exercise()
    for part in in_parallel(_run_chunk, [(target, chunk) for chunk in _chunks(seeds)]):
        exercise.add(part)
    return exercise


def in_parallel(work: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Map in processes of their own; in this one if there is a single item or processor."""
    workers = min(len(items), os.cpu_count() or 1)
    if workers < 2:  # noqa: PLR2004  nothing to spread
        return [work(item) for item in items]
    # Not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        return list(pool.map(work, items))


def _one_thread() -> None:
    # The tensors are tiny; several threads for each only wait for one another.
    torch.set_num_threads(1)


def _run_chunk(item: tuple[Target, Sequence[int]]) -> Exercise:
    target, seeds = item
    exercise = Exercise()
    for seed in seeds:
        run_seed(target, seed, exercise)
    return exercise


def _chunks(seeds: Sequence[int]) -> list[Sequence[int]]:
    """Parts of at least SEEDS_PER_CHUNK: starting a process takes seconds."""
    size = max(SEEDS_PER_CHUNK, -(-len(seeds) // (4 * (os.cpu_count() or 1))))
    return [seeds[start : start + size] for start in range(0, len(seeds), size)]


def missing_pairs(target: Target, exercise: Exercise) -> list[tuple[str, str]]:
    """Pairs that no run went through: a clean result says nothing of them."""
    return [
        (kind, overlap)
        for kind in target.kinds
        for overlap in target.overlaps
        if (kind, overlap) not in exercise.pairs
    ]
