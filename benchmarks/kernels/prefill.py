"""Prompts of Gated DeltaNet: right, and how far from what memory and tensor cores allow.

Checked are errors against float64 with the sizes of Qwen3.5-4B, beside those of PyTorch's
operations as published model code uses them in the same dtype. Timed is one layer, and each of its
launches by itself, beside the bytes that it must move.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from timing import time_us
from torch.nn import functional

from headrace.ops.gated_delta_prefill import MixerWeights, PrefillRows, PromptRow, number_rows
from headrace.ops.gated_delta_prefill import fused as prefill
from headrace.ops.gated_delta_scan import gated_delta_scan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

HK, HV, K, V, TAPS, DRAFTS, GRID = 16, 32, 128, 128, 4, 3, 64
F = 2 * HK * K + HV * V
EPS = 1e-6
MOST_ERROR = 2.0
"""A kernel's error over PyTorch's."""

LEAST_ERROR = 2e-6
"""Of float32: products of three tensor core products are as good as that."""


def weights(dtype: torch.dtype) -> MixerWeights:
    """Random weights with gates as in a trained model."""
    decay = -torch.exp(torch.rand(HV) * 3 - 4)
    return MixerWeights(
        conv=(torch.randn(TAPS, F) * 0.5).to("cuda", dtype).float(),
        gate_bias=torch.cat((torch.zeros(HV), torch.rand(HV) * 3 - 3)).cuda(),
        gate_factor=torch.cat((-torch.ones(HV), decay)).cuda(),
        unit_scale=torch.cat((torch.full((HK,), K**-0.5), torch.ones(HK))).cuda(),
        norm=(1 + 0.1 * torch.randn(V)).cuda(),
        norm_eps=EPS,
    )


def tables(prompts: Sequence[PromptRow]) -> PrefillRows:
    """Rows on the device."""
    layout, numbers = number_rows(prompts, GRID)
    return layout.on_device(torch.tensor(numbers, dtype=torch.int32, device="cuda"))


def by_operations(
    parts: tuple[Tensor, ...],
    w: MixerWeights,
    row: PromptRow,
    pools: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    wide: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """One row in PyTorch's operations: single steps in `dtype`, the recurrence in `wide`.

    Returns:
        Outputs [length, HV*V] and the state after the row.
    """
    own = slice(row.first, row.first + row.length)
    inputs, gate, logits = (part[own].to(dtype) for part in parts)
    window = pools[0][row.source or 0, : TAPS - 1].to(dtype) * (row.source is not None)
    history = torch.cat((window, inputs)).t()[None]
    mixed = functional.conv1d(history, w.conv.to(dtype).t()[:, None], groups=F)[0].t()
    mixed = functional.silu(mixed).to(wide)
    q, k, v = mixed.split((HK * K, HK * K, HV * V), -1)

    def unit(x: Tensor) -> Tensor:
        x = x.view(-1, HK, K)
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    rate = torch.sigmoid(-logits[:, :HV]).to(wide)
    shifted = logits[:, HV:].to(wide) + w.gate_bias[HV:].to(wide)
    log_decay = functional.softplus(shifted) * w.gate_factor[HV:].to(wide)
    state = pools[1][row.source or 0, None].to(wide) * (row.source is not None)
    pieces = -(-row.length // GRID)

    def cut(x: Tensor) -> Tensor:
        padded = x.new_zeros(pieces * GRID, *x.shape[1:])
        padded[: row.length] = x
        return padded.view(pieces, GRID, *x.shape[1:])

    o, _ = gated_delta_scan(
        state,
        cut(unit(q) * K**-0.5),
        cut(unit(k)),
        cut(v.view(-1, HV, V)),
        log_decay=cut(log_decay),
        rate=cut(rate),
        rows_per_round=(1,) * pieces,
    )
    o = o.reshape(-1, HV, V)[: row.length].to(dtype).to(wide)
    o = (o * torch.rsqrt((o * o).mean(-1, keepdim=True) + EPS) * w.norm.to(wide)).to(dtype)
    o = o.to(wide) * functional.silu(gate.to(wide)).view(-1, HV, V)
    return o.to(dtype).flatten(1), state[0]


def error_of(got: Tensor, want: Tensor) -> float:
    """Relative error in the square mean."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def check_case(dtype: torch.dtype, state_dtype: torch.dtype) -> dict[str, Any]:
    """Rows that begin on the grid and off it, with a state and without one, with an export."""
    prompts = [
        PromptRow(first=5, start=0, length=700, source=None, target=1, exports=((640, 2),)),
        PromptRow(first=705, start=37, length=300, source=3, target=3),
        PromptRow(first=1005, start=128, length=2, source=4, target=5),
    ]
    x = torch.randn(1024, F + HV * V + 2 * HV, device="cuda").to(dtype)
    parts = x.split((F, HV * V, 2 * HV), -1)
    w = weights(dtype)
    window = torch.randn(8, TAPS - 1 + DRAFTS, F, device="cuda").to(dtype)
    state = (torch.randn(8, HV, V, K, device="cuda") / 8).to(state_dtype)
    before = window.clone(), state.clone()
    out = torch.zeros(1024, HV * V, dtype=dtype, device="cuda")
    prefill.gated_delta_prefill(*parts, w, window, state, tables(prompts), out)
    mine, theirs = [], []
    for row in prompts:
        exact = by_operations(parts, w, row, before, torch.float64, torch.float64)
        own = by_operations(parts, w, row, before, dtype, torch.float32)
        got = out[row.first : row.first + row.length], state[row.target]
        pairs = (own[0], own[1].to(state_dtype))
        mine.append([error_of(a, b) for a, b in zip(got, exact, strict=True)])
        theirs.append([error_of(a, b) for a, b in zip(pairs, exact, strict=True)])
    head = replace(prompts[0], length=640)
    exported = by_operations(parts, w, head, before, torch.float64, torch.float64)[1]
    mine[0].append(error_of(state[2], exported))
    theirs[0].append(theirs[0][1])
    limits = [[MOST_ERROR * max(e, LEAST_ERROR) for e in errors] for errors in theirs]
    windows = [
        torch.equal(window[1, : TAPS - 1], x[702:705, :F]),
        torch.equal(window[2, : TAPS - 1], x[642:645, :F]),
        torch.equal(window[3, : TAPS - 1], x[1002:1005, :F]),
        torch.equal(window[5, 0], before[0][4, TAPS - 2]),
        torch.equal(window[5, 1 : TAPS - 1], x[1005:1007, :F]),
    ]
    untouched = all(torch.equal(a[6:], b[6:]) for a, b in zip((window, state), before, strict=True))
    fits = all(
        e <= limit
        for errors, most in zip(mine, limits, strict=True)
        for e, limit in zip(errors, most, strict=True)
    )
    return {
        "case": "gated_delta_prefill",
        "dtype": str(dtype).removeprefix("torch."),
        "state": str(state_dtype).removeprefix("torch."),
        "relative_errors_out_state": [[f"{e:.1e}" for e in errors] for errors in mine],
        "of_pytorch": [[f"{e:.1e}" for e in errors] for errors in theirs],
        "windows": windows,
        "passed": fits and all(windows) and untouched,
    }


def check_prefill() -> list[dict[str, Any]]:
    """Errors in both dtypes."""
    rows = []
    for dtype, state_dtype in (
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ):
        rows.append(check_case(dtype, state_dtype))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def bytes_of(rows: PrefillRows, tokens: int, *, sources: bool) -> dict[str, float]:
    """Bytes that each launch moves at least, and `layer`: without what launches pass on."""
    count = rows.rows.shape[0]
    states = count * (1 + sources) * HV * V * K * 2
    pair = tokens * HV * GRID * 2
    mixed = tokens * F * 2
    values = tokens * HV * V * 2
    return {
        "inputs": 2 * mixed,
        "windows": count * 2 * (TAPS - 1) * F * 2,
        "within": tokens * 2 * HK * K * 2 + 2 * pair,
        "along": mixed + 2 * pair + values + states,
        "norm": 3 * values,
        "layer": mixed + 2 * values + states,
    }


CASES = (
    ("2 x 4096", 2, 4096, False),
    ("32 x 256", 32, 256, False),
    ("1 x 8192", 1, 8192, False),
    ("32 x 128 with states", 32, 128, True),
)
SWEEPS: dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]] = {
    "inputs": (("RUNS", "INPUT_WARPS"), ((8, 8), (8, 4), (4, 4), (4, 2))),
    "within": (("HEADS", "WITHIN_WARPS"), ((1, 4), (1, 8), (2, 4))),
    "along": (("STAGES", "STAGES_ALONE"), ((2, 2), (3, 3))),
}
"""Of a launch: constants of the operation, and values that they are given in turn."""
SWEPT = ("2 x 4096", "1 x 8192")


def launches_of(count: int, length: int, *, sources: bool) -> prefill.Launches:
    """A layer of random inputs in bfloat16, with bfloat16 states."""
    prompts = [
        PromptRow(
            first=i * length,
            start=GRID if sources else 0,
            length=length,
            source=1 + i if sources else None,
            target=1 + count + i,
        )
        for i in range(count)
    ]
    x = torch.randn(count * length, F + HV * V + 2 * HV, device="cuda").to(torch.bfloat16)
    parts = x.split((F, HV * V, 2 * HV), -1)
    window = torch.randn(1 + 2 * count, TAPS - 1 + DRAFTS, F, device="cuda").to(torch.bfloat16)
    state = torch.zeros(1 + 2 * count, HV, V, K, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(count * length, HV * V, dtype=torch.bfloat16, device="cuda")
    return prefill.Launches.of(*parts, weights(torch.bfloat16), window, state, tables(prompts), out)


def report(case: str, what: str, us: float, floor: float, **more: object) -> dict[str, Any]:
    """One line."""
    row = {
        "case": f"gated_delta_prefill {case}",
        "launch": what,
        **more,
        "us": round(us, 1),
        "floor_us": round(floor, 1),
        "share_of_floor": round(floor / us, 3),
    }
    print(json.dumps(row), flush=True)
    return row


def bench_prefill(rate: float) -> list[dict[str, Any]]:
    """Times of a layer, of its launches, and of launches with other sizes."""
    results = []
    for name, count, length, sources in CASES:
        launches = launches_of(count, length, sources=sources)
        least = bytes_of(launches.rows, count * length, sources=sources)
        results.append(report(name, "layer", time_us(launches.run), least["layer"] / rate * 1e6))
        for what in ("inputs", "windows", "within", "along", "norm"):
            us = time_us(getattr(launches, what))
            results.append(report(name, what, us, least[what] / rate * 1e6))
        if name in SWEPT:
            for what in SWEEPS:
                results.extend(sweep(name, launches, what, least[what] / rate * 1e6))
    return results


def sweep(name: str, launches: prefill.Launches, what: str, floor: float) -> list[dict[str, Any]]:
    """One of the launches with other sizes."""
    names, tried = SWEEPS[what]
    defaults = [getattr(prefill, each) for each in names]
    results = []
    for values in tried:
        _set(names, values)
        sizes = dict(zip(names, values, strict=True))
        results.append(report(name, what, time_us(getattr(launches, what)), floor, sizes=sizes))
    _set(names, defaults)
    return results


def _set(names: Sequence[str], values: Sequence[int]) -> None:
    for name, value in zip(names, values, strict=True):
        setattr(prefill, name, value)
