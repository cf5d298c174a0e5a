"""Rotary position embedding of the leading dimensions of every head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def inverse_frequencies(rotary_dim: int, theta: float, device: torch.device) -> Tensor:
    """Frequencies of the rotated pairs.

    Args:
        rotary_dim: Number of rotated dimensions, r.
        theta: Base.
        device: Where they are wanted.

    Returns:
        theta^(-2i/r), [r/2] f32.
    """
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    return 1.0 / theta ** (pairs / rotary_dim)


def rotary_tables(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Angles of each token as the two factors that `rotate` needs.

    Args:
        positions: [T] i64.
        inverse_frequencies: [r/2] f32, r being the number of rotated dimensions.

    Returns:
        cos, [T, 1, r] f32, and sin with the first half negated, [T, 1, r] f32.
    """
    angles = positions[:, None].float() * inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate_(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate the leading dimensions of every head in place.

    Dimension i is paired with i + r/2. Swapping the halves and a sign in the sine table replace
    the usual negation and concatenation.

    Args:
        x: Heads, [T, H, D]; dimensions r to D-1 stay as they are.
        cos: [T, 1, r] f32.
        signed_sin: [T, 1, r] f32, from `rotary_tables`.

    Returns:
        x.
    """
    rotary_dim = cos.shape[-1]
    head = x[..., :rotary_dim]
    swapped = head.roll(rotary_dim // 2, -1)
    head.copy_((head * cos).add_(swapped * signed_sin))
    return x
