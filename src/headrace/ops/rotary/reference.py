"""Rotary embedding, pair by pair."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def rotate_reference(x: Tensor, positions: Tensor, rotary_dim: int, theta: float) -> Tensor:
    """Rotate each pair (i, i + r/2) of a head by position * theta^(-2i/r).

    Args:
        x: [T, H, D].
        positions: [T].
        rotary_dim: r, the leading dimensions that are rotated.
        theta: Base of the frequencies.

    Returns:
        [T, H, D] f64.

    Source: RoFormer, arXiv:2104.09864.
    """
    out = x.double().clone()
    half = rotary_dim // 2
    for t in range(x.shape[0]):
        for i in range(half):
            angle = float(positions[t]) * theta ** (-2.0 * i / rotary_dim)
            first, second = x[t, :, i].double(), x[t, :, i + half].double()
            out[t, :, i] = first * math.cos(angle) - second * math.sin(angle)
            out[t, :, i + half] = second * math.cos(angle) + first * math.sin(angle)
    return out
