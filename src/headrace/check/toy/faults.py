"""How a fault of the toy engine is run: mutant, twin, and the schedules that show its effect.

A fault is a subclass of the engine that takes one detour: wrongly if `self.is_faulty`, else rightly
through the same calls. The safe interface would not let most of them be written; `runtime.raw`
takes that back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace import rt
from headrace.check.mutants import Mutant, MutantClass, Outcome, register
from headrace.check.toy.engine import ToyEngine, wrong_requests
from headrace.check.toy.workload import generate

if TYPE_CHECKING:
    from collections.abc import Callable

UNORDERED = ("UNORDERED-WRITE-READ", "UNORDERED-READ-WRITE", "UNORDERED-WRITE-WRITE")
WRONG = "WRONG-TOKENS"
SEEDS_TRIED = 12
"""Workloads tried until the fault is on the path; a workload need not hold every situation."""
SCHEDULES_TRIED = 40
"""Runs without checks tried until one shows a wrong token."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What a detour's fault looks like.

    Attributes:
        engine: The detour.
        letter: Class of the mutant.
        kinds: Report kinds that count as seeing it.
        buffer: Part of the name of the memory that a report must name.
    """

    engine: type[ToyEngine]
    letter: MutantClass
    kinds: tuple[str, ...]
    buffer: str


def fault(
    name: str, letter: MutantClass, kinds: tuple[str, ...], buffer: str = ""
) -> Callable[[type[ToyEngine]], type[ToyEngine]]:
    """Register a detour as a mutant."""

    def add(engine: type[ToyEngine]) -> type[ToyEngine]:
        one = Fault(engine, letter, kinds, buffer)
        summary = (engine.__doc__ or "").strip().splitlines()[0]
        register(Mutant(name=name, letter=letter, run=partial(run_fault, one), summary=summary))
        return engine

    return add


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a detour."""

    reports: tuple[rt.Report, ...]
    wrong: list[int]
    failure: str
    engine: ToyEngine


def run_once(
    engine: type[ToyEngine], seed: int, policy: rt.Policy, *, is_faulty: bool, checks: bool
) -> Run:
    """Serve one workload; errors of the runtime end the run and are part of the result."""
    workload = generate(seed)
    runtime = rt.Runtime.create("sim", seed=seed, policy=policy, checks=checks)
    one = engine(runtime, workload, is_faulty=is_faulty)
    failure = ""
    wrong: list[int] = []
    try:
        wrong = wrong_requests(workload, one.run())
    except (rt.RtError, IndexError, RuntimeError, ValueError, KeyError) as error:
        failure = f"{type(error).__name__}: {error}"
    return Run(runtime.reports, wrong, failure, one)


def run_fault(fault: Fault, seed: int) -> Outcome:
    """Mutant, twin and effect, from one seed on."""
    found: rt.Report | None = None
    used = seed
    kind, site_a, site_b, text = "", "", "", ""
    for used in range(seed, seed + SEEDS_TRIED):
        run = run_once(fault.engine, used, "lazy", is_faulty=True, checks=True)
        if fault.kinds == (WRONG,):
            if run.wrong:
                kind, text = WRONG, f"requests {run.wrong} differ from the reference"
                site_a, site_b = run.engine.value_sites(run.wrong[0])
                break
            continue
        matches = [
            report
            for report in run.reports
            if report.kind in fault.kinds and fault.buffer in report.buffer
        ]
        if matches:
            found = matches[0]
            kind, site_a, site_b = found.kind, found.site_a, found.site_b
            text = str(found)
            break
    twin = run_once(fault.engine, used, "lazy", is_faulty=False, checks=True)
    return Outcome(
        killed=bool(kind and site_a and site_b),
        kind=kind,
        site_a=site_a,
        site_b=site_b,
        seed=used,
        twin_clean=not (twin.reports or twin.wrong or twin.failure),
        effect_shown=shows_effect(fault.engine, used),
        report=text,
    )


def shows_effect(engine: type[ToyEngine], seed: int) -> bool:
    """Whether some schedule gives a wrong token when nothing is checked."""
    schedules: list[tuple[int, rt.Policy]] = [(seed, "eager"), (seed, "lazy")]
    schedules += [(seed + offset, "random") for offset in range(SCHEDULES_TRIED)]
    return any(
        run_once(engine, number, policy, is_faulty=True, checks=False).wrong
        for number, policy in schedules
    )
