"""From the input projection of an attention layer to its queries and its KV blocks, in one launch.

For each token: RMS norm of every query and key head and rotation of their leading dimensions, each
where the family has it; a factor of the queries; keys and values to the token's slot. Everything
between the loads and the stores is float32. The bits of a token's results depend on the token
alone.
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
    head_scale: Tensor | None,
    cos: Tensor | None,
    signed_sin: Tensor | None,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    eps: float,
    *,
    num_heads: int | None = None,
    query_factor: float = 1.0,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values, return queries.

    Args:
        projected: Queries (H*D), keys, values (G*D each), and what else is behind them, [T, ..];
            rows may be strided.
        head_scale: Norm factors of each query and key head, [H + G, D] f32; None without norms.
        cos: From `rotary_tables`, [T, 1, r] f32, r even and at most D; None without rotation.
        signed_sin: The same, [T, 1, r] f32; None with cos.
        slots: block * P + offset of each token, [T] i64; 0 for padding, distinct otherwise.
        k_pool: [B, P, G, D]; overwritten at the slots that are not 0.
        v_pool: [B, P, G, D]; the same.
        eps: Added to the mean square of a head.
        num_heads: H, needed where no norm factors tell it.
        query_factor: What queries are multiplied by at last.

    Returns:
        Queries, [T, H, D], contiguous.

    Raises:
        ValueError: Sizes that do not fit each other.
    """
    tokens = projected.shape[0]
    kv_heads, head_dim = k_pool.shape[2:]
    if num_heads is None:
        num_heads = 0 if head_scale is None else head_scale.shape[0] - kv_heads
    _check_pools(k_pool, v_pool, head_scale, num_heads)
    _check_tokens(projected, slots, (num_heads, kv_heads, head_dim))
    _check_tables(cos, signed_sin, tokens, head_dim)
    query = projected.new_empty(tokens, num_heads, head_dim)
    run = reference.attention_inputs
    if can_launch(projected):
        from headrace.ops.attention_inputs import fused  # noqa: PLC0415  needs Triton

        run = fused.attention_inputs
    run(projected, head_scale, cos, signed_sin, slots, k_pool, v_pool, eps, query_factor, query)
    return query


def _check_pools(k_pool: Tensor, v_pool: Tensor, head_scale: Tensor | None, heads: int) -> None:
    page, kv_heads, head_dim = k_pool.shape[1:]
    if k_pool.shape != v_pool.shape or k_pool.stride() != v_pool.stride():
        msg = f"keys {tuple(k_pool.shape)} and values {tuple(v_pool.shape)} differ in layout"
        raise ValueError(msg)
    if k_pool.stride()[2:] != (head_dim, 1) or k_pool.stride(0) != page * k_pool.stride(1):
        msg = f"slots must lie one after another in memory, strides are {k_pool.stride()}"
        raise ValueError(msg)
    if heads <= 0:
        msg = f"{heads} query heads: give num_heads where no norm factors tell it"
        raise ValueError(msg)
    if head_scale is not None and head_scale.shape != (heads + kv_heads, head_dim):
        msg = f"head_scale {tuple(head_scale.shape)} does not fit keys {tuple(k_pool.shape)}"
        raise ValueError(msg)
    if head_dim & (head_dim - 1):
        msg = f"head size must be a power of 2, not {head_dim}"
        raise ValueError(msg)


def _check_tokens(projected: Tensor, slots: Tensor, sizes: tuple[int, int, int]) -> None:
    heads, kv_heads, head_dim = sizes
    tokens = projected.shape[0]
    columns = (heads + 2 * kv_heads) * head_dim
    if projected.shape[1] < columns or projected.stride(1) != 1:
        msg = f"projected: {projected.shape[1]} columns, strides {projected.stride()}, where "
        raise ValueError(msg + f"{heads} and twice {kv_heads} heads of {head_dim} are needed")
    if slots.shape != (tokens,):
        msg = f"slots {tuple(slots.shape)} for {tokens} tokens"
        raise ValueError(msg)


def _check_tables(
    cos: Tensor | None, signed_sin: Tensor | None, tokens: int, head_dim: int
) -> None:
    if cos is None or signed_sin is None:
        if cos is not signed_sin:
            msg = "cosines and sines come together"
            raise ValueError(msg)
        return
    rotary_dim = cos.shape[2]
    for name, table in (("cos", cos), ("signed_sin", signed_sin)):
        if table.shape != (tokens, 1, rotary_dim) or not table.is_contiguous():
            msg = f"{name}: shape {tuple(table.shape)}, strides {table.stride()}, where a "
            raise ValueError(msg + f"contiguous {tokens, 1, rotary_dim} is needed")
    if rotary_dim % 2 or rotary_dim > head_dim:
        msg = f"{rotary_dim} rotated dimensions of heads of {head_dim}: must be even, no more"
        raise ValueError(msg)
