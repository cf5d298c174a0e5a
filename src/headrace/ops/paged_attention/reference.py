"""Causal attention of one query over the tokens of its sequence, as the definition says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def attend_reference(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    position: int,
    window: int | None = None,
) -> Tensor:
    """Attend from one token.

    Args:
        query: [H, D].
        k_pool: [B, P, G, D].
        v_pool: [B, P, G, D].
        block_table: The sequence's blocks, [M].
        position: The token's position; it sees keys 0 to position.
        window: The newest of them that it sees; None for all.

    Returns:
        [H, D] f64.
    """
    num_heads, head_dim = query.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    blocks = [int(block) for block in block_table]
    at = [(blocks[p // block_size], p % block_size) for p in range(position + 1)][-(window or 0) :]
    out = torch.zeros(num_heads, head_dim, dtype=torch.float64)
    for h in range(num_heads):
        g = h // (num_heads // num_kv_heads)
        keys = torch.stack([k_pool[b, o, g] for b, o in at]).double()
        values = torch.stack([v_pool[b, o, g] for b, o in at]).double()
        weights = torch.softmax(keys @ query[h].double() * head_dim**-0.5, dim=0)
        out[h] = weights @ values
    return out
