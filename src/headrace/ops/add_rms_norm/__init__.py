"""RMS norm of each token, with the addition to the residual stream before it, in one launch.

Rows are added and rounded to the residual's dtype first, and what was rounded is normed, as the
PyTorch operations do it: a norm can be had again from the residual alone. In between everything is
float32. The bits of a row depend on the row alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.add_rms_norm import reference
from headrace.rt.kernels import can_launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_WIDTH", "add_rms_norm"]

MAX_WIDTH = 32768
"""Columns that a program can hold."""


def add_rms_norm(
    residual: Tensor, x: Tensor | None, scale: Tensor, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """Add x to the residual, then norm and scale the sum.

    Args:
        residual: [T, C], any float dtype; rows may be strided. Overwritten with the sum.
        x: What is added, [T, C]; rows may be strided. None adds nothing, and the residual is
            only read: a plain norm.
        scale: [C] f32. Zero-centred checkpoints store w and mean 1 + w: the caller adds the 1 once.
        eps: Added to the mean square.
        out: Where the norm goes, [T, C], rows may be strided; made if it is not given.

    Returns:
        The norm, [T, C]: out, or a tensor of the residual's dtype.

    Raises:
        ValueError: Sizes that do not fit each other.
    """
    if out is None:
        out = residual.new_empty(residual.shape)
    width = residual.shape[-1]
    if width > MAX_WIDTH:
        msg = f"{width} columns, and a program can hold {MAX_WIDTH}; use kernels torch"
        raise ValueError(msg)
    for name, tensor in (("residual", residual), ("x", x), ("out", out)):
        if tensor is not None and (tensor.shape != residual.shape or tensor.stride(-1) != 1):
            msg = f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()} beside a "
            raise ValueError(msg + f"residual {tuple(residual.shape)}; columns must be adjacent")
    if scale.shape != (width,):
        msg = f"scale has shape {tuple(scale.shape)} where rows have {width} columns"
        raise ValueError(msg)
    run = reference.add_rms_norm
    if can_launch(residual):
        from headrace.ops.add_rms_norm import fused  # noqa: PLC0415  needs Triton

        run = fused.add_rms_norm
    run(residual, x, scale, eps, out)
    return out
