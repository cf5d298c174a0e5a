"""Numbers in the documents that follow from the code."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from headrace.check import load_mutants
from headrace.check.mutants import registered

ROOT = Path(__file__).parents[2]


def test_the_documents_name_the_number_of_planted_faults() -> None:
    load_mutants()
    count = len(registered())
    assert f"{count} of {count} faults reported" in (ROOT / "README.md").read_text()
    assert f"{count} faults that are" in (ROOT / "CHANGELOG.md").read_text()
