"""Tables, comparisons and plots of made-up runs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest

from headrace.bench.__main__ import run_command
from headrace.bench.plot import draw
from headrace.bench.report import compare, comparison_text, document, read_document, table
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def row(batch: int, rate: float | None, **more: object) -> dict[str, Any]:
    """Make a row."""
    return {
        "case": "decode", "batch": batch, "request": {"prompt_tokens": 8}, "tokens_per_s": rate,
        "floor_tokens_per_s": 4 * rate if rate else None,
        "share_of_floor": 0.25 if rate else None, **more,
    }  # fmt: skip


def run(*rows: dict[str, Any], **settings: object) -> dict[str, Any]:
    """Make a run."""
    return document(
        model="m", device="d", settings=settings, ceilings=None, rows=list(rows)
    )


def test_table_shows_figures_floors_and_forced_results() -> None:
    text = table([row(1, 100.0), row(256, 20_000.0, forced_acceptance=[0.8])])

    assert "20,000" in text
    assert "25%" in text
    assert "FORCED" in text


def test_table_shows_the_reason_of_a_missing_figure() -> None:
    assert "time was up" in table([row(1, None, error="time was up")])


def test_runs_are_compared_by_case_batch_and_request() -> None:
    first = run(row(1, 100.0), row(8, 500.0), scheme="columns")
    second = run(row(8, 750.0), row(16, 900.0), scheme="replay")

    (pair,) = compare(first, second)
    assert pair["batch"] == 8
    assert pair["ratio"] == 1.5
    text = comparison_text(first, second)
    assert "scheme: columns | replay" in text
    assert "1.500x" in text


def test_times_are_compared_where_there_are_no_rates() -> None:
    first, second = (run(row(1, None, time_to_first_token_s=s)) for s in (4.0, 2.0))

    (pair,) = compare(first, second)
    assert pair["unit"] == "s"
    assert pair["ratio"] == 2.0


def test_runs_without_a_common_case_say_so() -> None:
    assert "no measurement in common" in comparison_text(run(row(1, 1.0)), run(row(2, 1.0)))


def test_compare_command_prints_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, rate in zip(paths, (10.0, 20.0), strict=True):
        path.write_text(json.dumps(run(row(1, rate))))
    plot = tmp_path / "both.svg"

    code = run_command(
        ["throughput", "--compare", *map(str, paths), "--plot", str(plot)]
    )

    assert code == 0
    assert "2.000x" in capsys.readouterr().out
    assert "a: decode" in plot.read_text()


def test_a_file_that_is_no_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[]")

    with pytest.raises(ConfigError, match="no result of headrace bench"):
        read_document(path)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(1, 100.0)],
        [row(1, 100.0), row(8, 900.0), row(256, 20_000.0)],
        [row(4, 7.0), row(4, 7.0)],
        [row(1, None)],
    ],
    ids=len,
)
def test_plots_are_well_formed_whatever_was_measured(rows: list[dict[str, Any]]) -> None:
    svg = draw([("<&>", run(*rows))], "title & more")

    assert ET.fromstring(svg).tag.endswith("svg")
    assert "nan" not in svg
