"""`headrace run` on a model that knows nothing: what it prints, where, and how it fails."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from headrace.cli import session
from headrace.cli.main import EXIT_WRONG_USE, run_command

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {
    "prompt_tokens", "cached_tokens", "completion_tokens", "time_to_first_token_s", "tokens_per_s",
    "steps", "draft_tokens", "accepted_tokens", "acceptance_by_position", "host_waits_per_step",
}  # fmt: skip


@pytest.fixture
def base(random_model: Path) -> list[str]:
    """Flags every run here has."""
    return ["--model", str(random_model), "--device=cpu", "--max-num-seqs=4"]


def answered(capsys: pytest.CaptureFixture[str], *tokens: str) -> dict[str, Any]:
    assert run_command(["run", *tokens, "--max-tokens=8", "--json"], environ={}) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def test_json_has_the_documented_keys(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    values = answered(capsys, "What is the code?", *base)

    assert values.keys() >= KEYS
    assert values["finish_reason"] in {"stop", "length"}
    assert 1 <= values["completion_tokens"] <= 8
    assert values["prompt_tokens"] == values["cached_tokens"] + sum(
        values["missed_tokens"].values()
    )


def test_quiet_prints_the_answer_alone(
    base: list[str], random_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = answered(capsys, "Hello", *base)["text"]

    run = subprocess.run(
        [sys.executable, "-m", "headrace", "run", "Hello", "--quiet", "--max-tokens=8", *base],
        capture_output=True, check=True,
    )  # fmt: skip

    assert random_model.exists()
    assert run.stdout.decode() == text + "\n"
    assert run.stderr == b""


def test_an_answer_has_a_limit_and_says_when_it_was_cut(
    base: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "DEFAULT_MAX_TOKENS", 5)
    for given, note in (
        (["--json"], "the answer was cut after 5 tokens; --max-tokens N allows more"),
        (["--json", "--max-tokens=7"], ""),
        (["--quiet"], ""),
    ):
        # A model of random weights, sampled, does not end by itself so soon, or it ends with stop.
        assert run_command(["run", "Hello", *given, *base], environ={}) == 0
        captured = capsys.readouterr()
        if "--json" in given:
            answer = json.loads(captured.out)
            most = 7 if len(given) > 1 else 5
            assert answer["completion_tokens"] <= most
            assert (note in captured.err) is (answer["finish_reason"] == "length" or not note)
        assert note or "was cut" not in captured.err


def test_stats_go_to_stderr(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = answered(capsys, "Hello", *base)["text"]

    assert run_command(["run", "Hello", "--stats", "--max-tokens=8", *base], environ={}) == 0

    captured = capsys.readouterr()
    assert captured.out == text + "\n"
    assert "time to first token" in captured.err


def test_prompt_passes_through_the_chat_template_unless_raw(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chat = answered(capsys, "Hello", *base)
    raw = answered(capsys, "Hello", "--raw", *base)

    assert raw["prompt_tokens"] == len("Hello")
    assert chat["prompt_tokens"] > raw["prompt_tokens"]


def test_prompt_may_come_through_a_pipe(
    base: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))

    assert answered(capsys, "--raw", *base)["prompt_tokens"] == len("Hello")


def test_seed_repeats_a_sampled_answer(
    base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def sampled(seed: int) -> str:
        answer = answered(capsys, "Hello", *base, "--temperature=1.5", f"--seed={seed}")
        text: str = answer["text"]
        return text

    # Any two seeds may agree by chance on a short answer; all of twelve do not.
    texts = [sampled(seed) for seed in range(3)]

    assert texts == [sampled(seed) for seed in range(3)]
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["Hello", "--temperature=-1"], "temperature must be in [0, 100], got -1"),
        (["Hello", "--temperature=nan"], "temperature must be finite"),
        (["Hello", "--top-p=0"], "top_p must be in (0, 1]"),
        (["Hello", "--max-tokens=0"], "max_tokens must be at least 1"),
        (["Hello", "--state-block-size=65"], "state_block_size is 65 but must be a multiple of 64"),
        (["Hello", "--speculative=medusa:2"], "speculative is 'medusa:2'"),
        (["  "], "the prompt is empty"),
        (["x" * 300], "max_model_len"),
    ],
    ids=lambda value: value[-1][:24] if isinstance(value, list) else "",
)
def test_wrong_value_is_wrong_use_with_the_limit(
    base: list[str], capsys: pytest.CaptureFixture[str], tokens: list[str], message: str
) -> None:
    assert run_command(["run", *base, *tokens], environ={}) == EXIT_WRONG_USE

    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
