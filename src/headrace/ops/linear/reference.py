"""Matrix product with a weight, as the definition says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each row with a weight matrix: out[t, o] = sum over c of x[t, c] * weight[o, c].

    Args:
        x: [T, C].
        weight: [O, C].

    Returns:
        [T, O] f32.
    """
    return torch.stack([(row * weight.float()).sum(-1) for row in x.float()])
