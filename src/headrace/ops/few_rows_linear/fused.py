"""The launches of the product of few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.few_rows_linear.kernel import few_rows_linear_kernel
from headrace.ops.fixed_linear.fused import add_runs
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from torch import Tensor

TILE_OUT, TILE_IN, NUM_WARPS, NUM_STAGES = 64, 128, 4, 3
"""Rows and columns of a weight that a program has at a time, its warps, and tiles on their way.

Tensor cores of Hopper multiply 64 rows at a time, so the weight is on that side of the product.
"""

PROGRAMS = 264
"""Two for each multiprocessor of an H200: with fewer tiles than half of them, columns are split."""

LEAST_TILES = 4
"""Tiles of columns of a part."""

LEAST_ROWS = 16
"""Rows of x that programs are compiled for; more of them are twice as many, and so on."""


def few_rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply; see the package."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    tiles = -(-outputs // TILE_OUT)
    steps = -(-inputs // TILE_IN)
    wanted = max(1, min(PROGRAMS // max(tiles, 1), steps // LEAST_TILES))
    chunk = -(-steps // wanted) * TILE_IN
    parts = max(1, -(-inputs // chunk))
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    made = out
    if parts > 1:
        made = torch.empty(parts * rows, outputs, dtype=torch.float32, device=x.device)
    launch_kernel(
        few_rows_linear_kernel,
        (tiles if rows else 0, parts),
        x,
        weight,
        made,
        rows,
        inputs,
        outputs,
        chunk,
        x.stride(0),
        weight.stride(0),
        ROWS=max(LEAST_ROWS, 1 << (rows - 1).bit_length()),
        TILE_OUT=TILE_OUT,
        TILE_IN=TILE_IN,
        HAS_TAIL=inputs % TILE_IN != 0,
        WIDE=x.device.type == "cpu",
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    if parts > 1:
        add_runs(made, out, parts)
    return out
