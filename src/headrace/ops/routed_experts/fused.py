"""The launches of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.ops.routed_experts.kernel import add_experts_kernel, expert_product_kernel
from headrace.ops.routed_experts.kernel_route import route_kernel, tiles_kernel
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.routed_experts import Routes, RoutingRule

CHUNK = 1024
"""Pairs that are counted at a time."""

BLOCK = 1024
"""Columns of a program that adds."""

_MIN_PADDED = 32
"""Fewer experts or columns would have several threads that look at the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """How products are cut.

    Attributes:
        rows: Tokens of a tile.
        columns: Weight rows of a program.
        step: Columns that are multiplied at a time.
        num_warps: Of a program.
        num_stages: Steps whose loads are on the way together.
    """

    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


FEW = TileShape(rows=16, columns=64, step=128, num_warps=4, num_stages=4)
"""For a few tokens an expert: what counts is that each weight is read once, by many programs."""

SOME = TileShape(rows=64, columns=128, step=64, num_warps=4, num_stages=4)
MANY = TileShape(rows=128, columns=128, step=64, num_warps=8, num_stages=4)

PLAIN = TileShape(rows=16, columns=64, step=32, num_warps=4, num_stages=2)
"""For float32, which tensor cores do not multiply."""

_SOME_PAIRS, _MANY_PAIRS = 24, 96
"""Pairs an expert, on average, from which larger tiles are taken."""

FIXED_PAIRS = _SOME_PAIRS
"""Pairs an expert for which products are cut where all batches must have the same tiles."""


def tile_shape(num_pairs: int, num_experts: int, dtype: torch.dtype) -> TileShape:
    """Choose how products are cut by what the host knows."""
    if dtype == torch.float32:
        return PLAIN
    if num_pairs < _SOME_PAIRS * num_experts:
        return FEW
    return SOME if num_pairs < _MANY_PAIRS * num_experts else MANY


def route_tokens(
    logits: Tensor,
    rule: RoutingRule,
    choice_bias: Tensor | None,
    x: Tensor | None,
    shared_gate: Tensor | None,
    slots: Tensor | None,
    routes: Routes,
) -> None:
    """Choose each token's experts; see the package."""
    rows, num_experts = logits.shape
    k = routes.experts.shape[1]
    width = 1 if x is None else x.shape[1]
    launch_kernel(
        route_kernel,
        (rows,),
        logits,
        choice_bias,
        x,
        shared_gate,
        slots,
        routes.experts,
        routes.factors,
        logits.stride(0),
        0 if x is None else x.stride(0),
        rule.scale,
        rule.eps,
        E=num_experts,
        E_PADDED=_padded(num_experts),
        K=k,
        K_PADDED=_padded(k),
        C=width,
        C_PADDED=_padded(width),
        IS_SOFTMAX=rule.scoring == "softmax",
        IS_NORMALISED=rule.is_normalised,
        # The choice is a chain of reductions, and one warp's are the fastest.
        num_warps=1,
    )


def routed_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routes: Routes,
    shared: Tensor | None,
    activation: str,
    out: Tensor,
    *,
    is_fixed: bool = False,
) -> None:
    """Weighted sums of the experts' outputs; see the package."""
    num_experts, width, inner = down.shape
    tokens, k = routes.experts.shape
    num_pairs = FIXED_PAIRS * num_experts if is_fixed else tokens * k
    shape = tile_shape(num_pairs, num_experts, x.dtype)
    pairs, tile_experts = sort_pairs(routes.experts, num_experts, shape.rows)
    hidden = x.new_empty(pairs.shape[0], inner)
    pair_out = x.new_empty(tokens * k, width)
    is_gated = activation == "silu_mul"
    for source, weight, made, is_up in (
        (x, gate_up, hidden, True),
        (hidden, down, pair_out, False),
    ):
        columns = shape.columns // 2 if is_up and is_gated else shape.columns
        launch_kernel(
            expert_product_kernel,
            # A tile's programs follow each other: they read the same tokens.
            (-(-made.shape[1] // columns), tile_experts.shape[0]),
            source,
            weight,
            made,
            pairs,
            tile_experts,
            source.stride(0),
            WIDTH=weight.shape[2],
            OUT=made.shape[1],
            K=k,
            TILE=shape.rows,
            COLUMNS=shape.columns,
            STEP=shape.step,
            IS_UP=is_up,
            IS_GATED=is_up and is_gated,
            WIDE=x.device.type == "cpu",
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
    launch_kernel(
        add_experts_kernel,
        (tokens, -(-width // BLOCK)),
        pair_out,
        routes.experts,
        routes.factors,
        shared,
        out,
        0 if shared is None else shared.stride(0),
        C=width,
        K=k,
        BLOCK=BLOCK,
        num_warps=4,
    )


def sort_pairs(experts: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """Sort pairs of token and expert by expert, and fill every expert's up to whole tiles.

    Args:
        experts: [T, k] i32; -1 for none.
        num_experts: E.
        tile: Pairs of a tile.

    Returns:
        The pair of each place, t * k + j, -1 for none, [tiles * tile] i32; and the expert of each
        tile, -1 for none, [tiles] i32. Places of tiles without expert hold anything.
    """
    num_pairs = experts.numel()
    # Full tiles take as many pairs; every expert has at most one that is not full.
    num_tiles = num_pairs // tile + min(num_experts, num_pairs)
    pairs = torch.empty(num_tiles * tile, dtype=torch.int32, device=experts.device)
    tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=experts.device)
    launch_kernel(
        tiles_kernel,
        (num_experts if num_pairs else 0,),
        experts,
        pairs,
        tile_experts,
        num_pairs,
        num_tiles,
        E=num_experts,
        E_PADDED=_padded(num_experts),
        TILE=tile,
        CHUNK=CHUNK,
        num_warps=4,
    )
    return pairs, tile_experts


def _padded(count: int) -> int:
    return max(1 << (count - 1).bit_length(), _MIN_PADDED)
