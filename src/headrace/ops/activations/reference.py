"""The pointwise functions in double precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def sigmoid_reference(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), f64."""
    return 1.0 / (1.0 + torch.exp(-x.double()))


def silu_reference(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)), f64."""
    return x.double() * sigmoid_reference(x)


def softplus_reference(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), f64."""
    return torch.log(1.0 + torch.exp(x.double()))


def gelu_reference(x: Tensor) -> Tensor:
    """Return x times the normal distribution's cumulative function at x, f64."""
    x64 = x.double()
    return x64 * torch.special.ndtr(x64)


def relu2_reference(x: Tensor) -> Tensor:
    """Return the square of the positive part of x, f64."""
    return torch.where(x > 0, x.double() ** 2, 0.0)
