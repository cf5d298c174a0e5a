"""Qwen3.5 and Qwen3-Next text models: Gated DeltaNet and gated attention layers, MLP or experts.

`Qwen35Model` is what the worker and the reference loop call. A layer is

    h = h + mixer(norm(h));   h = h + mlp(norm(h))

and the last norm follows the last layer. An addition and the norm behind it are one operation. The
hidden states that `forward` returns are *after* the last norm: both the head and the MTP module
take them (as in the published inference code).

MTP: the module at position p sees the hidden state of position p and the token at p+1, and its
output gives logits for position p+2 through the shared head:

    x = fc([norm_e(embed(token[p+1])) ; norm_h(hidden[p])]);  x = layer(x);  out = norm(x)

Its one attention layer has keys and values of its own (the last layer of the KV pools), at position
p. For more than one draft the module is applied to its own output, at p+1, p+2 and so on.

Source: Qwen3-Next and Qwen3.5 as in transformers (models/qwen3_next, models/qwen3_5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.models.layers.attention_plan import (
    AttentionPlan,
    FusedAttention,
    head_obstacle,
    plan_attention,
    plan_fused_attention,
)
from headrace.models.layers.gated_attention import (
    AttentionStep,
    AttentionWeights,
    gated_attention,
)
from headrace.models.layers.gated_delta_net import DeltaWeights, gated_delta_net
from headrace.models.layers.moe import feed_forward
from headrace.models.layers.product import product
from headrace.models.layers.recomputed import RUN
from headrace.models.layers.row_plan import plan_rows
from headrace.models.layers.split_plan import plan_split
from headrace.models.layers.state_plan import plan_states
from headrace.models.qwen3_5_weights import (
    Qwen35Weights,
    expected_tensors,
    load_weights,
    segments,
)
from headrace.models.shard import WHOLE, Shard
from headrace.ops.add_rms_norm import add_rms_norm
from headrace.ops.rms_norm import rms_norm
from headrace.ops.rotary import rotary_tables

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from headrace.models.batch import Caches, Kernels, StateCache, StateGroupSpec, StepBatch
    from headrace.models.layers.row_plan import RowPlan
    from headrace.models.layers.split_plan import SplitPlan
    from headrace.models.layers.state_plan import StatePlan
    from headrace.models.qwen3_5_config import Qwen35Config


_MIN_STATE, _MAX_STATE = 16, 128
"""Head sizes of states: tensor cores take 16 terms, a multiprocessor holds tiles of 128."""


_MAX_FIXED_GROUP = 8
"""The same with `RUN` tokens of a row in one tile, whatever its drafts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StepPlan:
    """What all layers of a step share."""

    attention: AttentionStep
    delta: StatePlan | SplitPlan | None


class Qwen35Model:
    """A Qwen3.5 or Qwen3-Next text model.

    Args:
        config: The model's sizes.
        weights: Its weights.
        state_dtype: Dtype name of the recurrent states.
        shard: Which part of it this is; config and weights are the part's.
    """

    def __init__(
        self,
        config: Qwen35Config,
        weights: Qwen35Weights,
        state_dtype: str = "float32",
        shard: Shard = WHOLE,
    ) -> None:
        self.config = config
        self.shard = shard
        self._weights = weights
        self._state_dtype = state_dtype
        self._sizes = config.delta

    @classmethod
    def from_weights(
        cls,
        config: Qwen35Config,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        state_dtype: str = "float32",
        shard: Shard = WHOLE,
    ) -> Qwen35Model:
        """Build the model from tensors under their checkpoint names.

        Args:
            config: The model's sizes.
            weights: All tensors; names may begin with `model.` or `model.language_model.`, and
                tensors of other parts (`model.visual.`) are ignored.
            dtype: Compute dtype.
            state_dtype: Dtype name of the recurrent states.
            shard: Which part of a model it is; sizes and tensors are the part's.

        Returns:
            The model, on the device of the tensors.

        Raises:
            WeightsError: A tensor is missing, unexpected or of the wrong shape.
        """
        return cls(config, load_weights(config, weights, dtype), state_dtype, shard)

    @staticmethod
    def expected_tensors(
        config: Qwen35Config, on_disk: Collection[str] = ()
    ) -> dict[str, tuple[int, ...]]:
        """Return every tensor that a checkpoint must hold.

        Args:
            config: The model's sizes.
            on_disk: Names that there are: they decide between spellings.

        Returns:
            Shape by name.
        """
        return expected_tensors(config, on_disk)

    @staticmethod
    def segments(config: Qwen35Config, name: str) -> tuple[int, ...] | None:
        """Return the sizes of the matrices that a tensor holds; see `HybridModel`."""
        return segments(config, name)

    @staticmethod
    def kernel_obstacle(config: Qwen35Config) -> str | None:
        """Return why the kernels cannot run a model, or None if they can."""
        sizes = config.delta
        for name, size in (
            ("linear_key_head_dim", sizes.key_dim),
            ("linear_value_head_dim", sizes.value_dim),
        ):
            if size & (size - 1):
                return f"{name} is {size}, and the kernels need a power of 2"
        for name, size in (
            ("linear_key_head_dim", sizes.key_dim),
            ("linear_value_head_dim", sizes.value_dim),
        ):
            if not _MIN_STATE <= size <= _MAX_STATE:
                return f"{name} is {size}, and the kernels need {_MIN_STATE}..{_MAX_STATE}"
        return head_obstacle(config)

    @staticmethod
    def fixed_obstacle(config: Qwen35Config) -> str | None:
        """Return why kernels cannot make a token's bits its own, or None if they can."""
        group = config.num_attention_heads // config.num_kv_heads
        if group > _MAX_FIXED_GROUP:
            return (
                f"a KV head has {group} query heads, and with tiles for {RUN} tokens of a row the "
                f"kernels take {_MAX_FIXED_GROUP} at most"
            )
        return None

    @property
    def num_kv_layers(self) -> int:
        """Layers of the KV pools: attention layers, then the MTP layer if there is one."""
        return len(self.config.attention_layers) + self.config.num_mtp_layers

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
        """Dtype of `logits`."""
        return self.dtype

    @property
    def num_parameters(self) -> int:
        """Elements of the checkpoint's tensors."""
        total = 0
        for shape in expected_tensors(self.config).values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total

    def state_groups(self, max_draft_tokens: int) -> tuple[StateGroupSpec, ...]:
        """Describe the state pools that this model needs.

        Args:
            max_draft_tokens: Most drafts in one step, s.

        Returns:
            One group: all Gated DeltaNet layers.
        """
        dtype = str(self.dtype).removeprefix("torch.")
        layers = self.config.linear_layers
        return (self._sizes.state_group(layers, max_draft_tokens, dtype, self._state_dtype),)

    def forward(self, batch: StepBatch, caches: Caches) -> Tensor:
        """Run the decoder over a step's tokens; writes keys, values and states.

        Args:
            batch: The step.
            caches: The pools.

        Returns:
            Hidden states after the last norm, [T, C].
        """
        weights = self._weights
        plan = self._plan(batch, caches, with_states=True)
        hidden = self.shard.embed(weights.embedding, batch.token_ids)
        group = caches.groups[0]
        linear_at = attention_at = 0
        assert plan.delta is not None
        norms = (*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm)
        normed = self._norm(hidden, None, weights.layers[0].input_norm, batch.kernels)
        for layer, next_norm in zip(weights.layers, norms, strict=True):
            if isinstance(layer.mixer, DeltaWeights):
                mixed = gated_delta_net(
                    normed,
                    layer.mixer,
                    self._sizes,
                    cache=group,
                    index=linear_at,
                    plan=plan.delta,
                )
                linear_at += 1
            else:
                mixed = self._attend(normed, layer.mixer, caches, attention_at, plan)
                attention_at += 1
            normed = self._norm(hidden, self.shard.sum(mixed), layer.mlp_norm, batch.kernels)
            fed = feed_forward(normed, layer.mlp, batch.kernels, batch.kv_slot_mapping)
            fed = self.shard.sum(fed)
            normed = self._norm(hidden, fed, next_norm, batch.kernels)
        return normed

    def mtp(
        self, batch: StepBatch, caches: Caches, hidden: Tensor, next_token_ids: Tensor
    ) -> Tensor:
        """Run the MTP module over a step's tokens; writes its layer's keys and values.

        Use it for all tokens of a step after `forward`, and again for chained drafts with a batch
        of one-token generating rows whose `hidden` is the module's own output.

        Args:
            batch: The step; its positions are those of `hidden`. `token_ids` and states are not
                used.
            caches: The pools.
            hidden: From `forward` or `mtp`, [T, C].
            next_token_ids: The token after each of the step's tokens, [T] i64.

        Returns:
            Hidden states after the module's norm, [T, C]; `logits` of them predict the token after
            next_token_ids.
        """
        module = self._weights.mtp
        assert module is not None, "this checkpoint has no MTP module"
        kernels = batch.kernels
        plan = self._plan(batch, caches, with_states=False)
        embedded = self.shard.embed(self._weights.embedding, next_token_ids)
        norms = ((embedded, module.embedding_norm), (hidden, module.hidden_norm))
        x = product(self._join(norms, kernels), module.fc, kernels)
        layer = module.layer
        assert isinstance(layer.mixer, AttentionWeights)
        normed = self._norm(x, None, layer.input_norm, kernels)
        mixed = self._attend(normed, layer.mixer, caches, self.num_kv_layers - 1, plan)
        normed = self._norm(x, self.shard.sum(mixed), layer.mlp_norm, kernels)
        fed = self.shard.sum(feed_forward(normed, layer.mlp, kernels, batch.kv_slot_mapping))
        return self._norm(x, fed, module.norm, kernels)

    def logits(
        self, hidden_rows: Tensor, kernels: Kernels = "torch", *, out: Tensor | None = None
    ) -> Tensor:
        """Apply the head.

        Args:
            hidden_rows: Rows of `forward` or `mtp`, [R, C].
            kernels: What multiplies.
            out: Where they go, [R filled up to ROW_TILE or more, vocabulary], logits_dtype.

        Returns:
            [R, vocabulary], logits_dtype.
        """
        vocab = self.config.vocab_size
        return self.shard.head(self._weights.head, hidden_rows, vocab, kernels, out=out)

    def _plan(self, batch: StepBatch, caches: Caches, *, with_states: bool) -> _StepPlan:
        config = self.config
        block_size, num_kv_heads = caches.k.shape[2:4]
        cos, signed_sin = rotary_tables(batch.positions, self._weights.inverse_frequencies)
        attention: AttentionPlan | FusedAttention
        rows = None
        if batch.kernels != "torch":
            out = self._zeros(batch, config.num_attention_heads, config.head_dim)
            attention = plan_fused_attention(batch, out)
        else:
            rows = plan_rows(batch)
            attention = plan_attention(batch, rows, block_size, num_kv_heads)
        delta: StatePlan | SplitPlan | None = None
        if with_states:
            delta = self._plan_delta(batch, rows, caches.groups[0])
        step = AttentionStep(
            slots=batch.kv_slot_mapping,
            cos=cos,
            signed_sin=signed_sin,
            plan=attention,
            kernels=batch.kernels,
        )
        return _StepPlan(attention=step, delta=delta)

    def _plan_delta(
        self, batch: StepBatch, rows: RowPlan | None, cache: StateCache
    ) -> StatePlan | SplitPlan:
        """Compute what the Gated DeltaNet layers of a step share."""
        taps = self.config.conv_kernel
        if batch.kernels != "torch":
            return plan_split(batch, 0, cache, taps, self._zeros(batch, self._sizes.values))
        return plan_states(batch, rows, 0, cache, taps)

    def _zeros(self, batch: StepBatch, *shape: int) -> Tensor:
        """Zeros for each packed token of a step, [T, *shape]."""
        tokens = batch.token_ids.shape[0]
        return torch.zeros(tokens, *shape, dtype=self.dtype, device=self.device)

    def _attend(
        self,
        normed: Tensor,
        weights: AttentionWeights,
        caches: Caches,
        kv_layer: int,
        plan: _StepPlan,
    ) -> Tensor:
        kv = (caches.k[kv_layer], caches.v[kv_layer])
        return gated_attention(normed, weights, kv, plan.attention, self.config.rms_norm_eps)

    def _norm(
        self, hidden: Tensor, added: Tensor | None, scale: Tensor, kernels: Kernels
    ) -> Tensor:
        """Add to the hidden states, in place, if there is anything to add; return their norm."""
        eps = self.config.rms_norm_eps
        if kernels != "torch":
            return add_rms_norm(hidden, added, scale, eps)
        if added is not None:
            hidden.add_(added)
        return rms_norm(hidden, scale, eps)

    def _join(self, parts: Sequence[tuple[Tensor, Tensor]], kernels: Kernels) -> Tensor:
        """Return the norms of tensors [T, C] with their scales [C], side by side."""
        if kernels == "torch":
            return torch.cat([self._norm(x, None, scale, kernels) for x, scale in parts], dim=-1)
        rows, width = parts[0][0].shape
        joined = parts[0][0].new_empty(rows, len(parts), width)
        for place, (x, scale) in enumerate(parts):
            add_rms_norm(x, None, scale, self.config.rms_norm_eps, out=joined[:, place])
        return joined.flatten(1)
