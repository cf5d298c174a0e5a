"""Causal convolution over a step, and the windows of inputs that it leaves behind.

What a layer keeps of its convolution is the same in every family: the last W-1 inputs, in a window
of W-1+s entries that drafts are rolled back in by an offset, or in a ring (replay scheme). Layers
whose only state is the window need nothing but this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.models.layers.state_plan import ColumnsPlan
from headrace.ops.causal_conv import causal_conv
from headrace.ops.gated_delta_step import store_states

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import StateCache
    from headrace.models.layers.state_plan import KnownPlan, ReplayPlan, StatePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConvWeights:
    """Weights of a depthwise convolution: taps [W, F] f32, oldest first; bias [F] f32 or None."""

    taps: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConvPools:
    """One layer's windows, [S, W-1+s, F], and its ring of inputs, [RB, R, F], with replay."""

    window: Tensor
    ring: Tensor | None

    @classmethod
    def of_layer(cls, cache: StateCache, index: int) -> ConvPools:
        """Take a layer's pools from its group's.

        Args:
            cache: The group's pools, with a "window" and with replay a "conv_input" ring.
            index: The layer's place in the group.
        """
        return cls(
            window=cache.state["window"][index],
            ring=cache.ring["conv_input"][index] if cache.ring else None,
        )


def windowed_conv(
    inputs: Tensor, weights: ConvWeights, pools: ConvPools, plan: StatePlan
) -> Tensor:
    """Convolve all tokens of a step with their own history and write the new windows.

    Args:
        inputs: Packed inputs, [T, F]; rows may be strided.
        weights: The layer's.
        pools: The layer's; overwritten at the plan's blocks.
        plan: The step's indices.

    Returns:
        Outputs before any activation, [T, F] f32.
    """
    carried = weights.taps.shape[0] - 1
    channels = inputs.shape[1]
    source = [inputs]
    new_base_window = None
    if isinstance(plan.verify, ColumnsPlan):
        windows = pools.window.index_select(0, plan.verify.window_block)
        source.append(windows.view(-1, channels))
    elif plan.verify is not None:
        own, new_base_window = _replay_windows(pools, plan.verify, carried)
        source.append(own)
    if plan.known is not None:
        source.append(_known_windows(pools, plan.known, carried))
    rows = torch.cat(source) if len(source) > 1 else inputs
    out = causal_conv(rows, plan.taps, weights.taps)
    _store_windows(rows, new_base_window, pools, plan, carried)
    return out if weights.bias is None else out.add_(weights.bias)


def _replay_windows(pools: ConvPools, plan: ReplayPlan, carried: int) -> tuple[Tensor, Tensor]:
    """Return the inputs before the step, [N * (W-1), F], and before the new base, [N, W-1, F]."""
    assert pools.ring is not None, "the replay scheme needs a ring"
    channels = pools.window.shape[-1]
    from_ring = pools.ring.view(-1, channels).index_select(0, plan.window_ring)
    from_base = pools.window.view(-1, channels).index_select(0, plan.window_base)
    both = from_ring.where(plan.is_window_ring, from_base).view(-1, 2, carried, channels)
    return both[:, 0].reshape(-1, channels), both[:, 1]


def _known_windows(pools: ConvPools, plan: KnownPlan, carried: int) -> Tensor:
    """Return the inputs before each known row, zeros without a state, [R * (W-1), F]."""
    channels = pools.window.shape[-1]
    windows = pools.window.new_zeros(plan.num_rows, carried, channels)
    if plan.source_blocks is not None:
        stored = pools.window[:, :carried].index_select(0, plan.source_blocks)
        windows.index_copy_(0, plan.sourced, stored)
    return windows.view(-1, channels)


def _store_windows(
    rows: Tensor,
    new_base_window: Tensor | None,
    pools: ConvPools,
    plan: StatePlan,
    carried: int,
) -> None:
    verify = plan.verify
    channels = rows.shape[1]
    if isinstance(verify, ColumnsPlan):
        new = rows.index_select(0, verify.new_window)
        # Rows that are not valid put back what they hold; the null block keeps its bytes.
        pools.window.index_copy_(0, verify.window_block, new.view(-1, *pools.window.shape[1:]))
    elif verify is not None:
        assert pools.ring is not None
        assert new_base_window is not None
        assert plan.rows is not None
        store_states(
            pools.window[:, :carried], verify.write_block, new_base_window, verify.is_write
        )
        ring = pools.ring.view(-1, channels)
        new = rows.index_select(0, plan.rows.token_index)
        ring.index_copy_(0, verify.ring_rows, new.where(verify.is_valid, ring[:1]))
    if plan.known is not None:
        new = rows.index_select(0, plan.known.new_windows).view(-1, carried, channels)
        pools.window[:, :carried].index_copy_(0, plan.known.window_blocks, new)
