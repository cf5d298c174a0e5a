"""Gated products in float32: the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def gated_product(gate: Tensor, value: Tensor, out: Tensor, *, is_silu: bool) -> None:
    """Multiply with silu or sigmoid of the gate; see the package."""
    wide = gate.float()
    factor = 1.0 / (1.0 + torch.exp(-wide))
    if is_silu:
        factor = wide * factor
    out.copy_(factor * value.float())
