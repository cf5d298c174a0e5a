"""The release gate's part that asks the engine."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tools.demo_model import engine_gate  # noqa: E402

NANO = ROOT / "src" / "headrace" / "assets" / "nano"


def test_engine_and_script_judge_the_nano_model_alike() -> None:
    table = engine_gate.compare("nano", NANO, 1)

    assert {key: row["examples"] for key, row in table.items()} == {"registers": 1, "phonebook": 1}
    assert all(row["engine"] == row["script"] == 1 for row in table.values()), table
    assert not engine_gate.failures(table)


def test_answers_that_differ_are_named() -> None:
    same = {"judged_differently": [], "changed_by_drafts": []}
    table = {
        "facts": same,
        "copy": same | {"judged_differently": [7]},
        "sort": same | {"changed_by_drafts": [8, 9]},
    }

    assert engine_gate.failures(table) == [
        "engine: copy, seeds [7] are not judged as by the script",
        "engine: sort, seeds [8, 9] are answered otherwise without drafts",
    ]
