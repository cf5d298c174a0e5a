"""Falcon-H1: attention and Mamba-2 side by side in every layer, with a constant at every joint.

    h = h + s * mamba(norm(h)) + a * attention(norm(h));   h = h + feed_forward(norm(h))

Source: Falcon-H1 as in transformers (models/falcon_h1), arXiv:2507.22448.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace.errors import ModelError
from headrace.models.checkpoint import CheckedTensors, Shapes, outer_shapes
from headrace.models.config import (
    MAMBA2_AND_ATTENTION,
    ModelConfig,
    boolean,
    common_fields,
    listed_layers,
    number,
    positive,
    require,
    require_free_time_steps,
    rope_whole_heads,
)
from headrace.models.decoder import DecoderStep, DecoderWeights, Multipliers
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
from headrace.models.layers.mlp import MlpWeights, load_mlp, mlp_shapes
from headrace.models.mamba2_decoder import Mamba2Decoder
from headrace.ops.activations import silu
from headrace.ops.linear import linear

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from headrace.models.config_keys import ConfigObject
    from headrace.models.layers.mamba2 import Mamba2Sizes, Mamba2Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconMultipliers:
    """The family's constants, named as in config.json.

    Attributes:
        ssm: Of the first projection's gate, x, B, C and dt.
        mlp: Of the MLP's gate before its activation, and of its output.
    """

    embedding: float
    lm_head: float
    attention_in: float
    attention_out: float
    key: float
    ssm_in: float
    ssm_out: float
    ssm: tuple[float, ...]
    mlp: tuple[float, ...]

    @classmethod
    def parse(cls, raw: ConfigObject) -> FalconMultipliers:
        """Read them from a config.json; what is not given is 1."""
        return cls(
            **{
                name: number(raw, f"{name}_multiplier", 1.0)
                for name in (
                    "embedding", "lm_head", "attention_in", "attention_out", "key",
                    "ssm_in", "ssm_out",
                )
            },
            ssm=_numbers(raw, "ssm_multipliers", 5),
            mlp=_numbers(raw, "mlp_multipliers", 2),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Config(ModelConfig):
    """A Falcon-H1 text model.

    Attributes:
        mamba: Sizes of the Mamba-2 part of each layer.
        has_conv_bias: Whether its convolution has a bias.
        has_mamba_norm: Whether there is a norm before its last projection.
        intermediate_size: Inner width of the MLPs.
        multipliers: The family's constants.
    """

    WITHOUT_EFFECT: ClassVar = frozenset({
        # Into how many tokens the reference cuts a scan.
        "mamba_chunk_size",
        # What intermediate_size was made from.
        "mlp_expansion_factor",
        # Of how many tokens a call of the reference returns logits.
        "num_logits_to_keep",
        # In a training run alone.
        "time_step_min", "time_step_max", "time_step_floor",
    })  # fmt: skip

    mamba: Mamba2Sizes
    has_conv_bias: bool
    has_mamba_norm: bool
    intermediate_size: int
    multipliers: FalconMultipliers

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> FalconH1Config:
        """Parse a `config.json`; see `ModelConfig.from_dict`.

        Args:
            raw: Contents of the file.
            architecture: Class name.

        Returns:
            The validated config.
        """
        raw = raw.with_defaults(num_key_value_heads=8)
        _refuse_other_maths(raw)
        num_layers = positive(raw, "num_hidden_layers")
        layer_types = (MAMBA2_AND_ATTENTION,) * num_layers
        common = common_fields(raw, layer_types, eps=("rms_norm_eps", 1e-5))
        rotary_dim, rope_theta = rope_whole_heads(raw)
        if raw.get("mamba_d_ssm", 1024) is None:
            inner = expanded(raw)
        else:
            inner = "mamba_d_ssm", positive(raw, "mamba_d_ssm", 1024)
            raw.leave_out("mamba_expand")
        return cls(
            **common,
            architecture=architecture,
            model_type="falcon_h1",
            rotary_dim=rotary_dim,
            rope_theta=rope_theta,
            mamba=mamba2_sizes(
                raw,
                norm_eps=common["rms_norm_eps"],
                inner=inner,
                gates_after_norm=boolean(raw, "mamba_norm_before_gate", default=True),
            ),
            has_conv_bias=boolean(raw, "mamba_conv_bias", default=True),
            has_mamba_norm=boolean(raw, "mamba_rms_norm"),
            intermediate_size=positive(raw, "intermediate_size", 14336),
            multipliers=FalconMultipliers.parse(raw),
        )


def _refuse_other_maths(raw: ConfigObject) -> None:
    """Raise for every known setting whose value changes the maths and is not implemented."""
    require(raw, "hidden_act", ["silu"])
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        require(raw, name, [False])
    require(raw, "mamba_use_mlp", [True])
    require(raw, "attn_layer_indices", [None])
    require(raw, "sliding_window", [None])
    for name in ("layers_block_type", "layer_types"):
        listed_layers(raw, name, {"hybrid": MAMBA2_AND_ATTENTION})
    require_free_time_steps(raw)


def _numbers(raw: ConfigObject, name: str, count: int) -> tuple[float, ...]:
    """Read a list of numbers above 0; all are 1 where there is none."""
    given = raw.get(name)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, list) or len(given) != count:
        raise ModelError(f"config.json: {name} is {given!r}, it must be a list of {count} numbers")
    return tuple(number({name: value}, name, 1.0) for value in given)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FalconLayer:
    """One layer; norms [C] f32."""

    input_norm: Tensor
    attention: PlainAttentionWeights
    mamba: Mamba2Weights
    feed_norm: Tensor
    feed_forward: MlpWeights


class FalconH1Model(Mamba2Decoder[FalconH1Config]):
    """A Falcon-H1 text model; see `HybridDecoder`."""

    @classmethod
    def from_weights(
        cls,
        config: FalconH1Config,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        state_dtype: str = "float32",
    ) -> FalconH1Model:
        """Build the model from tensors under their checkpoint names.

        Args:
            config: The model's sizes.
            weights: All tensors.
            dtype: Compute dtype.
            state_dtype: Dtype name of the recurrent states.

        Returns:
            The model, on the device of the tensors.

        Raises:
            WeightsError: A tensor is missing, unexpected or of the wrong shape.
        """
        source = CheckedTensors(config, cls.expected_tensors(config), weights, dtype)
        embedding = source.matrix("model.embed_tokens.weight")
        tied = config.tie_word_embeddings
        in_scale = _in_scale(config, embedding.device)
        joined = DecoderWeights(
            embedding=embedding,
            layers=tuple(
                _layer(config, source, f"model.layers.{i}.", in_scale)
                for i in range(config.num_layers)
            ),
            final_norm=source.full("model.final_layernorm.weight"),
            head=embedding if tied else source.matrix("lm_head.weight"),
        )
        given = config.multipliers
        multipliers = Multipliers(
            embedding=given.embedding,
            # The factor of the attention's input is in queries and keys; the one in the values is
            # taken at the output.
            query=given.attention_in**2 * given.key,
            logits_divisor=1.0 / given.lm_head,
        )
        return cls(config, joined, state_dtype, multipliers)

    @staticmethod
    def expected_tensors(config: FalconH1Config, _: Collection[str] = ()) -> Shapes:
        """Return every tensor that a checkpoint must hold; see `HybridDecoder`."""
        shapes = outer_shapes(config, "model.final_layernorm.weight")
        width = config.hidden_size
        for i in range(config.num_layers):
            prefix = f"model.layers.{i}."
            shapes |= attention_shapes(prefix + "self_attn.", config)
            shapes |= mamba2_shapes(
                prefix + "mamba.",
                config.mamba,
                width,
                has_conv_bias=config.has_conv_bias,
                has_norm=config.has_mamba_norm,
            )
            shapes |= mlp_shapes(prefix + "feed_forward.", width, config.intermediate_size)
            shapes |= {
                prefix + "input_layernorm.weight": (width,),
                prefix + "pre_ff_layernorm.weight": (width,),
            }
        return shapes

    @property
    def _sizes(self) -> Mamba2Sizes:
        return self.config.mamba

    def _run_layer(self, i: int, layer: FalconLayer, hidden: Tensor, step: DecoderStep) -> Tensor:
        factors = self.config.multipliers
        normed = self._norm(hidden, layer.input_norm, step.kernels)
        mixed = self._run_recurrent(i, layer.mamba, normed, step) * factors.ssm_out
        attended = self._run_attention(self._kv_places[i], layer.attention, normed, step)
        mixed += attended * (factors.attention_in * factors.attention_out)
        hidden = hidden + mixed
        normed = self._norm(hidden, layer.feed_norm, step.kernels)
        return hidden + self._feed(normed, layer.feed_forward, step)

    def _feed(self, normed: Tensor, weights: MlpWeights, _: DecoderStep) -> Tensor:
        before, after = self.config.multipliers.mlp
        gate, up = linear(normed, weights.gate_up).chunk(2, dim=-1)
        return linear(silu(gate * before).mul_(up), weights.down) * after


def _in_scale(config: FalconH1Config, device: torch.device) -> Tensor:
    """Return the factors of the outputs of the Mamba-2 parts' first projection, [..] f32."""
    sizes, factors = config.mamba, config.multipliers
    counts = (sizes.inner, sizes.inner, sizes.shared, sizes.shared, sizes.num_heads)
    parts = [
        torch.full((count,), factor * factors.ssm_in, device=device)
        for count, factor in zip(counts, factors.ssm, strict=True)
    ]
    return torch.cat(parts)


def _layer(
    config: FalconH1Config, source: CheckedTensors, prefix: str, in_scale: Tensor
) -> FalconLayer:
    return FalconLayer(
        input_norm=source.full(prefix + "input_layernorm.weight"),
        attention=load_attention(source, prefix + "self_attn."),
        mamba=load_mamba2(source, prefix + "mamba.", config.mamba, in_scale),
        feed_norm=source.full(prefix + "pre_ff_layernorm.weight"),
        feed_forward=load_mlp(source, prefix + "feed_forward."),
    )
