"""Root-mean-square norms row by row in double precision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm_reference(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * scale.

    Args:
        x: [T, C].
        scale: [C].
        eps: Added to the mean square.

    Returns:
        [T, C] f64.
    """
    rows = []
    for row in x.double():
        mean_square = sum(float(value) ** 2 for value in row) / len(row)
        rows.append(row / math.sqrt(mean_square + eps) * scale.double())
    return torch.stack(rows)


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x, weighed, times silu(gate).

    Args:
        x: [T, V].
        gate: [T, V].
        weight: [V].
        eps: Added to the mean square.

    Returns:
        [T, V] f64.
    """
    gate64 = gate.double()
    return rms_norm_reference(x, weight, eps) * gate64 / (1.0 + torch.exp(-gate64))
