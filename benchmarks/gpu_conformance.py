"""The engine on a real device: everything on at once, against plain synchronous decoding.

    python benchmarks/gpu_conformance.py [--requests 512] [--mixed-seconds 60] [--json FILE]

Seven parts, some lines of JSON each:

* conformance: both layouts and both schemes, with PyTorch operations and with fused kernels,
  speculation, asynchronous scheduling and prefix cache on, at least 500 requests at once; accuracy
  of the shipped model's tasks with everything on and off, and where outputs differ from the plain
  run (float32, so every difference is a rounding).
* demo: accuracy of the demo model's tasks with everything on and off, and what differs.
* deterministic: the same with `deterministic`, in bfloat16 and float32, with preemptions: no
  request may differ from one that runs alone; and what it costs.
* bfloat16: how often kernels and PyTorch operations first differ, beside how often PyTorch
  operations differ with another batch size.
* races: the second founding fault as a kernel with more programs than the device runs at once,
  next to its correct twin; how many of the runs give a wrong value.
* mixed: a load of new, finishing, aborted and preempted requests on the checked device
  (`cuda_checked`), with delays before copies and after events.
* speed: tokens per second of the runs above.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.llm import LLM
from headrace.engine.load import load_parts
from headrace.evals import suite
from headrace.sampling_params import SamplingParams

NUM_TOKENS = 24
PARTS = ("races", "conformance", "demo", "deterministic", "bfloat16", "mixed")
LAYOUTS: tuple[Literal["slots", "compact"], ...] = ("slots", "compact")
SCHEMES: tuple[Literal["columns", "replay"], ...] = ("columns", "replay")
ALONE = 48
"""Requests that run one at a time."""

MAX_LIVE = 40
ABORT_CHANCE = 0.1
PREEMPT_CHANCE = 0.03


def examples(count: int) -> list[Any]:
    """Registers and phone-book questions, half and half, by fresh seeds."""
    chosen = [suite("nano")[name] for name in ("registers", "phonebook")]
    first = random.SystemRandom().randrange(10**6, 10**9)
    return [chosen[i % 2].generate(first + i) for i in range(count)]


def run(
    config: EngineConfig, asked: list[Any], most_tokens: list[int] | None = None
) -> dict[str, Any]:
    """Answer all examples together, each in so many tokens at most, `NUM_TOKENS` by default.

    Returns:
        Tokens, accuracy and figures.
    """
    llm = LLM(config=config)
    prompts = [
        llm.chat_prompt(example.messages, tools=example.tools or None) if example.messages
        else llm.get_tokenizer().encode(example.prompt)
        for example in asked
    ]
    most_tokens = most_tokens or [NUM_TOKENS] * len(asked)
    params = [SamplingParams(temperature=0.0, max_tokens=most) for most in most_tokens]
    llm.generate(prompts[:4], params[:4])
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    stats = llm.stats()
    right = [e.is_right(o.outputs[0].text) for e, o in zip(asked, outputs, strict=True)]
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "accuracy": sum(right) / len(right),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(generated / seconds, 1),
        "steps": stats["steps"],
        "acceptance_by_position": stats["acceptance_by_position"],
        "hit_tokens": stats["prefix_cache"]["hit_tokens"],
        "preemptions": stats["preemptions"],
        "host_waits_per_step": round(stats["host_waits_per_step"], 2),
        "early_share": round(stats["early_enqueues"] / max(1, stats["steps"]), 3),
    }


def conformance(device: str, count: int) -> list[dict[str, Any]]:
    """Everything on, against everything off."""
    asked = examples(count)
    plain = EngineConfig(
        model="nano", device=device, dtype="float32", speculative="none", prefix_cache="none",  # type: ignore[arg-type]
        async_scheduling=False, state_scheme="columns", max_num_seqs=256, max_model_len=2560,
        kernels="torch",
    )
    baseline = run(plain, asked)
    rows = [{"part": "conformance", "case": "plain", **_without_tokens(baseline)}]
    for kernels, layout, scheme in product(kernels_of(device), LAYOUTS, SCHEMES):
        config = replace(
            plain, speculative="mtp:3", prefix_cache="align", async_scheduling=True,
            batch_layout=layout, state_scheme=scheme, kernels=kernels,
        )
        result = run(config, asked)
        rows.append(
            {
                "part": "conformance",
                "case": f"{kernels}, {layout}, {scheme}, mtp:3, align, async",
                **_without_tokens(result),
                **differences(baseline, result),
            }
        )
    return rows


def demo(device: str, count: int) -> list[dict[str, Any]]:
    """The demo model's tasks, all together, with everything off and on."""
    tasks = list(suite("demo").values())
    first = random.SystemRandom().randrange(10**6, 10**9)
    each = max(1, count // len(tasks))
    asked = [task.generate(first + index) for task in tasks for index in range(each)]
    most_tokens = [task.max_tokens for task in tasks for _ in range(each)]
    plain = EngineConfig(
        model="demo", device=device, dtype="float32", speculative="none",  # type: ignore[arg-type]
        prefix_cache="none",
        async_scheduling=False, state_scheme="columns", max_num_seqs=256, max_model_len=8192,
        kernels="torch",
    )
    baseline = run(plain, asked, most_tokens)
    rows = [{"part": "demo", "case": "plain", **_without_tokens(baseline)}]
    for layout in LAYOUTS:
        config = replace(
            plain, speculative="mtp:3", prefix_cache="align", async_scheduling=True,
            batch_layout=layout, state_scheme="auto", kernels="auto",
        )
        result = run(config, asked, most_tokens)
        figures = {**_without_tokens(result), **differences(baseline, result)}
        rows.append({"part": "demo", "case": f"{layout}, everything on", **figures})
    return rows


def deterministic(device: str, count: int) -> list[dict[str, Any]]:
    """Everything on against one request at a time, bit by bit in all that tokens show."""
    asked = examples(count)
    rows = []
    for dtype in ("bfloat16", "float32"):
        plain = EngineConfig(
            model="nano", device=device, dtype=dtype, speculative="none", prefix_cache="none",  # type: ignore[arg-type]
            async_scheduling=False, state_scheme="columns", max_num_seqs=256, max_model_len=2560,
            kernels="triton", graphs="off", deterministic=True,
        )
        everything = replace(
            plain, speculative="mtp:3", prefix_cache="align", async_scheduling=True, graphs="auto"
        )
        tight = replace(everything, batch_layout="compact", num_kv_blocks=800)
        cases = {
            "all at once": plain,
            "everything on, slots, columns": everything,
            "everything on, slots, replay": replace(everything, state_scheme="replay"),
            "everything on, compact, columns, tight": tight,
            "everything on, compact, replay, tight, chunks of 64": replace(
                tight, state_scheme="replay", max_num_batched_tokens=1088
            ),
            "not deterministic": replace(everything, deterministic=False),
        }
        alone = run(replace(plain, max_num_seqs=1), asked[:ALONE])
        rows.append(_deterministic_row(dtype, "alone", alone))
        together: dict[str, Any] | None = None
        for case, config in cases.items():
            result = run(config, asked)
            first = {"tokens": result["tokens"][:ALONE]}
            row = _deterministic_row(dtype, case, result)
            row["of_those_alone_differ"] = differences(alone, first)["requests_that_differ"]
            together = together or result
            rows.append(row | differences(together, result))
    return rows


def _deterministic_row(dtype: str, case: str, result: dict[str, Any]) -> dict[str, Any]:
    return {"part": "deterministic", "dtype": dtype, "case": case, **_without_tokens(result)}


def bfloat16(device: str, count: int) -> list[dict[str, Any]]:
    """How often runs in bfloat16 differ from one of PyTorch operations with everything at once."""
    asked = examples(count)
    plain = EngineConfig(
        model="nano", device=device, dtype="bfloat16", speculative="none", prefix_cache="none",  # type: ignore[arg-type]
        max_num_seqs=256, max_model_len=2560, kernels="torch",
    )
    baseline = run(plain, asked)
    cases = {"torch, 3 at once": replace(plain, max_num_seqs=3)}
    for kernels, scheme in product(kernels_of(device), SCHEMES):
        for state_dtype in ("float32", "bfloat16"):
            cases[f"{kernels}, {scheme}, state in {state_dtype}"] = replace(
                plain, kernels=kernels, state_scheme=scheme, state_dtype=state_dtype
            )
    rows = []
    for case, config in cases.items():
        result = run(config, asked)
        figures = {**_without_tokens(result), **differences(baseline, result)}
        rows.append({"part": "bfloat16", "case": case, **figures})
    return rows


def kernels_of(device: str) -> tuple[Literal["torch", "triton"], ...]:
    """What can compute generated tokens on a device."""
    return ("torch", "triton") if device == "cuda" else ("torch",)


def differences(baseline: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """How many requests of two runs differ, and per how many tokens one does for the first time."""
    pairs = list(zip(baseline["tokens"], result["tokens"], strict=True))
    differ = sum(a != b for a, b in pairs)
    total = sum(len(tokens) for tokens, _ in pairs)
    return {
        "requests": len(pairs),
        "requests_that_differ": differ,
        "first_divergences_per_1000_tokens": round(1000 * differ / total, 3),
    }


def _without_tokens(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "tokens"}


def races(rounds: int = 30) -> dict[str, Any]:
    """The founding kernel fault and its twin, with far more programs than one wave."""
    # Triton is imported where there is a device only.
    from headrace.check.racy_kernels import save_and_reset_kernel  # noqa: PLC0415
    from headrace.rt.kernels import launch_kernel  # noqa: PLC0415

    rows, layers = 512, 64
    wrong = {}
    for name, fault in (("faulty", True), ("shipped form", False)):
        bad = 0
        for _ in range(rounds):
            accepted = torch.randint(1, 5, (rows,), device="cuda", dtype=torch.int32)
            snapshot = accepted.clone()
            state = torch.randint(0, 1000, (rows, layers), device="cuda", dtype=torch.int32)
            out = torch.full_like(state, -1)
            launch_kernel(
                save_and_reset_kernel, (rows, layers), accepted, snapshot, state, out,
                LAYERS=layers, FAULT=fault,
            )
            torch.cuda.synchronize()
            expected = torch.where(
                (snapshot > 1)[:, None], state + snapshot[:, None], torch.full_like(state, -1)
            )
            bad += bool((out != expected).any())
        wrong[name] = bad
    return {
        "part": "races", "programs": rows * layers, "rounds": rounds,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "rounds_with_wrong_values": wrong,
    }


def mixed(backend: str, device: str, seconds: float) -> dict[str, Any]:
    """A mixed load until the time is up; every finished answer is compared with the plain run."""
    asked = examples(96)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    plain = LLM(
        model="nano", device=device, dtype="float32", speculative="none", prefix_cache="none",
        async_scheduling=False, max_model_len=2560, kernels="torch",
    )
    prompts = [plain.chat_prompt(example.messages) for example in asked]
    truth = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    reports: list[str] = []
    totals = {"requests": 0, "aborted": 0, "differ": 0, "steps": 0, "preemptions": 0}
    rng = random.Random()  # noqa: S311 - a load, no secret
    begin = time.monotonic()
    cases = list(product(kernels_of(device), LAYOUTS, SCHEMES))
    for kernels, layout, scheme in cases:
        config = EngineConfig(
            model="nano", device=device, dtype="float32", speculative="mtp:3",  # type: ignore[arg-type]
            batch_layout=layout, state_scheme=scheme, max_num_seqs=24, max_model_len=2560,  # type: ignore[arg-type]
            num_kv_blocks=1600, num_state_blocks=160, rt_backend=backend, kernels=kernels,
        )
        engine = Engine(config, parts=load_parts(config))
        end = time.monotonic() + seconds / len(cases)
        live: dict[str, int] = {}
        number = 0
        while time.monotonic() < end or engine.has_work():
            while time.monotonic() < end and len(live) < MAX_LIVE:
                which = rng.randrange(len(prompts))
                number += 1
                engine.add_request(str(number), prompts[which], params)
                live[str(number)] = which
            if rng.random() < ABORT_CHANCE and live:
                gone = rng.choice(list(live))
                engine.abort(gone)
                live.pop(gone)
                totals["aborted"] += 1
            if rng.random() < PREEMPT_CHANCE and engine.scheduler.running:
                engine.scheduler.preempt(engine.scheduler.running[-1])
            for output in engine.step():
                if output.finished and output.request_id in live:
                    which = live.pop(output.request_id)
                    totals["requests"] += 1
                    totals["differ"] += output.outputs[0].token_ids != truth[which]
        engine.scheduler.check()
        runtime = engine.parts.runtime
        runtime.finish()
        totals["steps"] += engine.worker.num_steps
        totals["preemptions"] += engine.scheduler.num_preemptions
        reports += [str(report) for report in runtime.reports]
    return {
        "part": "mixed", "backend": backend, "seconds": round(time.monotonic() - begin, 1),
        **totals, "reports": len(reports), "first_report": reports[0] if reports else None,
    }


def main() -> None:
    """Run the parts and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--mixed-seconds", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        if given.json:
            given.json.write_text(
                json.dumps(
                    {
                        "command": " ".join(sys.argv),
                        "versions": {
                            "torch": torch.__version__,
                            "python": platform.python_version(),
                        },
                        "device": torch.cuda.get_device_name() if on_gpu else platform.processor(),
                        "rows": rows,
                    },
                    indent=1,
                )
                + "\n"
            )

    parts = [given.only] if given.only else PARTS
    if "races" in parts and on_gpu:
        report(races())
    for part, measure in (
        ("conformance", conformance),
        ("demo", demo),
        ("deterministic", deterministic),
        ("bfloat16", bfloat16),
    ):
        for row in measure(given.device, given.requests) if part in parts else ():
            report(row)
    if "mixed" in parts:
        report(mixed("cuda_checked" if on_gpu else "sim", given.device, given.mixed_seconds))


if __name__ == "__main__":
    main()
