"""The product whose rows have the same bits among any others: checked, and beside PyTorch's.

Shapes of Qwen3.5-4B. Timed over several weights in turn, so that none stays in the cache.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from timing import time_us
from torch.nn import functional

from headrace.ops.fixed_linear import fixed_linear

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = {"mixer in": (2560, 12352), "gate and up": (2560, 18432), "down": (9216, 2560)}
"""Columns in and out."""

ROWS = (1, 32, 256, 8192)
WEIGHTS = 3
COUNTS = (1, 3, 64, 65, 300, 2048)
"""Numbers of rows among which the first one must have the same bits."""


def check_fixed_linear() -> list[dict[str, Any]]:
    """Error against float64 beside PyTorch's, and bits among other numbers of rows."""
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        for name, (inputs, outputs) in SHAPES.items():
            x, weight = _case(max(COUNTS), inputs, outputs, dtype)
            whole = fixed_linear(x, weight)
            same = [torch.equal(fixed_linear(x[-n:], weight), whole[-n:]) for n in COUNTS]
            want = x[:64].double() @ weight.double().t()
            errors = [
                float((made[:64].double() - want).norm() / want.norm())
                for made in (whole, functional.linear(x, weight))
            ]
            results.append(
                {
                    "case": f"fixed_linear, {name}",
                    "dtype": str(dtype).removeprefix("torch."),
                    "relative_error": f"{errors[0]:.2e}",
                    "relative_error_of_pytorch": f"{errors[1]:.2e}",
                    "equal_bits": all(same),
                    "passed": all(same) and errors[0] <= 2 * errors[1],
                }
            )
            print(json.dumps(results[-1]), flush=True)
    return results


def bench_fixed_linear(rate: float) -> list[dict[str, Any]]:
    """Times in bfloat16, of PyTorch's products beside."""
    results = []
    for name, (inputs, outputs) in SHAPES.items():
        weights = [_case(1, inputs, outputs, torch.bfloat16)[1] for _ in range(WEIGHTS)]
        for rows in ROWS:
            x, _ = _case(rows, inputs, 1, torch.bfloat16)
            out = torch.empty(rows, outputs, dtype=torch.bfloat16, device="cuda")

            def fixed(x: Tensor = x, out: Tensor = out, weights: list[Tensor] = weights) -> None:
                for weight in weights:
                    fixed_linear(x, weight, out=out)

            def library(x: Tensor = x, out: Tensor = out, weights: list[Tensor] = weights) -> None:
                for weight in weights:
                    torch.mm(x, weight.t(), out=out)

            own, theirs = (time_us(run, repeats=8) / WEIGHTS for run in (fixed, library))
            size = 2 * (inputs * outputs + rows * (inputs + outputs))
            results.append(
                {
                    "case": f"fixed_linear, {name}",
                    "rows": rows,
                    "us": round(own, 2),
                    "us_of_pytorch": round(theirs, 2),
                    "times_pytorch": round(own / theirs, 2),
                    "tflop_per_s": round(2e-6 * rows * inputs * outputs / own, 1),
                    "tflop_per_s_of_pytorch": round(2e-6 * rows * inputs * outputs / theirs, 1),
                    "share_of_copy_rate": round(size / rate * 1e6 / own, 3),
                }
            )
            print(json.dumps(results[-1]), flush=True)
    return results


def _case(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, inputs, device="cuda").to(dtype)
    return x, (torch.randn(outputs, inputs, device="cuda") * inputs**-0.5).to(dtype)
