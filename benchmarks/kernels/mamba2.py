"""Decode and verify of Mamba-2 layers: checked against the specification, timed for Nemotron-H-8B.

The shape: 128 heads of 64, states of 128, 8 groups that are normed by themselves.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from rows import DRAFTS, INTERVAL, RING, moved, rows_of
from timing import time_us

from headrace.ops.gated_delta_decode import Ring
from headrace.ops.mamba2_decode import MixerWeights, mamba2_decode, reference

if TYPE_CHECKING:
    from torch import Tensor

HEADS, P, D, GROUPS, TAPS = 128, 64, 128, 8, 4
LAYERS = 4
SCHEMES = ("columns", "replay")
MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Relative error of outputs, windows, states and ring, by the dtype of the state."""


def sizes_of(heads: int) -> tuple[int, int, int]:
    """Inner width, channels, width of an update."""
    inner, shared = heads * P, GROUPS * D
    return inner, inner + 2 * shared, shared + inner + heads


def weights(heads: int, device: str) -> MixerWeights:
    """Random weights with decays as in a trained model."""
    inner, channels, _ = sizes_of(heads)
    return MixerWeights(
        conv=torch.randn(TAPS, channels, device=device) * 0.5,
        conv_bias=torch.randn(channels, device=device) * 0.1,
        dt_bias=torch.rand(heads, device=device) * 3 - 5,
        decay_rate=-torch.exp(torch.rand(heads, device=device) * 3),
        skip=torch.rand(heads, device=device),
        norm=1 + torch.randn(GROUPS, inner // GROUPS, device=device) / 8,
        norm_eps=1e-5,
        gates_after_norm=False,
    )


def pools_of(
    batch: int, heads: int, dtype: torch.dtype, scheme: str, device: str
) -> tuple[Tensor, Tensor, Ring | None]:
    """Random pools of one layer."""
    _, channels, width = sizes_of(heads)
    blocks = 1 + batch * (1 + DRAFTS if scheme == "columns" else 1)
    window = torch.randn(blocks, TAPS - 1 + DRAFTS, channels, device=device).to(torch.bfloat16)
    state = torch.empty(blocks, heads, P, D, dtype=dtype, device=device).normal_()
    if scheme == "columns":
        return window, state, None
    updates = torch.randn(1 + batch, RING, width, device=device) * 0.1
    updates[..., -heads:] = -torch.rand(1 + batch, RING, heads, device=device)
    inputs = torch.randn(1 + batch, RING, channels, device=device).to(torch.bfloat16)
    return window, state, Ring(inputs=inputs, updates=updates, interval=INTERVAL)


def check_mamba2(device: str = "cuda", heads: int = 16) -> list[dict[str, Any]]:
    """Relative errors of the kernels against the specification on the CPU."""
    results = []
    batch, query = 9, 3
    inner, channels, _ = sizes_of(heads)
    for scheme in SCHEMES:
        for dtype, limit in MOST_ERROR.items():
            projected = torch.randn(batch * query, inner + channels + heads).to(torch.bfloat16)
            gate, inputs, dt = projected.split((inner, channels, heads), -1)
            index, lens, rows = rows_of(scheme, batch, query, "cpu")
            lens[5] = 0
            lens[6] = 1
            given = (inputs, gate, dt, weights(heads, "cpu"))
            pools = pools_of(batch, heads, dtype, scheme, "cpu")
            outcomes = []
            for op, place in ((mamba2_decode, device), (reference.mamba2_decode, "cpu")):
                window, state, ring = moved(pools, place)
                out = torch.zeros(batch * query, inner, device=place)
                op(
                    *moved(given, place), window, state, *moved((index, lens, rows), place), out,
                    ring=ring,
                )  # fmt: skip
                kept = [out, window, state] + ([ring.inputs, ring.updates] if ring else [])
                outcomes.append([tensor.float().cpu() for tensor in kept])
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(*outcomes, strict=True)]
            results.append(
                {
                    "case": f"mamba2_decode {scheme} against its specification",
                    "state": str(dtype).removeprefix("torch."),
                    "relative_error_out_window_state_ring": [f"{e:.1e}" for e in errors],
                    "passed": max(errors) <= limit,
                }
            )
            print(json.dumps(results[-1]), flush=True)
    return results


def floor_bytes(scheme: str, batch: int, query: int, dtype: torch.dtype) -> float:
    """Bytes that one layer must move."""
    inner, channels, width = sizes_of(HEADS)
    state = HEADS * P * D * dtype.itemsize
    tokens = batch * query * 2 * (channels + 2 * inner + HEADS)
    if scheme == "columns":
        return batch * (state * (1 + query) + 2 * 2 * (TAPS - 1) * channels) + tokens
    ring = 4 * width * ((1 + INTERVAL) / 2 + query) + 2 * channels * (TAPS - 1 + query)
    return batch * (state * (1 + 1 / INTERVAL) + ring) + tokens


def bench_mamba2(
    rate: float, device: str = "cuda", batches: tuple[int, ...] = (1, 8, 32, 128, 256)
) -> list[dict[str, Any]]:
    """Times by scheme, dtype of the state, batch and tokens of a row."""
    results = []
    inner, channels, _ = sizes_of(HEADS)
    given = weights(HEADS, device)
    for scheme in SCHEMES:
        for dtype in MOST_ERROR:
            for batch in batches:
                # 256 states of four columns are 4 GiB a layer.
                layers = [
                    pools_of(batch, HEADS, dtype, scheme, device)
                    for _ in range(LAYERS if batch < 128 else 2)  # noqa: PLR2004
                ]
                for query in (1, 1 + DRAFTS):
                    places = rows_of(scheme, batch, query, device)
                    tokens = batch * query
                    projected = torch.randn(tokens, inner + channels + HEADS, device=device)
                    parts = projected.to(torch.bfloat16).split((inner, channels, HEADS), -1)
                    out = torch.empty(tokens, inner, dtype=torch.bfloat16, device=device)

                    def run(
                        layers: Any = layers,  # noqa: ANN401
                        parts: Any = parts,  # noqa: ANN401
                        places: Any = places,  # noqa: ANN401
                        out: Tensor = out,
                    ) -> None:
                        gate, inputs, dt = parts
                        for window, state, ring in layers:
                            mamba2_decode(
                                inputs, gate, dt, given, window, state, *places, out, ring=ring
                            )

                    us = time_us(run) / len(layers)
                    floor = floor_bytes(scheme, batch, query, dtype) / rate * 1e6
                    results.append(
                        {
                            "case": f"mamba2_decode {scheme}",
                            "state": str(dtype).removeprefix("torch."),
                            "batch": batch,
                            "tokens_per_row": query,
                            "us_per_layer": round(us, 2),
                            "floor_us": round(floor, 2),
                            "share_of_floor": round(floor / us, 3),
                        }
                    )
                    print(json.dumps(results[-1]), flush=True)
    return results
