"""Attention of the known tokens, tile by tile and token by token: the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.paged_prefill.tiles import PrefillTiles


def paged_prefill(
    query: Tensor, k_pool: Tensor, v_pool: Tensor, tiles: PrefillTiles, out: Tensor
) -> None:
    """Attend from the known rows of a step; see the package."""
    group = query.shape[1] // k_pool.shape[2]
    page = k_pool.shape[1]
    for token, tokens, position, table in _tiles(tiles):
        at = torch.arange(position + tokens, device=query.device)
        blocks = tiles.tables[table + at // page].long()
        keys = k_pool[blocks, at % page].float().repeat_interleave(group, 1)  # [L, H, D]
        values = v_pool[blocks, at % page].float().repeat_interleave(group, 1)
        for t in range(tokens):
            seen = position + t + 1
            q = query[token + t].float() * query.shape[2] ** -0.5
            weights = torch.softmax((keys[:seen] * q).sum(-1), 0)
            out[token + t] = (weights[..., None] * values[:seen]).sum(0).to(out.dtype)


def _tiles(tiles: PrefillTiles) -> list[tuple[int, ...]]:
    """First packed token, tokens, first position and table of each tile, split or not."""
    records = tiles.records.tolist()
    place = tiles.layout.num_whole
    chosen = records[:place]
    for num_parts, num_tiles in tiles.layout.rounds:
        # The first part of a tile names all but the end of its keys.
        chosen += [part for part in records[place : place + num_parts] if part[4] == 0]
        place += num_parts + num_tiles
    return [tuple(record[:4]) for record in chosen]
