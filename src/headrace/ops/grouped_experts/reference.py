"""A mixture of experts row by row, as the definition says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def grouped_experts_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    factors: Tensor,
    activate: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the weighted sum of each row's experts.

    Args:
        x: [T, C].
        gate_up: [E, 2I, C], or [E, I, C].
        down: [E, C, I].
        experts: [T, k].
        factors: [T, k].
        activate: [2I] or [I] to [I]; None for silu(gate) * value.

    Returns:
        [T, C] f64.
    """
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(x.double()):
        for j, expert in enumerate(experts[t]):
            product = gate_up[expert].double() @ row
            if activate is None:
                gate, value = product.chunk(2)
                hidden = gate / (1.0 + torch.exp(-gate)) * value
            else:
                hidden = activate(product)
            out[t] += float(factors[t, j]) * (down[expert].double() @ hidden)
    return out
