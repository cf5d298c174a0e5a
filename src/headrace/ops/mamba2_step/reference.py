"""The Mamba-2 recurrence of one sequence, as the paper writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def mamba2_reference(
    state: Tensor, b: Tensor, c: Tensor, value: Tensor, *, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a sequence.

    Args:
        state: [H, P, D].
        b: [T, G, D].
        c: [T, G, D].
        value: dt * x, [T, H, P].
        decay: exp(dt * A), [T, H].

    Returns:
        Outputs, [T, H, P] f64, and the state after each token, [T, H, P, D] f64.

    Source: Mamba-2, arXiv:2405.21060.
    """
    state = state.double().clone()
    group = value.shape[1] // b.shape[1]
    outputs, states = [], []
    for t in range(b.shape[0]):
        out = torch.zeros(value.shape[1:], dtype=torch.float64)
        for h in range(value.shape[1]):
            write = torch.outer(value[t, h].double(), b[t, h // group].double())
            state[h] = float(decay[t, h]) * state[h] + write
            out[h] = state[h] @ c[t, h // group].double()
        outputs.append(out)
        states.append(state.clone())
    return torch.stack(outputs), torch.stack(states)
