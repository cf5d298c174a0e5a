"""Granite 4 hybrid: Mamba-2 and attention layers, a shared MLP beside a mixture of experts.

Source: GraniteMoeHybrid as in transformers (models/granitemoehybrid).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from headrace.models.checkpoint import CheckedTensors, Shapes, outer_shapes
from headrace.models.config import (
    FULL,
    MAMBA2,
    ROPE_KEYS,
    ModelConfig,
    boolean,
    common_fields,
    experts,
    listed_layers,
    number,
    positive,
    refuse,
    require,
    require_free_time_steps,
    rope_whole_heads,
)
from headrace.models.decoder import DecoderLayer, DecoderStep, DecoderWeights, Multipliers
from headrace.models.layers.attention import (
    PlainAttentionWeights,
    attention_shapes,
    load_attention,
)
from headrace.models.layers.mamba2_weights import (
    expanded,
    load_mamba2,
    mamba2_shapes,
    mamba2_sizes,
)
from headrace.models.layers.mlp import MlpWeights
from headrace.models.layers.moe import MoeWeights, feed_forward
from headrace.models.mamba2_decoder import Mamba2Decoder
from headrace.models.shard import WHOLE, Counts, Shard, attention_counts, attention_part

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Self

    import torch
    from torch import Tensor

    from headrace.models.config_keys import ConfigObject
    from headrace.models.layers.mamba2 import Mamba2Sizes, Mamba2Weights

_LAYER_KINDS = {
    "mamba": MAMBA2,
    "linear_attention": MAMBA2,
    "attention": FULL,
    "full_attention": FULL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(ModelConfig):
    """A Granite 4 hybrid text model.

    Attributes:
        mamba: Sizes of the Mamba-2 layers.
        has_conv_bias: Whether their convolutions have a bias.
        num_experts: Experts of each layer, 0 for none.
        num_chosen_experts: Experts of each token.
        expert_size: Inner width of an expert.
        shared_size: Inner width of the MLP that every token goes through.
        multipliers: The family's constants.
    """

    WITHOUT_EFFECT: ClassVar = frozenset({
        # Into how many tokens the reference cuts a scan.
        "mamba_chunk_size",
        # In a training run alone.
        "init_method",
    })

    mamba: Mamba2Sizes
    has_conv_bias: bool
    num_experts: int
    num_chosen_experts: int
    expert_size: int
    shared_size: int
    multipliers: Multipliers

    @property
    def counts(self) -> Counts:
        """Heads, groups and inner widths; see `ModelConfig`."""
        counts = attention_counts(self).with_divided(
            **self.mamba.counts, shared_intermediate_size=self.shared_size
        )
        if not self.num_experts:
            return counts
        return counts.with_divided(intermediate_size=self.expert_size)

    def part(self, size: int) -> Self:
        """Return a rank's sizes; see `ModelConfig`."""
        return replace(
            attention_part(self, size),
            mamba=self.mamba.part(size),
            expert_size=self.expert_size // size,
            shared_size=self.shared_size // size,
        )

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> GraniteConfig:
        """Parse a `config.json`; see `ModelConfig.from_dict`.

        Args:
            raw: Contents of the file.
            architecture: Class name.

        Returns:
            The validated config.
        """
        raw = raw.under_one_name({"layers_block_type": "layer_types"})
        _refuse_other_maths(raw)
        layer_types = listed_layers(raw, "layer_types", _LAYER_KINDS)
        if layer_types is None:
            refuse("layer_types", None, "a list")
            raise AssertionError
        common = common_fields(raw, layer_types)
        rotary_dim, rope_theta = 0, 1e4
        if raw.get("position_embedding_type") == "rope":
            rotary_dim, rope_theta = rope_whole_heads(raw)
        else:
            raw.leave_out(*ROPE_KEYS)
        num_experts, num_chosen = experts(raw, "num_local_experts", (8, 2))
        if not num_experts:
            raw.leave_out("intermediate_size")
        return cls(
            **common,
            architecture=architecture,
            model_type="granitemoehybrid",
            rotary_dim=rotary_dim,
            rope_theta=rope_theta,
            mamba=mamba2_sizes(raw, norm_eps=common["rms_norm_eps"], inner=expanded(raw)),
            has_conv_bias=boolean(raw, "mamba_conv_bias", default=True),
            num_experts=num_experts,
            num_chosen_experts=num_chosen,
            expert_size=positive(raw, "intermediate_size") if num_experts else 0,
            shared_size=positive(raw, "shared_intermediate_size", 1024),
            multipliers=Multipliers(
                embedding=number(raw, "embedding_multiplier", 1.0),
                residual=number(raw, "residual_multiplier", 1.0),
                query=number(raw, "attention_multiplier", 1.0) * common["head_dim"] ** 0.5,
                logits_divisor=number(raw, "logits_scaling", 1.0),
            ),
        )


def _refuse_other_maths(raw: ConfigObject) -> None:
    """Raise for every known setting whose value changes the maths and is not implemented."""
    require(raw, "hidden_act", ["silu"])
    require(raw, "normalization_function", ["rmsnorm"])
    require(raw, "attention_bias", [False])
    require(raw, "mamba_proj_bias", [False])
    require(raw, "position_embedding_type", [None, "nope", "rope"])
    require_free_time_steps(raw)


class GraniteModel(Mamba2Decoder[GraniteConfig]):
    """A Granite 4 hybrid text model; see `HybridDecoder`."""

    @classmethod
    def from_weights(
        cls,
        config: GraniteConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        state_dtype: str = "float32",
        shard: Shard = WHOLE,
    ) -> GraniteModel:
        """Build the model from tensors under their checkpoint names.

        Args:
            config: The model's sizes.
            weights: All tensors.
            dtype: Compute dtype.
            state_dtype: Dtype name of the recurrent states.
            shard: Which part of a model it is; sizes and tensors are the part's.

        Returns:
            The model, on the device of the tensors.

        Raises:
            WeightsError: A tensor is missing, unexpected or of the wrong shape.
        """
        source = CheckedTensors(config, cls.expected_tensors(config), weights, dtype)
        joined = DecoderWeights.read(
            config,
            source,
            layers=tuple(
                _layer(config, source, f"model.layers.{i}.", is_attention=kind == FULL)
                for i, kind in enumerate(config.layer_types)
            ),
            final_norm="model.norm.weight",
        )
        return cls(config, joined, state_dtype, config.multipliers, shard=shard)

    @staticmethod
    def segments(config: GraniteConfig, name: str) -> tuple[int, ...] | None:
        """Return the sizes of the matrices that a tensor holds; see `HybridModel`."""
        if name.endswith("shared_mlp.input_linear.weight"):
            return config.shared_size, config.shared_size
        if name.endswith("block_sparse_moe.input_linear.weight"):
            return config.expert_size, config.expert_size
        return config.mamba.segments(name)

    @staticmethod
    def expected_tensors(config: GraniteConfig, _: Collection[str] = ()) -> Shapes:
        """Return every tensor that a checkpoint must hold; see `HybridDecoder`."""
        shapes = outer_shapes(config, "model.norm.weight")
        for i, kind in enumerate(config.layer_types):
            own = _mixer_shapes(config, is_attention=kind == FULL)
            own |= _feed_shapes(config)
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
        return shapes

    @property
    def _sizes(self) -> Mamba2Sizes:
        return self.config.mamba

    def _feed(self, normed: Tensor, weights: MlpWeights | MoeWeights, step: DecoderStep) -> Tensor:
        return feed_forward(normed, weights, step.kernels, step.slots)


def _mixer_shapes(config: GraniteConfig, *, is_attention: bool) -> Shapes:
    if is_attention:
        return attention_shapes("self_attn.", config)
    width, has_bias = config.hidden_size, config.has_conv_bias
    return mamba2_shapes("mamba.", config.mamba, width, has_conv_bias=has_bias)


def _feed_shapes(config: GraniteConfig) -> Shapes:
    width, experts, inner = config.hidden_size, config.num_experts, config.expert_size
    shapes: Shapes = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "shared_mlp.input_linear.weight": (2 * config.shared_size, width),
        "shared_mlp.output_linear.weight": (width, config.shared_size),
    }
    if experts:
        shapes |= {
            "block_sparse_moe.router.layer.weight": (experts, width),
            "block_sparse_moe.input_linear.weight": (experts, 2 * inner, width),
            "block_sparse_moe.output_linear.weight": (experts, width, inner),
        }
    return shapes


def _layer(
    config: GraniteConfig, source: CheckedTensors, prefix: str, *, is_attention: bool
) -> DecoderLayer:
    mixer: PlainAttentionWeights | Mamba2Weights
    if is_attention:
        mixer = load_attention(source, prefix + "self_attn.")
    else:
        mixer = load_mamba2(source, prefix + "mamba.", config.mamba)
    feed: MlpWeights | MoeWeights
    feed = shared = MlpWeights(
        gate_up=source.matrix(prefix + "shared_mlp.input_linear.weight"),
        down=source.matrix(prefix + "shared_mlp.output_linear.weight"),
    )
    if config.num_experts:
        own = prefix + "block_sparse_moe."
        feed = MoeWeights(
            router=source.matrix(own + "router.layer.weight"),
            gate_up=source.matrix(own + "input_linear.weight"),
            down=source.matrix(own + "output_linear.weight"),
            num_chosen=config.num_chosen_experts,
            shared=shared,
            shared_gate=None,
        )
    return DecoderLayer(
        input_norm=source.full(prefix + "input_layernorm.weight"),
        mixer=mixer,
        feed_norm=source.full(prefix + "post_attention_layernorm.weight"),
        feed_forward=feed,
    )
