"""A file that cannot be written is found out before the work that fills it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headrace.cli.main import run_command
from headrace.output_files import require_writable

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    new, old = tmp_path / "deep" / "new.json", tmp_path / "old.json"
    old.write_text("old", encoding="utf-8")
    for path in (None, new, old):
        require_writable("--output", path)
    assert not new.exists()
    assert new.parent.is_dir()
    assert old.read_text(encoding="utf-8") == "old"


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["trace", "--model", "/no/such", "--output"], "--output"),
        (["bench", "throughput", "/no/such", "--json"], "--json"),
        (["bench", "latency", "/no/such", "--plot"], "--plot"),
        (["check", "--mutant", "none of them", "--html"], "--html"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_commands_refuse_it_before_they_begin(
    command: list[str], flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    for path in (tmp_path, occupied / "below.json"):
        assert run_command([*command, str(path)]) == 2
        message = f"headrace: error: {flag} {path} cannot be written"
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["trace", "--steps", "0"], "--steps is 0 but must be at least 1"),
        (["trace", "--batch", "-1"], "--batch is -1 but must be at least 1"),
        (["trace", "--timeout", "nan"], "--timeout is nan but must be above 0"),
        (["top", "--interval", "-1"], "--interval is -1 but must be in [0, 86400]"),
        (["top", "--interval", "nan"], "--interval is nan but must be in [0, 86400]"),
    ],
    ids=" ".join,
)
def test_numbers_that_make_no_sense_are_wrong_use(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command) == 2
    assert message in capsys.readouterr().err
