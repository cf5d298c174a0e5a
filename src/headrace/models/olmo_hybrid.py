"""OLMo hybrid: Gated DeltaNet whose states may have negative eigenvalues, and attention layers.

Attention layers norm what a block gives, the others what it takes:

    attention:  h = h + norm(attention(h));  h = h + norm(mlp(h))
    others:     h = h + delta_net(norm(h));  h = h + mlp(norm(h))

Source: OLMo hybrid as in transformers (models/olmo_hybrid).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace.errors import ModelError
from headrace.models.checkpoint import CheckedTensors, Shapes, outer_shapes
from headrace.models.config import (
    FULL,
    LINEAR,
    ROPE_KEYS,
    ModelConfig,
    boolean,
    common_fields,
    conv_taps,
    listed_layers,
    positive,
    refuse,
    require,
    rope_parameters,
    rope_whole_heads,
)
from headrace.models.decoder import (
    ConvolvedDecoder,
    DecoderLayer,
    DecoderStep,
    DecoderWeights,
    Multipliers,
)
from headrace.models.layers.attention import attention_shapes, load_attention
from headrace.models.layers.gated_delta_net import (
    DeltaSizes,
    DeltaWeights,
    gated_delta_net,
    join_delta,
)
from headrace.models.layers.mlp import MlpWeights, load_mlp, mlp, mlp_shapes

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from headrace.models.config_keys import ConfigObject
    from headrace.models.layers.attention import PlainAttentionWeights

_GATED_NORM_EPS = 1e-5
"""Of the linear layers' gated norm, whatever `rms_norm_eps` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoHybridConfig(ModelConfig):
    """An OLMo hybrid text model.

    Attributes:
        delta: Sizes of the Gated DeltaNet layers.
        intermediate_size: Inner width of the MLPs.
    """

    WITHOUT_EFFECT: ClassVar = frozenset({
        # In a training run alone.
        "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max",
        "linear_dt_init_floor",
    })  # fmt: skip

    delta: DeltaSizes
    intermediate_size: int

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> OlmoHybridConfig:
        """Parse a `config.json`; see `ModelConfig.from_dict`.

        Args:
            raw: Contents of the file.
            architecture: Class name.

        Returns:
            The validated config.
        """
        require(raw, "hidden_act", ["silu"])
        require(raw, "attention_bias", [False])
        rotary_dim, rope_theta = _rope(raw)
        return cls(
            **common_fields(raw, _layer_types(raw)),
            architecture=architecture,
            model_type="olmo_hybrid",
            rotary_dim=rotary_dim,
            rope_theta=rope_theta,
            delta=_delta_sizes(raw),
            intermediate_size=positive(raw, "intermediate_size"),
        )


def _rope(raw: ConfigObject) -> tuple[int, float]:
    """Return the rotated dimensions, 0 where the frequencies have no base, and that base."""
    parameters = rope_parameters(raw)
    if "rope_theta" in parameters and parameters["rope_theta"] is None:
        raw.leave_out(*ROPE_KEYS)
        return 0, 1e4
    if parameters.get("rope_theta", raw.get("rope_theta")) is None:
        # Published models have no rotary embedding; readers disagree on what silence means.
        supported = "an object whose rope_theta is a number, or null for no rotary embedding"
        refuse("rope_parameters", raw.get("rope_parameters"), supported)
    return rope_whole_heads(raw)


def _layer_types(raw: ConfigObject) -> tuple[str, ...]:
    listed = listed_layers(raw, "layer_types", {LINEAR: LINEAR, FULL: FULL})
    if listed is not None:
        return listed
    num_layers = positive(raw, "num_hidden_layers")
    kinds = [FULL if i % 4 == 3 else LINEAR for i in range(num_layers)]  # noqa: PLR2004
    if FULL not in kinds:
        kinds[-1] = FULL
    return tuple(kinds)


def _delta_sizes(raw: ConfigObject) -> DeltaSizes:
    def size(name: str, default: int) -> int:
        return default if raw.get(name) is None else positive(raw, name)

    heads = positive(raw, "num_attention_heads")
    key_heads = size("linear_num_key_heads", heads)
    key_dim = size("linear_key_head_dim", int(0.75 * positive(raw, "hidden_size") / key_heads))
    sizes = DeltaSizes(
        num_key_heads=key_heads,
        num_value_heads=size("linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=size("linear_value_head_dim", 2 * key_dim),
        conv_kernel=conv_taps(raw, "linear_conv_kernel_dim", 4),
        norm_eps=_GATED_NORM_EPS,
        max_rate=2.0 if boolean(raw, "linear_allow_neg_eigval", default=True) else 1.0,
    )
    if sizes.num_value_heads % sizes.num_key_heads:
        raise ModelError(
            f"config.json: linear_num_value_heads {sizes.num_value_heads} is no multiple of "
            f"linear_num_key_heads {sizes.num_key_heads}"
        )
    return sizes


class OlmoHybridModel(ConvolvedDecoder[OlmoHybridConfig]):
    """An OLMo hybrid text model; see `HybridDecoder`."""

    _mixer = staticmethod(gated_delta_net)

    @classmethod
    def from_weights(
        cls,
        config: OlmoHybridConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        state_dtype: str = "float32",
    ) -> OlmoHybridModel:
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
        prefixes = [f"model.layers.{i}." for i in range(config.num_layers)]
        joined = DecoderWeights.read(
            config,
            source,
            layers=tuple(
                _layer(config, source, prefix, kind, _norms(kind, prefix, weights))
                for prefix, kind in zip(prefixes, config.layer_types, strict=True)
            ),
            final_norm="model.norm.weight",
        )
        return cls(config, joined, state_dtype, Multipliers())

    @staticmethod
    def expected_tensors(config: OlmoHybridConfig, on_disk: Collection[str] = ()) -> Shapes:
        """Return every tensor that a checkpoint must hold; see `HybridDecoder`."""
        shapes = outer_shapes(config, "model.norm.weight")
        width = config.hidden_size
        for i, kind in enumerate(config.layer_types):
            prefix = f"model.layers.{i}."
            if kind == FULL:
                shapes |= attention_shapes(prefix + "self_attn.", config)
                for name, heads in (("q", config.num_attention_heads), ("k", config.num_kv_heads)):
                    shapes[f"{prefix}self_attn.{name}_norm.weight"] = (heads * config.head_dim,)
            else:
                shapes |= _delta_shapes(prefix + "linear_attn.", width, config.delta)
            shapes |= {f"{prefix}{name}.weight": (width,) for name in _norms(kind, prefix, on_disk)}
            shapes |= mlp_shapes(prefix + "mlp.", width, config.intermediate_size)
        return shapes

    @property
    def _sizes(self) -> DeltaSizes:
        return self.config.delta

    def _run_layer(self, i: int, layer: DecoderLayer, hidden: Tensor, step: DecoderStep) -> Tensor:
        if self.config.layer_types[i] != FULL:
            return super()._run_layer(i, layer, hidden, step)
        mixed = self._run_mixer(i, layer, hidden, step)
        hidden = hidden + self._norm(mixed, layer.input_norm, step.kernels)
        assert layer.feed_norm is not None
        fed = self._feed(hidden, layer.feed_forward, step)
        return hidden + self._norm(fed, layer.feed_norm, step.kernels)

    def _feed(self, normed: Tensor, weights: MlpWeights, step: DecoderStep) -> Tensor:
        return mlp(normed, weights, step.kernels)


def _norms(kind: str, prefix: str, on_disk: Collection[str]) -> tuple[str, str]:
    """Names of a layer's norms: the mixer's, the MLP's."""
    if kind == LINEAR:
        return "attention_layer_norm", "feedforward_layer_norm"
    # transformers, when it saves, gives the attention's norm a name of the other layers.
    is_renamed = prefix + "feedforward_layer_norm.weight" in on_disk
    name = "feedforward_layer_norm" if is_renamed else "post_attention_layernorm"
    return name, "post_feedforward_layernorm"


def _delta_shapes(prefix: str, width: int, sizes: DeltaSizes) -> Shapes:
    heads = sizes.num_value_heads
    rows = dict.fromkeys("qk", sizes.keys) | dict.fromkeys("vg", sizes.values)
    rows |= dict.fromkeys("ba", heads)
    return {
        **{f"{prefix}{name}_proj.weight": (count, width) for name, count in rows.items()},
        **{f"{prefix}{n}_conv1d.weight": (rows[n], 1, sizes.conv_kernel) for n in "qkv"},
        prefix + "A_log": (heads,),
        prefix + "dt_bias": (heads,),
        prefix + "o_norm.weight": (sizes.value_dim,),
        prefix + "o_proj.weight": (width, sizes.values),
    }


def _layer(
    config: OlmoHybridConfig, source: CheckedTensors, prefix: str, kind: str, names: tuple[str, str]
) -> DecoderLayer:
    mixer: PlainAttentionWeights | DeltaWeights
    if kind == FULL:
        own = prefix + "self_attn."
        query, key = (source.full(f"{own}{name}_norm.weight") for name in "qk")
        mixer = replace(load_attention(source, own), row_scale=(query, key))
    else:
        own = prefix + "linear_attn."
        mixer = join_delta(
            config.delta,
            qkv=source.matrix(*(f"{own}{name}_proj.weight" for name in "qkv")),
            gate=source.matrix(own + "g_proj.weight"),
            rate=source.matrix(own + "b_proj.weight"),
            decay=source.matrix(own + "a_proj.weight"),
            taps=torch.cat([source.taps(f"{own}{name}_conv1d.weight") for name in "qkv"], 1),
            a_log=source.full(own + "A_log"),
            dt_bias=source.full(own + "dt_bias"),
            norm=source.full(own + "o_norm.weight"),
            out_proj=source.matrix(own + "o_proj.weight"),
        )
    input_norm, feed_norm = names
    return DecoderLayer(
        input_norm=source.full(f"{prefix}{input_norm}.weight"),
        mixer=mixer,
        feed_norm=source.full(f"{prefix}{feed_norm}.weight"),
        feed_forward=load_mlp(source, prefix + "mlp."),
    )
