"""Matrix product with a weight, in row tiles of one fixed size on the CPU.

The bits of a product's row depend on the number of rows that are multiplied together: a BLAS picks
its kernels and its split over threads by shape. With every call at ROW_TILE rows a row's bits
depend on the row alone, which is what makes a request's logits independent of its batch mates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

ROW_TILE = 16
"""Rows of one product on the CPU: half the work is wasted for 8 rows, and no tile is ragged."""


def linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply each row with a weight matrix.

    Args:
        x: Rows, [T, C]; on the CPU T is a multiple of ROW_TILE.
        weight: [O, C], the dtype of x.
        out: Where the product goes, [T or more, O], the dtype of x; made if it is not given.

    Returns:
        x @ weight^T, [T, O]: the first rows of out, if that is given.
    """
    rows = x.shape[0]
    is_tiled = x.device.type == "cpu" and rows != ROW_TILE
    if out is None and not is_tiled:
        return functional.linear(x, weight)
    transposed = weight.t()
    out = x.new_empty(rows, weight.shape[0]) if out is None else out[:rows]
    if not is_tiled:
        return torch.mm(x, transposed, out=out)
    assert rows % ROW_TILE == 0, f"{rows=} is no multiple of {ROW_TILE}"
    x_tiles = x.view(-1, ROW_TILE, x.shape[1]).unbind()
    out_tiles = out.view(-1, ROW_TILE, out.shape[1]).unbind()
    for x_tile, out_tile in zip(x_tiles, out_tiles, strict=True):
        torch.mm(x_tile, transposed, out=out_tile)
    return out


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head of each row with a matrix of the head's own.

    Args:
        x: Rows, [T, H, A]; on the CPU T is a multiple of ROW_TILE.
        weight: [H, O, A], the dtype of x.

    Returns:
        x[:, h] @ weight[h]^T, [T, H, O].
    """
    rows = x.shape[0]
    transposed = weight.transpose(1, 2)
    if x.device.type != "cpu":
        return torch.bmm(x.transpose(0, 1), transposed).transpose(0, 1)
    assert rows % ROW_TILE == 0, f"{rows=} is no multiple of {ROW_TILE}"
    out = x.new_empty(rows, weight.shape[0], weight.shape[1])
    for start in range(0, rows, ROW_TILE):
        tile = x[start : start + ROW_TILE].transpose(0, 1).contiguous()
        out[start : start + ROW_TILE] = torch.bmm(tile, transposed).transpose(0, 1)
    return out


def pad_rows(x: Tensor) -> Tensor:
    """Append rows of zeros up to a multiple of ROW_TILE.

    Args:
        x: [R, C].

    Returns:
        [ceil(R / ROW_TILE) * ROW_TILE, C]; x itself if nothing is missing.
    """
    missing = -x.shape[0] % ROW_TILE
    if missing == 0:
        return x
    return functional.pad(x, (0, 0, 0, missing))
