"""The command's promises, on the toy engine."""

import json
from pathlib import Path

import pytest

from headrace import rt
from headrace.check import ToyTarget, load_mutants, run_check
from headrace.check.runs import Exercise, run_seed, schedule_seed
from headrace.check.toy.engine import ToyEngine, wrong_requests
from headrace.check.toy.faults import run_once
from headrace.check.toy.host_mutants import CountsLandInCompactedArray
from headrace.check.toy.workload import generate
from headrace.errors import ConfigError

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
def test_correct_engine_is_clean_at_every_depth(depth: int, policy: rt.Policy) -> None:
    workload = generate(depth)
    runtime = rt.Runtime.create("sim", seed=depth, policy=policy)
    answers = ToyEngine(runtime, workload, depth=depth).run()
    assert wrong_requests(workload, answers) == []
    assert runtime.reports == ()


@pytest.mark.parametrize("seed", [47, 95, 161, 227])
def test_slot_waits_for_a_checkpoint_enqueued_after_its_last_step(seed: int) -> None:
    exercise = Exercise()
    run_seed(ToyTarget(), seed, exercise)
    assert exercise.is_clean


def test_clean_check_exits_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(seeds=3, targets=[ToyTarget()]) == 0
    text = capsys.readouterr().out
    assert "toy: 3 seeds" in text
    assert "not exercised, so nothing is known of them" in text


def test_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(seeds=2, json=True, targets=[ToyTarget()]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"seeds", "steps", "accesses", "pairs", "reports"} <= set(report)
    assert report["seeds"] == 2
    assert report["accesses"] > 60 * report["steps"]
    assert ["recurrent_state", "forward with checkpoint"] in report["pairs"]


class FaultyTarget(ToyTarget):
    """The first founding fault as a target."""

    name = "faulty"

    def run(self, runtime: rt.Runtime, seed: int) -> list[str]:
        workload = generate(seed)
        engine = CountsLandInCompactedArray(runtime, workload, is_faulty=True)
        return [str(index) for index in wrong_requests(workload, engine.run())]


def test_report_ends_in_one_and_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "run.html"
    assert run_check(seed=3, html=page, targets=[FaultyTarget()]) == 1
    assert "live counts" in capsys.readouterr().out
    drawn = page.read_text(encoding="utf-8")
    assert drawn.count('class="marked"') == 2
    assert "stream d2h" in drawn


class BrokenTarget(FaultyTarget):
    """A race whose wrong value breaks the engine: the toy's is followed by an error."""

    name = "broken"

    def run(self, runtime: rt.Runtime, seed: int) -> list[str]:
        super().run(runtime, seed)
        return [str([0][len(runtime.reports)])]


def test_run_that_an_error_ends_keeps_its_reports_and_lets_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_check(seeds=2, json=True, targets=[BrokenTarget()]) == 1
    reports = json.loads(capsys.readouterr().out)["reports"]
    assert {report["seed"] for report in reports if report.get("buffer") == "live counts"} == {
        schedule_seed(0), schedule_seed(1),
    }
    ended = [report["detail"] for report in reports if report["kind"] == "ENDED-EARLY"]
    assert [text.split(":")[0] for text in ended] == ["seed 0", "seed 1"]
    assert "IndexError at src/headrace/check/test_check.py:" in ended[0]


class BlindTarget(ToyTarget):
    """Nothing of it can be seen."""

    name = "blind"

    def run(self, runtime: rt.Runtime, seed: int) -> list[str]:
        del seed
        runtime.frames("step", depth=1, inputs={}, outputs={}).next()
        return []


def test_run_out_of_sight_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(seeds=1, targets=[BlindTarget()]) == 1
    assert "TOO-FEW-ACCESSES seed 0" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(6))
def test_founding_fault_is_reported_for_every_seed(seed: int) -> None:
    run = run_once(CountsLandInCompactedArray, seed, "random", is_faulty=True, checks=True)
    assert any("live counts" in report.buffer for report in run.reports)


def test_one_seed_is_one_report_byte_for_byte(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert run_check(mutant="landing-read-before-its-event", seed=5, json=True) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    (row,) = json.loads(texts[0])["mutants"]
    assert row["killed"]
    assert "host_mutants.py" in row["site_a"]
    assert "host_mutants.py" in row["site_b"]
    runs = [Exercise(), Exercise()]
    for exercise in runs:
        run_seed(FaultyTarget(), 9, exercise)
    assert [str(one) for one in runs[0].reports] == [str(one) for one in runs[1].reports]


def test_unknown_mutant_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'none-such' is unknown"):
        run_check(mutant="none-such")


def test_catalogue_is_large_enough() -> None:
    mutants = load_mutants()
    assert len({one.name for one in mutants}) >= 38
    assert {"H", "R", "V", "C"} <= {one.letter for one in mutants}


@pytest.mark.parametrize(
    "name",
    [
        "state-overwritten-while-checkpointed",
        "two-rows-with-one-slot",
        "graph-replayed-after-a-resize",
        "landing-written-through-a-raw-view",
        "current-row-map",
    ],
)
def test_mutant_is_killed_with_a_clean_twin_and_a_visible_effect(name: str) -> None:
    (mutant,) = [one for one in load_mutants() if one.name == name]
    outcome = mutant.run(0)
    assert outcome.killed
    assert outcome.twin_clean
    assert outcome.effect_shown
