"""docs/scenarios.md: every entry has a test, and every test that names an entry has one there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_ROW = re.compile(r"^\| (B\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)
_IN_NAME = re.compile(r"test((?:_b\d+)+)_")


def listed() -> dict[str, tuple[str, list[str]]]:
    rows = _ROW.findall((ROOT / "docs/scenarios.md").read_text(encoding="utf-8"))
    entries = {entry: (title, re.findall("`(.+?)`", files)) for entry, title, files in rows}
    assert len(entries) == len(rows), "an entry stands there twice"
    return entries


def entries_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    found = _IN_NAME.match(node.name)
    entries = [part.upper() for part in found[1].split("_")[1:]] if found else []
    for mark in node.decorator_list:
        is_mark = isinstance(mark, ast.Call) and isinstance(mark.func, ast.Attribute)
        if is_mark and mark.func.attr == "scenarios":  # type: ignore[attr-defined]
            entries += [
                arg.value for arg in mark.args  # type: ignore[attr-defined]
                if isinstance(arg, ast.Constant)
            ]
    return entries


@pytest.fixture(scope="module")
def tested() -> dict[str, set[str]]:
    """Entry to the files with a test that names it."""
    files: dict[str, set[str]] = {}
    for path in sorted([*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("src/**/test_*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for entry in entries_of(node):
                    files.setdefault(entry, set()).add(path.relative_to(ROOT).as_posix())
    return files


def test_every_entry_has_a_test(tested: dict[str, set[str]]) -> None:
    without = [entry for entry in listed() if entry not in tested]
    assert not without, f"no test is called test_{without[0].lower()}_... or marked with it"


def test_every_entry_that_a_test_names_is_listed(tested: dict[str, set[str]]) -> None:
    assert tested.keys() <= listed().keys()


def test_the_files_that_are_named_hold_such_a_test(tested: dict[str, set[str]]) -> None:
    for entry, (title, files) in listed().items():
        assert title
        assert files, f"{entry} names no file"
        assert set(files) <= tested.get(entry, set()), f"{entry} has no test in one of {files}"
