"""The launch of the gated product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.gated_product.kernel import gated_product_kernel
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from torch import Tensor

BLOCK, NUM_WARPS = 1024, 4
"""Columns of a program: one load of 16 bytes for each thread, if they are bfloat16."""


def gated_product(gate: Tensor, value: Tensor, out: Tensor, *, is_silu: bool) -> None:
    """Multiply with silu or sigmoid of the gate; see the package."""
    rows, width = gate.shape
    launch_kernel(
        gated_product_kernel,
        (rows, -(-width // BLOCK)),
        gate,
        value,
        out,
        gate.stride(0),
        value.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=BLOCK,
        IS_SILU=is_silu,
        num_warps=NUM_WARPS,
    )
