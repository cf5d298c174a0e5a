"""MLPs of a mixture of experts, each row through the few experts that its router chose.

Rows are sorted by expert and every expert's rows are filled up to tiles of ROW_TILE, so that every
product has one fixed shape: a row's bits depend on the row and its experts alone, as in
`headrace.ops.linear`. The number of tiles has a bound that the host knows, so nothing waits for the
device to say how many rows an expert got.

This is the reference path on every device: an expert's weights are copied once per tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.activations import silu_mul
from headrace.ops.linear import ROW_TILE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

TILES_AT_ONCE = 32
"""Tiles whose weights are copied together: bounds the memory that the copies take."""


def grouped_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    factors: Tensor,
    activate: Callable[[Tensor], Tensor] = silu_mul,
) -> Tensor:
    """Send each row through its experts and add up their weighted outputs.

    Args:
        x: Rows, [T, C].
        gate_up: Gate rows, then value rows of each expert, [E, 2I, C]; for an activation without
            gate, value rows alone, [E, I, C].
        down: [E, C, I].
        experts: Each row's experts, distinct, [T, k] i64.
        factors: Their weights, [T, k] f32.
        activate: What is done to the first product, [.., 2I] or [.., I] to [.., I]; an element's
            bits may not depend on its place.

    Returns:
        [T, C], the dtype of x: sum over k of factor * down(activate(gate_up x)).
    """
    rows, k = experts.shape
    num_experts = gate_up.shape[0]
    slots, tile_experts = _tile(experts, num_experts)
    num_slots = tile_experts.shape[0] * ROW_TILE
    # Slots without a row compute row 0; nobody reads what they give.
    row_of = torch.arange(rows * k, device=x.device).div_(k, rounding_mode="floor")
    source = torch.zeros(num_slots, dtype=torch.long, device=x.device)
    source.scatter_(0, slots, row_of)
    inputs = x.index_select(0, source)
    out = x.new_empty(num_slots, x.shape[1])
    for first in range(0, tile_experts.shape[0], TILES_AT_ONCE):
        chosen = tile_experts[first : first + TILES_AT_ONCE]
        part = slice(first * ROW_TILE, (first + chosen.shape[0]) * ROW_TILE)
        hidden = activate(_tile_products(inputs[part], gate_up, chosen))
        out[part] = _tile_products(hidden, down, chosen)
    chosen_out = out.index_select(0, slots).view(rows, k, -1)
    return (chosen_out.float() * factors[..., None]).sum(1).to(x.dtype)


def _tile(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Give every (row, choice) a slot so that each tile of ROW_TILE slots has one expert.

    Args:
        experts: [T, k] i64.
        num_experts: E.

    Returns:
        The slot of each pair in row order, [T * k] i64, and the expert of each tile, [tiles] i64;
        tiles that no pair needs have any expert.
    """
    flat = experts.reshape(-1)
    pairs = flat.shape[0]
    # Full tiles take at least ROW_TILE pairs each; every expert has at most one that is not full.
    max_tiles = pairs // ROW_TILE + min(num_experts, pairs)
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.long, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    tiles = (counts + (ROW_TILE - 1)).div_(ROW_TILE, rounding_mode="floor")
    tile_ends, pair_ends = tiles.cumsum(0), counts.cumsum(0)
    sorted_experts = flat.index_select(0, order)
    first_slot = ((tile_ends - tiles) * ROW_TILE).index_select(0, sorted_experts)
    first_pair = (pair_ends - counts).index_select(0, sorted_experts)
    slots = torch.empty_like(flat)
    slots[order] = first_slot + torch.arange(pairs, device=flat.device) - first_pair
    at = torch.arange(max_tiles, device=flat.device)
    tile_experts = torch.searchsorted(tile_ends, at, right=True).clamp_(max=num_experts - 1)
    return slots, tile_experts


def _tile_products(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Multiply tile i of x [n * ROW_TILE, C] with weights[chosen[i]] [O, C]^T."""
    own = weights.index_select(0, chosen).transpose(1, 2)
    tiles = x.view(-1, ROW_TILE, x.shape[1])
    if x.device.type != "cpu":
        return torch.bmm(tiles, own).view(x.shape[0], -1)
    out = x.new_empty(tiles.shape[0], ROW_TILE, own.shape[2])
    for x_tile, weight, out_tile in zip(tiles, own, out, strict=True):
        torch.mm(x_tile, weight, out=out_tile)
    return out.view(x.shape[0], -1)
