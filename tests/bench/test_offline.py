"""Tiny runs of every offline measurement."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from headrace.bench.__main__ import run_command
from headrace.bench.breakdown import _summary
from headrace.bench.engines import Load, open_engine, shape_model, sized
from headrace.bench.measure import Bench, Case
from headrace.bench.rounds import Pace, run_round
from headrace.bench.start import cold_start
from headrace.bench.waits import DeviceWaits
from headrace.config import EngineConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

ROW_KEYS = {
    "case", "batch", "floor_tokens_per_s", "share_of_floor", "prompt_tokens", "cached_tokens",
    "completion_tokens", "time_to_first_token_s", "tokens_per_s", "steps", "draft_tokens",
    "accepted_tokens", "acceptance_by_position", "host_waits_per_step",
}  # fmt: skip
CEILINGS = ["--copy-tb-s", "0.01", "--matmul-tflops", "0.01"]


def measured(tmp_path: Path, shape: Path, *arguments: str) -> dict[str, Any]:
    """Run a bench on the tiny shape and return its JSON."""
    out = tmp_path / "run.json"
    command = [*arguments, "--random-weights", str(shape), "--device", "cpu", "--repeats", "1",
               "--json", str(out), *CEILINGS]  # fmt: skip
    assert run_command(command) == 0
    document: dict[str, Any] = json.loads(out.read_text())
    return document


@pytest.fixture(scope="module")
def engine(shape: Path) -> Engine:
    config = sized(
        EngineConfig(device="cpu", speculative="none"),
        Load(max_batch=2, max_requests=8, max_tokens=200),
    )
    return open_engine(config, model=shape_model(config, shape))


def test_throughput_has_every_key_of_the_interface(tmp_path: Path, shape: Path) -> None:
    run = measured(
        tmp_path, shape, "throughput", "--batch", "1,2", "--prompt-tokens", "5",
        "--output-tokens", "4", "--speculative", "none", "--plot", str(tmp_path / "a.svg"),
    )  # fmt: skip

    assert {"command", "versions", "device", "model", "settings", "rows"} <= set(run)
    assert [row["batch"] for row in run["rows"]] == [1, 2]
    for row in run["rows"]:
        assert set(row) >= ROW_KEYS
        assert row["completion_tokens"] == 4 * row["batch"]
        assert row["share_of_floor"] == pytest.approx(
            row["tokens_per_s"] / row["floor_tokens_per_s"]
        )
    assert run["ceilings"]["is_measured"] is False
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_forced_acceptance_is_reached_and_said(
    tmp_path: Path, shape: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = measured(
        tmp_path, shape, "throughput", "--batch", "2", "--prompt-tokens", "5",
        "--output-tokens", "33", "--speculative", "mtp:3", "--forced-acceptance", "1,1,1",
    )  # fmt: skip

    (row,) = run["rows"]
    assert row["forced_acceptance"] == [1.0, 1.0, 1.0]
    assert row["acceptance_by_position"] == [1.0, 1.0, 1.0]
    assert row["tokens_per_step"] == 4.0
    assert row["floor_parts_ms"]["drafts"] > 0
    assert "FORCED" in capsys.readouterr().out


def test_real_acceptance_of_random_weights_is_not_forced(tmp_path: Path, shape: Path) -> None:
    run = measured(
        tmp_path, shape, "throughput", "--prompt-tokens", "5", "--output-tokens", "9",
        "--speculative", "mtp:2",
    )  # fmt: skip

    (row,) = run["rows"]
    assert "forced_acceptance" not in row
    assert row["draft_tokens"] > 0


def test_forced_acceptance_must_fit_the_drafts(shape: Path) -> None:
    config = EngineConfig(device="cpu", speculative="mtp:1", max_model_len=64, max_num_seqs=1)
    with pytest.raises(ConfigError, match="has 3 places but speculation proposes 1"):
        open_engine(config, model=shape_model(config, shape), shares=(0.8, 0.64, 0.512))


def test_latency_times_every_token_of_an_open_load(tmp_path: Path, shape: Path) -> None:
    run = measured(
        tmp_path, shape, "latency", "--batch", "2", "--prompt-tokens", "5", "--output-tokens",
        "4", "--speculative", "none", "--arrival-rate", "200", "--requests", "3",
        "--concurrency", "2",
    )  # fmt: skip

    (row,) = run["rows"]
    assert row["requests"] == 3
    assert set(row["inter_token_s"]) == {"p50", "p90", "p99"}
    assert row["request_s"]["p99"] >= row["time_to_first_token"]["p50"]


def test_breakdown_names_launches_and_writes_a_trace(tmp_path: Path, shape: Path) -> None:
    trace = tmp_path / "trace.json"
    run = measured(
        tmp_path, shape, "throughput", "--prompt-tokens", "5", "--output-tokens", "3",
        "--speculative", "none", "--breakdown", "2", "--trace", str(trace),
    )  # fmt: skip

    found = run["rows"][0]["breakdown"]
    assert found["steps"] == 2
    assert {"forward", "verify", "advance"} <= {one["name"] for one in found["launches"]}
    assert json.loads(trace.read_text())["traceEvents"]


def test_breakdown_of_a_device_counts_kernels_once_and_overlaps_not_twice() -> None:
    def event(name: str, start: float, end: float, *, on_device: bool = True) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            device_type=SimpleNamespace(name="CUDA" if on_device else "CPU"),
            device_time_total=0.0 if on_device else 30.0,
            cpu_time_total=50.0,
            self_cpu_time_total=5.0,
            time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
        )

    found = _summary(
        [
            event("launch: forward", 0, 50, on_device=False),
            event("launch: forward", 0, 40),
            event("kernel", 0, 20),
            event("kernel", 10, 30),
            event("aten::mm", 0, 5, on_device=False),
        ],
        steps=2,
        seconds=60e-6,
        on_gpu=True,
    )

    assert found["device_busy_share"] == pytest.approx(0.5)
    assert [(one["name"], one["ms_per_step"]) for one in found["kernels"]] == [("kernel", 0.02)]
    assert found["launches"][0]["ms_per_step"] == pytest.approx(0.015)


def test_shared_prefix_is_cached_before_the_clock_starts(engine: Engine) -> None:
    case = Case(name="cached", batch=2, prompt_tokens=8, output_tokens=1, shared_prefix=128,
                repeats=1)  # fmt: skip
    row = Bench(engine).prefill(case)

    assert row["cached_tokens"] == 2 * 128
    assert row["prompt_tokens"] == 2 * 136


def test_rounds_do_not_help_each_other(engine: Engine) -> None:
    case = Case(name="decode", batch=2, prompt_tokens=130, output_tokens=3, repeats=2)
    row = Bench(engine).decode(case)

    assert row["cached_tokens"] == 0
    assert len(row["tokens_per_s_runs"]) == 2


def test_nothing_is_left_in_the_engine_when_time_is_up(engine: Engine) -> None:
    result = run_round(
        engine, [[1, 2, 3]] * 4, 100, pace=Pace(deadline_s=time.perf_counter() + 0.01)
    )

    assert not result.is_complete
    assert not engine.has_work()
    bench = Bench(engine, deadline_s=time.perf_counter())
    row = bench.decode(Case(name="late", batch=1, prompt_tokens=4, output_tokens=4))
    assert row["tokens_per_s"] is None
    assert "time was up" in row["error"]


def test_concurrency_is_a_limit(engine: Engine) -> None:
    run = run_round(engine, [[1, 2, 3]] * 5, 4, pace=Pace(concurrency=1, is_streamed=True))

    assert run.completion_tokens == 20
    assert len(run.inter_token_s) == 15


def test_device_waits_are_steps_enqueued_after_the_last_one_ended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On the CPU a recorded event has always happened, so every step comes late.
    monkeypatch.setattr(engine.parts.runtime, "backend", "cuda")
    run = run_round(engine, [[1, 2, 3]], 6)

    assert run.steady_steps > 0
    assert run.device_waits == run.steady_steps
    assert "execute" not in vars(engine.worker)


def test_waits_are_unknown_where_everything_is_done_at_once(engine: Engine) -> None:
    with DeviceWaits(engine) as waits:
        pass

    assert waits.num_waits is None


def test_process_start_to_first_token(tmp_path: Path, shape: Path) -> None:
    run = measured(
        tmp_path, shape, "throughput", "--prompt-tokens", "4", "--output-tokens", "2",
        "--speculative", "none", "--cold-start", "--max-num-seqs", "2",
    )  # fmt: skip

    row = run["rows"][0]
    assert row["case"] == "process start to first token"
    assert row["time_to_first_token_s"] > sum(row["stages_s"].values()) > 0


def test_a_child_that_fails_says_why(
    tmp_path: Path, shape: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such device >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))

    row = cold_start(EngineConfig(device="cpu"), shape=shape, prompt_tokens=4)

    assert row["time_to_first_token_s"] is None
    assert "no such device" in row["error"]


_ALONE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ImportError(f"{name} is not installed here")
REFUSED = set(sys.argv.pop(1).split(","))
sys.meta_path.insert(0, Refuse())
from headrace.bench.__main__ import run_command
sys.exit(run_command(sys.argv[1:]))
"""


def test_offline_benches_need_torch_triton_and_numpy_only(tmp_path: Path) -> None:
    """The shipped model, in a process where none of the other dependencies can be imported."""
    file = Path(__file__).parents[2] / "pyproject.toml"
    dependencies = tomllib.loads(file.read_text())["project"]["dependencies"]
    needed = [re.split(r"[<>=\[; ]", name)[0] for name in dependencies]
    others = {name.replace("-", "_") for name in needed} - {"torch", "triton", "numpy"}
    refused = ",".join(others | {"yaml", "safetensors", "transformers"})
    file = tmp_path / "rows.json"
    subprocess.run(
        [
            sys.executable, "-c", _ALONE, refused, "throughput", "--model", "nano",
            "--batch", "1,2", "--prompt-tokens", "8", "--output-tokens", "9", "--repeats", "1",
            "--json", str(file), "--plot", str(tmp_path / "plot.svg"),
        ],
        check=True, capture_output=True, timeout=200,
    )
    assert [row["batch"] for row in json.loads(file.read_text())["rows"]] == [1, 2]
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")
