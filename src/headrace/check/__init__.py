"""The checker as a command: an engine on the simulated device, and the mutants.

`headrace check` calls `run_check` and exits with what it returns.
"""

from __future__ import annotations

import json as json_module
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace.check.mutants import registered
from headrace.check.real import RealTarget
from headrace.check.runs import (
    Exercise,
    in_parallel,
    missing_pairs,
    run_seed,
    run_seeds,
    schedule_seed,
)
from headrace.check.target import Target, ToyTarget
from headrace.check.timeline import write_timeline
from headrace.errors import ConfigError
from headrace.output_files import require_writable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.check.mutants import Mutant, Outcome

__all__ = ["MUTANT_MODULES", "Target", "ToyTarget", "load_mutants", "run_check"]

MUTANT_MODULES = [
    "headrace.check.toy.host_mutants",
    "headrace.check.toy.stream_mutants",
    "headrace.check.toy.graph_mutants",
    "headrace.check.toy.row_mutants",
    "headrace.check.toy.state_mutants",
    "headrace.check.kernel_mutants",
    "headrace.check.engine_mutants",
    "headrace.check.store_mutants",
]
"""Modules that register mutants when imported; those that are not there are left out."""

TARGETS: list[Target] = [ToyTarget(), RealTarget()]
"""Engines under check."""


def load_mutants() -> Sequence[Mutant]:
    """Import every module that registers mutants; all of them by name."""
    for module in MUTANT_MODULES:
        if find_spec(module) is not None:
            import_module(module)
    return registered()


def run_check(
    *,
    seeds: int = 50,
    seed: int | None = None,
    mutants: bool = False,
    mutant: str | None = None,
    json: bool = False,
    html: Path | None = None,
    targets: Sequence[Target] | None = None,
) -> int:
    """Check the engine, or the checker by its mutants.

    Args:
        seeds: Run seeds 0 to seeds - 1.
        seed: Run this one only, and print its reports in full.
        mutants: Run all mutants instead.
        mutant: Run this one only.
        json: Print JSON on stdout and nothing else.
        html: Also draw a timeline here: of the first run with a report, else of the first run.
        targets: Engines to check; all known ones by default.

    Returns:
        0 if there is no report and every mutant was killed, else 1.

    Raises:
        ConfigError: The mutant is unknown, `seeds` is not positive, or `html` cannot be written.
    """
    require_writable("--html", html)
    if mutants or mutant is not None:
        return _check_mutants(mutant, seed or 0, as_json=json)
    if seeds < 1:
        raise ConfigError(f"--seeds is {seeds}; it must be at least 1")
    numbers = [seed] if seed is not None else list(range(seeds))
    chosen = list(targets) if targets is not None else TARGETS
    exercises = {target.name: run_seeds(target, numbers) for target in chosen}
    if html is not None:
        _draw(html, chosen, exercises)
    if json:
        _print(json_module.dumps(_as_json(chosen, exercises, numbers), indent=2))
    else:
        for target in chosen:
            _print(_describe(target, exercises[target.name]))
    return 0 if all(exercise.is_clean for exercise in exercises.values()) else 1


def _draw(path: Path, targets: Sequence[Target], exercises: dict[str, Exercise]) -> None:
    """Draw the first run with a finding; it is run again, which gives the same run."""
    target = targets[0]
    for one in targets:
        if not exercises[one.name].is_clean:
            target = one
            break
    exercise = exercises[target.name]
    seed = exercise.seeds[0]
    if exercise.reports:
        schedule = exercise.reports[0].seed
        seed = next(one for one in exercise.seeds if schedule_seed(one) == schedule)
    runtime = run_seed(target, seed, Exercise())
    lines = [_summary(one, exercises[one.name]) for one in targets]
    write_timeline(path, runtime, f"headrace check: {target.name}, seed {seed}", lines)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _summary(target: Target, exercise: Exercise) -> str:
    possible = len(target.kinds) * len(target.overlaps)
    seen = possible - len(missing_pairs(target, exercise))
    return (
        f"{target.name}: {len(exercise.seeds)} seeds, {exercise.steps} steps, "
        f"{exercise.launches} launches, {exercise.accesses} accesses, {exercise.syncs} host waits, "
        f"{seen} of {possible} pairs of state kind and overlap; "
        f"{len(exercise.reports)} reports, {len(exercise.wrong)} wrong answers"
        + (f", {len(exercise.ended)} runs ended by an error" if exercise.ended else "")
    )


def _describe(target: Target, exercise: Exercise) -> str:
    lines = [_summary(target, exercise)]
    if exercise.steady_steps:
        share = exercise.early_steps / exercise.steady_steps
        lines.append(
            f"  {exercise.early_steps} of {exercise.steady_steps} steady steps ({share:.1%}) were "
            "enqueued before the results of the step before them were read"
        )
    for kind in target.kinds:
        seen = [overlap for overlap in target.overlaps if (kind, overlap) in exercise.pairs]
        lines.append(f"  {kind}: {', '.join(seen) or 'nothing'}")
    missing = missing_pairs(target, exercise)
    if missing:
        lines.append("  not exercised, so nothing is known of them:")
        lines += [f"    {kind}: {overlap}" for kind, overlap in missing]
    lines += [str(report) for report in exercise.reports]
    lines += [f"WRONG-TOKENS {wrong}" for wrong in exercise.wrong]
    lines += [f"ENDED-EARLY {ended}" for ended in exercise.ended]
    lines += [
        f"TOO-FEW-ACCESSES seed {number}: fewer than {target.min_accesses_per_step} checked "
        "accesses a step; something has left the checker's sight"
        for number in exercise.thin_seeds
    ]
    return "\n".join(lines)


def _as_json(
    targets: Sequence[Target], exercises: dict[str, Exercise], seeds: list[int]
) -> dict[str, object]:
    runs = list(exercises.values())
    return {
        "seeds": len(seeds),
        "steps": sum(run.steps for run in runs),
        "launches": sum(run.launches for run in runs),
        "accesses": sum(run.accesses for run in runs),
        "host_waits": sum(run.syncs for run in runs),
        "steady_steps": sum(run.steady_steps for run in runs),
        "early_steps": sum(run.early_steps for run in runs),
        "pairs": sorted({pair for run in runs for pair in run.pairs}),
        "pairs_missing": {
            target.name: missing_pairs(target, exercises[target.name]) for target in targets
        },
        "reports": [
            *[report.as_dict() for run in runs for report in run.reports],
            *[{"kind": "WRONG-TOKENS", "detail": wrong} for run in runs for wrong in run.wrong],
            *[{"kind": "ENDED-EARLY", "detail": ended} for run in runs for ended in run.ended],
            *[
                {"kind": "TOO-FEW-ACCESSES", "seed": number}
                for run in runs
                for number in run.thin_seeds
            ],
        ],
    }


def _check_mutants(name: str | None, seed: int, *, as_json: bool) -> int:
    known = load_mutants()
    chosen = known if name is None else [one for one in known if one.name == name]
    if not chosen:
        names = ", ".join(one.name for one in known)
        raise ConfigError(f"mutant {name!r} is unknown; known are {names}")
    results = in_parallel(_run_mutant, [(one.name, seed) for one in chosen])
    outcomes = list(zip(chosen, results, strict=True))
    if not as_json:
        for one, outcome in outcomes:
            _print(_mutant_line(one, outcome))
            if name is not None:
                _print(outcome.report)
    killed = sum(outcome.counts for _, outcome in outcomes)
    if as_json:
        rows = [_mutant_json(one, outcome) for one, outcome in outcomes]
        total = {"killed": killed, "total": len(outcomes), "mutants": rows}
        _print(json_module.dumps(total, indent=2))
    else:
        _print(f"{killed} of {len(outcomes)} mutants killed")
    return 0 if killed == len(outcomes) else 1


def _run_mutant(item: tuple[str, int]) -> Outcome:
    """Run one by name: the mutants themselves do not travel to other processes."""
    name, seed = item
    return next(one for one in load_mutants() if one.name == name).run(seed)


def _mutant_line(mutant: Mutant, outcome: Outcome) -> str:
    if outcome.counts:
        return (
            f"killed   {mutant.letter} {mutant.name}: {outcome.kind}, {outcome.site_a} and "
            f"{outcome.site_b} (seed {outcome.seed})"
        )
    reasons = [
        text
        for holds, text in (
            (outcome.killed, "no report"),
            (outcome.twin_clean, "its correct twin is not clean"),
            (outcome.effect_shown, "no schedule shows its effect"),
        )
        if not holds
    ]
    return f"SURVIVED {mutant.letter} {mutant.name}: {'; '.join(reasons)}"


def _mutant_json(mutant: Mutant, outcome: Outcome) -> dict[str, object]:
    return {
        "name": mutant.name,
        "class": mutant.letter,
        "killed": outcome.counts,
        "reported": outcome.killed,
        "twin_clean": outcome.twin_clean,
        "effect_shown": outcome.effect_shown,
        "kind": outcome.kind,
        "site_a": outcome.site_a,
        "site_b": outcome.site_b,
        "seed": outcome.seed,
    }
