"""Root-mean-square norms, plain and gated; sums in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.activations import silu

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square of the last axis, then scale.

    Args:
        x: [..., C], any float dtype.
        scale: Factors, broadcast against x, f32. Zero-centred checkpoints store w and mean 1 + w:
            the caller adds the 1 once.
        eps: Added to the mean square.

    Returns:
        The shape and dtype of x.
    """
    x32 = x.float()
    inverse = (x32 * x32).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x32 * inverse).mul_(scale).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm, weigh, then multiply with silu of a gate.

    Args:
        x: [..., V] f32.
        gate: [..., V], any float dtype.
        weight: [V] f32, used as it is (no 1 + w).
        eps: Added to the mean square.

    Returns:
        [..., V] in the dtype of gate.
    """
    inverse = (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * inverse).mul_(weight).mul_(silu(gate.float())).to(gate.dtype)


def l2_normalise(x: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide by the length of the last axis, then scale.

    Args:
        x: [..., K] f32.
        scale: Factors, broadcast against [..., 1], f32.
        eps: Added to the squared length.

    Returns:
        [..., K] f32.
    """
    inverse = (x * x).sum(-1, keepdim=True).add_(eps).rsqrt_().mul_(scale)
    return x * inverse


__all__ = ["gated_rms_norm", "l2_normalise", "rms_norm"]
