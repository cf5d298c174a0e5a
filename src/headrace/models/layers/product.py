"""Products of a step with a layer's weights, by a library or for few rows by a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.few_rows_linear import few_rows_linear
from headrace.ops.linear import linear

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import Kernels

FEW_ROWS = 0
"""Up to so many rows a kernel reads the weights; 0 gives all products to the library.

`benchmarks/kernels/run.py --only few_rows_linear` says where the kernel is faster: until that has
been measured, the library has them.
"""


def product(x: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
    """Multiply each row with a weight matrix.

    Args:
        x: Rows, [T, C]; on the CPU T is a multiple of ROW_TILE.
        weight: [O, C], the dtype of x.
        kernels: What computes the step; with "triton" few rows of bfloat16 may go through a kernel.

    Returns:
        x @ weight^T, [T, O].
    """
    if kernels == "triton" and x.shape[0] <= FEW_ROWS and x.dtype == torch.bfloat16:
        return few_rows_linear(x, weight)
    return linear(x, weight)
