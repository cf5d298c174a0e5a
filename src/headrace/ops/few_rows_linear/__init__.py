"""Matrix product of a few rows with a weight: the weight is read once, as fast as it comes.

A step of few tokens waits for its weights. Each program streams some rows of one of them through
shared memory, or a part of their columns where the weight has few rows; parts are added in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.few_rows_linear import reference
from headrace.rt.kernels import can_launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_ROWS", "few_rows_linear"]

MAX_ROWS = 64
"""Rows that a program holds sums of."""


def few_rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each row with a weight matrix.

    Args:
        x: Rows, [T, C] bf16, T up to MAX_ROWS; rows may be strided.
        weight: [O, C] bf16; rows may be strided.

    Returns:
        x @ weight^T, [T, O] bf16. Sums are float32.

    Raises:
        ValueError: Shapes, strides or dtypes that do not fit.
    """
    rows, width = x.shape
    if rows > MAX_ROWS:
        msg = f"{rows} rows, and a program holds {MAX_ROWS}; use headrace.ops.linear"
        raise ValueError(msg)
    if weight.shape[1] != width:
        msg = f"rows have {width} columns and the weight {weight.shape[1]}"
        raise ValueError(msg)
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype != torch.bfloat16:
            msg = f"{name} is {tensor.dtype} and must be bfloat16; use headrace.ops.linear"
            raise ValueError(msg)
        if tensor.stride(1) != 1:
            msg = f"{name}: columns must be adjacent, strides are {tensor.stride()}"
            raise ValueError(msg)
    run = reference.few_rows_linear
    if can_launch(x):
        from headrace.ops.few_rows_linear import fused  # noqa: PLC0415  needs Triton

        run = fused.few_rows_linear
    return run(x, weight)
