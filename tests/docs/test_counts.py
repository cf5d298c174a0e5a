"""Numbers in the documents that follow from the code."""

from __future__ import annotations

import json
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


def test_measured_figures_are_those_of_the_results_and_of_what_runs() -> None:
    table = (ROOT / "README.md").read_text().partition("## Measured")[2].partition("\n## ")[0]
    results = ROOT / "benchmarks" / "results"
    rows = json.loads((results / "kernels-h200.json").read_text())["rows"]
    (decode,) = [
        row for row in rows
        if row["case"] == "gated_delta_decode columns" and row["state"] == "float32"
        and (row["batch"], row["tokens_per_row"], row["launches"]) == (128, 1, 2)
    ]
    assert f"{decode['us_per_layer']:.0f} µs, {decode['share_of_floor']:.2f} of the" in table

    runs = json.loads((results / "h200_conformance.json").read_text())["runs"]
    rows = [row for run in runs for row in run["rows"]]
    compared = [row for row in rows if "requests_that_differ" in row]
    cases = [row for row in compared if row["part"] == "conformance"]
    assert [row["requests_that_differ"] for row in cases] == [0] * 8
    assert {row["requests"] for row in cases} == {512}
    assert "0 of 512 requests differ in each of the 8 cases" in table
    layouts = [row for row in compared if row["part"] == "demo"]
    assert [row["requests_that_differ"] for row in layouts] == [0, 0]
    assert f"the demo model 0 of {layouts[0]['requests']} in both layouts" in table
    (mixed,) = [row for row in rows if row["part"] == "mixed"]
    differ, reports = mixed["differ"], mixed["reports"]
    assert f"{mixed['requests']:,} requests, {differ} differ, {reports} reports" in table
