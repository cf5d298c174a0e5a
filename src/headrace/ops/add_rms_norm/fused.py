"""The launch of the norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.add_rms_norm.kernel import add_rms_norm_kernel
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from torch import Tensor

_PER_WARP, _MAX_WARPS = 512, 16
"""Columns of a warp: two loads of 16 bytes for each thread, if they are bfloat16."""

_MIN_PADDED = 32
"""Fewer columns would have several threads that add to the same one."""


def add_rms_norm(
    residual: Tensor, x: Tensor | None, scale: Tensor, eps: float, out: Tensor
) -> None:
    """Add, then norm; see the package."""
    rows, width = residual.shape
    padded = max(1 << (width - 1).bit_length(), _MIN_PADDED)
    launch_kernel(
        add_rms_norm_kernel,
        (rows,),
        residual,
        x,
        scale,
        out,
        residual.stride(0),
        0 if x is None else x.stride(0),
        out.stride(0),
        eps,
        C=width,
        PADDED=padded,
        num_warps=min(max(padded // _PER_WARP, 1), _MAX_WARPS),
    )
