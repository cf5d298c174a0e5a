"""From the input projection of an attention layer to its queries and its KV blocks, in one launch.

For each token: RMS norm of every query and key head, rotation of their leading dimensions, keys and
values to the token's slot. Everything between the loads and the stores is float32. The bits of a
token's results depend on the token alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.attention_inputs import reference
from headrace.rt.kernels import can_launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attention_inputs"]


def attention_inputs(
    projected: Tensor,
    head_scale: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    eps: float,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values, return queries.

    Args:
        projected: Queries (H*D), keys, values (G*D each), and what else is behind them, [T, ..];
            rows may be strided.
        head_scale: Norm factors of each query and key head, [H + G, D] f32.
        cos: From `rotary_tables`, [T, 1, r] f32, r even and at most D.
        signed_sin: The same, [T, 1, r] f32.
        slots: block * P + offset of each token, [T] i64; 0 for padding, distinct otherwise.
        k_pool: [B, P, G, D]; overwritten at the slots that are not 0.
        v_pool: [B, P, G, D]; the same.
        eps: Added to the mean square of a head.

    Returns:
        Queries, [T, H, D], contiguous.

    Raises:
        ValueError: Sizes that do not fit each other.
    """
    tokens = projected.shape[0]
    kv_heads, head_dim = k_pool.shape[2:]
    heads = head_scale.shape[0] - kv_heads
    _check_pools(k_pool, v_pool, head_scale, heads)
    _check_tokens(projected, cos, signed_sin, slots, (heads, kv_heads, head_dim))
    query = projected.new_empty(tokens, heads, head_dim)
    run = reference.attention_inputs
    if can_launch(projected):
        from headrace.ops.attention_inputs import fused  # noqa: PLC0415  needs Triton

        run = fused.attention_inputs
    run(projected, head_scale, cos, signed_sin, slots, k_pool, v_pool, eps, query)
    return query


def _check_pools(k_pool: Tensor, v_pool: Tensor, head_scale: Tensor, heads: int) -> None:
    page, _, head_dim = k_pool.shape[1:]
    if k_pool.shape != v_pool.shape or k_pool.stride() != v_pool.stride():
        msg = f"keys {tuple(k_pool.shape)} and values {tuple(v_pool.shape)} differ in layout"
        raise ValueError(msg)
    if k_pool.stride()[2:] != (head_dim, 1) or k_pool.stride(0) != page * k_pool.stride(1):
        msg = f"slots must lie one after another in memory, strides are {k_pool.stride()}"
        raise ValueError(msg)
    if head_scale.shape[1] != head_dim or heads <= 0:
        msg = f"head_scale {tuple(head_scale.shape)} does not fit keys {tuple(k_pool.shape)}"
        raise ValueError(msg)
    if head_dim & (head_dim - 1):
        msg = f"head size must be a power of 2, not {head_dim}"
        raise ValueError(msg)


def _check_tokens(
    projected: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    slots: Tensor,
    sizes: tuple[int, int, int],
) -> None:
    heads, kv_heads, head_dim = sizes
    tokens = projected.shape[0]
    columns = (heads + 2 * kv_heads) * head_dim
    if projected.shape[1] < columns or projected.stride(1) != 1:
        msg = f"projected: {projected.shape[1]} columns, strides {projected.stride()}, where "
        raise ValueError(msg + f"{heads} and twice {kv_heads} heads of {head_dim} are needed")
    rotary_dim = cos.shape[2]
    for name, table in (("cos", cos), ("signed_sin", signed_sin)):
        if table.shape != (tokens, 1, rotary_dim) or not table.is_contiguous():
            msg = f"{name}: shape {tuple(table.shape)}, strides {table.stride()}, where a "
            raise ValueError(msg + f"contiguous {tokens, 1, rotary_dim} is needed")
    if rotary_dim % 2 or rotary_dim > head_dim:
        msg = f"{rotary_dim} rotated dimensions of heads of {head_dim}: must be even, no more"
        raise ValueError(msg)
    if slots.shape != (tokens,):
        msg = f"slots {tuple(slots.shape)} for {tokens} tokens"
        raise ValueError(msg)
