"""The metrics that the guide names: those that are there, and those that it calls absent."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide"
NAME = r"`((?:vllm:|headrace:|http_|process_)[a-z0-9_]+)`"


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Names as they are written in questions to Prometheus."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        hook = importlib.import_module("docs_hook")
    finally:
        sys.path.remove(str(ROOT / "tools"))
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \|", hook.metrics(), re.M)
    return {f"{name}_total" if kind == "counter" else name for name, kind in rows}


def rows_after(page: str, header: str) -> list[tuple[str, str]]:
    """The table that begins with a header: first cell and the rest of each row."""
    text = (GUIDE / page).read_text(encoding="utf-8")
    table = text.partition(f"| {header} |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").partition(" | ") for line in table.splitlines()[2:]]
    assert len(rows) > 5, page
    return [(first, rest) for first, _, rest in rows]


def test_what_stands_for_another_servers_metric_is_exported(exported: set[str]) -> None:
    for theirs, ours in rows_after("moving.md", "SGLang"):
        named = set(re.findall(NAME, ours))
        assert named or "the two above" in ours, theirs
        assert named <= exported, named - exported


def test_what_is_called_absent_is_not_exported(exported: set[str]) -> None:
    for absent, _ in rows_after("metrics.md", "absent"):
        named = re.findall(r"`([a-z0-9_:]+\*?)`", absent)
        assert named
        for name in named:
            found = {one for one in exported if re.fullmatch(name.replace("*", ".*"), one)}
            assert not found, name


def test_the_rest_of_the_page_names_metrics_that_are_there(exported: set[str]) -> None:
    text = (GUIDE / "metrics.md").read_text(encoding="utf-8")
    before, _, rest = text.partition("| absent |")
    told = before + rest.partition("\n\n")[2]
    named = set(re.findall(NAME, told))
    assert len(named) > 10
    assert named <= exported, named - exported
