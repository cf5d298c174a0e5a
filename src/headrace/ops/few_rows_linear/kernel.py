"""A product of few rows: a program streams TILE_OUT rows of the weight past all rows of x."""

# ruff: noqa: ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def few_rows_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    inputs,
    outputs,
    chunk,
    x_stride,
    weight_stride,
    ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Programs (tile of outputs, part of chunk columns); out is [parts, rows, outputs].

    HAS_TAIL: the last tile of columns is not whole. WIDE multiplies in float32: the interpreter
    cannot multiply bfloat16.
    """
    column = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, TILE_IN)
    # What is behind the end repeats the last one, and is not stored.
    x_row = x_ptr + tl.minimum(row, rows - 1).to(tl.int64) * x_stride
    w_row = weight_ptr + tl.minimum(column, outputs - 1).to(tl.int64) * weight_stride
    acc = tl.zeros([TILE_OUT, ROWS], tl.float32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, inputs), TILE_IN):
        at = (start + k)[None, :]
        if HAS_TAIL:
            w = tl.load(w_row[:, None] + at, mask=at < inputs, other=0.0)
            x = tl.load(x_row[:, None] + at, mask=at < inputs, other=0.0)
        else:
            # No program reads it again, unlike the rows of x.
            w = tl.load(w_row[:, None] + at, eviction_policy="evict_first")
            x = tl.load(x_row[:, None] + at)
        if WIDE:
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    out_row = (part.to(tl.int64) * rows + row) * outputs
    tl.store(
        out_ptr + out_row[:, None] + column[None, :],
        tl.trans(acc).to(out_ptr.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < outputs)[None, :],
    )
