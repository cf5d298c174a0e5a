"""`headrace check`: the engine on the simulated device, and the checker's own mutants."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - cyclopts reads the annotation
from typing import Annotated

from cyclopts import Parameter


def check(
    *,
    seeds: int = 50,
    seed: int | None = None,
    mutants: Annotated[bool, Parameter(negative="")] = False,
    mutant: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
    html: Path | None = None,
) -> int:
    """Run the engine on the simulated device and report every race and every wrong token.

    Exits with 1 on any report or surviving mutant.

    Args:
        seeds: Workloads to run, seeds 0 to N-1.
        seed: Run this one only, and print its reports in full.
        mutants: Put every known fault back, one at a time: each must be reported.
        mutant: Put this one back.
        json: Print JSON.
        html: Also draw the timeline of a run, with the accesses of a report marked.
    """
    from headrace.check import run_check  # noqa: PLC0415 - imports torch

    return run_check(
        seeds=seeds, seed=seed, mutants=mutants, mutant=mutant, json=json, html=html
    )
