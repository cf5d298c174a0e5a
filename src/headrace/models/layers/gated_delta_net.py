"""The Gated DeltaNet layer over a step: conv windows, recurrent states, rings.

Source: Gated Delta Networks, arXiv:2412.06464, as Qwen3-Next and Qwen3.5 build it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace.models.batch import ReplayMetadata
from headrace.models.layers.product import product
from headrace.models.layers.recomputed import RUN, RecomputedStates
from headrace.models.layers.recurrence import convolved_group, recur
from headrace.models.layers.split_plan import SplitPlan
from headrace.models.layers.windowed_conv import ConvPools, ConvWeights, windowed_conv
from headrace.ops.activations import silu
from headrace.ops.gated_delta_decode import MixerWeights, Ring, gated_delta_decode
from headrace.ops.gated_delta_prefill import gated_delta_prefill
from headrace.ops.gated_delta_scan import gated_delta_scan
from headrace.ops.gated_delta_step import gated_delta_step
from headrace.ops.rms_norm import gated_rms_norm, l2_normalise

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import ColumnsMetadata, Kernels, StateCache, StateGroupSpec
    from headrace.models.layers.state_plan import StatePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """Sizes of a Gated DeltaNet layer, and its recurrence.

    Attributes:
        num_key_heads: HK.
        num_value_heads: HV, a multiple of HK.
        key_dim: K.
        value_dim: V.
        conv_kernel: Taps of the convolution, W.
        norm_eps: Of the gated norm.
        max_rate: Learning rates are this times a sigmoid: 1, or 2 where the state may have negative
            eigenvalues.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm_eps: float
    max_rate: float = 1.0

    @property
    def keys(self) -> int:
        """Columns of all keys: HK * K."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Columns of all values: HV * V."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution, F."""
        return 2 * self.keys + self.values

    @property
    def update_width(self) -> int:
        """What the state takes of a token: unit key, value, rate, log decay."""
        return self.keys + self.values + 2 * self.num_value_heads

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
            "gated_delta_net",
            layers,
            window=(self.conv_kernel - 1 + max_drafts, self.channels),
            state=(self.num_value_heads, self.value_dim, self.key_dim),
            update_width=self.update_width,
            dtype=dtype,
            state_dtype=state_dtype,
        )

    def step(self, state: Tensor, token: Tensor, *, wants_output: bool) -> Tensor | None:
        """Apply one token to each row's state [N, HV, V, K]; see `Recurrence`."""
        key, value, rate, log_decay, query = self._split(token, wants_output=wants_output)
        heads = (self.num_key_heads, -1)
        out = gated_delta_step(
            state.view(state.shape[0], *heads, self.value_dim, self.key_dim),
            key,
            value.unflatten(-1, (*heads, self.value_dim)),
            log_decay.exp().unflatten(-1, heads),
            rate.unflatten(-1, heads),
            query=query,
        )
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
        key, value, rate, log_decay, query = self._split(tokens, wants_output=True)
        assert query is not None
        out, taken = gated_delta_scan(
            state,
            query,
            key,
            value.unflatten(-1, (self.num_value_heads, self.value_dim)),
            rate=rate,
            log_decay=log_decay,
            rows_per_round=rows_per_round,
            snapshots=snapshots,
        )
        return out.flatten(-2), taken

    def _split(
        self, token: Tensor, *, wants_output: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Split tokens to key [.., HK, K], value [.., HV*V], rate, log decay [.., HV], query."""
        heads = (self.num_key_heads, self.key_dim)
        sizes = [self.keys, self.values, self.num_value_heads, self.num_value_heads]
        if not wants_output:
            key, value, rate, log_decay = token.split_with_sizes(sizes, -1)
            return key.unflatten(-1, heads), value, rate, log_decay, None
        key, value, rate, log_decay, query = token.split_with_sizes([*sizes, self.keys], -1)
        return key.unflatten(-1, heads), value, rate, log_decay, query.unflatten(-1, heads)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaWeights:
    """Weights of one Gated DeltaNet layer.

    Attributes:
        in_proj: Queries, keys and values (F), output gate (HV * V), negated rate logits (HV) and
            decay logits (HV), [F + HV*V + 2*HV, C].
        conv: Of queries, keys and values.
        gate_bias: 0 for the rates, dt_bias for the decays, [2*HV] f32.
        gate_factor: -1 for the rates, -exp(A_log) for the decays, [2*HV] f32.
        unit_scale: Length of queries (K^-1/2) and keys (1), [2*HK, 1] f32.
        norm: [V] f32.
        out_proj: [C, HV*V].
    """

    in_proj: Tensor
    conv: ConvWeights
    gate_bias: Tensor
    gate_factor: Tensor
    unit_scale: Tensor
    norm: Tensor
    out_proj: Tensor


def join_delta(
    sizes: DeltaSizes,
    *,
    qkv: Tensor,
    gate: Tensor,
    rate: Tensor,
    decay: Tensor,
    taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    out_proj: Tensor,
) -> DeltaWeights:
    """Join a checkpoint's tensors as the layer takes them, with constants folded in.

    Args:
        sizes: The layer's sizes.
        qkv: Projection to queries, keys and values, [F, C].
        gate: Projection to the output gate, [HV*V, C].
        rate: Projection to the logits of the learning rates, [HV, C].
        decay: Projection to the logits of the decays, [HV, C].
        taps: [W, F] f32, oldest first.
        a_log: [HV] f32.
        dt_bias: [HV] f32.
        norm: [V] f32.
        out_proj: [C, HV*V].

    Returns:
        The weights.
    """
    scale = torch.ones(2 * sizes.num_key_heads, 1, device=a_log.device)
    scale[: sizes.num_key_heads] = sizes.key_dim**-0.5
    return DeltaWeights(
        in_proj=torch.cat((qkv, gate, -rate, decay)),
        conv=ConvWeights(taps=taps, bias=None),
        gate_bias=torch.cat((torch.zeros_like(dt_bias), dt_bias)),
        gate_factor=torch.cat((-torch.ones_like(a_log), -a_log.exp())),
        unit_scale=scale,
        norm=norm,
        out_proj=out_proj,
    )


def gated_delta_net(
    x: Tensor,
    weights: DeltaWeights,
    sizes: DeltaSizes,
    *,
    cache: StateCache,
    index: int,
    plan: StatePlan | SplitPlan,
) -> Tensor:
    """Run one layer over the packed tokens of a step and update its states.

    Args:
        x: Normed hidden states, [T, C].
        weights: The layer's weights.
        sizes: The layer's sizes.
        cache: The group's layer.
        index: The layer's place in the group.
        plan: The step's indices.

    Returns:
        [T, C].
    """
    kernels: Kernels = plan.kernels if isinstance(plan, SplitPlan) else "torch"
    projected = product(x, weights.in_proj, kernels)
    if isinstance(plan, SplitPlan):
        mixed = _mix_split(projected, weights, sizes, cache, index, plan)
    else:
        mixed = _mix(projected, weights, sizes, cache, index, plan)
    return product(mixed, weights.out_proj, kernels)


def _mix_split(
    projected: Tensor,
    weights: DeltaWeights,
    sizes: DeltaSizes,
    cache: StateCache,
    index: int,
    plan: SplitPlan,
) -> Tensor:
    """Run the mixer between its projections, in kernels where there are some, [T, HV*V]."""
    assert sizes.max_rate == 1.0, f"the kernels' rates are sigmoids, not up to {sizes.max_rate}"
    is_fixed = plan.kernels == "fixed"
    inputs = (*_split(projected, sizes), _mixer_weights(weights, sizes))
    pools = (cache.state["window"][index], cache.state["recurrent"][index])
    if plan.generating is not None:
        rows = plan.generating
        gated_delta_decode(
            *inputs,
            *pools,
            rows.token_index,
            rows.query_lens,
            rows.states,
            plan.out,
            ring=_ring(cache, index, rows.states),
            is_fixed=is_fixed,
        )
    if plan.prompts is not None:
        gated_delta_prefill(*inputs, *pools, plan.prompts, plan.out, is_fixed=is_fixed)
    if plan.recomputed is not None:
        _mix_again(inputs, pools, plan.recomputed, plan.out)
    if plan.others is not None:
        others = plan.others
        own = projected.index_select(0, others.tokens)
        mixed = _mix(own, weights, sizes, cache, index, others.plan)
        plan.out.index_copy_(0, others.tokens, mixed)
    return plan.out


def _mix_again(
    inputs: tuple[Tensor, Tensor, Tensor, MixerWeights],
    pools: tuple[Tensor, Tensor],
    rows: RecomputedStates,
    out: Tensor,
) -> None:
    """Run generated tokens once more through the kernel that computed them first.

    Args:
        inputs: Conv inputs, output gate and logits of the gates of all tokens; the weights.
        pools: Windows and states; overwritten at the rows' targets.
        rows: The rows.
        out: [T, HV*V]; overwritten at the rows' tokens.
    """
    carried = inputs[3].conv.shape[0] - 1
    # With the entries before a run's last token, a window keeps those of its other tokens.
    windows = pools[0].new_zeros(rows.num_rows + 1, carried + RUN - 1, pools[0].shape[2])
    states = pools[1].new_zeros(rows.num_rows + 1, *pools[1].shape[1:])
    own = windows[:, :carried]
    own.index_copy_(0, rows.sourced, pools[0][:, :carried].index_select(0, rows.sources))
    states.index_copy_(0, rows.sourced, pools[1].index_select(0, rows.sources))
    for run in rows.runs:
        gated_delta_decode(
            *inputs, windows, states, run.token_index, run.query_lens, run.states, out,
            is_fixed=True,
        )  # fmt: skip
    entry = rows.last_run[:, None] - 1 + torch.arange(carried, device=out.device)
    last = windows[1:].gather(1, entry[..., None].expand(-1, -1, windows.shape[2]))
    pools[0][:, :carried].index_copy_(0, rows.targets, last)
    pools[1].index_copy_(0, rows.targets, states[1:])


def _mixer_weights(weights: DeltaWeights, sizes: DeltaSizes) -> MixerWeights:
    return MixerWeights(
        conv=weights.conv.taps,
        gate_bias=weights.gate_bias,
        gate_factor=weights.gate_factor,
        unit_scale=weights.unit_scale,
        norm=weights.norm,
        norm_eps=sizes.norm_eps,
    )


def _ring(cache: StateCache, index: int, states: ColumnsMetadata | ReplayMetadata) -> Ring | None:
    if not isinstance(states, ReplayMetadata):
        return None
    return Ring(
        inputs=cache.ring["conv_input"][index],
        updates=cache.ring["update"][index],
        interval=states.interval,
    )


def _split(projected: Tensor, sizes: DeltaSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Split what the input projection gave to conv inputs, output gate and logits of the gates."""
    inputs, gate, logits = projected.split_with_sizes(
        (sizes.channels, sizes.values, 2 * sizes.num_value_heads), -1
    )
    return inputs, gate, logits


def _mix(
    projected: Tensor,
    weights: DeltaWeights,
    sizes: DeltaSizes,
    cache: StateCache,
    index: int,
    plan: StatePlan,
) -> Tensor:
    """Run the mixer between its projections in PyTorch operations, [T, HV*V]; 0 for padding."""
    heads, key_heads = sizes.num_value_heads, 2 * sizes.num_key_heads
    inputs, gate, logits = _split(projected, sizes)
    mixed = silu(windowed_conv(inputs, weights.conv, ConvPools.of_layer(cache, index), plan))
    query, key, value = mixed.split_with_sizes((sizes.keys, sizes.keys, sizes.values), -1)
    unit = mixed[:, : 2 * sizes.keys].view(-1, key_heads, sizes.key_dim)
    unit.copy_(l2_normalise(unit, weights.unit_scale))
    log_rate, log_decay = _log_gates(logits, weights).chunk(2, -1)
    rate = log_rate.exp()
    if sizes.max_rate != 1.0:
        rate = rate * sizes.max_rate
    out = recur(
        torch.cat((key, value, rate, log_decay, query), -1),
        sizes,
        cache.state["recurrent"][index],
        cache.ring["update"][index] if cache.ring else None,
        plan,
    )
    out = functional.pad(out, (0, 0, 0, projected.shape[0] - out.shape[0]))
    value_shape = (-1, heads, sizes.value_dim)
    normed = gated_rms_norm(
        out.view(value_shape), gate.view(value_shape), weights.norm, sizes.norm_eps
    )
    return normed.view(-1, sizes.values)


def _log_gates(logits: Tensor, weights: DeltaWeights) -> Tensor:
    """Return log rates, then log decays, [T, 2*HV] f32.

    A rate is sigmoid(b) = exp(-softplus(-b)) and a decay exp(-exp(A_log) softplus(a + dt_bias)), so
    one softplus serves both (b is negated in the weights).
    """
    shifted = logits.float() + weights.gate_bias
    tail = shifted.abs().neg_().exp_().log1p_()
    return tail.add_(shifted.clamp_(min=0.0)).mul_(weights.gate_factor)
