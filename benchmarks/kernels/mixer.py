"""The mixer of a Gated DeltaNet layer: right, and how far from what the memory allows.

Checked are its outputs, windows, states and rings against the specification. Timed are both schemes
over the layers of Qwen3.5-4B, each with its own pools. The sweeps try a few sizes of programs with
bfloat16 states: the module's own first, then others.
"""

# Closures over loop variables run before the loop goes on.

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from rows import DRAFTS, INTERVAL, RING, moved, rows_of
from timing import time_us

from headrace.ops.gated_delta_decode import MixerWeights, Ring, fused, reference

if TYPE_CHECKING:
    from torch import Tensor

HK, HV, K, V, TAPS = 16, 32, 128, 128, 4
F = 2 * HK * K + HV * V
LAYERS = 24
ENTRIES = TAPS - 1 + DRAFTS
MANY_ROWS = 128
"""From so many on, four layers drive each other's states from the cache."""
MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Of what is computed, in the square mean: states in bfloat16 may come out a unit apart."""


def weights(device: str, heads: tuple[int, int], dtype: torch.dtype) -> MixerWeights:
    """Random weights with gates as in a trained model."""
    hk, hv = heads
    channels = 2 * hk * K + hv * V
    decay = -torch.exp(torch.rand(hv) * 3 - 4)
    return MixerWeights(
        conv=(torch.randn(TAPS, channels) * 0.5).to(device, dtype),
        gate_bias=torch.cat((torch.zeros(hv), torch.rand(hv) * 3 - 3)).to(device),
        gate_factor=torch.cat((-torch.ones(hv), decay)).to(device),
        unit_scale=torch.cat((torch.full((hk,), K**-0.5), torch.ones(hk))).to(device),
        norm=(1 + 0.1 * torch.randn(V)).to(device),
        norm_eps=1e-6,
    )


def pools_of(
    batch: int, heads: tuple[int, int], layers: int, dtype: torch.dtype, device: str, scheme: str
) -> tuple[Tensor, Tensor, Ring | None]:
    """Random pools of all layers."""
    hk, hv = heads
    channels = 2 * hk * K + hv * V
    blocks = 1 + batch * (1 + DRAFTS if scheme == "columns" else 1)
    window = torch.randn(layers, blocks, ENTRIES, channels, device=device).to(torch.bfloat16)
    state = torch.empty(layers, blocks, hv, V, K, dtype=dtype, device=device)
    for layer in range(layers):
        state[layer].normal_()
    if scheme == "columns":
        return window, state, None
    updates = torch.randn(layers, 1 + batch, RING, hk * K + hv * V + 2 * hv, device=device).mul_(
        0.1
    )
    updates[..., -2 * hv :].uniform_(0.5, 1.0)
    inputs = torch.randn(layers, 1 + batch, RING, channels, device=device).to(torch.bfloat16)
    return window, state, Ring(inputs=inputs, updates=updates, interval=INTERVAL)


def floor_bytes(scheme: str, batch: int, query: int, dtype: torch.dtype) -> float:
    """Bytes that one layer must move."""
    state = HV * V * K * dtype.itemsize
    tokens = batch * query * (2 * F + 2 * 2 * HV * V + 4 * HV)
    if scheme == "columns":
        window = batch * 2 * 2 * (TAPS - 1) * F
        return batch * state * (1 + query) + window + tokens
    update = 4 * (HK * K + HV * V + 2 * HV)
    pending = (1 + INTERVAL) / 2
    ring = batch * (update * (pending + query) + 2 * F * (TAPS - 1 + query))
    return batch * state * (1 + 1 / INTERVAL) + ring + tokens


class Case:
    """One layer after the other of a scheme, with pools of their own.

    Args:
        scheme: "columns" or "replay".
        dtype: Of the states.
        batch, query: Rows, and tokens of each.
    """

    def __init__(self, scheme: str, dtype: torch.dtype, batch: int, query: int) -> None:
        self.layers = LAYERS if batch < MANY_ROWS else 4
        self._pools = pools_of(batch, (HK, HV), self.layers, dtype, "cuda", scheme)
        self._weights = weights("cuda", (HK, HV), torch.bfloat16)
        self._rows = rows_of(scheme, batch, query, "cuda")
        tokens = batch * query
        x = torch.randn(tokens, F + HV * V + 2 * HV, device="cuda").to(torch.bfloat16)
        self._parts = x.split((F, HV * V, 2 * HV), dim=-1)
        self._out = torch.empty(tokens, HV * V, dtype=torch.bfloat16, device="cuda")

    def run(self) -> None:
        """Launch every layer once."""
        window, state, ring = self._pools
        index, lens, rows = self._rows
        for layer in range(self.layers):
            own = ring and Ring(
                inputs=ring.inputs[layer], updates=ring.updates[layer], interval=INTERVAL
            )
            fused.gated_delta_decode(
                *self._parts, self._weights, window[layer], state[layer], index, lens, rows,
                self._out, ring=own,
            )  # fmt: skip

    def us(self) -> float:
        """Time of a layer."""
        return time_us(self.run) / self.layers


def bench_decode(rate: float, *, quick: bool) -> list[dict[str, Any]]:
    """Times by scheme, dtype of the state, batch and tokens of a row."""
    results = []
    for scheme in ("columns", "replay"):
        for dtype in (torch.float32, torch.bfloat16):
            for batch in (1, 32, 128) if quick else (1, 32, 128, 256):
                for query in (1, 1 + DRAFTS):
                    case = Case(scheme, dtype, batch, query)
                    floor = floor_bytes(scheme, batch, query, dtype) / rate * 1e6
                    us = case.us()
                    results.append(
                        {
                            "case": f"gated_delta_decode {scheme}",
                            "state": str(dtype).removeprefix("torch."),
                            "batch": batch,
                            "tokens_per_row": query,
                            "launches": 2,
                            "us_per_layer": round(us, 2),
                            "floor_us": round(floor, 2),
                            "share_of_floor": round(floor / us, 3),
                        }
                    )
                    print(json.dumps(results[-1]), flush=True)
    return results


def sweep(
    scheme: str, query: int, names: tuple[str, ...], settings: tuple[tuple[int, ...], ...],
    rate: float,
) -> list[dict[str, Any]]:
    """Times of a scheme with bfloat16 states by settings of the launches."""
    results = []
    own = tuple(getattr(fused, name) for name in names)
    for batch in (1, 32, 256):
        case = Case(scheme, torch.bfloat16, batch, query)
        floor = floor_bytes(scheme, batch, query, torch.bfloat16) / rate * 1e6
        for values in (own, *settings):
            for name, value in zip(names, values, strict=True):
                setattr(fused, name, value)
            row: dict[str, Any] = {"case": f"sweep {scheme}", "batch": batch}
            row |= dict(zip(names, values, strict=True))
            us = case.us()
            row |= {"us_per_layer": round(us, 2), "share_of_floor": round(floor / us, 3)}
            results.append(row)
            print(json.dumps(row), flush=True)
    for name, value in zip(names, own, strict=True):
        setattr(fused, name, value)
    return results


def sweep_columns(rate: float) -> list[dict[str, Any]]:
    """Plain decoding: value rows at a time, warps."""
    names = "ROWS", "NUM_WARPS"
    settings = (16, 4), (16, 2), (64, 8)
    return sweep("columns", 1, names, settings, rate)


def sweep_replay(rate: float) -> list[dict[str, Any]]:
    """Verifying three drafts: sizes of both launches."""
    names = "PREPARE_WARPS", "CHUNK", "ANSWER_WARPS", "ANSWER_REGISTERS", "REPLAY_ROWS"
    settings = (
        (1, 32, 4, 128, 16),
        (2, 32, 8, 64, 16),
        (2, 64, 4, 128, 16),
    )
    return sweep("replay", 1 + DRAFTS, names, settings, rate)


def check_decode() -> list[dict[str, Any]]:
    """Relative error of the kernel on the GPU against the specification on the CPU."""
    results = []
    heads = (4, 8)
    channels = 2 * heads[0] * K + heads[1] * V
    for scheme in ("columns", "replay"):
        for dtype in (torch.float32, torch.bfloat16):
            batch, query = 17, 3
            pools = pools_of(batch, heads, 1, dtype, "cpu", scheme)
            w = weights("cpu", heads, torch.bfloat16)
            index, lens, rows = rows_of(scheme, batch, query, "cpu")
            lens[5] = 0
            lens[6] = 1
            x = torch.randn(batch * query, channels + heads[1] * V + 2 * heads[1])
            parts = x.to(torch.bfloat16).split((channels, heads[1] * V, 2 * heads[1]), dim=-1)

            def run(
                op: Any,  # noqa: ANN401  either implementation
                device: str,
                *,
                pools: Any = pools,  # noqa: ANN401
                w: Any = w,  # noqa: ANN401
                inputs: Any = (parts, index, lens, rows, batch * query),  # noqa: ANN401
            ) -> list[Tensor]:
                window, state, ring = (moved(pool, device) for pool in pools)
                projected, places, lengths, batch_rows, count = inputs
                own = ring and Ring(
                    inputs=ring.inputs[0], updates=ring.updates[0], interval=INTERVAL
                )
                out = torch.zeros(count, heads[1] * V, device=device)
                op.gated_delta_decode(
                    *moved(projected, device), moved(w, device), window[0], state[0],
                    *moved((places, lengths, batch_rows), device), out, ring=own,
                )  # fmt: skip
                tensors = [out, window, state] + ([own.inputs, own.updates] if own else [])
                return [t.float().cpu() for t in tensors]

            got, want = run(fused, "cuda"), run(reference, "cpu")
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
            results.append(
                {
                    "case": f"gated_delta_decode {scheme} against its specification",
                    "state": str(dtype).removeprefix("torch."),
                    "relative_error_out_window_state_ring": [f"{e:.1e}" for e in errors],
                    "passed": max(errors) <= MOST_ERROR[dtype],
                }
            )
            print(json.dumps(results[-1]), flush=True)
    return results
