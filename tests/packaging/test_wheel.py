"""What is installed is what runs, and nothing else."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headrace"
# Module to distribution, where the two differ.
DISTRIBUTION = {"prometheus_client": "prometheus-client", "yaml": "pyyaml"}
OPTIONAL = {"httpx", "huggingface_hub", "opentelemetry", "ray", "xgrammar"}
TEST_FILES = re.compile(r"test_\w*\.py|conftest\.py|pytest_plugin\.py|testing\.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Build the wheel and return the names in it."""
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_wheel_has_no_tests(wheel: set[str]) -> None:
    assert [name for name in wheel if re.search(r"(^|/)(test_\w*|conftest)\.py$", name)] == []


def test_wheel_has_types_licence_and_models(wheel: set[str]) -> None:
    assert "headrace/py.typed" in wheel
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    for file in (PACKAGE / "assets").rglob("*"):
        if file.is_file():
            assert f"headrace/{file.relative_to(PACKAGE)}" in wheel


def test_shipped_models_stay_small() -> None:
    nano = [file for file in (PACKAGE / "assets" / "nano").rglob("*") if file.is_file()]

    assert sum(file.stat().st_size for file in nano) < 1_000_000


def test_every_imported_library_is_a_declared_dependency() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        requirements = tomllib.load(file)["project"]["dependencies"]
    declared = {re.split(r"[<>=;\s\[]", text)[0].lower() for text in requirements}

    missing = {
        (library, str(file.relative_to(ROOT)))
        for file in PACKAGE.rglob("*.py")
        if not TEST_FILES.fullmatch(file.name)
        for library in imported_by(file)
        if DISTRIBUTION.get(library, library) not in declared | OPTIONAL
    }

    assert missing == set()


def imported_by(file: Path) -> set[str]:
    """Return the top-level names of other people's modules that a file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"headrace", "__future__"}
