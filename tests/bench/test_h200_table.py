"""The table's script runs through at tiny sizes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "h200_table.py"


def load() -> Any:  # noqa: ANN401 - a script without stubs
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location("h200_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["h200_table"] = module
    spec.loader.exec_module(module)
    return module


script = load()
DRY = ["--dry-run", "--no-start", "--device", "cpu"]


@pytest.mark.parametrize("flags", [
    ["--only", "prefill,cached"],
    pytest.param(["--quick", "--only", "forced"], marks=pytest.mark.full),
])
def test_dry_run_measures_and_judges(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    code = script.main([*DRY, "--json", str(out), "--traces", str(tmp_path), *flags])

    assert code == 0
    rows = json.loads(out.read_text())["rows"]
    assert rows
    for row in rows:
        assert "error" not in row, row
        assert row["measured"] > 0
        assert row["verdict"] in ("missed", "required", "aim")
    assert "verdict" in capsys.readouterr().out


def test_a_group_that_fails_leaves_the_others_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA out of memory")

    out = tmp_path / "table.json"
    monkeypatch.setattr(script, "open_engine", broken)
    code = script.main([*DRY, "--json", str(out), "--only", "prefill,cached"])

    assert code == 1
    errors = [row["error"] for row in json.loads(out.read_text())["rows"]]
    assert errors == ["RuntimeError: CUDA out of memory"] * 2


def test_nothing_new_is_started_when_time_is_up(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    script.main([*DRY, "--json", str(out), "--only", "long", "--seconds", "0"])

    assert json.loads(out.read_text())["rows"][0]["error"] == "no time was left"


def test_every_case_of_the_table_is_there() -> None:
    groups = {group.name: group for group in script.groups()}
    batches = {
        name: sorted(line.case.batch for line in groups[name].lines) for name in ("plain", "forced")
    }

    assert batches == {"plain": [1, 8, 32, 128, 256], "forced": [1, 32, 128, 256]}
    for group in groups.values():
        assert (script.SHAPES / f"{group.shape}.json").is_file()
