"""Settings every test runs under, and lines at the end: per scenario, per family under parity."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Before torch is imported: one thread per process keeps results and timings the same whether the
# suite runs alone or with pytest-xdist.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

pytest_plugins = ("headrace.rt.pytest_plugin",)

_LIST = Path(__file__).parent / "docs" / "scenarios.md"
_IN_NAME = re.compile(r"test((?:_b\d+)+)_")
_ROW = re.compile(r"\| (B\d+) \| (.+?) \| .* \|$", re.MULTILINE)
_PROPERTY = "scenario"


def scenarios_of(name: str, marks: Iterable[pytest.Mark]) -> list[str]:
    """Entries of docs/scenarios.md that a test shows: those in its name, or in its marker."""
    found = _IN_NAME.match(name)
    ids = [part.upper() for part in found[1].split("_")[1:]] if found else []
    return ids + [str(entry) for mark in marks for entry in mark.args]


def chosen_variants(variants: Sequence[Mapping[str, object]]) -> set[int]:
    """Choose variants of a test, each a map of parameters: few, and every value is among them."""
    values = [{(name, repr(value)) for name, value in each.items()} for each in variants]
    times = dict.fromkeys(set[tuple[str, str]]().union(*values), 0)
    chosen: set[int] = set()
    while 0 in times.values():
        # Most values that no variant has yet; then values that few have.
        best = max(
            range(len(values)),
            key=lambda at: (
                sum(times[value] == 0 for value in values[at]),
                -sum(times[value] for value in values[at]),
            ),
        )
        chosen.add(best)
        for value in values[best]:
            times[value] += 1
    return chosen


def _thin_out(items: Iterable[pytest.Item]) -> None:
    """Leave to `-m full` what tests marked `thinned` need not for every value of a parameter."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "thinned" in marks and "full" not in marks:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for variants in tests.values():
        chosen = chosen_variants([variant.callspec.params for variant in variants])
        for place, variant in enumerate(variants):
            if place not in chosen:
                variant.add_marker("full")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests whose names hold an entry, before `-m` selects, and let reports carry it."""
    _thin_out(items)
    for item in items:
        for entry in scenarios_of(item.name, item.iter_markers("scenarios")):
            item.user_properties.append((_PROPERTY, entry))
            if item.get_closest_marker("scenarios") is None:
                item.add_marker("scenarios")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line per family under parity, and after `pytest -m scenarios` one per entry."""
    _write_parity(terminalreporter)
    if "scenarios" not in terminalreporter.config.option.markexpr.split():
        return
    outcomes: dict[str, list[str]] = {}
    for kind in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(kind):
            for key, entry in getattr(report, "user_properties", ()):
                if key == _PROPERTY:
                    outcomes.setdefault(entry, []).append(kind)
    terminalreporter.section("scenarios")
    for entry, title in _ROW.findall(_LIST.read_text(encoding="utf-8")):
        kinds = outcomes.get(entry, [])
        verdict = "not run" if not kinds else "passed"
        if {"failed", "error"} & set(kinds):
            verdict = "FAILED"
        elif kinds and "passed" not in kinds:
            verdict = "skipped"
        terminalreporter.write_line(f"{entry:5}{verdict:9}{len(kinds):4}  {title}")


def _write_parity(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each family that was held against its reference."""
    families: dict[str, list[tuple[float, float]]] = {}
    for kind in ("passed", "failed"):
        for report in terminalreporter.getreports(kind):
            for key, value in getattr(report, "user_properties", ()):
                if key == "parity":
                    family, error, erasing = value
                    families.setdefault(family, []).append((error, erasing))
    if families:
        terminalreporter.section("parity")
    for family, figures in sorted(families.items()):
        errors, changes = zip(*figures, strict=True)
        terminalreporter.write_line(
            f"{family:13} largest error {max(errors):.1e} x std of the logits, erasing a state "
            f"changes them by {min(changes):.2f} at least, {len(figures)} cases"
        )
