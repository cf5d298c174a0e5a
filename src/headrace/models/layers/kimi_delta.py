"""The Kimi Delta Attention layer over a step: conv windows, recurrent states, rings.

Gated DeltaNet with a decay for each channel of a key, and an output gate through a narrow layer.

Source: Kimi Linear, arXiv:2510.26692.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace.models.layers.recurrence import convolved_group, recur
from headrace.models.layers.windowed_conv import ConvPools, ConvWeights, windowed_conv
from headrace.ops.activations import sigmoid, silu, softplus
from headrace.ops.kimi_delta_scan import kimi_delta_scan
from headrace.ops.kimi_delta_step import kimi_delta_step
from headrace.ops.linear import linear
from headrace.ops.rms_norm import l2_normalise, rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import StateCache, StateGroupSpec
    from headrace.models.layers.state_plan import StatePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSizes:
    """Sizes of a layer, H heads with keys and values of size D, conv taps W; its recurrence."""

    num_heads: int
    head_dim: int
    conv_kernel: int
    norm_eps: float

    @property
    def inner(self) -> int:
        """Columns of all queries, of all keys and of all values, H * D."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution, F: queries, keys and values."""
        return 3 * self.inner

    @property
    def update_width(self) -> int:
        """What the state takes of a token: unit key, value, log decays, rate."""
        return 3 * self.inner + self.num_heads

    def state_group(
        self, layers: tuple[int, ...], max_drafts: int, dtype: str, state_dtype: str
    ) -> StateGroupSpec:
        """Describe the pools of layers of these sizes.

        Args:
            layers: Model layer indices.
            max_drafts: Most drafts in one step, s.
            dtype: Of the conv windows.
            state_dtype: Of the recurrent states.
        """
        return convolved_group(
            "kimi_delta",
            layers,
            window=(self.conv_kernel - 1 + max_drafts, self.channels),
            state=(self.num_heads, self.head_dim, self.head_dim),
            update_width=self.update_width,
            dtype=dtype,
            state_dtype=state_dtype,
        )

    def step(self, state: Tensor, token: Tensor, *, wants_output: bool) -> Tensor | None:
        """Apply one token to each row's state [N, H, V, K]; see `Recurrence`."""
        key, value, log_decay, rate, query = self._split(token, wants_output=wants_output)
        out = kimi_delta_step(state, key, value, log_decay.exp(), rate, query=query)
        return None if out is None else out.flatten(1)

    def scan(
        self,
        state: Tensor,
        tokens: Tensor,
        *,
        rows_per_round: tuple[int, ...],
        snapshots: tuple[tuple[int, int], ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """Run prompts piece by piece; see `Recurrence`."""
        key, value, log_decay, rate, query = self._split(tokens, wants_output=True)
        assert query is not None
        out, taken = kimi_delta_scan(
            state,
            query,
            key,
            value,
            log_decay=log_decay,
            rate=rate,
            rows_per_round=rows_per_round,
            snapshots=snapshots,
        )
        return out.flatten(-2), taken

    def _split(
        self, token: Tensor, *, wants_output: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Split tokens to key, value, log decay [.., H, D], rate [.., H] and query [.., H, D]."""
        heads = (self.num_heads, self.head_dim)
        query = None
        if wants_output:
            token, last = token.split_with_sizes((self.update_width, self.inner), -1)
            query = last.unflatten(-1, heads)
        vectors, rate = token.split_with_sizes((3 * self.inner, self.num_heads), -1)
        key, value, log_decay = (x.unflatten(-1, heads) for x in vectors.chunk(3, -1))
        return key, value, log_decay, rate, query


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KimiDeltaWeights:
    """Weights of one layer.

    Attributes:
        in_proj: Queries, keys, values (H*D each), what decays and output gate are made from (D
            each), rate logits (H), [.., C].
        conv: Of queries, keys and values.
        decay_proj: [H*D, D].
        decay_bias: [H*D] f32.
        decay_factor: -exp(A_log) of each head's channels, [H*D] f32.
        gate_proj: [H*D, D].
        unit_scale: Length of queries (D^-1/2) and keys (1), [2*H, 1] f32.
        norm: [D] f32.
        out_proj: [C, H*D].
    """

    in_proj: Tensor
    conv: ConvWeights
    decay_proj: Tensor
    decay_bias: Tensor
    decay_factor: Tensor
    gate_proj: Tensor
    unit_scale: Tensor
    norm: Tensor
    out_proj: Tensor


def kimi_delta(
    x: Tensor,
    weights: KimiDeltaWeights,
    sizes: KimiDeltaSizes,
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
    tokens, inner, heads = x.shape[0], sizes.inner, (-1, sizes.num_heads, sizes.head_dim)
    inputs, decay, gate, rate = linear(x, weights.in_proj).split_with_sizes(
        (sizes.channels, sizes.head_dim, sizes.head_dim, sizes.num_heads), -1
    )
    mixed = silu(windowed_conv(inputs, weights.conv, ConvPools.of_layer(cache, index), plan))
    query, key_value = mixed.split_with_sizes((inner, 2 * inner), -1)
    unit = mixed[:, : 2 * inner].view(-1, 2 * sizes.num_heads, sizes.head_dim)
    unit.copy_(l2_normalise(unit, weights.unit_scale))
    shifted = linear(decay.contiguous(), weights.decay_proj).float() + weights.decay_bias
    log_decay = softplus(shifted).mul_(weights.decay_factor)
    out = recur(
        torch.cat((key_value, log_decay, sigmoid(rate.float()), query), -1),
        sizes,
        cache.state["recurrent"][index],
        cache.ring["update"][index] if cache.ring else None,
        plan,
    )
    out = functional.pad(out, (0, 0, 0, tokens - out.shape[0]))
    normed = rms_norm(out.view(heads), weights.norm, sizes.norm_eps).view(tokens, inner)
    gate = linear(gate.contiguous(), weights.gate_proj).float()
    return linear(normed.mul_(sigmoid(gate)).to(x.dtype), weights.out_proj)
