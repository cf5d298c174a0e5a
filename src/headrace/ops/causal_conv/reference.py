"""Causal depthwise convolution of one sequence, as the definition says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def causal_conv_reference(x: Tensor, window: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve a sequence's next tokens.

    Args:
        x: Inputs, [T, F].
        window: The W-1 inputs before them, oldest first, [W-1, F].
        weight: [W, F], oldest tap first.

    Returns:
        Outputs before the activation, [T, F] f32, and the last W-1 inputs, [W-1, F].

    Source: Mamba, arXiv:2312.00752.
    """
    history = list(window.float()) + list(x.float())
    outputs = []
    for t in range(x.shape[0]):
        out = torch.zeros_like(history[0])
        for w in range(weight.shape[0]):
            out = out + weight[w].float() * history[t + w]
        outputs.append(out)
    return torch.stack(outputs), torch.stack(history[-(weight.shape[0] - 1) :])
