"""Head norms, rotation and the write to the KV blocks: one program for each token and head.

A program of a key head writes the value head of the same number too. Programs write apart from each
other as long as slots are distinct, and none reads what another one writes.
"""

# Names exist where their constants say.
# ruff: noqa: ANN201
# mypy: disable-error-code="possibly-undefined"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attention_inputs_kernel(
    projected_ptr,
    head_scale_ptr,
    cos_ptr,
    signed_sin_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    query_ptr,
    projected_stride,
    slot_stride,
    eps,
    query_factor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
):
    """See the package. Tables of cosines and sines are [T, R], heads [D].

    Without norms head_scale is None, and R is 0 without rotation.
    """
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    is_rotated = d < R
    partner = tl.where(d < R // 2, d + R // 2, d - R // 2)
    row = projected_ptr + t * projected_stride + head * D
    # All loads are on their way before the sum. The other half comes once more, from the cache:
    # cheaper than to exchange registers.
    x = tl.load(row + d).to(tl.float32)  # [D]
    if R > 0:
        y = tl.load(row + partner, mask=is_rotated, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + t * R + d, mask=is_rotated, other=1.0)
        sin = tl.load(signed_sin_ptr + t * R + d, mask=is_rotated, other=0.0)
    if head_scale_ptr is not None:
        scale = head_scale_ptr + head * D
        x_scale = tl.load(scale + d)
        if R > 0:
            y_scale = tl.load(scale + partner, mask=is_rotated, other=0.0)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        x = x * inverse * x_scale
        if R > 0:
            y = y * inverse * y_scale
    if R > 0:
        x = x * cos + y * sin
    if head < H:
        x = x * query_factor
        tl.store(query_ptr + (t * H + head) * D + d, x.to(query_ptr.dtype.element_ty))
    else:
        slot = tl.load(slots_ptr + t).to(tl.int64)
        if slot > 0:
            at = slot * slot_stride + (head - H) * D + d
            tl.store(k_ptr + at, x.to(k_ptr.dtype.element_ty))
            value = tl.load(row + G * D + d)
            tl.store(v_ptr + at, value.to(v_ptr.dtype.element_ty))
