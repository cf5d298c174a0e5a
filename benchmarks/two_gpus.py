"""One model on two GPUs beside one: the same answers, speed of decoding, share of collectives.

    python benchmarks/two_gpus.py [--shape benchmarks/shapes/qwen3.5-9b-text.json] [--json FILE]

Three parts, one line of JSON each:

* answers: the shipped models' greedy tokens on one device and on several, in float32 and bfloat16:
  how many requests differ, and the first output position at which one does.
* decode: random bfloat16 weights of the shape, written to a temporary folder; tokens per second of
  a batch of generating rows on one device and on several, and what the second is of the first.
* collectives: time of NCCL's kernels on rank 0 in such steps, as a share of all kernels' time.

`--device cpu` runs all of it at tiny sizes, through Gloo.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace import LLM, SamplingParams
from headrace.bench.random_weights import draw_weights, read_shape

PARTS = ("answers", "decode", "collectives")
WARM_TOKENS, TIMED_TOKENS = 32, 128
FILE_BYTES = 4 << 30


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Prompts that begin differently, so that none hits another's prefix."""
    return [[(7 * i + 13 * j) % vocab for j in range(i, i + length)] for i in range(count)]


def answers(given: argparse.Namespace) -> dict[str, Any]:
    """Compare greedy tokens of the shipped models."""
    found: dict[str, Any] = {}
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    for model in ("nano", "demo"):
        for dtype in ("float32", "bfloat16"):
            tokens = []
            for size in (1, given.devices):
                with LLM(
                    model, device=given.device, dtype=dtype, max_model_len=1024, max_num_seqs=64,
                    tensor_parallel_size=size,
                ) as llm:
                    outputs = llm.generate(prompts(given.requests, 70, 500), params)
                    tokens.append([list(o.outputs[0].token_ids) for o in outputs])
            first = [
                next((i for i, pair in enumerate(zip(a, b, strict=True)) if len({*pair}) > 1), None)
                for a, b in zip(*tokens, strict=True)
            ]
            differing = [at for at in first if at is not None]
            found[f"{model} {dtype}"] = {
                "requests": len(first), "differ": len(differing),
                "first_difference": min(differing, default=None),
            }
    return found


def write_model(shape: Path, folder: Path, device: str) -> None:
    """Write random weights in files of a few gigabytes."""
    (folder / "config.json").write_text(shape.read_text(encoding="utf-8"), encoding="utf-8")
    part: dict[str, torch.Tensor] = {}
    size, number = 0, 0
    for name, tensor in draw_weights(read_shape(shape), device=device, dtype="bfloat16"):
        part[name] = tensor.to("cpu", torch.bfloat16)
        size += part[name].nbytes
        if size > FILE_BYTES:
            save_file(part, folder / f"model-{number}.safetensors")
            part, size, number = {}, 0, number + 1
    if part:
        save_file(part, folder / f"model-{number}.safetensors")


def decode(
    given: argparse.Namespace, folder: Path, size: int, *, is_profiled: bool
) -> dict[str, float]:
    """Generate with a full batch; tokens per second, or microseconds of kernels by kind."""
    config = read_shape(folder / "config.json")
    with LLM(
        str(folder), device=given.device, max_model_len=512, max_num_seqs=given.batch,
        prefix_cache="none", tensor_parallel_size=size, speculative="none",
    ) as llm:
        asked = prompts(given.batch, 32, config.vocab_size)
        warm = SamplingParams(temperature=0.0, max_tokens=WARM_TOKENS, ignore_eos=True)
        timed = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
        llm.generate(asked, warm)  # Compiles and captures.
        if is_profiled:
            with torch.profiler.profile(activities=_activities(given.device)) as profiler:
                llm.generate(asked, timed)
            return _kernel_times(profiler)
        begin = time.perf_counter()
        llm.generate(asked, warm)
        middle = time.perf_counter()
        llm.generate(asked, timed)
        # The prompts' time is in both.
        steps_s = (time.perf_counter() - middle) - (middle - begin)
    return {
        "tokens_per_s": given.batch * (given.tokens - WARM_TOKENS) / steps_s,
        "step_ms": 1e3 * steps_s / (given.tokens - WARM_TOKENS),
    }


def _activities(device: str) -> list[torch.profiler.ProfilerActivity]:
    kind = torch.profiler.ProfilerActivity
    return [kind.CUDA if device == "cuda" else kind.CPU]


def _kernel_times(profiler: torch.profiler.profile) -> dict[str, float]:
    times = {"collectives_us": 0.0, "others_us": 0.0}
    for event in profiler.key_averages():
        own = event.self_device_time_total or event.self_cpu_time_total
        is_collective = "nccl" in event.key.lower() or "gloo" in event.key.lower()
        times["collectives_us" if is_collective else "others_us"] += own
    total = sum(times.values())
    return times | {"share": times["collectives_us"] / total if total else 0.0}


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    shape = Path(__file__).parent / "shapes" / "qwen3.5-9b-text.json"
    parser.add_argument("--shape", type=Path, default=shape)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=WARM_TOKENS + TIMED_TOKENS)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--only", choices=PARTS, nargs="*", default=PARTS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    lines: list[dict[str, Any]] = []

    def tell(part: str, **figures: object) -> None:
        lines.append({"part": part, **figures})
        sys.stdout.write(json.dumps(lines[-1]) + "\n")
        sys.stdout.flush()
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()

    if "answers" in given.only:
        tell("answers", devices=given.devices, **answers(given))
    if {"decode", "collectives"} & {*given.only}:
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            write_model(given.shape, folder, given.device)
            if "decode" in given.only:
                one, several = (
                    decode(given, folder, size, is_profiled=False) for size in (1, given.devices)
                )
                ratio = several["tokens_per_s"] / one["tokens_per_s"]
                tell("decode", batch=given.batch, one=one, several=several, ratio=ratio)
            if "collectives" in given.only:
                times = decode(given, folder, given.devices, is_profiled=True)
                tell("collectives", batch=given.batch, **times)
    if given.json is not None:
        given.json.write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
