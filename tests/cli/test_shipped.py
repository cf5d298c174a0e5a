"""The commands a newcomer types first, on the model that is shipped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.demo import prompts_for
from headrace.cli.main import EXIT_WRONG_USE, run_command
from headrace.config import EngineConfig
from headrace.evals import ABILITIES
from headrace.weights.resolve import resolve_model, shipped_name

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("model", ["demo", pytest.param("nano", marks=pytest.mark.full), "parity"])
def test_demo_answers_all_five_prompts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_command(["demo", f"--model={model}", "--device=cpu"], environ={})

    text = capsys.readouterr().out
    assert code == 0, text
    assert "5 of 5 answers are right" in text
    assert ABILITIES[model].can in text
    assert ABILITIES[model].cannot in text
    for figure in ("tokens/s", "drafts accepted", "prefix cache", "recurrent state"):
        assert figure in text


def test_demo_fails_if_one_answer_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *rest = prompts_for("nano")
    wrong = replace(first, expected="something else", check=lambda _: False)
    monkeypatch.setattr("headrace.cli.demo.prompts_for", lambda _: [wrong, *rest])

    assert run_command(["demo", "--model=nano", "--device=cpu"], environ={}) == 1
    text = capsys.readouterr().out
    assert "WRONG, expected: something else" in text
    assert "4 of 5 answers are right" in text


@pytest.mark.parametrize("model", ["demo", "nano", "parity"])
def test_demo_prompts_are_the_same_every_time(model: str) -> None:
    assert list(prompts_for(model)) == list(prompts_for(model))
    assert len(list(prompts_for(model))) == 5


def test_the_model_without_a_name_is_the_demo_model() -> None:
    assert shipped_name(resolve_model(EngineConfig().model)) == "demo"


def test_eval_reaches_its_thresholds(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_command(["eval", "nano", "--samples=6", "--json", "--device=cpu"], environ={})

    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert code == 0, result
    assert re.search(r"2 of 2: phonebook, 6 examples \.\.\. 100\.0% right, \d+\.\d s", shown.err)
    assert result["passed"] is True
    assert result["tasks"].keys() == result["thresholds"].keys() == {"registers", "phonebook"}


@pytest.mark.parametrize(
    "damage", ["state", *(pytest.param(d, marks=pytest.mark.full) for d in ("conv", "kv"))]
)
def test_eval_shows_what_a_damaged_cache_costs(
    damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--task=facts", "--samples=12", f"--damage={damage}"]
    code = run_command(["eval", "demo", *asked, "--json", "--device=cpu"], environ={})

    result = json.loads(capsys.readouterr().out)
    assert code == 1, result
    assert result["passed"] is False
    assert result["damage"] == damage
    for name, before in result["undamaged"].items():
        assert before >= result["thresholds"][name]
    lost = {name: result["undamaged"][name] - result["tasks"][name] for name in result["tasks"]}
    assert max(lost.values()) >= 0.3, result


def test_eval_of_an_unknown_task_names_the_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["eval", "nano", "--task=sums"], environ={}) == EXIT_WRONG_USE
    assert "no task 'sums'; tasks: registers, phonebook" in capsys.readouterr().err


def test_eval_with_damage_on_several_devices_is_wrong_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["eval", "nano", "--damage=state", "--tensor-parallel-size=2", "--device=cpu"]
    assert run_command(asked, environ={}) == EXIT_WRONG_USE
    assert "use tensor_parallel_size 1, or leave damage out" in capsys.readouterr().err


def test_eval_of_a_model_without_tasks_is_wrong_use(
    random_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["eval", str(random_model)], environ={}) == EXIT_WRONG_USE
    assert "tasks with known answers exist for the shipped models" in capsys.readouterr().err


def test_chat_remembers_the_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter([
        "Notes: The code of Ann is 4711. The code of Bob is 0815.\nWhat is the code of Ann?",
        "What is the code of Bob?",
    ])  # fmt: skip
    monkeypatch.setattr("headrace.cli.chat.read_message", lambda: next(said, None))

    assert run_command(["chat", "--model=nano", "--device=cpu"], environ={}) == 0

    shown = capsys.readouterr()
    assert ABILITIES["nano"].can in shown.err
    assert shown.out == "The code of Ann is 4711.\nThe code of Bob is 0815.\n"


@pytest.mark.parametrize("afresh", [False, True], ids=["in_one_conversation", "each_alone"])
@pytest.mark.parametrize("model", ["demo", "nano", "parity"])
def test_chat_answers_the_five_questions_that_it_proposes(
    model: str,
    afresh: bool,  # noqa: FBT001 (a parameter of the test)
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about = ABILITIES[model]
    lines = [line for text in about.ask for line in ((text, "/reset") if afresh else (text,))]
    said = iter(lines)
    monkeypatch.setattr("headrace.cli.chat.read_message", lambda: next(said, None))

    assert run_command(["chat", f"--model={model}", "--device=cpu"], environ={}) == 0

    shown = capsys.readouterr()
    assert len(about.ask) == len(about.answers) == 5
    assert all(question in shown.err for question in about.ask)
    left = shown.out
    for expected in about.answers:
        _, found, left = left.partition(expected)
        assert found, (expected, shown.out)


def test_make_demo_passes() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert run.returncode == 0, run.stdout + run.stderr
    assert "34 concurrent requests" in run.stdout
