"""Jamba: Mamba-1 layers, attention without positions every few of them, mixtures of experts.

Source: Jamba as in transformers (models/jamba).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from headrace.errors import ModelError
from headrace.models.checkpoint import CheckedTensors, Shapes, outer_shapes
from headrace.models.config import (
    FULL,
    MAMBA1,
    ModelConfig,
    boolean,
    common_fields,
    conv_taps,
    experts,
    listed_layers,
    positive,
    refuse,
    require,
)
from headrace.models.decoder import (
    ConvolvedDecoder,
    DecoderLayer,
    DecoderStep,
    DecoderWeights,
    Multipliers,
)
from headrace.models.layers.attention import (
    PlainAttentionWeights,
    attention_shapes,
    load_attention,
)
from headrace.models.layers.mamba1 import (
    Mamba1Sizes,
    Mamba1Weights,
    load_mamba1,
    mamba1,
    time_rank,
)
from headrace.models.layers.mlp import MlpWeights, load_mlp, mlp_shapes
from headrace.models.layers.moe import MoeWeights, Routing, feed_forward, load_experts

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from torch import Tensor

    from headrace.models.config_keys import ConfigObject

_LAYER_KINDS = {
    "mamba": MAMBA1,
    "linear_attention": MAMBA1,
    "attention": FULL,
    "full_attention": FULL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JambaConfig(ModelConfig):
    """A Jamba text model.

    Attributes:
        mamba: Sizes of the Mamba-1 layers.
        moe_layers: Layers whose MLP is a mixture of experts.
        num_experts: Experts of those layers.
        num_chosen_experts: Experts of each token.
        intermediate_size: Inner width of an MLP, and of an expert.
    """

    WITHOUT_EFFECT: ClassVar = frozenset({
        # How the reference computes a scan.
        "use_mamba_kernels", "use_mambapy", "use_associative_scan",
        # Of how many tokens a call of the reference returns logits.
        "num_logits_to_keep", "calc_logits_for_entire_prompt",
        # What max_position_embeddings says.
        "n_ctx",
    })  # fmt: skip

    mamba: Mamba1Sizes
    moe_layers: tuple[int, ...]
    num_experts: int
    num_chosen_experts: int
    intermediate_size: int

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> JambaConfig:
        """Parse a `config.json`; see `ModelConfig.from_dict`.

        Args:
            raw: Contents of the file.
            architecture: Class name.

        Returns:
            The validated config.
        """
        raw = raw.under_one_name({"num_local_experts": "num_experts"})
        raw = raw.with_defaults(num_key_value_heads=8)
        require(raw, "hidden_act", ["silu", "swish"])
        require(raw, "mamba_proj_bias", [False])
        require(raw, "mamba_inner_layernorms", [True])
        require(raw, "sliding_window", [None])
        attention = _every(raw, "attn_layer", (8, 4))
        layer_types = tuple(
            FULL if i in attention else MAMBA1 for i in range(positive(raw, "num_hidden_layers"))
        )
        for name in ("layer_types", "layers_block_type"):
            if listed_layers(raw, name, _LAYER_KINDS) not in (None, layer_types):
                refuse(name, raw[name], "what attn_layer_period and attn_layer_offset say")
        common = common_fields(raw, layer_types)
        num_experts, num_chosen = experts(raw, "num_experts", (16, 2))
        moe_layers = _every(raw, "expert_layer", (2, 1))
        if num_experts <= 1:
            # One expert is an MLP under its plain names.
            raw.leave_out("expert_layer_period", "expert_layer_offset")
            moe_layers = ()
        return cls(
            **common,
            architecture=architecture,
            model_type="jamba",
            rotary_dim=0,
            rope_theta=1e4,
            mamba=_mamba_sizes(raw, common["rms_norm_eps"]),
            moe_layers=moe_layers,
            num_experts=num_experts,
            num_chosen_experts=num_chosen,
            intermediate_size=positive(raw, "intermediate_size", 14336),
        )


def _every(raw: ConfigObject, name: str, default: tuple[int, int]) -> tuple[int, ...]:
    """Read a pattern of layers from its period and offset."""
    period = positive(raw, f"{name}_period", default[0])
    offset = raw.get(f"{name}_offset", default[1])
    if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset < period:
        raise ModelError(
            f"config.json: {name}_offset is {offset!r}, it must be an integer from 0 to "
            f"{name}_period - 1, {period - 1}"
        )
    return tuple(range(offset, positive(raw, "num_hidden_layers"), period))


def _mamba_sizes(raw: ConfigObject, eps: float) -> Mamba1Sizes:
    return Mamba1Sizes(
        channels=positive(raw, "mamba_expand", 2) * positive(raw, "hidden_size"),
        state_dim=positive(raw, "mamba_d_state", 16),
        time_rank=time_rank(raw, "mamba_dt_rank"),
        conv_kernel=conv_taps(raw, "mamba_d_conv", 4),
        has_conv_bias=boolean(raw, "mamba_conv_bias", default=True),
        norm_eps=eps,
        has_norm_weights=True,
    )


class JambaModel(ConvolvedDecoder[JambaConfig]):
    """A Jamba text model; see `HybridDecoder`."""

    _mixer = staticmethod(mamba1)

    @classmethod
    def from_weights(
        cls,
        config: JambaConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        state_dtype: str = "float32",
    ) -> JambaModel:
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
        joined = DecoderWeights.read(
            config,
            source,
            layers=tuple(_layer(config, source, i) for i in range(config.num_layers)),
            final_norm="model.final_layernorm.weight",
        )
        return cls(config, joined, state_dtype, Multipliers())

    @staticmethod
    def expected_tensors(config: JambaConfig, _: Collection[str] = ()) -> Shapes:
        """Return every tensor that a checkpoint must hold; see `HybridDecoder`."""
        shapes = outer_shapes(config, "model.final_layernorm.weight")
        width, inner = config.hidden_size, config.intermediate_size
        for i, kind in enumerate(config.layer_types):
            own = f"model.layers.{i}."
            shapes[own + "input_layernorm.weight"] = (width,)
            shapes[own + "pre_ff_layernorm.weight"] = (width,)
            if kind == FULL:
                shapes |= attention_shapes(own + "self_attn.", config)
            else:
                shapes |= config.mamba.tensor_shapes(own + "mamba.", width)
            own += "feed_forward."
            if i not in config.moe_layers:
                shapes |= mlp_shapes(own, width, inner)
                continue
            shapes[own + "router.weight"] = (config.num_experts, width)
            for expert in range(config.num_experts):
                shapes |= mlp_shapes(f"{own}experts.{expert}.", width, inner)
        return shapes

    @property
    def _sizes(self) -> Mamba1Sizes:
        return self.config.mamba

    def _feed(self, normed: Tensor, weights: MlpWeights | MoeWeights, step: DecoderStep) -> Tensor:
        return feed_forward(normed, weights, step.kernels, step.slots)


def _layer(config: JambaConfig, source: CheckedTensors, i: int) -> DecoderLayer:
    own = f"model.layers.{i}."
    mixer: PlainAttentionWeights | Mamba1Weights
    if config.layer_types[i] == FULL:
        mixer = load_attention(source, own + "self_attn.")
    else:
        mixer = load_mamba1(source, own + "mamba.", config.mamba)
    return DecoderLayer(
        input_norm=source.full(own + "input_layernorm.weight"),
        mixer=mixer,
        feed_norm=source.full(own + "pre_ff_layernorm.weight"),
        feed_forward=_feed_forward(config, source, i),
    )


def _feed_forward(config: JambaConfig, source: CheckedTensors, i: int) -> MlpWeights | MoeWeights:
    own = f"model.layers.{i}.feed_forward."
    if i not in config.moe_layers:
        return load_mlp(source, own)
    gate_up, down = load_experts(source, own + "experts.", config.num_experts)
    return MoeWeights(
        router=source.matrix(own + "router.weight"),
        gate_up=gate_up,
        down=down,
        num_chosen=config.num_chosen_experts,
        shared=None,
        shared_gate=None,
        # The softmax over all experts; a token's factors need not add up to 1.
        routing=Routing(is_normalised=False),
    )
