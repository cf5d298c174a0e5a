"""Addition to the residual stream and RMS norm: one program for each token."""

# ruff: noqa: ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_rms_norm_kernel(
    residual_ptr,
    x_ptr,
    scale_ptr,
    out_ptr,
    residual_stride,
    x_stride,
    out_stride,
    eps,
    C: tl.constexpr,
    PADDED: tl.constexpr,
):
    """See the package. PADDED is the power of 2 that holds the C columns; x_ptr may be None."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    is_column = column < C
    at = residual_ptr + t * residual_stride + column
    row = tl.load(at, mask=is_column, other=0.0).to(tl.float32)  # [PADDED]
    # On its way before the sum: a step's weights have driven it from the cache, and few programs
    # have nothing else to do.
    scale = tl.load(scale_ptr + column, mask=is_column, other=0.0)
    if x_ptr is not None:
        x = tl.load(x_ptr + t * x_stride + column, mask=is_column, other=0.0)
        stored = (row + x.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(at, stored, mask=is_column)
        # What later layers see of the residual is what this norm sees.
        row = stored.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(row * row, 0) / C + eps)
    normed = (row * inverse * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + t * out_stride + column, normed, mask=is_column)
