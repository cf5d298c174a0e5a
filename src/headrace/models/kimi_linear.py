"""Kimi Linear: Kimi Delta Attention and latent attention layers, mixtures of experts.

No layer has a rotary embedding. The first layers' feed-forward blocks are plain MLPs.

Source: Kimi Linear, arXiv:2510.26692, and as in transformers (models/kimi_linear).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace.errors import ModelError
from headrace.models.checkpoint import CheckedTensors, Shapes, outer_shapes
from headrace.models.config import (
    FULL,
    KIMI_DELTA,
    LINEAR,
    ModelConfig,
    boolean,
    common_fields,
    conv_taps,
    count,
    experts,
    json_object,
    listed_layers,
    number,
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
from headrace.models.layers.kimi_delta import KimiDeltaSizes, KimiDeltaWeights, kimi_delta
from headrace.models.layers.latent_attention import (
    LatentAttentionWeights,
    LatentSizes,
    latent_attention,
)
from headrace.models.layers.mlp import MlpWeights, load_mlp, mlp_shapes
from headrace.models.layers.moe import MoeWeights, Routing, feed_forward, load_experts
from headrace.models.layers.windowed_conv import ConvWeights

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from headrace.models.config_keys import ConfigObject
    from headrace.models.layers.attention import PlainAttentionStep

_LATENT_NORM_EPS = 1e-6
"""Of the latent's norm, whatever `rms_norm_eps` is."""

LATER_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""Fields as transformers saves them, to their names in published files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiLinearConfig(ModelConfig):
    """A Kimi Linear text model.

    What is kept of a token for attention is a latent, so `head_dim` is that of the latent and the
    shared part of the keys, and `num_kv_heads` is 1.

    Attributes:
        delta: Sizes of the Kimi Delta Attention layers.
        latent: Sizes of the latent attention layers.
        is_sparse: Whether each layer has experts.
        intermediate_size: Inner width of the MLPs of the other layers.
        num_experts: Experts of each sparse layer.
        num_chosen_experts: Experts of each token.
        expert_size: Inner width of an expert.
        shared_size: Inner width of the MLP beside the experts.
        routing: How the experts are weighed.
    """

    WITHOUT_EFFECT: ClassVar = frozenset({
        # No layer has a rotary embedding.
        "rope_theta", "rope_parameters",
        # The reference makes both from other sizes, whatever they say.
        "head_dim", "qk_head_dim",
        # How many devices shared a matrix in training.
        "pretraining_tp",
    })  # fmt: skip

    delta: KimiDeltaSizes
    latent: LatentSizes
    is_sparse: tuple[bool, ...]
    intermediate_size: int
    num_experts: int
    num_chosen_experts: int
    expert_size: int
    shared_size: int
    routing: Routing

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> KimiLinearConfig:
        """Parse a `config.json`; see `ModelConfig.from_dict`.

        Args:
            raw: Contents of the file.
            architecture: Class name.

        Returns:
            The validated config.
        """
        raw = raw.under_one_name(LATER_NAMES).with_defaults(num_key_value_heads=32)
        _refuse_other_maths(raw)
        renamed = raw.replaced(
            max_position_embeddings=raw.get("model_max_length"),
            num_experts_per_tok=raw.get("num_experts_per_token", 8),
            head_dim=None,
        )
        common = common_fields(renamed, _layer_types(raw), eps=("rms_norm_eps", 1e-5))
        latent = _latent_sizes(raw)
        common |= {"num_kv_heads": 1, "head_dim": latent.latent + latent.shared}
        num_experts, num_chosen = experts(renamed, "num_experts", (256, 8))
        expert_size = positive(raw, "moe_intermediate_size", 1024)
        return cls(
            **common,
            architecture=architecture,
            model_type="kimi_linear",
            rotary_dim=0,
            rope_theta=1e4,
            delta=_delta_sizes(raw, common["rms_norm_eps"]),
            latent=latent,
            is_sparse=_sparse_layers(raw),
            intermediate_size=positive(raw, "intermediate_size"),
            num_experts=num_experts,
            num_chosen_experts=num_chosen,
            expert_size=expert_size,
            shared_size=expert_size * positive(raw, "num_shared_experts", 1),
            routing=_routing(raw, num_experts),
        )

    @property
    def kv_value_dim(self) -> int:
        """Values are the beginnings of the keys and have no pool."""
        return 0


def _refuse_other_maths(raw: ConfigObject) -> None:
    """Raise for every known setting whose value changes the maths and is not implemented."""
    require(raw, "hidden_act", ["silu"])
    require(raw, "attention_bias", [False])
    require(raw, "mla_use_nope", [True])
    require(raw, "rope_scaling", [None])
    require(raw, "q_lora_rank", [None])
    require(raw, "moe_layer_freq", [1])
    require(raw, "moe_router_activation_func", ["sigmoid"])
    require(raw, "topk_method", ["noaux_tc"])
    require(raw, "num_nextn_predict_layers", [None, 0])
    if raw.get("num_key_value_heads") is not None:
        require(raw, "num_key_value_heads", [raw.get("num_attention_heads")])
    if not raw.get("num_experts", 256):
        refuse("num_experts", raw["num_experts"], "1 or more")


def _linear_config(raw: ConfigObject) -> dict[str, Any]:
    """Fields of the linear layers, which published files hold in an object of their own."""
    own = json_object(raw, "linear_attn_config")
    found = {name: own.get(name) for name in ("kda_layers", "full_attn_layers")}
    for name, later, default in (
        ("head_dim", "linear_head_dim", 128),
        ("num_heads", "linear_num_heads", 32),
        ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
    ):
        found[name] = own[name] if name in own else raw.get(later, default)
        if name in own:
            raw.leave_out(later)
    return found


def _delta_sizes(raw: ConfigObject, eps: float) -> KimiDeltaSizes:
    own = _linear_config(raw)
    return KimiDeltaSizes(
        num_heads=positive(own, "num_heads"),
        head_dim=positive(own, "head_dim"),
        conv_kernel=conv_taps(own, "short_conv_kernel_size"),
        norm_eps=eps,
    )


def _latent_sizes(raw: ConfigObject) -> LatentSizes:
    return LatentSizes(
        num_heads=positive(raw, "num_attention_heads"),
        latent=positive(raw, "kv_lora_rank", 512),
        shared=positive(raw, "qk_rope_head_dim", 64),
        own=positive(raw, "qk_nope_head_dim", 128),
        value=positive(raw, "v_head_dim", 128),
        norm_eps=_LATENT_NORM_EPS,
    )


def _layer_types(raw: ConfigObject) -> tuple[str, ...]:
    listed = listed_layers(raw, "layer_types", {LINEAR: KIMI_DELTA, FULL: FULL})
    if listed is not None:
        json_object(raw, "linear_attn_config").leave_out("kda_layers", "full_attn_layers")
        return listed
    num_layers = positive(raw, "num_hidden_layers")
    own = _linear_config(raw)
    delta, full = own["kda_layers"], own["full_attn_layers"]
    if delta is None or full is None:
        return tuple(FULL if i and i % 4 == 0 else KIMI_DELTA for i in range(num_layers))
    # These lists count from 1.
    if sorted([*delta, *full]) != list(range(1, num_layers + 1)):
        raise ModelError(
            f"config.json: linear_attn_config.kda_layers {delta} and full_attn_layers {full} must "
            f"name each layer from 1 to {num_layers} once"
        )
    return tuple(FULL if i + 1 in full else KIMI_DELTA for i in range(num_layers))


def _sparse_layers(raw: ConfigObject) -> tuple[bool, ...]:
    listed = listed_layers(raw, "mlp_layer_types", {"dense": "dense", "sparse": "sparse"})
    if listed is not None:
        raw.leave_out("first_k_dense_replace")
        return tuple(kind == "sparse" for kind in listed)
    first = count(raw, "first_k_dense_replace", 1)
    return tuple(i >= first for i in range(positive(raw, "num_hidden_layers")))


def _routing(raw: ConfigObject, num_experts: int) -> Routing:
    groups = positive(raw, "num_expert_group", 1)
    chosen = positive(raw, "topk_group", 1)
    if num_experts % groups or chosen > groups:
        raise ModelError(
            f"config.json: num_expert_group {groups} must divide num_experts {num_experts} and be "
            f"at least topk_group {chosen}"
        )
    if groups > 1:
        require(raw, "use_grouped_topk", [True])
    else:
        raw.leave_out("use_grouped_topk")
    return Routing(
        scoring="sigmoid",
        is_normalised=boolean(raw, "moe_renormalize", default=True),
        scale=number(raw, "routed_scaling_factor", 2.446),
        eps=1e-20,
        num_groups=groups,
        num_chosen_groups=chosen,
    )


class KimiLinearModel(ConvolvedDecoder[KimiLinearConfig]):
    """A Kimi Linear text model; see `HybridDecoder`."""

    _mixer = staticmethod(kimi_delta)

    @classmethod
    def from_weights(
        cls,
        config: KimiLinearConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        state_dtype: str = "float32",
    ) -> KimiLinearModel:
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
        source = CheckedTensors(config, cls.expected_tensors(config, weights), weights, dtype)
        joined = DecoderWeights.read(
            config,
            source,
            layers=tuple(_layer(config, source, i, weights) for i in range(config.num_layers)),
            final_norm="model.norm.weight",
        )
        return cls(config, joined, state_dtype, Multipliers())

    @staticmethod
    def expected_tensors(config: KimiLinearConfig, on_disk: Collection[str] = ()) -> Shapes:
        """Return every tensor that a checkpoint must hold; see `HybridDecoder`."""
        shapes = outer_shapes(config, "model.norm.weight")
        width = config.hidden_size
        for i, kind in enumerate(config.layer_types):
            prefix = f"model.layers.{i}."
            own = prefix + "self_attn."
            shapes |= _latent_shapes(config, own) if kind == FULL else _delta_shapes(config, own)
            shapes |= {
                prefix + "input_layernorm.weight": (width,),
                prefix + "post_attention_layernorm.weight": (width,),
            }
            if config.is_sparse[i]:
                shapes |= _moe_shapes(config, prefix + "block_sparse_moe.")
            else:
                own = _mlp_prefix(prefix, on_disk)
                shapes |= mlp_shapes(own, width, config.intermediate_size)
        return shapes

    @property
    def _sizes(self) -> KimiDeltaSizes:
        return self.config.delta

    def _attend(
        self,
        x: Tensor,
        weights: LatentAttentionWeights,
        kv: tuple[Tensor, Tensor],
        attention: PlainAttentionStep,
    ) -> Tensor:
        return latent_attention(x, weights, self.config.latent, kv[0], attention)

    def _feed(self, normed: Tensor, weights: MlpWeights | MoeWeights, step: DecoderStep) -> Tensor:
        return feed_forward(normed, weights, step.kernels, step.slots)


def _mlp_prefix(prefix: str, on_disk: Collection[str]) -> str:
    """Prefix of a plain MLP's names; transformers, when it saves, gives it that of the experts."""
    own = prefix + "block_sparse_moe."
    return own if own + "gate_proj.weight" in on_disk else prefix + "mlp."


def _latent_shapes(config: KimiLinearConfig, prefix: str) -> Shapes:
    width, sizes = config.hidden_size, config.latent
    heads = sizes.num_heads
    return {
        prefix + "q_proj.weight": (heads * (sizes.own + sizes.shared), width),
        prefix + "kv_a_proj_with_mqa.weight": (sizes.latent + sizes.shared, width),
        prefix + "kv_a_layernorm.weight": (sizes.latent,),
        prefix + "kv_b_proj.weight": (heads * (sizes.own + sizes.value), sizes.latent),
        prefix + "o_proj.weight": (width, heads * sizes.value),
    }


def _delta_shapes(config: KimiLinearConfig, prefix: str) -> Shapes:
    width, sizes = config.hidden_size, config.delta
    inner, heads, dim = sizes.inner, sizes.num_heads, sizes.head_dim
    return {
        **{f"{prefix}{name}_proj.weight": (inner, width) for name in "qkv"},
        **{f"{prefix}{name}_conv1d.weight": (inner, 1, sizes.conv_kernel) for name in "qkv"},
        **{f"{prefix}{name}_a_proj.weight": (dim, width) for name in "fg"},
        **{f"{prefix}{name}_b_proj.weight": (inner, dim) for name in "fg"},
        prefix + "b_proj.weight": (heads, width),
        prefix + "A_log": (1, 1, heads, 1),
        prefix + "dt_bias": (inner,),
        prefix + "o_norm.weight": (dim,),
        prefix + "o_proj.weight": (width, inner),
    }


def _moe_shapes(config: KimiLinearConfig, prefix: str) -> Shapes:
    width, size = config.hidden_size, config.expert_size
    shapes: Shapes = {
        prefix + "gate.weight": (config.num_experts, width),
        prefix + "gate.e_score_correction_bias": (config.num_experts,),
    }
    for expert in range(config.num_experts):
        own = f"{prefix}experts.{expert}."
        shapes |= {f"{own}{name}.weight": (size, width) for name in ("w1", "w3")}
        shapes[own + "w2.weight"] = (width, size)
    return shapes | mlp_shapes(prefix + "shared_experts.", width, config.shared_size)


def _layer(
    config: KimiLinearConfig, source: CheckedTensors, i: int, on_disk: Collection[str]
) -> DecoderLayer:
    prefix = f"model.layers.{i}."
    mixer: LatentAttentionWeights | KimiDeltaWeights
    if config.layer_types[i] == FULL:
        mixer = _latent(config.latent, source, prefix + "self_attn.")
    else:
        mixer = _delta(config.delta, source, prefix + "self_attn.")
    feed: MlpWeights | MoeWeights
    if config.is_sparse[i]:
        feed = _moe(config, source, prefix + "block_sparse_moe.")
    else:
        feed = load_mlp(source, _mlp_prefix(prefix, on_disk))
    return DecoderLayer(
        input_norm=source.full(prefix + "input_layernorm.weight"),
        mixer=mixer,
        feed_norm=source.full(prefix + "post_attention_layernorm.weight"),
        feed_forward=feed,
    )


def _latent(sizes: LatentSizes, source: CheckedTensors, prefix: str) -> LatentAttentionWeights:
    up = source.matrix(prefix + "kv_b_proj.weight").unflatten(0, (sizes.num_heads, -1))
    key_up, value_up = up.split_with_sizes((sizes.own, sizes.value), 1)
    names = (prefix + "q_proj.weight", prefix + "kv_a_proj_with_mqa.weight")
    return LatentAttentionWeights(
        in_proj=source.matrix(*names),
        latent_norm=source.full(prefix + "kv_a_layernorm.weight"),
        key_up=key_up.transpose(1, 2).contiguous(),
        value_up=value_up.contiguous(),
        out_proj=source.matrix(prefix + "o_proj.weight"),
    )


def _delta(sizes: KimiDeltaSizes, source: CheckedTensors, prefix: str) -> KimiDeltaWeights:
    decay_rate = source.full(prefix + "A_log").exp().view(-1, 1).expand(-1, sizes.head_dim)
    scale = torch.ones(2 * sizes.num_heads, 1, device=decay_rate.device)
    scale[: sizes.num_heads] = sizes.head_dim**-0.5
    names = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj")
    taps = [source.taps(f"{prefix}{name}_conv1d.weight") for name in "qkv"]
    return KimiDeltaWeights(
        in_proj=source.matrix(*(f"{prefix}{name}.weight" for name in names)),
        conv=ConvWeights(taps=torch.cat(taps, 1), bias=None),
        decay_proj=source.matrix(prefix + "f_b_proj.weight"),
        decay_bias=source.full(prefix + "dt_bias"),
        decay_factor=-decay_rate.reshape(-1),
        gate_proj=source.matrix(prefix + "g_b_proj.weight"),
        unit_scale=scale,
        norm=source.full(prefix + "o_norm.weight"),
        out_proj=source.matrix(prefix + "o_proj.weight"),
    )


def _moe(config: KimiLinearConfig, source: CheckedTensors, prefix: str) -> MoeWeights:
    names = ("w1", "w3", "w2")
    gate_up, down = load_experts(source, prefix + "experts.", config.num_experts, names)
    return MoeWeights(
        router=source.full(prefix + "gate.weight"),
        gate_up=gate_up,
        down=down,
        num_chosen=config.num_chosen_experts,
        shared=load_mlp(source, prefix + "shared_experts."),
        shared_gate=None,
        routing=config.routing,
        choice_bias=source.full(prefix + "gate.e_score_correction_bias"),
    )
