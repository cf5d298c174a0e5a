"""Pointwise functions whose result for an element does not depend on its place in the tensor.

PyTorch's silu, gelu, sigmoid and softplus compute the vector body and the tail of a tensor with
different code, so an element's last bit depends on where it stands. exp, log1p, erf and arithmetic
do not, so the functions are composed of those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), any shape."""
    return x.neg().exp_().add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)), any shape."""
    # One temporary: on the CPU, fresh memory costs more than the arithmetic.
    out = x.neg().exp_().add_(1.0)
    return torch.div(x, out, out=out)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) without overflow, any shape."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0.0))


def gelu(x: Tensor) -> Tensor:
    """Return x / 2 * (1 + erf(x / sqrt 2)), any shape."""
    return (x * 0.5**0.5).erf_().add_(1.0).mul_(x).mul_(0.5)


def relu2(x: Tensor) -> Tensor:
    """Return max(x, 0)^2, any shape."""
    return x.clamp(min=0.0).square_()


def silu_mul(gate_up: Tensor) -> Tensor:
    """Gate one half of the columns by the other.

    Args:
        gate_up: Gate, then values, [T, 2I].

    Returns:
        silu(gate) * values, [T, I].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Gate one half of the columns by the other.

    Args:
        gate_up: Gate, then values, [T, 2I].

    Returns:
        gelu(gate) * values, [T, I].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate).mul_(up)
