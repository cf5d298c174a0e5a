"""The fused kernels on a GPU: right, and how far from what the memory allows.

    python benchmarks/kernels/run.py [--json FILE] [--quick] [--only NAME]

For the Qwen3.5-4B shape (24 Gated DeltaNet layers, 16 key and 32 value heads of 128, 3 drafts at
most). Times are medians over replays of a graph that launches the kernel once for each of the
layers, each with its own pools; floors are the bytes that must move over the copy rate measured in
the same run. Random inputs.
"""

# Closures over loop variables run before the loop goes on.
# ruff: noqa: B023, PLR2004

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from choice import bench_choice, check_choice
from experts import bench_experts, check_experts
from few_rows import bench_few_rows, check_few_rows
from fusions import bench_fusions, check_fusions
from mamba2 import bench_mamba2, check_mamba2
from mixer import (
    ENTRIES,
    HV,
    LAYERS,
    F,
    K,
    V,
    bench_decode,
    check_decode,
    sweep_columns,
    sweep_replay,
)
from prefill import bench_prefill, check_prefill
from prefill_attention import bench_prefill as bench_paged_prefill
from prefill_attention import check_prefill as check_paged_prefill
from products import bench_fixed_linear, check_fixed_linear
from rows import DRAFTS
from timing import copy_rate, time_us

from headrace.ops.paged_decode import fused as attention
from headrace.ops.paged_decode import reference as reference_attention
from headrace.ops.state_columns import StatePool
from headrace.ops.state_columns import fused as fused_columns
from headrace.ops.state_columns import reference as reference_columns


def columns_case(batch: int, device: str, *, moving: bool) -> dict[str, Any]:
    """A premove in which all rows move, or none."""
    block_size = 64
    computed = torch.full((batch,), 128 if moving else 130, device=device)
    return {
        "computed": computed,
        "scheduled": torch.full((batch,), 1, device=device),
        "accepted": torch.full((batch,), 3 if moving else 1, dtype=torch.int32, device=device),
        "state_column": torch.full((batch,), 1 if moving else 2, dtype=torch.int32, device=device),
        "block_size": block_size,
        "max_accepted": DRAFTS + 1,
    }


def check_columns() -> list[dict[str, Any]]:
    """Bit-for-bit comparison of the moves on the GPU with the reference."""
    batch, columns = 33, 8
    results = []
    for moving in (True, False):
        window = torch.randn(2, 1 + batch * columns, ENTRIES, 512).to(torch.bfloat16)
        state = torch.randn(2, 1 + batch * columns, 4, 64, 64)
        table = torch.arange(1, 1 + batch * columns, dtype=torch.int32).view(batch, columns)
        outcomes = []
        for op, device in ((reference_columns, "cpu"), (fused_columns, "cuda")):
            pools = (
                StatePool(tensor=window.clone().to(device), kind="window"),
                StatePool(tensor=state.clone().to(device), kind="recurrent"),
            )
            case = columns_case(batch, device, moving=moving)
            out = case["accepted"].clone(), case["state_column"].clone()
            op.premove(
                pools, table.to(device), **case, accepted_out=out[0], state_column_out=out[1]
            )
            outcomes.append([t.cpu() for t in (pools[0].tensor, pools[1].tensor, *out)])
        same = all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
        results.append({"case": f"state_columns premove moving={moving}", "equal_bits": same})
        print(json.dumps(results[-1]), flush=True)
    return results


def bench_columns(rate: float) -> list[dict[str, Any]]:
    """One launch for all layers: every row moves, or none does."""
    results = []
    for batch in (1, 32, 128, 256):
        columns = 8
        layers = LAYERS if batch <= 32 else 6
        window = torch.zeros(layers, 1 + batch * 5, ENTRIES, F, dtype=torch.bfloat16, device="cuda")
        state = torch.zeros(layers, 1 + batch * 5, HV, V, K, dtype=torch.bfloat16, device="cuda")
        window.normal_()
        for layer in range(layers):
            state[layer].normal_()
        table = torch.zeros(batch, columns, dtype=torch.int32, device="cuda")
        table[:, 1:6] = torch.arange(1, 1 + batch * 5, device="cuda").view(batch, 5)
        pools = (
            StatePool(tensor=window, kind="window"),
            StatePool(tensor=state, kind="recurrent"),
        )
        for moving in (True, False):
            case = columns_case(batch, "cuda", moving=moving)
            out = case["accepted"].clone(), case["state_column"].clone()

            def run() -> None:
                fused_columns.premove(
                    pools, table, **case, accepted_out=out[0], state_column_out=out[1]
                )

            us = time_us(run)
            size = layers * batch * 2 * 2 * (ENTRIES * F + HV * V * K) if moving else 0
            floor = size / rate * 1e6
            results.append(
                {
                    "case": "state_columns premove",
                    "moving": "all" if moving else "none",
                    "batch": batch,
                    "layers": layers,
                    "us": round(us, 2),
                    "floor_us": round(floor, 2),
                    "share_of_floor": round(floor / us, 3),
                }
            )
            print(json.dumps(results[-1]), flush=True)
    return results


def bench_attention(rate: float) -> list[dict[str, Any]]:
    """Decode attention of one layer: 16 query and 4 KV heads of 256, 1,024 tokens of context."""
    results = []
    heads, kv_heads, size, page, length = 16, 4, 256, 64, 1024
    for batch in (1, 32, 128, 256):
        blocks = 1 + batch * length // page
        k, v = (
            torch.randn(4, blocks, page, kv_heads, size, device="cuda").to(torch.bfloat16)
            for _ in range(2)
        )
        order = 1 + torch.randperm(blocks - 1, device="cuda").to(torch.int32)
        for query in (1, 1 + DRAFTS):
            index = torch.arange(batch * query, device="cuda").view(batch, query)
            q = torch.randn(batch * query, heads, size, device="cuda").to(torch.bfloat16)
            given = (
                order.view(batch, -1),
                index,
                torch.full((batch,), query, device="cuda"),
                torch.full((batch,), length, device="cuda"),
                length,
            )
            out = torch.empty_like(q)

            def run() -> None:
                for layer in range(4):
                    attention.paged_decode(q, k[layer], v[layer], *given, out)

            us = time_us(run) / 4
            want = torch.empty_like(q)
            if batch <= 32:
                reference_attention.paged_decode(q, k[3], v[3], *given, want)
            floor = batch * length * kv_heads * size * 2 * 2 / rate * 1e6
            results.append(
                {
                    "case": "paged_decode",
                    "batch": batch,
                    "tokens_per_row": query,
                    "context": length,
                    "us_per_layer": round(us, 2),
                    "floor_us": round(floor, 2),
                    "share_of_floor": round(floor / us, 3),
                    "relative_error": f"{float((out - want).norm() / want.norm()):.1e}"
                    if batch <= 32
                    else None,
                }
            )
            print(json.dumps(results[-1]), flush=True)
    return results


PARTS = (
    "attention", "choice", "columns", "decode", "deterministic_linear", "experts",
    "few_rows_linear", "fusions",
    "gated_delta_prefill", "mamba2", "paged_prefill", "sweep_columns", "sweep_replay",
)  # fmt: skip


def main() -> None:
    """Run what is asked for and print JSON; 1 if a kernel errs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=PARTS, help="one part instead of all")
    options = parser.parse_args()
    import triton  # noqa: PLC0415

    torch.manual_seed(0)
    parts = PARTS if options.only is None else (options.only,)
    checkers = {
        "choice": check_choice,
        "columns": check_columns,
        "decode": check_decode,
        "sweep_columns": check_decode,
        "sweep_replay": check_decode,
        "deterministic_linear": check_fixed_linear,
        "experts": check_experts,
        "few_rows_linear": check_few_rows,
        "fusions": check_fusions,
        "gated_delta_prefill": check_prefill,
        "mamba2": check_mamba2,
        "paged_prefill": check_paged_prefill,
    }
    wanted = dict.fromkeys(check for part, check in checkers.items() if part in parts)
    checks = [row for check in wanted for row in check()]
    rate = copy_rate()
    print(json.dumps({"copy_tb_per_s": round(rate / 1e12, 3)}), flush=True)
    benches = {
        "attention": lambda: bench_attention(rate),
        "choice": lambda: bench_choice(rate),
        "columns": lambda: bench_columns(rate),
        "decode": lambda: bench_decode(rate, quick=options.quick),
        "deterministic_linear": lambda: bench_fixed_linear(rate),
        "experts": lambda: bench_experts(rate),
        "few_rows_linear": lambda: bench_few_rows(rate),
        "fusions": lambda: bench_fusions(rate),
        "gated_delta_prefill": lambda: bench_prefill(rate),
        "mamba2": lambda: bench_mamba2(rate),
        "paged_prefill": lambda: bench_paged_prefill(rate),
        "sweep_columns": lambda: sweep_columns(rate),
        "sweep_replay": lambda: sweep_replay(rate),
    }
    rows = [row for part in parts for row in benches[part]()]
    report = {
        "command": " ".join(("python benchmarks/kernels/run.py", *sys.argv[1:])),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "device": torch.cuda.get_device_name(),
        "copy_bytes_per_s": rate,
        "model": "Qwen3.5-4B shape, one layer; experts of 35B-A3B",
        "checks": checks,
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    failed = [row["case"] for row in checks if row.get("passed") is False]
    sys.stdout.write(f"{len(rows)} rows, {len(checks)} checks, failed: {failed or 'none'}\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
