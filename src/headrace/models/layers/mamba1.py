"""The Mamba-1 layer over a step: conv windows, recurrent states, rings.

Time step, B and C come from the convolved channels, through a narrow projection; some families norm
the three before they use them. Rejected drafts are rolled back as in every other recurrent layer:
states of each column, or a ring of what the state takes of a token.

Source: Mamba, arXiv:2312.00752.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from headrace.models.config import positive
from headrace.models.layers.recurrence import convolved_group, recur
from headrace.models.layers.windowed_conv import ConvPools, ConvWeights, windowed_conv
from headrace.ops.activations import silu, softplus
from headrace.ops.linear import linear
from headrace.ops.mamba1_scan import mamba1_scan
from headrace.ops.mamba1_step import mamba1_step
from headrace.ops.rms_norm import rms_norm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from headrace.models.batch import StateCache, StateGroupSpec
    from headrace.models.checkpoint import CheckedTensors, Shapes
    from headrace.models.layers.state_plan import StatePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Sizes:
    """Sizes of a Mamba-1 layer.

    Attributes:
        channels: Inner width, I: inputs of the recurrence and channels of the convolution.
        state_dim: State entries of each channel, D.
        time_rank: Width that the time steps are made from.
        conv_kernel: Taps of the convolution, W.
        has_conv_bias: Whether it has a bias.
        norm_eps: Of the norms of time step, B and C; None for layers without.
        has_norm_weights: Whether those norms have weights of their own.
    """

    channels: int
    state_dim: int
    time_rank: int
    conv_kernel: int
    has_conv_bias: bool
    norm_eps: float | None = None
    has_norm_weights: bool = False

    @property
    def update_width(self) -> int:
        """What the state takes of a token: dt, dt * x, B."""
        return 2 * self.channels + self.state_dim

    @property
    def split(self) -> dict[str, int]:
        """Columns of the narrow projection: time step, B and C."""
        return {"dt": self.time_rank, "b": self.state_dim, "c": self.state_dim}

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
        group = convolved_group(
            "mamba1",
            layers,
            window=(self.conv_kernel - 1 + max_drafts, self.channels),
            state=(self.channels, self.state_dim),
            update_width=self.update_width,
            dtype=dtype,
            state_dtype=state_dtype,
        )
        # Eight updates are as large as a state of 16 entries a channel: applying a few of them
        # costs what writing the state would.
        return replace(group, replay_interval=2)

    def tensor_shapes(self, prefix: str, width: int) -> Shapes:
        """List a layer's tensors as published checkpoints name them.

        Args:
            prefix: Before every name.
            width: Model width, C.
        """
        channels = self.channels
        shapes: Shapes = {
            "in_proj.weight": (2 * channels, width),
            "conv1d.weight": (channels, 1, self.conv_kernel),
            "x_proj.weight": (sum(self.split.values()), channels),
            "dt_proj.weight": (channels, self.time_rank),
            "dt_proj.bias": (channels,),
            "A_log": (channels, self.state_dim),
            "D": (channels,),
            "out_proj.weight": (width, channels),
        }
        if self.has_conv_bias:
            shapes["conv1d.bias"] = (channels,)
        if self.has_norm_weights:
            shapes |= {f"{name}_layernorm.weight": (n,) for name, n in self.split.items()}
        return {prefix + name: shape for name, shape in shapes.items()}


def time_rank(raw: Mapping[str, Any], name: str) -> int:
    """Read the width that time steps are made from; "auto" is a sixteenth of the model's.

    Args:
        raw: Contents of config.json.
        name: Of the setting.
    """
    if raw.get(name, "auto") == "auto":
        return math.ceil(positive(raw, "hidden_size") / 16)
    return positive(raw, name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mamba1Weights:
    """Weights of one Mamba-1 layer.

    Attributes:
        in_proj: Channels, then their gate, [2I, C].
        conv: Of the channels.
        x_proj: Time step, B and C of the convolved channels, [.., I].
        norms: Factors of their norms, each [..] f32; None for layers without.
        dt_proj: [I, rank].
        dt_bias: [I] f32.
        rate: A = -exp(A_log), [I, D] f32.
        skip: D of the paper, [I] f32.
        out_proj: [C, I].
    """

    in_proj: Tensor
    conv: ConvWeights
    x_proj: Tensor
    norms: tuple[Tensor, ...] | None
    dt_proj: Tensor
    dt_bias: Tensor
    rate: Tensor
    skip: Tensor
    out_proj: Tensor


def load_mamba1(source: CheckedTensors, prefix: str, sizes: Mamba1Sizes) -> Mamba1Weights:
    """Take one layer's weights from a checkpoint.

    Args:
        source: The checkpoint.
        prefix: Of the tensors' names.
        sizes: The layer's sizes.
    """
    dt_bias = source.full(prefix + "dt_proj.bias")
    norms = None
    if sizes.has_norm_weights:
        norms = tuple(source.full(f"{prefix}{name}_layernorm.weight") for name in sizes.split)
    elif sizes.norm_eps is not None:
        norms = tuple(torch.ones(n, device=dt_bias.device) for n in sizes.split.values())
    return Mamba1Weights(
        in_proj=source.matrix(prefix + "in_proj.weight"),
        conv=ConvWeights(
            taps=source.taps(prefix + "conv1d.weight"),
            bias=source.full(prefix + "conv1d.bias") if sizes.has_conv_bias else None,
        ),
        x_proj=source.matrix(prefix + "x_proj.weight"),
        norms=norms,
        dt_proj=source.matrix(prefix + "dt_proj.weight"),
        dt_bias=dt_bias,
        rate=-source.full(prefix + "A_log").exp(),
        skip=source.full(prefix + "D"),
        out_proj=source.matrix(prefix + "out_proj.weight"),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Recurrence:
    """One layer's arithmetic: its decay rates are weights, so they are not part of a token."""

    sizes: Mamba1Sizes
    rate: Tensor

    @property
    def update_width(self) -> int:
        """See `Recurrence`."""
        return self.sizes.update_width

    def step(self, state: Tensor, token: Tensor, *, wants_output: bool) -> Tensor | None:
        """Apply one token to each row's state [N, I, D]; see `Recurrence`."""
        dt, value, b, c = self._split(token, wants_output=wants_output)
        return mamba1_step(state, dt, value, b, rate=self.rate, c=c)

    def scan(
        self,
        state: Tensor,
        tokens: Tensor,
        *,
        rows_per_round: tuple[int, ...],
        snapshots: tuple[tuple[int, int], ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """Run prompts piece by piece; see `Recurrence`."""
        dt, value, b, c = self._split(tokens, wants_output=True)
        assert c is not None
        return mamba1_scan(
            state,
            dt,
            value,
            b,
            c,
            rate=self.rate,
            rows_per_round=rows_per_round,
            snapshots=snapshots,
        )

    def _split(
        self, token: Tensor, *, wants_output: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Split tokens to dt [.., I], dt * x [.., I], B [.., D] and C [.., D]."""
        channels, state_dim = self.sizes.channels, self.sizes.state_dim
        widths = [channels, channels, state_dim]
        if not wants_output:
            dt, value, b = token.split_with_sizes(widths, -1)
            return dt, value, b, None
        dt, value, b, c = token.split_with_sizes([*widths, state_dim], -1)
        return dt, value, b, c


def mamba1(
    x: Tensor,
    weights: Mamba1Weights,
    sizes: Mamba1Sizes,
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
    tokens = x.shape[0]
    inputs, gate = linear(x, weights.in_proj).chunk(2, -1)
    mixed = silu(windowed_conv(inputs, weights.conv, ConvPools.of_layer(cache, index), plan))
    narrow = linear(mixed.to(x.dtype), weights.x_proj)
    # Copies: on the CPU the bits of a product may depend on where its rows begin.
    low, b, c = (part.contiguous() for part in narrow.split_with_sizes([*sizes.split.values()], -1))
    if weights.norms is not None:
        assert sizes.norm_eps is not None
        parts = zip((low, b, c), weights.norms, strict=True)
        low, b, c = (rms_norm(part, scale, sizes.norm_eps) for part, scale in parts)
    dt = softplus(linear(low, weights.dt_proj).float() + weights.dt_bias)
    out = recur(
        torch.cat((dt, dt * mixed, b.float(), c.float()), -1),
        _Recurrence(sizes=sizes, rate=weights.rate),
        cache.state["recurrent"][index],
        cache.ring["update"][index] if cache.ring else None,
        plan,
    )
    out = functional.pad(out, (0, 0, 0, tokens - out.shape[0]))
    out = (out + mixed * weights.skip) * silu(gate.float())
    return linear(out.to(x.dtype), weights.out_proj)
