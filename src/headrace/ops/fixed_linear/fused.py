"""The launches of the product with fixed tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.ops.fixed_linear.kernel import add_runs_kernel, fixed_linear_kernel
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSizes:
    """What bits depend on: the same for all products of a dtype.

    Attributes:
        rows, outputs, inputs: Of a tile.
        num_warps, num_stages: Of its program.
    """

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


TILES = {
    torch.bfloat16: TileSizes(rows=64, outputs=128, inputs=64, num_warps=4, num_stages=4),
    # Without tensor cores: a thread holds 16 sums, and what they take from shared memory.
    torch.float32: TileSizes(rows=32, outputs=64, inputs=32, num_warps=4, num_stages=3),
}
"""Tensor cores of Hopper multiply 64 rows at a time, however few there are."""

CHUNK = 1024
"""Columns that are summed before they are added to what is to their left: a multiple of a tile."""

BAND = 8
"""Tiles of rows that go over the weights together."""

MIN_TILES = 132
"""With fewer tiles than an H200 has multiprocessors, runs become programs of their own."""

ADD_BLOCK = 1024
"""Outputs that a program adds up."""


def fixed_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply each row with a weight matrix; see the package."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    sizes = TILES[x.dtype]
    row_tiles = -(-rows // sizes.rows)
    tiles = row_tiles * -(-outputs // sizes.outputs)
    runs = -(-inputs // CHUNK)
    is_split = runs > 1 and tiles < MIN_TILES
    made = out
    if is_split:
        made = torch.empty(runs * rows, outputs, dtype=torch.float32, device=x.device)
    launch_kernel(
        fixed_linear_kernel,
        (tiles, runs if is_split else 1),
        x,
        weight,
        made,
        rows,
        row_tiles,
        x.stride(0),
        weight.stride(0),
        made.stride(0),
        IN=inputs,
        OUT=outputs,
        TILE_ROWS=sizes.rows,
        TILE_OUT=sizes.outputs,
        TILE_IN=sizes.inputs,
        CHUNK=CHUNK,
        BAND=BAND,
        IS_SPLIT=is_split,
        WIDE=x.device.type == "cpu",
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )
    if is_split:
        add_runs(made, out[:rows], runs)


def add_runs(made: Tensor, out: Tensor, runs: int) -> None:
    """Add the sums of runs of columns in their order, made [runs * T, O] f32, to out [T, O]."""
    rows, outputs = out.shape
    launch_kernel(
        add_runs_kernel,
        (rows, -(-outputs // ADD_BLOCK)),
        made,
        out,
        rows,
        out.stride(0),
        OUT=outputs,
        RUNS=runs,
        BLOCK=ADD_BLOCK,
        num_warps=4,
    )
