"""Head norms, rotation and the write to the blocks in float32: the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def attention_inputs(
    projected: Tensor,
    head_scale: Tensor | None,
    cos: Tensor | None,
    signed_sin: Tensor | None,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    eps: float,
    query_factor: float,
    query: Tensor,
) -> None:
    """Norm, rotate and write; see the package."""
    page, kv_heads, head_dim = k_pool.shape[1:]
    heads = query.shape[1]
    columns = (heads + 2 * kv_heads) * head_dim
    each = projected[:, :columns].view(-1, heads + 2 * kv_heads, head_dim).float()
    normed, value = each[:, : heads + kv_heads], each[:, heads + kv_heads :]
    if head_scale is not None:
        inverse = torch.rsqrt((normed * normed).mean(-1, keepdim=True) + eps)
        normed = normed * inverse * head_scale
    rotated = normed
    if cos is not None and signed_sin is not None:
        half = cos.shape[2] // 2
        first, second, rest = normed.split((half, half, head_dim - 2 * half), -1)
        c, s = cos[..., :half], signed_sin[..., half:]
        rotated = torch.cat((first * c - second * s, second * c + first * s, rest), -1)
    query.copy_(rotated[:, :heads] * query_factor)
    # No index of what is real, which would ask the device how many there are: padding writes the
    # null slot's own bytes.
    block, offset = slots // page, slots % page
    is_real = (slots > 0)[:, None, None]
    for pool, new in ((k_pool, rotated[:, heads:]), (v_pool, value)):
        pool[block, offset] = torch.where(is_real, new.to(pool.dtype), pool[:1, 0])
