"""The Mamba-1 recurrence of one sequence, as the paper writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def mamba1_reference(
    state: Tensor, dt: Tensor, x: Tensor, b: Tensor, c: Tensor, *, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a sequence.

    Args:
        state: [I, D].
        dt: [T, I].
        x: [T, I].
        b: [T, D].
        c: [T, D].
        rate: A, [I, D].

    Returns:
        Outputs, [T, I] f64, and the state after each token, [T, I, D] f64.

    Source: Mamba, arXiv:2312.00752.
    """
    state = state.double().clone()
    outputs, states = [], []
    for t in range(dt.shape[0]):
        out = torch.zeros(dt.shape[1], dtype=torch.float64)
        for i in range(dt.shape[1]):
            step = dt[t, i].double()
            state[i] = torch.exp(step * rate[i].double()) * state[i] + step * x[t, i] * b[t]
            out[i] = state[i] @ c[t].double()
        outputs.append(out)
        states.append(state.clone())
    return torch.stack(outputs), torch.stack(states)
