"""Checkpoint names and shapes of Qwen3.5 and Qwen3-Next, and their weights as the layers take them.

Projections that read the same input are joined into one matrix, so a layer is two products and not
six. Constants are folded in once: 1 + w of the zero-centred norms, -exp(A_log), and a sign that
lets one softplus serve both gates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.models.checkpoint import CheckedTensors, Shapes
from headrace.models.config import LINEAR
from headrace.models.layers.gated_attention import AttentionWeights
from headrace.models.layers.gated_delta_net import DeltaWeights, join_delta
from headrace.models.layers.mlp import MlpWeights
from headrace.models.layers.moe import MoeWeights
from headrace.ops.rotary import inverse_frequencies

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from torch import Tensor

    from headrace.models.qwen3_5_config import Qwen35Config

TEXT_PREFIXES = ("model.language_model.", "model.")
IGNORED_PREFIXES = ("model.visual.", "visual.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One decoder layer; norms are factors 1 + w, [C] f32."""

    input_norm: Tensor
    mixer: DeltaWeights | AttentionWeights
    mlp_norm: Tensor
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MtpWeights:
    """The MTP module; fc is [C, 2C], embedding first, norms are factors 1 + w, [C] f32."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    fc: Tensor
    layer: LayerWeights
    norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Qwen35Weights:
    """All weights; embedding and head [vocabulary, C], inverse_frequencies [r/2] f32.

    A rank of several has a part of each, and of the vocabulary's rows.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
    mtp: MtpWeights | None
    inverse_frequencies: Tensor


def expected_tensors(config: Qwen35Config, on_disk: Collection[str] = ()) -> Shapes:
    """List every tensor that a checkpoint must hold.

    Args:
        config: The model's sizes.
        on_disk: Names that there are. They decide whether the text model is under `model.` or, in
            multimodal checkpoints, under a name of its own, and whether the experts of a layer are
            one tensor or many.

    Returns:
        Shape by name; MTP tensors have the prefix `mtp.`.
    """
    shapes = _model_shapes(config, {_canonical(name) for name in on_disk})
    nested, plain = TEXT_PREFIXES
    if not any(name.startswith(nested) for name in on_disk):
        return shapes
    return {
        nested + name.removeprefix(plain) if name.startswith(plain) else name: shape
        for name, shape in shapes.items()
    }


def _model_shapes(config: Qwen35Config, names: Collection[str]) -> Shapes:
    width, vocab = config.hidden_size, config.vocab_rows
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, width)
    for i, kind in enumerate(config.layer_types):
        shapes |= _layer_shapes(config, f"model.layers.{i}.", names, is_linear=kind == LINEAR)
    if config.num_mtp_layers:
        shapes |= _layer_shapes(config, "mtp.layers.0.", names, is_linear=False)
        shapes["mtp.fc.weight"] = (width, 2 * width)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            shapes[f"mtp.{name}.weight"] = (width,)
    return shapes


def _layer_shapes(
    config: Qwen35Config, prefix: str, names: Collection[str], *, is_linear: bool
) -> Shapes:
    width = config.hidden_size
    mixer = _linear_shapes(config) if is_linear else _attention_shapes(config)
    if config.num_experts:
        feed = _moe_shapes(config, is_split=_has_split_experts(config, prefix, names))
    else:
        feed = _mlp_shapes("mlp.", config.intermediate_size, width)
    shapes: Shapes = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        **feed,
        **mixer,
    }
    return {prefix + name: shape for name, shape in shapes.items()}


def _mlp_shapes(prefix: str, inner: int, width: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (inner, width),
        f"{prefix}up_proj.weight": (inner, width),
        f"{prefix}down_proj.weight": (width, inner),
    }


def _has_split_experts(config: Qwen35Config, prefix: str, names: Collection[str]) -> bool:
    """Whether a layer's experts are tensors of their own, as Qwen3-Next publishes them."""
    if prefix + "mlp.experts.0.gate_proj.weight" in names:
        return True
    if prefix + "mlp.experts.gate_up_proj" in names:
        return False
    return config.model_type == "qwen3_next"


def _moe_shapes(config: Qwen35Config, *, is_split: bool) -> Shapes:
    width, inner, count = config.hidden_size, config.expert_size, config.num_experts
    shapes: Shapes = {
        "mlp.gate.weight": (count, width),
        "mlp.shared_expert_gate.weight": (1, width),
        **_mlp_shapes("mlp.shared_expert.", config.shared_size, width),
    }
    if is_split:
        for i in range(count):
            shapes |= _mlp_shapes(f"mlp.experts.{i}.", inner, width)
    else:
        shapes["mlp.experts.gate_up_proj"] = (count, 2 * inner, width)
        shapes["mlp.experts.down_proj"] = (count, width, inner)
    return shapes


def _linear_shapes(config: Qwen35Config) -> Shapes:
    width, heads = config.hidden_size, config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    if config.model_type == "qwen3_next":
        projections: Shapes = {
            "in_proj_qkvz.weight": (config.conv_channels + values, width),
            "in_proj_ba.weight": (2 * heads, width),
        }
    else:
        projections = {
            "in_proj_qkv.weight": (config.conv_channels, width),
            "in_proj_z.weight": (values, width),
            "in_proj_b.weight": (heads, width),
            "in_proj_a.weight": (heads, width),
        }
    shapes: Shapes = {
        **projections,
        "conv1d.weight": (config.conv_channels, 1, config.conv_kernel),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (config.linear_value_head_dim,),
        "out_proj.weight": (width, values),
    }
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _attention_shapes(config: Qwen35Config) -> Shapes:
    width, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_kv_heads * dim
    return {
        "self_attn.q_proj.weight": (2 * queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }


def segments(config: Qwen35Config, name: str) -> tuple[int, ...] | None:
    """Sizes of the matrices that a tensor holds, along the axis in which ranks have parts of it.

    Args:
        config: The model's sizes, or a rank's.
        name: The tensor's.

    Returns:
        The sizes, or None for a single matrix, or one that is grouped by head.
    """
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        sizes = config.delta
        return sizes.keys, sizes.keys, sizes.values
    if name.endswith("experts.gate_up_proj"):
        return config.expert_size, config.expert_size
    return None


def load_weights(
    config: Qwen35Config, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Qwen35Weights:
    """Check a checkpoint's tensors and join them for the layers.

    Args:
        config: The model's sizes.
        tensors: By checkpoint name.
        dtype: Compute dtype of the matrices; norms and gates are kept in float32.

    Returns:
        The weights.

    Raises:
        WeightsError: A tensor is missing, unexpected or of the wrong shape.
    """
    own = _own(config, tensors)
    source = CheckedTensors(config, expected_tensors(config, own), tensors, dtype, own)
    embedding = source.matrix("model.embed_tokens.weight")
    mtp = None
    if config.num_mtp_layers:
        mtp = MtpWeights(
            embedding_norm=source.centred_norm("mtp.pre_fc_norm_embedding.weight"),
            hidden_norm=source.centred_norm("mtp.pre_fc_norm_hidden.weight"),
            fc=source.matrix("mtp.fc.weight"),
            layer=_layer(config, source, "mtp.layers.0.", is_linear=False),
            norm=source.centred_norm("mtp.norm.weight"),
        )
    return Qwen35Weights(
        embedding=embedding,
        layers=tuple(
            _layer(config, source, f"model.layers.{i}.", is_linear=kind == LINEAR)
            for i, kind in enumerate(config.layer_types)
        ),
        final_norm=source.centred_norm("model.norm.weight"),
        head=embedding if config.tie_word_embeddings else source.matrix("lm_head.weight"),
        mtp=mtp,
        inverse_frequencies=inverse_frequencies(
            config.rotary_dim, config.rope_theta, embedding.device
        ),
    )


def _own(config: Qwen35Config, names: Iterable[str]) -> dict[str, str]:
    """Map names under `model.` to the given names of the text model's tensors."""
    own = {_canonical(name): name for name in names if _is_own(name)}
    if config.num_mtp_layers:
        return own
    return {name: given for name, given in own.items() if not name.startswith("mtp.")}


def _is_own(name: str) -> bool:
    return not name.startswith(IGNORED_PREFIXES)


def _canonical(name: str) -> str:
    for prefix in TEXT_PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name


def _layer(
    config: Qwen35Config, source: CheckedTensors, prefix: str, *, is_linear: bool
) -> LayerWeights:
    mixer: DeltaWeights | AttentionWeights
    if is_linear:
        mixer = _linear_mixer(config, source, prefix + "linear_attn.")
    else:
        mixer = _attention_mixer(config, source, prefix + "self_attn.")
    return LayerWeights(
        input_norm=source.centred_norm(prefix + "input_layernorm.weight"),
        mixer=mixer,
        mlp_norm=source.centred_norm(prefix + "post_attention_layernorm.weight"),
        mlp=_moe(config, source, prefix + "mlp.")
        if config.num_experts
        else _mlp(source, prefix + "mlp."),
    )


def _mlp(source: CheckedTensors, prefix: str) -> MlpWeights:
    return MlpWeights(
        gate_up=source.matrix(prefix + "gate_proj.weight", prefix + "up_proj.weight"),
        down=source.matrix(prefix + "down_proj.weight"),
    )


def _moe(config: Qwen35Config, source: CheckedTensors, prefix: str) -> MoeWeights:
    own = prefix + "experts."
    if source.has(own + "gate_up_proj"):
        gate_up, down = source.matrix(own + "gate_up_proj"), source.matrix(own + "down_proj")
    else:
        each = [f"{own}{i}." for i in range(config.num_experts)]
        gate_up = source.stack(*((f"{e}gate_proj.weight", f"{e}up_proj.weight") for e in each))
        down = source.stack(*((f"{e}down_proj.weight",) for e in each))
    return MoeWeights(
        router=source.matrix(prefix + "gate.weight"),
        gate_up=gate_up,
        down=down,
        num_chosen=config.num_chosen_experts,
        shared=_mlp(source, prefix + "shared_expert."),
        shared_gate=source.matrix(prefix + "shared_expert_gate.weight"),
    )


def _attention_mixer(config: Qwen35Config, source: CheckedTensors, prefix: str) -> AttentionWeights:
    heads, dim = config.num_attention_heads, config.head_dim
    # q_proj holds query and gate of each head in turn.
    query, gate = source.matrix(prefix + "q_proj.weight").view(heads, 2, dim, -1).unbind(1)
    key, value = (source.matrix(f"{prefix}{name}_proj.weight") for name in "kv")
    return AttentionWeights(
        in_proj=torch.cat((query.flatten(0, 1), key, value, gate.flatten(0, 1))),
        head_scale=torch.cat(
            (
                source.centred_norm(prefix + "q_norm.weight").expand(heads, dim),
                source.centred_norm(prefix + "k_norm.weight").expand(config.num_kv_heads, dim),
            )
        ),
        out_proj=source.matrix(prefix + "o_proj.weight"),
    )


def _linear_mixer(config: Qwen35Config, source: CheckedTensors, prefix: str) -> DeltaWeights:
    if config.model_type == "qwen3_next":
        qkv, gate, rate, decay = _ungroup(config, source, prefix)
    else:
        qkv, gate, rate, decay = (
            source.matrix(f"{prefix}in_proj_{name}.weight") for name in _SPLIT_NAMES
        )
    return join_delta(
        config.delta,
        qkv=qkv,
        gate=gate,
        rate=rate,
        decay=decay,
        taps=source.taps(prefix + "conv1d.weight"),
        a_log=source.full(prefix + "A_log"),
        dt_bias=source.full(prefix + "dt_bias"),
        norm=source.full(prefix + "norm.weight"),
        out_proj=source.matrix(prefix + "out_proj.weight"),
    )


_SPLIT_NAMES = ("qkv", "z", "b", "a")


def _ungroup(
    config: Qwen35Config, source: CheckedTensors, prefix: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort Qwen3-Next's fused projections, which are grouped per key head.

    Returns:
        Rows of qkv, z, b and a as Qwen3.5 stores them.
    """
    key_heads, k, v = (
        config.linear_num_key_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    group = config.linear_num_value_heads // key_heads
    qkvz = source.matrix(prefix + "in_proj_qkvz.weight").unflatten(0, (key_heads, -1))
    query, key, value, z = qkvz.split((k, k, group * v, group * v), dim=1)
    ba = source.matrix(prefix + "in_proj_ba.weight").unflatten(0, (key_heads, 2, group))
    qkv = torch.cat([part.flatten(0, 1) for part in (query, key, value)])
    return qkv, z.flatten(0, 1), ba[:, 0].flatten(0, 1), ba[:, 1].flatten(0, 1)
