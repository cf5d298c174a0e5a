"""Gated products: one program for each token and BLOCK columns.

An output may be where the values are: a program reads what it overwrites, and no other one's.
"""

# ruff: noqa: ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_product_kernel(
    gate_ptr,
    value_ptr,
    out_ptr,
    gate_stride,
    value_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SILU: tl.constexpr,
):
    """See the package."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < WIDTH
    gate = tl.load(gate_ptr + t * gate_stride + column, mask=is_column, other=0.0).to(tl.float32)
    value = tl.load(value_ptr + t * value_stride + column, mask=is_column, other=0.0)
    value = value.to(tl.float32)
    # Of the absolute value, which cannot overflow.
    small = tl.exp(-tl.abs(gate))
    factor = tl.where(gate >= 0, 1.0, small)
    # The approximate division errs in the last two bits of float32: seen there and nowhere else.
    if out_ptr.dtype.element_ty == tl.float32:
        factor = tl.div_rn(factor, 1.0 + small)
    else:
        factor = factor / (1.0 + small)
    if IS_SILU:
        factor = gate * factor
    product = factor * value
    out = out_ptr + t * out_stride + column
    tl.store(out, product.to(out_ptr.dtype.element_ty), mask=is_column)
