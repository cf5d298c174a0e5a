"""Causal depthwise convolution over inputs that are found by index.

A token's taps lie in two places: earlier inputs of the same step, and the sequence's window of the
last W-1 inputs. The caller puts both into one source and says where each tap lies, so one gather
serves prompts, single tokens and drafts, at any read offset of the window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def causal_conv(source: Tensor, taps: Tensor, weight: Tensor) -> Tensor:
    """Convolve each token with its own window.

    Args:
        source: Inputs of the step and windows, one row each, [X, F].
        taps: Row of source for each token and tap, oldest tap first, [T, W] i64.
        weight: [W, F] f32, oldest tap first.

    Returns:
        Outputs before the activation, [T, F] f32.
    """
    tokens, width = taps.shape
    inputs = source.index_select(0, taps.reshape(-1)).view(tokens, width, -1)
    # Multiply and sum over a fixed number of taps: a row's bits do not depend on the others.
    return inputs.float().mul_(weight).sum(1)
