"""The launches: whole tiles, then parts of split tiles and their sums."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from headrace.ops.paged_prefill.kernel import add_parts_kernel, paged_prefill_kernel
from headrace.ops.paged_prefill.tiles import FIELDS
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.paged_prefill.tiles import PrefillTiles

_ADDED_ROWS = 16
"""Rows of a tile whose parts one program adds."""


def paged_prefill(
    query: Tensor, k_pool: Tensor, v_pool: Tensor, tiles: PrefillTiles, out: Tensor
) -> None:
    """Attend from the known rows of a step; see the package."""
    head_dim = query.shape[2]
    kv_heads = k_pool.shape[2]
    sizes = tiles.layout.sizes
    heads = {"GROUP": query.shape[1] // kv_heads, "G": kv_heads, "D": head_dim}

    def attend(records: Tensor, partial: Tensor | None, stats: Tensor | None) -> None:
        launch_kernel(
            paged_prefill_kernel,
            (records.shape[0], kv_heads),
            query,
            k_pool,
            v_pool,
            tiles.tables,
            records,
            out,
            partial,
            stats,
            query.stride(0),
            k_pool.stride(0),
            head_dim**-0.5 * math.log2(math.e),
            **heads,
            P=k_pool.shape[1],
            SLOT=k_pool.stride(1),
            PARTS=partial is not None,
            ROWS=sizes.rows,
            KEYS=sizes.keys,
            FIELDS=FIELDS,
            WIDE=query.device.type == "cpu",
            # Runs of keys with and without a mask are code of their own: nothing is left to it.
            enable_fp_fusion=not tiles.layout.is_fixed,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
        )

    place = tiles.layout.num_whole
    attend(tiles.records[:place], None, None)
    if not tiles.layout.rounds:
        return
    most = max(num_parts for num_parts, _ in tiles.layout.rounds)
    shape = (most, kv_heads, sizes.rows)
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(*shape, 2, dtype=torch.float32, device=query.device)
    for num_parts, num_tiles in tiles.layout.rounds:
        attend(tiles.records[place : place + num_parts], partial, stats)
        place += num_parts
        launch_kernel(
            add_parts_kernel,
            (num_tiles, kv_heads, sizes.rows // _ADDED_ROWS),
            partial,
            stats,
            tiles.records[place : place + num_tiles],
            out,
            **heads,
            ROWS=sizes.rows,
            ADDED=_ADDED_ROWS,
            FIELDS=FIELDS,
            num_warps=4,
        )
        place += num_tiles
