"""Products of a step with a layer's weights, by a library or by a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.few_rows_linear import few_rows_linear
from headrace.ops.fixed_linear import fixed_linear
from headrace.ops.linear import linear

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import Kernels

FEW_ROWS = 16
"""Up to so many rows a kernel reads the weights; the library has all others.

Measured on an H200 (`benchmarks/kernels/run.py --only few_rows_linear`): the products of a layer of
Qwen3.5-4B take 69 us with 16 rows, the library's 76; with 32 rows both take 75.
"""


def product(x: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
    """Multiply each row with a weight matrix.

    Args:
        x: Rows, [T, C]; on the CPU T is a multiple of ROW_TILE.
        weight: [O, C], the dtype of x.
        kernels: What computes the step; with "triton" few rows of bfloat16 may go through a kernel,
            with "fixed" all rows go through one whose bits do not depend on their number.

    Returns:
        x @ weight^T, [T, O].
    """
    if kernels == "fixed":
        return fixed_linear(x, weight)
    if kernels == "triton" and x.shape[0] <= FEW_ROWS and x.dtype == torch.bfloat16:
        return few_rows_linear(x, weight)
    return linear(x, weight)
