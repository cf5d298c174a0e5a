"""Attention of known tokens: chunks of prompts and tokens computed again, keys in KV blocks.

The keys and values of the step's own tokens are in the pools already; a token sees all up to its
own. Head sizes that are powers of 2 up to 256, any number of query heads for each KV head that
fits a tile. The bits of a token's result depend on its own row alone. Layers with a window cannot
use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.paged_decode import check_heads
from headrace.ops.paged_prefill import reference
from headrace.ops.paged_prefill.tiles import (
    FIELDS,
    MAX_HEAD,
    PrefillTiles,
    Span,
    TileLayout,
    Tiling,
    tiling,
)
from headrace.rt.kernels import can_launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FIELDS", "PrefillTiles", "Span", "TileLayout", "Tiling", "paged_prefill", "tiling"]


def paged_prefill(
    query: Tensor, k_pool: Tensor, v_pool: Tensor, tiles: PrefillTiles, out: Tensor
) -> None:
    """Attend from the known rows of a step.

    Args:
        query: Queries after rotation, [T, H, D]; tokens may be strided.
        k_pool: Keys after rotation, [B, P, G, D].
        v_pool: [B, P, G, D].
        tiles: The rows' tiles, cut for these heads.
        out: [T, H, D], contiguous; overwritten at the rows' tokens.

    Raises:
        ValueError: Sizes that do not fit each other.
    """
    check_heads(query, k_pool, v_pool)
    if out.shape != query.shape or not out.is_contiguous():
        msg = f"outputs must be contiguous and {tuple(query.shape)}, not {tuple(out.shape)}"
        raise ValueError(msg)
    if query.shape[2] & (query.shape[2] - 1) or query.shape[2] > MAX_HEAD:
        msg = f"head size must be a power of 2 up to {MAX_HEAD}, not {query.shape[2]}"
        raise ValueError(msg)
    run = reference.paged_prefill
    if can_launch(query):
        from headrace.ops.paged_prefill import fused  # noqa: PLC0415  needs Triton

        run = fused.paged_prefill
    run(query, k_pool, v_pool, tiles, out)
