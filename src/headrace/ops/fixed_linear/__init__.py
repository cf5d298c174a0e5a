"""Matrix product with a weight, of which a row's bits depend on the row and the weight alone.

Libraries choose a kernel, its tiles and its splits by the number of rows, and with them the order
in which a row's products are added. Here tiles and order are fixed by the dtype: whatever else is
multiplied in the same call, a row's result is the same. It is slower than a library's product
(`benchmarks/kernels/run.py --only fixed_linear`): for `deterministic` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.fixed_linear import reference
from headrace.rt.kernels import can_launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fixed_linear"]


def fixed_linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply each row with a weight matrix.

    Args:
        x: Rows, [T, C] f32 or bf16; rows may be strided.
        weight: [O, C], the dtype of x; rows may be strided.
        out: Where the product goes, [T or more, O], the dtype of x; rows may be strided. Made if it
            is not given.

    Returns:
        x @ weight^T, [T, O]: the first rows of out, if that is given. Sums are float32.

    Raises:
        ValueError: Shapes, strides or dtypes that do not fit.
    """
    rows, width = x.shape
    if weight.shape[1] != width:
        msg = f"rows have {width} columns and the weight {weight.shape[1]}"
        raise ValueError(msg)
    if out is None:
        out = x.new_empty(rows, weight.shape[0])
    out = out[:rows]
    if out.shape != (rows, weight.shape[0]):
        msg = f"out has shape {tuple(out.shape)} where the product has {rows, weight.shape[0]}"
        raise ValueError(msg)
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        if tensor.dtype != x.dtype or x.dtype not in (torch.float32, torch.bfloat16):
            msg = f"{name} is {tensor.dtype} beside rows of {x.dtype}; all must be float32, or "
            raise ValueError(msg + "all bfloat16")
        if tensor.stride(1) != 1:
            msg = f"{name}: columns must be adjacent, strides are {tensor.stride()}"
            raise ValueError(msg)
    run = reference.fixed_linear
    if can_launch(x):
        from headrace.ops.fixed_linear import fused  # noqa: PLC0415  needs Triton

        run = fused.fixed_linear
    run(x, weight, out)
    return out
