"""A matrix product whose rows have the same bits among any others.

A program makes one tile of outputs. Its sums go over runs of CHUNK columns: within a run tile by
tile into an accumulator that starts at zero, then run by run into the total, from the first one on.
Where few tiles would leave the device idle, runs are programs of their own, and a second kernel
adds them in the same order. Nothing else depends on the number of rows.
"""

# ruff: noqa: ANN201

from __future__ import annotations

import triton
import triton.language as tl


# Numbers that change from step to step: one machine code for all of their values.
@triton.jit(do_not_specialize=["rows", "row_tiles"])
def fixed_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    row_tiles,
    x_stride,
    weight_stride,
    out_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    CHUNK: tl.constexpr,
    BAND: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Programs (tile, 1), or (tile, run) where IS_SPLIT: then out is [runs, rows, OUT] f32.

    Tiles go in bands of BAND tiles of rows, so that programs that run together share weights in
    cache. WIDE multiplies in float32: the interpreter cannot multiply bfloat16.
    """
    OUT_TILES: tl.constexpr = (OUT + TILE_OUT - 1) // TILE_OUT
    tile = tl.program_id(0)
    band = tile // (BAND * OUT_TILES)
    width = tl.minimum(row_tiles - band * BAND, BAND)
    place = tile % (BAND * OUT_TILES)
    row = (band * BAND + place % width) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = (place // width) * TILE_OUT + tl.arange(0, TILE_OUT)
    k = tl.arange(0, TILE_IN)
    # Rows and columns behind the end repeat the last one, and are not stored.
    x_row = tl.minimum(row, rows - 1).to(tl.int64) * x_stride
    w_row = tl.minimum(column, OUT - 1).to(tl.int64) * weight_stride
    first, last = 0, (IN + CHUNK - 1) // CHUNK
    if IS_SPLIT:
        first = tl.program_id(1)
        last = first + 1
    total = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    for run in range(first, last):
        acc = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
        for start in range(run * CHUNK, tl.minimum((run + 1) * CHUNK, IN), TILE_IN):
            at = start + k
            x_at = x_ptr + x_row[:, None] + at[None, :]
            w_at = weight_ptr + w_row[:, None] + at[None, :]
            if IN % TILE_IN == 0:
                x = tl.load(x_at)
                w = tl.load(w_at)
            else:
                x = tl.load(x_at, mask=(at < IN)[None, :], other=0.0)
                w = tl.load(w_at, mask=(at < IN)[None, :], other=0.0)
            if WIDE:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        total += acc
    out_row = row.to(tl.int64)
    if IS_SPLIT:
        out_row += tl.program_id(1).to(tl.int64) * rows
    tl.store(
        out_ptr + out_row[:, None] * out_stride + column[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < OUT)[None, :],
    )


@triton.jit(do_not_specialize=["rows"])
def add_runs_kernel(
    partial_ptr,
    out_ptr,
    rows,
    out_stride,
    OUT: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the runs [RUNS, rows, OUT] of BLOCK outputs of one row, from the first one on."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for run in tl.static_range(RUNS):
        at = partial_ptr + (run * tl.cast(rows, tl.int64) + row) * OUT + column
        total += tl.load(at, mask=column < OUT, other=0.0)
    tl.store(
        out_ptr + row * out_stride + column,
        total.to(out_ptr.dtype.element_ty),
        mask=column < OUT,
    )
