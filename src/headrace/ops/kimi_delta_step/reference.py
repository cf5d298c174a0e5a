"""The delta rule with a decay for each channel over one sequence, as the paper writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def kimi_delta_reference(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, *, decay: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a sequence.

    Args:
        state: [H, V, K].
        query: [T, H, K], scaled.
        key: [T, H, K], of unit length.
        value: [T, H, V].
        decay: [T, H, K], in (0, 1].
        rate: [T, H], in [0, 1].

    Returns:
        Outputs, [T, H, V] f64, and the state after each token, [T, H, V, K] f64.

    Source: Kimi Linear, arXiv:2510.26692.
    """
    state = state.double().clone()
    outputs, states = [], []
    for t in range(key.shape[0]):
        out = torch.zeros(value.shape[1:], dtype=torch.float64)
        for h in range(value.shape[1]):
            k = key[t, h].double()
            decayed = state[h] @ torch.diag(decay[t, h].double())
            change = float(rate[t, h]) * (value[t, h].double() - decayed @ k)
            state[h] = decayed + torch.outer(change, k)
            out[h] = state[h] @ query[t, h].double()
        outputs.append(out)
        states.append(state.clone())
    return torch.stack(outputs), torch.stack(states)
