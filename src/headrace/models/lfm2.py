"""LFM2, dense: gated short convolutions and attention layers.

Source: LFM2 as in transformers (models/lfm2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace.models.checkpoint import CheckedTensors, Shapes, outer_shapes
from headrace.models.config import (
    CONV,
    FULL,
    ModelConfig,
    boolean,
    common_fields,
    conv_taps,
    listed_layers,
    number,
    positive,
    require,
    rope_whole_heads,
)
from headrace.models.decoder import (
    DecoderLayer,
    DecoderStep,
    DecoderWeights,
    HybridDecoder,
    Multipliers,
)
from headrace.models.layers.attention import PlainAttentionWeights
from headrace.models.layers.mlp import MlpWeights
from headrace.models.layers.moe import MoeWeights, feed_forward
from headrace.models.layers.short_conv import ShortConvWeights, short_conv, state_group
from headrace.models.layers.windowed_conv import ConvWeights
from headrace.models.shard import WHOLE, Counts, Shard, attention_counts, attention_part

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Self

    from torch import Tensor

    from headrace.models.batch import StateCache, StateGroupSpec
    from headrace.models.config_keys import ConfigObject
    from headrace.models.layers.state_plan import StatePlan

MLP_NAMES = ("w1", "w3", "w2")
"""Gate, up and down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(ModelConfig):
    """A dense LFM2 text model.

    Attributes:
        conv_kernel: Taps of the short convolution, W.
        intermediate_size: Width of the MLP, after the family's rounding.
    """

    WITHOUT_EFFECT: ClassVar = frozenset({
        # In a training run alone.
        "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init",
        "conv_use_xavier_init",
    })  # fmt: skip

    conv_kernel: int
    intermediate_size: int

    @property
    def conv_channels(self) -> int:
        """Channels of the convolutions; a rank has its part of the model's width."""
        return self.hidden_size // self.num_shards

    @property
    def counts(self) -> Counts:
        """Heads, channels and inner widths; see `ModelConfig`."""
        return attention_counts(self).with_divided(
            hidden_size=self.hidden_size, intermediate_size=self.intermediate_size
        )

    def part(self, size: int) -> Self:
        """Return a rank's sizes; see `ModelConfig`."""
        intermediate_size = self.intermediate_size // size
        return replace(attention_part(self, size), intermediate_size=intermediate_size)

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> Lfm2Config:
        """Parse a `config.json`; see `ModelConfig.from_dict`.

        Args:
            raw: Contents of the file.
            architecture: Class name.

        Returns:
            The validated config.
        """
        return cls(
            **lfm2_fields(raw),
            architecture=architecture,
            model_type="lfm2",
            intermediate_size=_intermediate_size(raw),
        )


def lfm2_fields(raw: ConfigObject) -> dict[str, Any]:
    """Read what LFM2 and LFM2-MoE spell alike: all of `Lfm2Config` but the width of the MLP."""
    raw = raw.under_one_name({"theta": "rope_theta", "tie_embedding": "tie_word_embeddings"})
    raw = raw.with_defaults(num_key_value_heads=8)
    _refuse_other_maths(raw)
    rotary_dim, rope_theta = rope_whole_heads(raw, default_theta=1e6)
    return common_fields(raw, _layer_types(raw), eps=("norm_eps", 1e-5)) | {
        "tie_word_embeddings": boolean(raw, "tie_word_embeddings", default=True),
        "rotary_dim": rotary_dim,
        "rope_theta": rope_theta,
        "conv_kernel": conv_taps(raw, "conv_L_cache", 3),
    }


def _refuse_other_maths(raw: ConfigObject) -> None:
    """Raise for every known setting whose value changes the maths and is not implemented."""
    require(raw, "conv_bias", [False])
    require(raw, "block_use_swiglu", [True])
    require(raw, "use_pos_enc", [True])
    width = positive(raw, "hidden_size")
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        require(raw, name, [width])
    require(raw, "block_norm_eps", [number(raw, "norm_eps", 1e-5)])
    require(raw, "num_heads", [raw.get("num_attention_heads")])


def _layer_types(raw: ConfigObject) -> tuple[str, ...]:
    listed = listed_layers(raw, "layer_types", {"conv": CONV, "full_attention": FULL})
    if listed is not None:
        raw.leave_out("full_attn_idxs")
        return listed
    num_layers = positive(raw, "num_hidden_layers")
    attention = raw.get("full_attn_idxs")
    if attention is None:
        attention = range(num_layers)
    return tuple(FULL if i in attention else CONV for i in range(num_layers))


def _intermediate_size(raw: ConfigObject) -> int:
    """Width of the MLP: two thirds of the given one, scaled and rounded up, if so configured."""
    name = "intermediate_size"
    if "block_ff_dim" in raw:
        raw.leave_out(name)
        name = "block_ff_dim"
    size = positive(raw, name)
    if not boolean(raw, "block_auto_adjust_ff_dim", default=True):
        raw.leave_out("block_ffn_dim_multiplier", "block_multiple_of")
        return size
    size = int(2 * size / 3)
    if raw.get("block_ffn_dim_multiplier", 1.0) is None:
        raw.leave_out("block_multiple_of")
        return size
    size = int(number(raw, "block_ffn_dim_multiplier", 1.0) * size)
    unit = positive(raw, "block_multiple_of", 256)
    return -(-size // unit) * unit


class Lfm2Model(HybridDecoder[Lfm2Config]):
    """A dense LFM2 text model; see `HybridDecoder`."""

    @classmethod
    def from_weights(
        cls,
        config: Lfm2Config,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        state_dtype: str = "float32",
        shard: Shard = WHOLE,
    ) -> Lfm2Model:
        """Build the model from tensors under their checkpoint names.

        Args:
            config: The model's sizes.
            weights: All tensors.
            dtype: Compute dtype.
            state_dtype: Not used: the only state is a window in the compute dtype.
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
                DecoderLayer(
                    input_norm=source.full(f"model.layers.{i}.operator_norm.weight"),
                    mixer=_mixer(config, source, f"model.layers.{i}.", is_attention=kind == FULL),
                    feed_norm=source.full(f"model.layers.{i}.ffn_norm.weight"),
                    feed_forward=cls._read_feed(config, source, i),
                )
                for i, kind in enumerate(config.layer_types)
            ),
            final_norm="model.embedding_norm.weight",
        )
        return cls(config, joined, state_dtype, Multipliers(), shard=shard)

    @staticmethod
    def segments(config: Lfm2Config, name: str) -> tuple[int, ...] | None:
        """Return the sizes of the matrices that a tensor holds; see `HybridModel`."""
        return (config.conv_channels,) * 3 if name.endswith("conv.in_proj.weight") else None

    @classmethod
    def expected_tensors(cls, config: Lfm2Config, _: Collection[str] = ()) -> Shapes:
        """Return every tensor that a checkpoint must hold; see `HybridDecoder`."""
        shapes = outer_shapes(config, "model.embedding_norm.weight")
        width = config.hidden_size
        for i, kind in enumerate(config.layer_types):
            own = _attention_shapes(config) if kind == FULL else _conv_shapes(config)
            own |= {"operator_norm.weight": (width,), "ffn_norm.weight": (width,)}
            own |= cls._feed_shapes(config, i)
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
        return shapes

    @staticmethod
    def _feed_shapes(config: Lfm2Config, i: int) -> Shapes:
        """List the tensors of layer i's feed-forward block, below the layer's name."""
        del i
        return mlp_shapes("feed_forward.", config.hidden_size, config.intermediate_size)

    @staticmethod
    def _read_feed(config: Lfm2Config, source: CheckedTensors, i: int) -> MlpWeights | MoeWeights:
        """Read the feed-forward block of layer i."""
        del config
        own = f"model.layers.{i}.feed_forward."
        gate, up, down = (f"{own}{name}.weight" for name in MLP_NAMES)
        return MlpWeights(gate_up=source.matrix(gate, up), down=source.matrix(down))

    def state_groups(self, max_draft_tokens: int) -> tuple[StateGroupSpec, ...]:
        """Describe the state pools: one group, all convolutions; windows and nothing else."""
        return (
            state_group(
                self.config.linear_layers,
                taps=self.config.conv_kernel,
                channels=self.config.conv_channels,
                max_drafts=max_draft_tokens,
                dtype=str(self.dtype).removeprefix("torch."),
            ),
        )

    @property
    def _conv_kernel(self) -> int:
        return self.config.conv_kernel

    def _mix(
        self,
        normed: Tensor,
        weights: ShortConvWeights,
        cache: StateCache,
        index: int,
        plan: StatePlan,
    ) -> Tensor:
        return short_conv(normed, weights, cache=cache, index=index, plan=plan)

    def _feed(self, normed: Tensor, weights: MlpWeights | MoeWeights, step: DecoderStep) -> Tensor:
        return feed_forward(normed, weights, step.kernels, step.slots)


def mlp_shapes(prefix: str, width: int, inner: int) -> Shapes:
    """List the tensors of one MLP.

    Args:
        prefix: Of their names.
        width: C.
        inner: I.
    """
    gate, up, down = (f"{prefix}{name}.weight" for name in MLP_NAMES)
    return {gate: (inner, width), up: (inner, width), down: (width, inner)}


def _attention_shapes(config: Lfm2Config) -> Shapes:
    width, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_kv_heads * dim
    return {
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.out_proj.weight": (width, queries),
        "self_attn.q_layernorm.weight": (dim,),
        "self_attn.k_layernorm.weight": (dim,),
    }


def _conv_shapes(config: Lfm2Config) -> Shapes:
    width, channels = config.hidden_size, config.conv_channels
    return {
        "conv.in_proj.weight": (3 * channels, width),
        "conv.conv.weight": (channels, 1, config.conv_kernel),
        "conv.out_proj.weight": (width, channels),
    }


def _mixer(
    config: Lfm2Config, source: CheckedTensors, prefix: str, *, is_attention: bool
) -> PlainAttentionWeights | ShortConvWeights:
    if is_attention:
        own = prefix + "self_attn."
        counts = {"q": config.num_attention_heads, "k": config.num_kv_heads}
        scales = [
            source.full(f"{own}{name}_layernorm.weight").expand(count, -1)
            for name, count in counts.items()
        ]
        return PlainAttentionWeights(
            in_proj=source.matrix(*(f"{own}{name}_proj.weight" for name in "qkv")),
            head_scale=torch.cat(scales),
            out_proj=source.matrix(own + "out_proj.weight"),
        )
    own = prefix + "conv."
    return ShortConvWeights(
        in_proj=source.matrix(own + "in_proj.weight"),
        conv=ConvWeights(taps=source.taps(own + "conv.weight"), bias=None),
        out_proj=source.matrix(own + "out_proj.weight"),
    )
