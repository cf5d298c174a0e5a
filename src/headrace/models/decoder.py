"""The decoder that most hybrid families share: a mixer and a feed-forward block in every layer.

    h = h + r * mixer(norm(h));   h = h + r * feed_forward(norm(h))

Layers may be a mixer alone, and a model may have no attention at all. A family adds its recurrent
mixer, its feed-forward block, its checkpoint names, and constants.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import torch

from headrace.models.config import FULL, ModelConfig
from headrace.models.layers.attention import (
    PlainAttentionStep,
    PlainAttentionWeights,
    plain_attention,
)
from headrace.models.layers.attention_plan import (
    AttentionPlan,
    FusedAttention,
    plan_attention,
    plan_fused_attention,
)
from headrace.models.layers.row_plan import plan_rows
from headrace.models.layers.split_plan import plan_generating_split
from headrace.models.layers.state_plan import plan_states
from headrace.models.shard import WHOLE, Shard
from headrace.ops.add_rms_norm import add_rms_norm
from headrace.ops.rms_norm import rms_norm
from headrace.ops.rotary import inverse_frequencies, rotary_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

    from headrace.models.batch import Caches, Kernels, StateCache, StateGroupSpec, StepBatch
    from headrace.models.checkpoint import CheckedTensors, Shapes
    from headrace.models.layers.row_plan import RowPlan
    from headrace.models.layers.split_plan import SplitPlan
    from headrace.models.layers.state_plan import StatePlan

Config = TypeVar("Config", bound=ModelConfig)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderLayer:
    """One layer.

    Attributes:
        input_norm: [C] f32.
        mixer: Attention, or the family's recurrent mixer.
        feed_norm: [C] f32; None for a layer of a mixer alone.
        feed_forward: The family's feed-forward weights, None with feed_norm.
    """

    input_norm: Tensor
    mixer: Any
    feed_norm: Tensor | None = None
    feed_forward: Any = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderWeights:
    """All weights; embedding and head [vocabulary, C], final_norm [C] f32.

    Layers are `DecoderLayer`, or what the family's `_run_layer` takes.
    """

    embedding: Tensor
    layers: tuple[Any, ...]
    final_norm: Tensor
    head: Tensor

    @classmethod
    def read(
        cls,
        config: ModelConfig,
        source: CheckedTensors,
        *,
        layers: tuple[Any, ...],
        final_norm: str,
        embedding: str = "model.embed_tokens.weight",
    ) -> DecoderWeights:
        """Take what is outside the layers from a checkpoint; a tied head is the embedding.

        Args:
            config: The model's sizes.
            source: The checkpoint.
            layers: What the family's layers are.
            final_norm: Name of the last norm.
            embedding: Name of the embedding.

        Returns:
            The weights.
        """
        embedded = source.matrix(embedding)
        is_tied = config.tie_word_embeddings
        return cls(
            embedding=embedded,
            layers=layers,
            final_norm=source.full(final_norm),
            head=embedded if is_tied else source.matrix("lm_head.weight"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Constants that some families multiply with.

    Attributes:
        embedding: Of the embedded tokens.
        residual: Of what each block adds.
        query: Of the attention scores, in units of the usual D^-1/2.
        logits_divisor: What the logits are divided by.
    """

    embedding: float = 1.0
    residual: float = 1.0
    query: float = 1.0
    logits_divisor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderStep:
    """What the layers of a step share.

    Attributes:
        caches: The pools.
        attention: Of the attention layers; None in a model without.
        states: Of each state group.
        embedded: The step's embedded tokens, [T, C].
        slots: Where each packed token's key and value go, [T] i64; 0 for padding.
        kernels: What computes between the products.
    """

    caches: Caches
    attention: PlainAttentionStep | None
    states: tuple[StatePlan | SplitPlan, ...]
    embedded: Tensor
    slots: Tensor
    kernels: Kernels


class HybridDecoder(ABC, Generic[Config]):
    """A decoder of attention layers and one kind of recurrent layers, in one state group or more.

    Args:
        config: The model's sizes.
        weights: Its weights.
        state_dtype: Dtype name of the recurrent states.
        multipliers: The family's constants.
        residual_in_float32: Keep what the layers add to in float32, whatever the compute dtype.
        shard: Which part of the model this is; config and weights are the part's.
    """

    def __init__(
        self,
        config: Config,
        weights: DecoderWeights,
        state_dtype: str,
        multipliers: Multipliers,
        *,
        residual_in_float32: bool = False,
        shard: Shard = WHOLE,
    ) -> None:
        self.config = config
        self.shard = shard
        self._weights = weights
        self._state_dtype = state_dtype
        self._multipliers = multipliers
        self._residual_in_float32 = residual_in_float32
        # Group and place in it of each recurrent layer.
        self._places = {
            layer: (group, index)
            for group, spec in enumerate(self.state_groups(0))
            for index, layer in enumerate(spec.layers)
        }
        self._kv_places = {layer: at for at, layer in enumerate(config.attention_layers)}
        self._frequencies = None
        if config.rotary_dim:
            self._frequencies = inverse_frequencies(
                config.rotary_dim, config.rope_theta, weights.embedding.device
            )

    @staticmethod
    @abstractmethod
    def expected_tensors(
        config: Any,  # noqa: ANN401 - the family's config
        on_disk: Collection[str] = (),
    ) -> Shapes:
        """Return every tensor that a checkpoint must hold.

        Args:
            config: The model's sizes.
            on_disk: Names that there are, for families whose checkpoints come in several spellings.

        Returns:
            Shape by name.
        """

    @staticmethod
    def segments(config: Any, name: str) -> tuple[int, ...] | None:  # noqa: ANN401, ARG004
        """Return the sizes of the matrices that a tensor holds; see `HybridModel`."""
        return None

    @staticmethod
    def kernel_obstacle(config: ModelConfig) -> str | None:
        """Return why no fused kernels can run a model."""
        return f"no kernel serves the layers of {config.architecture}"

    @staticmethod
    def fixed_obstacle(config: ModelConfig) -> str | None:
        """Return why kernels cannot make a token's bits its own."""
        return f"operations of {config.architecture} follow the number of tokens in a step"

    @abstractmethod
    def state_groups(self, max_draft_tokens: int) -> tuple[StateGroupSpec, ...]:
        """Describe the state pools that this model needs; see `HybridModel`."""

    @property
    @abstractmethod
    def _conv_kernel(self) -> int:
        """Taps of the recurrent layers' convolution, W; 1 for layers without."""

    @property
    def _window(self) -> int | None:
        """Newest positions that attention sees, a token's own included; None for all."""
        return None

    @abstractmethod
    def _mix(
        self,
        normed: Tensor,
        weights: Any,  # noqa: ANN401 - the family's
        cache: StateCache,
        index: int,
        plan: Any,  # noqa: ANN401 - StatePlan, or SplitPlan too where kernels serve the family
    ) -> Tensor:
        """Run the recurrent mixer that is `index` in its group over normed rows [T, C]."""

    @property
    def _mixed_width(self) -> int:
        """Columns of what a recurrent mixer gives its last projection; where kernels serve it."""
        raise NotImplementedError(f"no kernel serves the mixers of {type(self).__name__}")

    def _feed(
        self,
        normed: Tensor,
        weights: Any,  # noqa: ANN401 - the family's
        step: DecoderStep,
    ) -> Tensor:
        """Run the feed-forward block over normed rows [T, C]."""
        raise NotImplementedError(f"{type(self).__name__} has no feed-forward blocks")

    @property
    def num_kv_layers(self) -> int:
        """Layers of the KV pools."""
        return len(self.config.attention_layers)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""
        return self._weights.embedding.dtype

    @property
    def logits_dtype(self) -> torch.dtype:
        """Dtype of `logits`: the head's own, or float32 where they are divided."""
        return self.dtype if self._multipliers.logits_divisor == 1.0 else torch.float32

    @property
    def num_parameters(self) -> int:
        """Elements of the checkpoint's tensors."""
        return sum(math.prod(shape) for shape in self.expected_tensors(self.config).values())

    def forward(self, batch: StepBatch, caches: Caches) -> Tensor:
        """Run the decoder over a step's tokens; writes keys, values and states.

        Args:
            batch: The step.
            caches: The pools.

        Returns:
            Hidden states after the last norm, [T, C].
        """
        hidden = self._embed(batch.token_ids)
        step = self._plan(batch, caches, hidden)
        for i, layer in enumerate(self._weights.layers):
            hidden = self._run_layer(i, layer, hidden, step)
        return self._norm(hidden, self._weights.final_norm, batch.kernels)

    def _norm(self, hidden: Tensor, scale: Tensor, kernels: Kernels) -> Tensor:
        """Norm rows [T, C], in the compute dtype."""
        if kernels == "triton":
            out = torch.empty_like(hidden, dtype=self.dtype)
            return add_rms_norm(hidden, None, scale, self.config.rms_norm_eps, out=out)
        normed = rms_norm(hidden, scale, self.config.rms_norm_eps)
        return normed.to(self.dtype) if self._residual_in_float32 else normed

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Embed tokens [T], [T, C]."""
        embedded = self.shard.embed(self._weights.embedding, token_ids)
        if self._residual_in_float32:
            embedded = embedded.float()
        factor = self._multipliers.embedding
        return embedded if factor == 1.0 else embedded * factor

    def _run_layer(
        self,
        i: int,
        layer: Any,  # noqa: ANN401 - the family's
        hidden: Tensor,
        step: DecoderStep,
    ) -> Tensor:
        """Run layer i; families with another order of norms and sums have their own."""
        assert isinstance(layer, DecoderLayer)
        normed = self._norm(hidden, layer.input_norm, step.kernels)
        hidden = self._add(hidden, self._run_mixer(i, layer, normed, step))
        if layer.feed_norm is None:
            return hidden
        normed = self._norm(hidden, layer.feed_norm, step.kernels)
        return self._add(hidden, self._feed(normed, layer.feed_forward, step))

    def _run_mixer(self, i: int, layer: DecoderLayer, x: Tensor, step: DecoderStep) -> Tensor:
        """Run layer i's attention or recurrent mixer over what it takes, [T, C]."""
        if self.config.layer_types[i] == FULL:
            return self._run_attention(self._kv_places[i], layer.mixer, x, step)
        return self._run_recurrent(i, layer.mixer, x, step)

    def _run_attention(
        self,
        at: int,
        weights: Any,  # noqa: ANN401 - the family's
        x: Tensor,
        step: DecoderStep,
    ) -> Tensor:
        """Run attention with the keys and values of layer `at` of the KV pools, [T, C]."""
        kv = (step.caches.k[at], step.caches.v[at])
        assert step.attention is not None
        return self._attend(x, weights, kv, step.attention)

    def _run_recurrent(
        self,
        i: int,
        weights: Any,  # noqa: ANN401 - the family's
        x: Tensor,
        step: DecoderStep,
    ) -> Tensor:
        """Run the recurrent mixer of layer i, [T, C]."""
        group, index = self._places[i]
        return self._mix(x, weights, step.caches.groups[group], index, step.states[group])

    def _attend(
        self,
        x: Tensor,
        weights: Any,  # noqa: ANN401 - the family's
        kv: tuple[Tensor, Tensor],
        attention: PlainAttentionStep,
    ) -> Tensor:
        """Run an attention layer over what it takes, [T, C]."""
        assert isinstance(weights, PlainAttentionWeights)
        eps, factor = self.config.rms_norm_eps, self._multipliers.query
        return plain_attention(x, weights, kv, attention, eps=eps, query_factor=factor)

    def logits(
        self, hidden_rows: Tensor, kernels: Kernels = "torch", *, out: Tensor | None = None
    ) -> Tensor:
        """Apply the head.

        Args:
            hidden_rows: Rows of `forward`, [R, C].
            kernels: What multiplies.
            out: Where they go, [R filled up to ROW_TILE or more, vocabulary], logits_dtype.

        Returns:
            [R, vocabulary], logits_dtype.
        """
        table, vocab = self._weights.head, self.config.vocab_size
        divisor = self._multipliers.logits_divisor
        if divisor == 1.0:
            return self.shard.head(table, hidden_rows, vocab, kernels, out=out)
        logits = self.shard.head(table, hidden_rows, vocab, kernels).float()
        return torch.div(logits, divisor, out=None if out is None else out[: logits.shape[0]])

    def _add(self, hidden: Tensor, change: Tensor) -> Tensor:
        """Add what a block gives, of which each rank has a part, to the hidden states."""
        change = self.shard.sum(change)
        factor = self._multipliers.residual
        return hidden + (change if factor == 1.0 else change * factor)

    def _plan(
        self, batch: StepBatch, caches: Caches, embedded: Tensor, *, with_states: bool = True
    ) -> DecoderStep:
        """Compute what the layers of a step share: for attention, and for each state group."""
        # Kernels make their indices by themselves.
        is_fused = batch.kernels == "triton"
        rows = None if is_fused else plan_rows(batch)
        attention = None
        if self.num_kv_layers:
            attention = self._plan_attention(batch, caches, rows)
        states: tuple[StatePlan | SplitPlan, ...] = ()
        if with_states and is_fused:
            out = self._zeros(batch, self._mixed_width)
            states = tuple(
                plan_generating_split(batch, group, cache, self._conv_kernel, out)
                for group, cache in enumerate(caches.groups)
            )
        elif with_states:
            states = tuple(
                plan_states(batch, rows, group, cache, self._conv_kernel)
                for group, cache in enumerate(caches.groups)
            )
        return DecoderStep(
            caches=caches,
            attention=attention,
            states=states,
            embedded=embedded,
            slots=batch.kv_slot_mapping,
            kernels=batch.kernels,
        )

    def _plan_attention(
        self, batch: StepBatch, caches: Caches, rows: RowPlan | None
    ) -> PlainAttentionStep:
        rotary = None
        if self._frequencies is not None:
            rotary = rotary_tables(batch.positions, self._frequencies)
        plan: AttentionPlan | FusedAttention
        if batch.kernels == "triton":
            assert self._window is None, "the kernels' rows see all keys before them"
            heads = self.config.num_attention_heads, self.config.head_dim
            plan = plan_fused_attention(batch, self._zeros(batch, *heads))
        else:
            block_size, num_kv_heads = caches.k.shape[2:4]
            plan = plan_attention(batch, rows, block_size, num_kv_heads, self._window)
        return PlainAttentionStep(
            slots=batch.kv_slot_mapping, rotary=rotary, plan=plan, kernels=batch.kernels
        )

    def _zeros(self, batch: StepBatch, *shape: int) -> Tensor:
        """Zeros for each packed token of a step, [T, *shape]."""
        tokens = batch.token_ids.shape[0]
        return torch.zeros(tokens, *shape, dtype=self.dtype, device=self.device)


class ConvolvedSizes(Protocol):
    """Sizes of recurrent layers with a convolution, such as `Mamba2Sizes`."""

    @property
    def conv_kernel(self) -> int:
        """Taps of the convolution, W."""

    def state_group(
        self, layers: tuple[int, ...], max_drafts: int, dtype: str, state_dtype: str
    ) -> StateGroupSpec:
        """Describe the pools of these layers: windows in dtype, states in state_dtype."""


class ConvolvedDecoder(HybridDecoder[Config]):
    """A decoder whose recurrent layers are all of one kind and size, with a convolution.

    Attributes:
        _mixer: The layer: what it takes is normed rows [T, C], its weights, the sizes, and by name
            `cache`, `index` in its group and `plan`.
    """

    _mixer: ClassVar[Callable[..., Tensor]]

    @property
    @abstractmethod
    def _sizes(self) -> ConvolvedSizes:
        """Sizes of the recurrent layers."""

    def state_groups(self, max_draft_tokens: int) -> tuple[StateGroupSpec, ...]:
        """Describe the state pools: one group, all layers with a state."""
        dtype = str(self.dtype).removeprefix("torch.")
        layers = self.config.linear_layers
        return (self._sizes.state_group(layers, max_draft_tokens, dtype, self._state_dtype),)

    @property
    def _conv_kernel(self) -> int:
        return self._sizes.conv_kernel

    def _mix(
        self,
        normed: Tensor,
        weights: Any,  # noqa: ANN401 - the mixer's
        cache: StateCache,
        index: int,
        plan: StatePlan | SplitPlan,
    ) -> Tensor:
        return self._mixer(normed, weights, self._sizes, cache=cache, index=index, plan=plan)
