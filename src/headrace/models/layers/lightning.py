"""The lightning attention layer over a step: linear attention whose heads decay at fixed rates.

Per head, with state S [V, K] and decay r:

    S := r * S + v k^T;   o := S q

That is Mamba-2's recurrence with a key, a value and a query of each head's own in the place of B,
dt * x and C, so its scan and its step serve here. There is no convolution, and so no window.

Source: Lightning Attention-2, arXiv:2401.04658, as MiniMax-01 (arXiv:2501.08313) builds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace.models.batch import StateGroupSpec, StateTensorSpec
from headrace.models.layers.mamba2 import Mamba2Sizes
from headrace.models.layers.recurrence import recur
from headrace.ops.activations import sigmoid, silu
from headrace.ops.linear import linear
from headrace.ops.rms_norm import rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import StateCache
    from headrace.models.layers.state_plan import StatePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningSizes:
    """Sizes of a lightning attention layer: H heads, keys and values of size D."""

    num_heads: int
    head_dim: int
    norm_eps: float

    @property
    def inner(self) -> int:
        """Columns of all queries, of all keys and of all values, H * D."""
        return self.num_heads * self.head_dim

    @property
    def recurrence(self) -> Mamba2Sizes:
        """The arithmetic: every head is a group of its own."""
        return Mamba2Sizes(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_groups=self.num_heads,
            state_dim=self.head_dim,
            conv_kernel=1,
            norm_eps=self.norm_eps,
        )

    def state_group(self, layers: tuple[int, ...], state_dtype: str) -> StateGroupSpec:
        """Describe the pools of layers of these sizes.

        Args:
            layers: Model layer indices.
            state_dtype: Of the states.
        """
        state = (self.num_heads, self.head_dim, self.head_dim)
        update = (self.recurrence.update_width,)
        return StateGroupSpec(
            kind="lightning",
            layers=layers,
            state=(
                StateTensorSpec(name="recurrent", kind="recurrent", shape=state, dtype=state_dtype),
            ),
            ring=(StateTensorSpec(name="update", kind="ring", shape=update, dtype="float32"),),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LightningWeights:
    """Weights of one layer.

    Attributes:
        in_proj: Queries, keys, values and output gate, H*D rows each, [4*H*D, C].
        log_decay: -slope, [H] f32.
        norm: [H*D] f32.
        out_proj: [C, H*D].
    """

    in_proj: Tensor
    log_decay: Tensor
    norm: Tensor
    out_proj: Tensor


def lightning_attention(
    x: Tensor,
    weights: LightningWeights,
    sizes: LightningSizes,
    *,
    cache: StateCache,
    index: int,
    plan: StatePlan,
) -> Tensor:
    """Run one layer over the packed tokens of a step and update its states.

    Args:
        x: Normed hidden states, [T, C].
        weights: The layer's weights.
        sizes: The layer's sizes.
        cache: The group's pools.
        index: The layer's place in the group.
        plan: The step's indices.

    Returns:
        [T, C].
    """
    tokens, inner = x.shape[0], sizes.inner
    mixed, gate = linear(x, weights.in_proj).split_with_sizes((3 * inner, inner), -1)
    query, key, value = silu(mixed).float().split_with_sizes((inner, inner, inner), -1)
    out = recur(
        # The decay goes with each token: places in a piece that no token fills must not decay.
        torch.cat((key, value, weights.log_decay.expand(tokens, -1), query), -1),
        sizes.recurrence,
        cache.state["recurrent"][index],
        cache.ring["update"][index] if cache.ring else None,
        plan,
    )
    out = functional.pad(out, (0, 0, 0, tokens - out.shape[0]))
    normed = rms_norm(out, weights.norm, sizes.norm_eps).to(x.dtype)
    return linear(normed.mul_(sigmoid(gate)), weights.out_proj)
