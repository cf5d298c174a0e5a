"""The Mamba-2 layer over a step: conv windows, recurrent states, rings.

Source: Mamba-2, arXiv:2405.21060, as Granite 4 and its relatives build it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace.models.batch import ReplayMetadata
from headrace.models.layers.recurrence import convolved_group, recur
from headrace.models.layers.split_plan import SplitPlan
from headrace.models.layers.windowed_conv import ConvPools, ConvWeights, windowed_conv
from headrace.ops.activations import silu, softplus
from headrace.ops.gated_delta_decode import Ring
from headrace.ops.linear import linear
from headrace.ops.mamba2_decode import MAX_PART, MixerWeights, mamba2_decode
from headrace.ops.mamba2_scan import mamba2_scan
from headrace.ops.mamba2_step import mamba2_step
from headrace.ops.rms_norm import rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import StateCache, StateGroupSpec
    from headrace.models.layers.split_plan import GeneratingRows
    from headrace.models.layers.state_plan import StatePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Sizes:
    """Sizes of a Mamba-2 layer: H heads of P inputs, G groups that share B and C of size D.

    Attributes:
        norm_eps: Of the norm before the last projection.
        gates_after_norm: Whether the gate comes after that norm and not before it.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_kernel: int
    norm_eps: float
    gates_after_norm: bool = False

    @property
    def inner(self) -> int:
        """Columns of x, H * P."""
        return self.num_heads * self.head_dim

    @property
    def shared(self) -> int:
        """Columns of B, and of C, G * D."""
        return self.num_groups * self.state_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution, F: x, B and C."""
        return self.inner + 2 * self.shared

    @property
    def update_width(self) -> int:
        """What the state takes of a token: B, dt * x, log decay."""
        return self.shared + self.inner + self.num_heads

    @property
    def kernel_obstacle(self) -> str | None:
        """Why the kernels cannot run layers of these sizes, or None if they can."""
        for name, size in (("head", self.head_dim), ("state", self.state_dim)):
            if size & (size - 1):
                return f"the {name} size of Mamba-2 is {size}, and the kernels need a power of 2"
        if self.inner > MAX_PART:
            return f"Mamba-2 layers are {self.inner} wide, and the kernels can norm {MAX_PART}"
        return None

    @property
    def counts(self) -> dict[str, int]:
        """What ranks have equal parts of: heads, and groups, which are normed by themselves."""
        return {"heads of Mamba-2 layers": self.num_heads, "groups of those": self.num_groups}

    def part(self, size: int) -> Mamba2Sizes:
        """Return the sizes of one of `size` parts."""
        return replace(
            self, num_heads=self.num_heads // size, num_groups=self.num_groups // size
        )

    def segments(self, name: str) -> tuple[int, ...] | None:
        """Sizes of what a tensor of the layer holds one after another; None for one thing."""
        if name.endswith("in_proj.weight"):
            return self.inner, self.inner, self.shared, self.shared, self.num_heads
        if name.endswith(("conv1d.weight", "conv1d.bias")):
            return self.inner, self.shared, self.shared
        return None

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
            "mamba2",
            layers,
            window=(self.conv_kernel - 1 + max_drafts, self.channels),
            state=(self.num_heads, self.head_dim, self.state_dim),
            update_width=self.update_width,
            dtype=dtype,
            state_dtype=state_dtype,
        )

    def step(self, state: Tensor, token: Tensor, *, wants_output: bool) -> Tensor | None:
        """Apply one token to each row's state [N, H, P, D]; see `Recurrence`."""
        b, value, log_decay, c = self._split(token, wants_output=wants_output)
        rows, heads = token.shape[0], (self.num_groups, self.num_heads // self.num_groups)
        out = mamba2_step(
            state.view(rows, *heads, self.head_dim, self.state_dim),
            b,
            value.view(rows, *heads, self.head_dim),
            log_decay.exp().view(rows, *heads),
            c=c,
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
        b, value, log_decay, c = self._split(tokens, wants_output=True)
        assert c is not None
        out, taken = mamba2_scan(
            state,
            b,
            c,
            value.unflatten(-1, (self.num_heads, self.head_dim)),
            log_decay=log_decay,
            rows_per_round=rows_per_round,
            snapshots=snapshots,
        )
        return out.flatten(-2), taken

    def _split(
        self, token: Tensor, *, wants_output: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Split tokens to B [.., G, D], dt * x [.., H*P], log decay [.., H] and C [.., G, D]."""
        groups = (self.num_groups, self.state_dim)
        sizes = [self.shared, self.inner, self.num_heads]
        if not wants_output:
            b, value, log_decay = token.split_with_sizes(sizes, -1)
            return b.unflatten(-1, groups), value, log_decay, None
        b, value, log_decay, c = token.split_with_sizes([*sizes, self.shared], -1)
        return b.unflatten(-1, groups), value, log_decay, c.unflatten(-1, groups)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mamba2Weights:
    """Weights of one Mamba-2 layer.

    Attributes:
        in_proj: Gate (H*P), x, B and C (F), dt (H), [.., C].
        in_scale: Factors of its outputs, [..] f32; None without.
        conv: Of x, B and C.
        dt_bias: [H] f32.
        decay_rate: A = -exp(A_log), [H] f32.
        skip: D, [H, 1] f32.
        norm: Factors of each part that is normed by itself, usually [G, H*P/G] f32; None without.
        out_proj: [C, H*P].
    """

    in_proj: Tensor
    in_scale: Tensor | None
    conv: ConvWeights
    dt_bias: Tensor
    decay_rate: Tensor
    skip: Tensor
    norm: Tensor | None
    out_proj: Tensor


def mamba2(
    x: Tensor,
    weights: Mamba2Weights,
    sizes: Mamba2Sizes,
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
        cache: The group's pools.
        index: The layer's place in the group.
        plan: The step's indices.

    Returns:
        [T, C].
    """
    projected = linear(x, weights.in_proj)
    if weights.in_scale is not None:
        projected = (projected * weights.in_scale).to(x.dtype)
    if isinstance(plan, SplitPlan):
        mixed = _mix_split(projected, weights, sizes, cache, index, plan)
    else:
        mixed = _mix(projected, weights, sizes, cache, index, plan)
    return linear(mixed, weights.out_proj)


def _mix_split(
    projected: Tensor,
    weights: Mamba2Weights,
    sizes: Mamba2Sizes,
    cache: StateCache,
    index: int,
    plan: SplitPlan,
) -> Tensor:
    """Run the mixer between its projections, generating rows in kernels, [T, H*P]."""
    if plan.generating is not None:
        _decode(projected, weights, sizes, cache, index, plan.generating, plan.out)
    if plan.others is not None:
        others = plan.others
        own = projected.index_select(0, others.tokens)
        mixed = _mix(own, weights, sizes, cache, index, others.plan)
        plan.out.index_copy_(0, others.tokens, mixed)
    return plan.out


def _decode(
    projected: Tensor,
    weights: Mamba2Weights,
    sizes: Mamba2Sizes,
    cache: StateCache,
    index: int,
    rows: GeneratingRows,
    out: Tensor,
) -> None:
    """Run the mixer of generating rows in kernels; writes their tokens of out [T, H*P]."""
    gate, inputs, dt = _split(projected, sizes)
    ring = None
    if isinstance(rows.states, ReplayMetadata):
        ring = Ring(
            inputs=cache.ring["conv_input"][index],
            updates=cache.ring["update"][index],
            interval=rows.states.interval,
        )
    mamba2_decode(
        inputs,
        gate,
        dt,
        MixerWeights(
            conv=weights.conv.taps,
            conv_bias=weights.conv.bias,
            dt_bias=weights.dt_bias,
            decay_rate=weights.decay_rate,
            skip=weights.skip[:, 0],
            norm=weights.norm,
            norm_eps=sizes.norm_eps,
            gates_after_norm=sizes.gates_after_norm,
        ),
        cache.state["window"][index],
        cache.state["recurrent"][index],
        rows.token_index,
        rows.query_lens,
        rows.states,
        out,
        ring=ring,
    )


def _split(projected: Tensor, sizes: Mamba2Sizes) -> tuple[Tensor, ...]:
    """Split what the input projection gave to gate, conv inputs and time steps."""
    return projected.split_with_sizes((sizes.inner, sizes.channels, sizes.num_heads), -1)


def _mix(
    projected: Tensor,
    weights: Mamba2Weights,
    sizes: Mamba2Sizes,
    cache: StateCache,
    index: int,
    plan: StatePlan,
) -> Tensor:
    """Run the mixer between its projections in PyTorch operations, [T, H*P]."""
    tokens, heads = projected.shape[0], (sizes.num_heads, sizes.head_dim)
    gate, inputs, dt = _split(projected, sizes)
    mixed = silu(windowed_conv(inputs, weights.conv, ConvPools.of_layer(cache, index), plan))
    own, b, c = mixed.split_with_sizes((sizes.inner, sizes.shared, sizes.shared), -1)
    own = own.reshape(tokens, *heads)
    dt = softplus(dt.float() + weights.dt_bias)
    value = (own * dt[..., None]).view(tokens, sizes.inner)
    out = recur(
        torch.cat((b, value, dt * weights.decay_rate, c), -1),
        sizes,
        cache.state["recurrent"][index],
        cache.ring["update"][index] if cache.ring else None,
        plan,
    )
    out = functional.pad(out, (0, 0, 0, tokens - out.shape[0]))
    out = (out.view(tokens, *heads) + own * weights.skip).view(tokens, sizes.inner)
    return _gate(out, gate, weights, sizes).to(projected.dtype)


def _gate(out: Tensor, gate: Tensor, weights: Mamba2Weights, sizes: Mamba2Sizes) -> Tensor:
    """Norm and gate the heads' outputs, in the family's order, [T, H*P] f32."""
    opened = silu(gate.float())
    if weights.norm is None:
        return out * opened
    if not sizes.gates_after_norm:
        out = out * opened
    parts = out.view(-1, *weights.norm.shape)
    normed = rms_norm(parts, weights.norm, sizes.norm_eps).view(out.shape)
    return normed * opened if sizes.gates_after_norm else normed
