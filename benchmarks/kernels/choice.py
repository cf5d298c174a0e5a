"""The choice of a token: kernel against PyTorch's operations, same tokens and time.

Checked are the tokens, bit for bit: of few different values, with noise and without. Timed are the
kernel on bfloat16 logits, and what it replaces: a copy in float32 and its argmax, and sampling by
PyTorch's operations. Then a few sizes of programs at the most rows.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from timing import time_us

from headrace.ops.token_choice import choose_tokens, fused
from headrace.worker.sampler import SamplingTensors, sample

VOCAB = 248_320
ROWS = (1, 32, 128, 1024)
SAMPLED_ROWS = (1, 128)
"""PyTorch's operations take 24 bytes an entry when they sample."""
SIZES = ((2048, 4, 2048), (2048, 4, 8192), (1024, 4, 4096), (4096, 8, 4096), (2048, 8, 4096))
"""Entries of a program at a time, its warps, programs in all; the module's own come first."""


def sampling(rows: int) -> SamplingTensors:
    """Rows of all temperatures, a fifth of them greedy."""
    cold = torch.arange(rows, device="cuda") % 5 == 0
    return SamplingTensors(
        temperature=(torch.rand(rows, device="cuda") * 2).masked_fill(cold, 0.0),
        top_k=torch.full((rows,), VOCAB, device="cuda"),
        top_p=torch.ones(rows, device="cuda"),
        min_p=torch.zeros(rows, device="cuda"),
        seed=torch.randint(-(2**62), 2**62, (rows,), device="cuda"),
        position=torch.randint(0, 2**20, (rows,), device="cuda"),
    )


def check_choice() -> list[dict[str, Any]]:
    """Tokens of the kernel and of PyTorch's operations."""
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        for rows, vocab in ((1, 7), (3, 1000), (200, VOCAB)):
            few = torch.randint(0, 4, (rows, vocab), device="cuda").to(dtype)
            few[-1, vocab // 2 :] = float("nan")
            wide = (torch.randn(rows, vocab, device="cuda") * 3).to(dtype)
            params = sampling(rows)
            drawn = (
                sample(wide, params, is_all_greedy=False, filters=False, kernels=kernels)
                for kernels in ("triton", "torch")
            )
            equal = [torch.equal(choose_tokens(few), few.float().argmax(-1)), torch.equal(*drawn)]
            results.append(
                {
                    "case": f"token_choice {rows} x {vocab}",
                    "dtype": str(dtype).removeprefix("torch."),
                    "equal_tokens_greedy_sampled": equal,
                    "passed": all(equal),
                }
            )
            print(json.dumps(results[-1]), flush=True)
    return results


def bench_choice(rate: float) -> list[dict[str, Any]]:
    """Times by rows, then by sizes of programs."""
    results = []

    def report(rows: int, how: str, us: float, **more: object) -> None:
        floor = rows * VOCAB * 2 / rate * 1e6
        row = {"case": "token_choice", "rows": rows, "how": how, **more, "us": round(us, 2)}
        results.append(row | {"floor_us": round(floor, 2), "share_of_floor": round(floor / us, 3)})
        print(json.dumps(results[-1]), flush=True)

    logits = torch.randn(max(ROWS), VOCAB, dtype=torch.bfloat16, device="cuda")
    for rows in ROWS:
        mine = logits[:rows]
        report(rows, "kernel", time_us(lambda mine=mine: choose_tokens(mine)))
        own = time_us(lambda mine=mine: mine.float().argmax(-1))
        report(rows, "float32 copy and argmax", own)
        report(rows, "argmax", time_us(lambda mine=mine: mine.argmax(-1)))
    for rows in SAMPLED_ROWS:
        for kernels in ("triton", "torch"):
            given = logits[:rows], sampling(rows)

            def run(given: Any = given, kernels: Any = kernels) -> None:  # noqa: ANN401
                sample(*given, is_all_greedy=False, filters=False, kernels=kernels)

            report(rows, f"sampled, {kernels}", time_us(run))
    kept = fused.BLOCK, fused.NUM_WARPS, fused.PROGRAMS
    for size in (kept, *SIZES):
        fused.BLOCK, fused.NUM_WARPS, fused.PROGRAMS = size
        us = time_us(lambda: choose_tokens(logits))
        report(max(ROWS), "kernel", us, block=size[0], warps=size[1], programs=size[2])
    fused.BLOCK, fused.NUM_WARPS, fused.PROGRAMS = kept
    return results
