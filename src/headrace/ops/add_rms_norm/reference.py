"""Addition and norm in float32: the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def add_rms_norm(
    residual: Tensor, x: Tensor | None, scale: Tensor, eps: float, out: Tensor
) -> None:
    """Add, then norm; see the package."""
    if x is not None:
        residual.copy_(residual.float() + x.float())
    row = residual.float()
    inverse = torch.rsqrt((row * row).mean(-1, keepdim=True) + eps)
    out.copy_(row * inverse * scale)
