"""Products of few rows: the kernel that streams weights beside PyTorch's.

Shapes of Qwen3.5-4B. Timed over enough weights in turn that none stays in the cache, as in a step:
the kernel's own sizes first, then a few others. What is printed last decides `FEW_ROWS` of
`headrace/models/layers/product.py`: the sums over the products of a layer, by rows.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from timing import time_us
from torch.nn import functional

from headrace.ops.few_rows_linear import few_rows_linear, fused

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = {
    "mixer in": (2560, 12352),
    "attention in": (2560, 10240),
    "out": (4096, 2560),
    "gate and up": (2560, 18432),
    "down": (9216, 2560),
}
"""Columns in and out."""

LAYER = {"mixer in": 0.75, "attention in": 0.25, "out": 1.0, "gate and up": 1.0, "down": 1.0}
"""Products of a layer, on average."""

ROWS = (16, 32, 64)
"""Steps are filled up to 16 rows."""

WEIGHT_BYTES = 400 << 20
"""Of different weights that are multiplied in turn."""

SIZES = ((64, 64, 4, 6), (64, 128, 4, 3), (128, 64, 4, 4), (32, 128, 4, 4), (16, 256, 4, 4))
"""Rows and columns of a tile, warps, tiles on their way."""


def check_few_rows() -> list[dict[str, Any]]:
    """Error against float64 beside PyTorch's."""
    results = []
    for name, (inputs, outputs) in SHAPES.items():
        for rows in (1, 17, 64):
            x, weight = _rows(rows, inputs), _weight(inputs, outputs)
            want = x.double() @ weight.double().t()
            errors = [
                float((made.double() - want).norm() / want.norm())
                for made in (few_rows_linear(x, weight), functional.linear(x, weight))
            ]
            results.append(
                {
                    "case": f"few_rows_linear, {name}, {rows} rows",
                    "relative_error": f"{errors[0]:.2e}",
                    "relative_error_of_pytorch": f"{errors[1]:.2e}",
                    "passed": errors[0] <= 2 * errors[1],
                }
            )
            print(json.dumps(results[-1]), flush=True)
    return results


def bench_few_rows(rate: float) -> list[dict[str, Any]]:
    """Times by shape, rows and sizes, then the sums of a layer."""
    results: list[dict[str, Any]] = []
    own = fused.TILE_OUT, fused.TILE_IN, fused.NUM_WARPS, fused.NUM_STAGES
    layers: dict[tuple[int, str], float] = {}
    for name, (inputs, outputs) in SHAPES.items():
        count = -(-WEIGHT_BYTES // (2 * inputs * outputs))
        weights = [_weight(inputs, outputs) for _ in range(count)]
        for rows in ROWS:
            x = _rows(rows, inputs)

            def kernel(x: Tensor = x, weights: list[Tensor] = weights) -> None:
                for weight in weights:
                    few_rows_linear(x, weight)

            def library(x: Tensor = x, weights: list[Tensor] = weights) -> None:
                for weight in weights:
                    functional.linear(x, weight)

            floor = 2 * inputs * outputs / rate * 1e6
            times = {"pytorch": time_us(library, repeats=5) / count}
            for sizes in (own, *(SIZES if rows == ROWS[0] else ())):
                fused.TILE_OUT, fused.TILE_IN, fused.NUM_WARPS, fused.NUM_STAGES = sizes
                times[" ".join(map(str, sizes))] = time_us(kernel, repeats=5) / count
            for how, us in times.items():
                place = rows, how
                layers[place] = layers.get(place, 0.0) + LAYER[name] * us
                row = {"case": f"few_rows_linear, {name}", "rows": rows, "how": how}
                results.append(row | {"us": round(us, 2), "share_of_floor": round(floor / us, 3)})
                print(json.dumps(results[-1]), flush=True)
    fused.TILE_OUT, fused.TILE_IN, fused.NUM_WARPS, fused.NUM_STAGES = own
    for (rows, how), us in layers.items():
        row = {"case": "few_rows_linear, products of a layer", "rows": rows, "how": how}
        results.append(row | {"us": round(us, 2)})
        print(json.dumps(results[-1]), flush=True)
    return results


def _rows(rows: int, inputs: int) -> Tensor:
    return torch.randn(rows, inputs, device="cuda").to(torch.bfloat16)


def _weight(inputs: int, outputs: int) -> Tensor:
    return (torch.randn(outputs, inputs, device="cuda") * inputs**-0.5).to(torch.bfloat16)
