"""The gated delta rule of one sequence, as the paper writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def gated_delta_reference(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, *, decay: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a sequence.

    Args:
        state: [HV, V, K].
        query: [T, HK, K], scaled.
        key: [T, HK, K], of unit length.
        value: [T, HV, V].
        decay: [T, HV], in (0, 1].
        rate: [T, HV], in [0, 2].

    Returns:
        Outputs, [T, HV, V] f64, and the state after each token, [T, HV, V, K] f64.

    Source: Gated Delta Networks, arXiv:2412.06464.
    """
    state = state.double().clone()
    group = value.shape[1] // key.shape[1]
    outputs, states = [], []
    for t in range(key.shape[0]):
        out = torch.zeros(value.shape[1:], dtype=torch.float64)
        for h in range(value.shape[1]):
            k, q = key[t, h // group].double(), query[t, h // group].double()
            decayed = float(decay[t, h]) * state[h]
            change = float(rate[t, h]) * (value[t, h].double() - decayed @ k)
            state[h] = decayed + torch.outer(change, k)
            out[h] = state[h] @ q
        outputs.append(out)
        states.append(state.clone())
    return torch.stack(outputs), torch.stack(states)
