"""`headrace plan` against arithmetic done apart, and against runs that were measured."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.plan import CONTEXTS, Gpu, Plan, Share, find_gpu, make_plan
from headrace.cli.main import EXIT_FAILURE, EXIT_WRONG_USE, run_command
from headrace.config import EngineConfig
from headrace.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "benchmarks" / "shapes"
RESULTS = ROOT / "benchmarks" / "results" / "h200-quick.json"
H200 = find_gpu("h200")
BAND = 0.15
"""How far a prediction may be from the run it is held against, as a share."""
KERNELS = {"kernels": "triton"}
SIZES = ("0.8b", "4b", "9b", "35b-a3b")


def shape(size: str) -> str:
    return str(SHAPES / f"qwen3.5-{size}-text.json")


def plan_of(size: str, **options: Any) -> Plan:  # noqa: ANN401 - settings of several types
    given = {name: options.pop(name) for name in ("gpus", "context", "acceptance")
             if name in options}  # fmt: skip
    return make_plan(EngineConfig(model=shape(size), **options), H200, **given)


def by_hand(size: str) -> dict[str, int]:
    """Count parameters and bytes from the published sizes."""
    c = json.loads(Path(shape(size)).read_text("utf-8"))
    hidden, keys = c["hidden_size"], c["linear_num_key_heads"] * c["linear_key_head_dim"]
    heads = c["linear_num_value_heads"]
    values = heads * c["linear_value_head_dim"]
    channels = 2 * keys + values
    delta = (
        hidden * (2 * keys + 2 * values) + hidden * 2 * heads + 4 * channels + 2 * heads
        + c["linear_value_head_dim"] + values * hidden
    )  # fmt: skip
    wide, narrow = (c[f"num_{one}_heads"] * c["head_dim"] for one in ("attention", "key_value"))
    attention = hidden * (2 * wide + 2 * narrow) + wide * hidden + 2 * c["head_dim"]
    experts, expert = c["num_experts"], 3 * hidden * c["moe_intermediate_size"]
    mlp = 3 * hidden * c["intermediate_size"]
    if experts:
        shared = 3 * hidden * c["shared_expert_intermediate_size"] + hidden
        mlp = experts * expert + shared + experts * hidden
    layers = c["num_hidden_layers"]
    of_attention = layers // 4
    body = layers * (mlp + 2 * hidden) + of_attention * attention
    body += (layers - of_attention) * delta + hidden
    mtp = attention + mlp + 2 * hidden + 2 * hidden * hidden + 3 * hidden
    tables = c["vocab_size"] * hidden * (1 if c["tie_word_embeddings"] else 2)
    return {
        "parameters": body + mtp + tables,
        # The MTP layer has keys and values too.
        "kv": (of_attention + 1) * 2 * narrow * 2,
        "window": (layers - of_attention) * 3 * channels * 2,
        "state": (layers - of_attention) * values * c["linear_key_head_dim"],
        "hidden": hidden,
        "vocab": c["vocab_size"],
    }


def most_by_hand(counts: dict[str, int], itemsize: int, context: int) -> int:
    """Most sequences that an H200 holds with `columns`, no drafts and the default settings."""
    total = int(139.8 * 2**30)
    state = counts["state"] * itemsize + counts["window"]
    block = 16 * (counts["kv"] + 8)
    n = 0
    while True:
        n += 1
        # A ninth of 90 % is not ours, nor what the driver took; weights and one step's activations
        # come before the pools; captured logits are in bfloat16 and float32.
        budget = int(0.9 * total) - 2**30 - 2 * counts["parameters"] - 8192 * counts["hidden"] * 64
        budget -= n * counts["vocab"] * (2 + 4)
        # Three for each sequence and two checkpoints, or what half of the memory holds.
        states = min(1 + 5 * n, budget // 2 // state)
        blocks = (budget - states * state) // block
        needed = n * (-(-context // 16) + 1) + 1
        if 3 * n + 1 > states or needed > blocks:
            return n - 1


@pytest.mark.parametrize("size", SIZES)
def test_memory_is_that_counted_by_hand(size: str) -> None:
    counts, found = by_hand(size), plan_of(size, **KERNELS)

    assert found.parameters == counts["parameters"]
    assert found.weight_bytes == 2 * counts["parameters"]
    assert found.kv_bytes_per_token == counts["kv"]
    assert [state.state_dtype for state in found.states] == ["float32", "bfloat16"]
    for state, itemsize in zip(found.states, (4, 2), strict=True):
        one = counts["state"] * itemsize + counts["window"]
        assert state.state_bytes_per_sequence == 3 * one
        assert [fit.context_tokens for fit in state.fits] == list(CONTEXTS)
        for fit in state.fits:
            assert fit.sequences == most_by_hand(counts, itemsize, fit.context_tokens) > 0


def test_floor_is_bytes_over_speed() -> None:
    """Batch 1 of the 4B shape with float32 states: weights once, states read and written."""
    counts = by_hand("4b")
    hidden = counts["hidden"]
    mtp = hidden * (2 * 4096 + 2 * 1024) + 4096 * hidden + 512 + 3 * hidden * 9216
    mtp += 5 * hidden + 2 * hidden * hidden
    kv = counts["kv"] * 8 // 9  # The MTP layer's are not read.
    moved = 2 * (counts["parameters"] - mtp) + 2 * (4 * counts["state"] + counts["window"])
    seconds = (moved + 1024 * kv) / 4.23e12
    speed = plan_of("4b", **KERNELS).states[0].decode[0]

    assert speed.batch == 1
    assert speed.floor_tokens_per_s == pytest.approx(1 / seconds, rel=1e-6)


def measured() -> list[tuple[str, dict[str, Any], float]]:
    """Rows of the runs that shares are taken from, with tok/s; the profiled step's, if there is."""
    runs = json.loads(RESULTS.read_text("utf-8"))["runs"]
    found = []
    for run, group in ((runs[1], "plain"), (runs[2], "forced")):
        steps = {p["batch"]: p["step_ms"] for p in run["profiles"] if p["group"] == group}
        for row in run["rows"]:
            if row["group"] == group:
                rate = row["tokens_per_s"]
                if row["batch"] in steps:
                    rate = 1e3 * row["batch"] * row["tokens_per_step"] / steps[row["batch"]]
                found.append((f"{group} {row['batch']}", row, rate))
    assert len(found) == 6
    return found


@pytest.mark.parametrize(
    ("row", "rate"), [pytest.param(row, rate, id=name) for name, row, rate in measured()]
)
def test_predictions_are_near_what_was_measured(row: dict[str, Any], rate: float) -> None:
    kept = row["acceptance_by_position"]
    options = {"speculative": f"mtp:{len(kept)}", "acceptance": tuple(kept)} if kept else {}
    context = row["request"]["prompt_tokens"] + row["request"]["output_tokens"] // 2
    found = plan_of("4b", state_dtype="bfloat16", context=context, **KERNELS, **options)

    (state,) = found.states
    assert state.state_scheme == row["engine"]["state_scheme"]
    (speed,) = [one for one in state.decode if one.batch == row["batch"]]
    assert speed.fits
    # Products took 772 to 808 TFLOP/s from run to run, and those bound the largest batch.
    assert speed.floor_tokens_per_s == pytest.approx(row["floor_tokens_per_s"], rel=0.04)
    assert speed.predicted_tokens_per_s == pytest.approx(rate, rel=BAND)


def test_a_batch_that_was_not_measured_is_predicted_from_those_around_it() -> None:
    """Batch 32 of the plain rows, had only 1 and 256 been measured."""
    shares = json.loads((ROOT / "src/headrace/bench/shares.json").read_text("utf-8"))
    by_batch = {int(b): s for b, s in shares["groups"][0]["by_batch"].items()}
    left_out = by_batch.pop(32)
    share = Share(
        shape="", state_dtype="", state_scheme="", num_drafts=0, by_batch=by_batch
    )

    assert share.at(32) == pytest.approx(left_out, rel=BAND)
    assert share.at(1) == by_batch[1]
    assert share.at(4096) == by_batch[256]
    low, high = sorted((by_batch[1], by_batch[256]))
    assert low <= share.at(8) <= high


def test_shares_are_those_of_their_source() -> None:
    kept = json.loads((ROOT / "src/headrace/bench/shares.json").read_text("utf-8"))
    file, *groups = kept["source"].split()
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        tool: Any = importlib.import_module("measured_shares")
    finally:
        sys.path.remove(str(ROOT / "tools"))

    assert tool.shares_of(ROOT / file, groups) == kept


def test_h200_is_as_fast_as_its_source_says() -> None:
    ceilings = json.loads(RESULTS.read_text("utf-8"))["runs"][1]["ceilings"]
    assert pytest.approx(ceilings["copy_tb_s"], rel=1e-3) == H200.copy_tb_s
    assert pytest.approx(ceilings["matmul_tflops"], rel=1e-3) == H200.matmul_tflops


@pytest.mark.parametrize(
    ("model", "settings"), [("35b-a3b", KERNELS), ("4b", {"kernels": "torch"})]
)
def test_what_was_not_measured_has_a_floor_and_no_prediction(
    model: str, settings: dict[str, Any]
) -> None:
    found = plan_of(model, **settings)

    assert "no prediction" in found.notes[0]
    for state in found.states:
        assert all(speed.floor_tokens_per_s > 0 for speed in state.decode)
        assert all(speed.predicted_tokens_per_s is None for speed in state.decode)


def test_a_model_that_fits_nowhere_says_why_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.json"
    small.write_text('{"memory_gib": 12, "copy_tb_s": 1, "matmul_tflops": 100}')
    command = ["plan", shape("9b"), "--gpu", str(small)]
    assert run_command([*command, "--json"], environ={}) == EXIT_FAILURE
    values = json.loads(capsys.readouterr().out)
    assert "the weights take" in values["obstacle"]
    assert values["states"] == []
    assert run_command(command, environ={}) == EXIT_FAILURE
    assert "does not fit: the weights take" in " ".join(capsys.readouterr().out.split())


def test_a_file_describes_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"memory_gib": 24, "copy_tb_s": 0.8, "matmul_tflops": 70}')
    assert run_command(["plan", "nano", "--gpu", str(file), "--json"], environ={}) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["gpu"] == {
        "name": "mine", "memory_gib": 24.0, "copy_tb_s": 0.8, "matmul_tflops": 70.0,
        "source": str(file),
    }  # fmt: skip
    assert values["states"][0]["fits"][0]["sequences"] > 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "found list"),
        ('{"memory_gib": 24}', "memory_gib, copy_tb_s, matmul_tflops"),
        ('{"memory_gib": 24, "copy_tb_s": 1, "matmul_tflops": 7, "cores": 3}', "'cores'"),
        ('{"memory_gib": 0, "copy_tb_s": 1, "matmul_tflops": 7}', "memory_gib is 0"),
        ('{"memory_gib": true, "copy_tb_s": 1, "matmul_tflops": 7}', "memory_gib is True"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_files_that_describe_no_gpu_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        find_gpu(str(file))
    assert message in str(refused.value)


def test_unknown_gpus_are_answered_with_those_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "nano", "--gpu", "b7"], environ={}) == EXIT_WRONG_USE
    assert "gpu 'b7' is not known; choose h200, h100, a100" in capsys.readouterr().err
    assert isinstance(find_gpu("H100"), Gpu)


def test_drafts_want_their_acceptance() -> None:
    with pytest.raises(ConfigError, match="acceptance has 0 places but a step has 3 drafts"):
        plan_of("4b", speculative="mtp:3", **KERNELS)


def test_the_table_says_what_is_floor_and_what_prediction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["plan", shape("4b"), "--gpus=2", "--kernels=triton"]
    assert run_command(command, environ={"COLUMNS": "200"}) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "2 x NVIDIA H200" in text
    for phrase in ("float32: floor", "prediction", "tokens/s of each GPU", "they are taken over"):
        assert phrase in text
