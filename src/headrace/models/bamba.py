"""Bamba: Mamba-2 and rotary attention layers, each followed by a gated MLP.

Source: Bamba as in transformers (models/bamba).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from headrace.errors import ModelError
from headrace.models.checkpoint import CheckedTensors, Shapes, outer_shapes
from headrace.models.config import (
    FULL,
    MAMBA2,
    ModelConfig,
    boolean,
    common_fields,
    listed_layers,
    positive,
    refuse,
    require,
    require_free_time_steps,
    rope,
)
from headrace.models.decoder import DecoderLayer, DecoderStep, DecoderWeights, Multipliers
from headrace.models.layers.attention import attention_shapes, load_attention
from headrace.models.layers.mamba2_weights import (
    expanded,
    load_mamba2,
    mamba2_shapes,
    mamba2_sizes,
)
from headrace.models.layers.mlp import MlpWeights, load_mlp, mlp, mlp_shapes
from headrace.models.mamba2_decoder import Mamba2Decoder
from headrace.models.shard import WHOLE, Counts, Shard, attention_counts, attention_part

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Self

    import torch
    from torch import Tensor

    from headrace.models.config_keys import ConfigObject
    from headrace.models.layers.attention import PlainAttentionWeights
    from headrace.models.layers.mamba2 import Mamba2Sizes, Mamba2Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class BambaConfig(ModelConfig):
    """A Bamba text model.

    Attributes:
        mamba: Sizes of the Mamba-2 layers.
        has_conv_bias: Whether their convolutions have a bias.
        intermediate_size: Inner width of the MLPs.
    """

    WITHOUT_EFFECT: ClassVar = frozenset({
        # Into how many tokens the reference cuts a scan, and what computes it.
        "mamba_chunk_size", "use_mamba_kernels",
        # Of how many tokens a call of the reference returns logits.
        "num_logits_to_keep",
        # Traces of Jamba's config, of which Bamba has neither layers nor norms.
        "attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset",
        "num_experts_per_tok", "mamba_dt_rank", "mamba_inner_layernorms",
        # In a training run alone.
        "z_loss_coefficient",
    })  # fmt: skip

    mamba: Mamba2Sizes
    has_conv_bias: bool
    intermediate_size: int

    @property
    def counts(self) -> Counts:
        """Heads, groups and inner widths; see `ModelConfig`."""
        return attention_counts(self).with_divided(
            **self.mamba.counts, intermediate_size=self.intermediate_size
        )

    def part(self, size: int) -> Self:
        """Return a rank's sizes; see `ModelConfig`."""
        return replace(
            attention_part(self, size),
            mamba=self.mamba.part(size),
            intermediate_size=self.intermediate_size // size,
        )

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> BambaConfig:
        """Parse a `config.json`; see `ModelConfig.from_dict`.

        Args:
            raw: Contents of the file.
            architecture: Class name.

        Returns:
            The validated config.
        """
        raw = raw.under_one_name({"layer_types": "layers_block_type"})
        raw = raw.with_defaults(num_key_value_heads=8)
        _refuse_other_maths(raw)
        common = common_fields(raw, _layer_types(raw), eps=("rms_norm_eps", 1e-5))
        # The reference takes another factor from rope_parameters alone.
        require(raw, "partial_rotary_factor", [0.5])
        rotary_dim, rope_theta = rope(raw, default_factor=0.5)
        # Published files give the number of rotated dimensions, later ones the factor.
        require(raw, "attn_rotary_emb", [None, rotary_dim])
        return cls(
            **common,
            architecture=architecture,
            model_type="bamba",
            rotary_dim=rotary_dim,
            rope_theta=rope_theta,
            mamba=mamba2_sizes(raw, norm_eps=common["rms_norm_eps"], inner=expanded(raw)),
            has_conv_bias=boolean(raw, "mamba_conv_bias", default=True),
            intermediate_size=positive(raw, "intermediate_size", 14336),
        )


def _refuse_other_maths(raw: ConfigObject) -> None:
    """Raise for every known setting whose value changes the maths and is not implemented."""
    require(raw, "hidden_act", ["silu"])
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias"):
        require(raw, name, [False])
    require(raw, "num_experts", [None, 1])
    require(raw, "sliding_window", [None])
    require_free_time_steps(raw)


def _layer_types(raw: ConfigObject) -> tuple[str, ...]:
    kinds = {
        "mamba": MAMBA2,
        "linear_attention": MAMBA2,
        "attention": FULL,
        "full_attention": FULL,
    }
    listed = listed_layers(raw, "layers_block_type", kinds)
    attention = raw.get("attn_layer_indices")
    if listed is not None:
        if attention is not None and tuple(i in attention for i in range(len(listed))) != tuple(
            kind == FULL for kind in listed
        ):
            refuse("attn_layer_indices", attention, "what layers_block_type says")
        return listed
    attention = attention or ()
    num_layers = positive(raw, "num_hidden_layers")
    if not all(isinstance(i, int) and 0 <= i < num_layers for i in attention):
        raise ModelError(
            f"config.json: attn_layer_indices is {attention!r} but there are {num_layers} layers"
        )
    return tuple(FULL if i in attention else MAMBA2 for i in range(num_layers))


class BambaModel(Mamba2Decoder[BambaConfig]):
    """A Bamba text model; see `HybridDecoder`."""

    @classmethod
    def from_weights(
        cls,
        config: BambaConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        state_dtype: str = "float32",
        shard: Shard = WHOLE,
    ) -> BambaModel:
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
            final_norm="model.final_layernorm.weight",
        )
        return cls(config, joined, state_dtype, Multipliers(), shard=shard)

    @staticmethod
    def segments(config: BambaConfig, name: str) -> tuple[int, ...] | None:
        """Return the sizes of the matrices that a tensor holds; see `HybridModel`."""
        return config.mamba.segments(name)

    @staticmethod
    def expected_tensors(config: BambaConfig, _: Collection[str] = ()) -> Shapes:
        """Return every tensor that a checkpoint must hold; see `HybridDecoder`."""
        shapes = outer_shapes(config, "model.final_layernorm.weight")
        width, has_bias = config.hidden_size, config.has_conv_bias
        for i, kind in enumerate(config.layer_types):
            prefix = f"model.layers.{i}."
            if kind == FULL:
                shapes |= attention_shapes(prefix + "self_attn.", config)
            else:
                own = prefix + "mamba."
                shapes |= mamba2_shapes(own, config.mamba, width, has_conv_bias=has_bias)
            shapes |= mlp_shapes(prefix + "feed_forward.", width, config.intermediate_size)
            shapes |= {
                prefix + "input_layernorm.weight": (width,),
                prefix + "pre_ff_layernorm.weight": (width,),
            }
        return shapes

    @property
    def _sizes(self) -> Mamba2Sizes:
        return self.config.mamba

    def _feed(self, normed: Tensor, weights: MlpWeights, step: DecoderStep) -> Tensor:
        return mlp(normed, weights, step.kernels)


def _layer(
    config: BambaConfig, source: CheckedTensors, prefix: str, *, is_attention: bool
) -> DecoderLayer:
    mixer: PlainAttentionWeights | Mamba2Weights
    if is_attention:
        mixer = load_attention(source, prefix + "self_attn.")
    else:
        mixer = load_mamba2(source, prefix + "mamba.", config.mamba)
    return DecoderLayer(
        input_norm=source.full(prefix + "input_layernorm.weight"),
        mixer=mixer,
        feed_norm=source.full(prefix + "pre_ff_layernorm.weight"),
        feed_forward=load_mlp(source, prefix + "feed_forward."),
    )
