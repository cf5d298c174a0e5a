"""The gated short convolution: a layer whose only state is its window of inputs.

Source: LFM2 as in transformers (models/lfm2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.models.batch import StateGroupSpec, StateTensorSpec
from headrace.models.layers.windowed_conv import ConvPools, ConvWeights, windowed_conv
from headrace.ops.linear import linear

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import StateCache
    from headrace.models.layers.state_plan import StatePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShortConvWeights:
    """Weights of one layer: input gate, output gate and x, [3C, C]; conv; output, [C, C]."""

    in_proj: Tensor
    conv: ConvWeights
    out_proj: Tensor


def state_group(
    layers: tuple[int, ...], *, taps: int, channels: int, max_drafts: int, dtype: str
) -> StateGroupSpec:
    """Describe the pools of short convolutions.

    Args:
        layers: Model layer indices.
        taps: W.
        channels: F.
        max_drafts: Most drafts in one step, s.
        dtype: Of the windows.
    """
    window = (taps - 1 + max_drafts, channels)
    return StateGroupSpec(
        kind="short_conv",
        layers=layers,
        state=(StateTensorSpec(name="window", kind="window", shape=window, dtype=dtype),),
        ring=(StateTensorSpec(name="conv_input", kind="ring", shape=(channels,), dtype=dtype),),
    )


def short_conv(
    x: Tensor, weights: ShortConvWeights, *, cache: StateCache, index: int, plan: StatePlan
) -> Tensor:
    """Run one layer over the packed tokens of a step and update its windows.

    Args:
        x: Normed hidden states, [T, C].
        weights: The layer's weights.
        cache: The group's pools.
        index: The layer's place in the group.
        plan: The step's indices.

    Returns:
        [T, C].
    """
    before, after, own = linear(x, weights.in_proj).chunk(3, -1)
    mixed = windowed_conv(before * own, weights.conv, ConvPools.of_layer(cache, index), plan)
    return linear(mixed.to(x.dtype).mul_(after), weights.out_proj)
