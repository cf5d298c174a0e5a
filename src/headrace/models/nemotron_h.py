"""Nemotron-H and Nemotron 3: every layer is one mixer: Mamba-2, attention, an MLP or experts.

    h = h + mixer(norm(h))

Attention has no positions of its own; MLP and experts square the positive part in the place of a
gate. Time steps are not clamped, as in the published inference code (transformers clamps those of
prompts from below, at `time_step_min`, which otherwise only initialises a training run).

MTP: the layers `mtp.layers.*` at position p see the hidden state of position p after the last norm,
and the token at p+1; their output gives logits for position p+2 through the shared head:

    x = eh_proj([norm(embed(token[p+1])) ; norm(hidden[p])]);  layers;  norm

For more than one draft they are applied to their own output. Their attention has the last layers of
the KV pools.

Source: Nemotron-H as in transformers (models/nemotron_h), arXiv:2504.03624; MTP as in vLLM
(model_executor/models/nemotron_h_mtp.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace.errors import ModelError
from headrace.models.checkpoint import CheckedTensors, Shapes, outer_shapes
from headrace.models.config import (
    FULL,
    MAMBA2,
    MLP,
    MOE,
    ModelConfig,
    boolean,
    common_fields,
    count,
    experts,
    listed_layers,
    number,
    positive,
    refuse,
    require,
    require_free_time_steps,
)
from headrace.models.decoder import DecoderLayer, DecoderStep, DecoderWeights, Multipliers
from headrace.models.layers.attention import attention_shapes, load_attention
from headrace.models.layers.mamba2_weights import (
    Mamba2Fields,
    load_mamba2,
    mamba2_shapes,
    mamba2_sizes,
)
from headrace.models.layers.mlp import MlpWeights
from headrace.models.layers.moe import MoeWeights, Routing, feed_forward
from headrace.models.mamba2_decoder import Mamba2Decoder
from headrace.models.shard import WHOLE, Counts, Shard, attention_counts, attention_part
from headrace.ops.linear import linear

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Self

    from torch import Tensor

    from headrace.models.batch import Caches, StepBatch
    from headrace.models.config_keys import ConfigObject
    from headrace.models.layers.mamba2 import Mamba2Sizes

_LETTERS = {"M": MAMBA2, "*": FULL, "-": MLP, "E": MOE}
_KINDS = {
    "mamba": MAMBA2,
    "linear_attention": MAMBA2,
    "attention": FULL,
    "full_attention": FULL,
    "mlp": MLP,
    "moe": MOE,
}
_FIELDS = Mamba2Fields(
    heads=("mamba_num_heads", 128),
    head_dim=("mamba_head_dim", 64),
    groups=("n_groups", 8),
    state_dim=("ssm_state_size", 128),
    taps=("conv_kernel", 4),
)
_OF_EXPERTS = (
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size",
    "moe_shared_expert_intermediate_size", "n_group", "topk_group", "norm_topk_prob",
    "routed_scaling_factor",
)  # fmt: skip
"""Settings of layers that a model may have none of."""

_OTHER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_num_groups": "n_groups",
    "mamba_state_dim": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
    "attention_head_dim": "head_dim",
    "layer_types": "layers_block_type",
    "num_local_experts": "n_routed_experts",
    "norm_eps": "layer_norm_epsilon",
    "rms_norm_eps": "layer_norm_epsilon",
}
"""Names that published files use beside or in the place of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(ModelConfig):
    """A Nemotron-H text model.

    Attributes:
        mamba: Sizes of the Mamba-2 layers.
        has_conv_bias: Whether their convolutions have a bias.
        intermediate_size: Inner width of the MLP layers.
        num_experts: Experts of each MoE layer, 0 without such layers.
        num_chosen_experts: Experts of each token.
        expert_size: Inner width of an expert.
        shared_size: Inner width of the MLP beside the experts.
        latent_size: Width in which the experts work, None for the model's.
        routing: How experts are chosen and weighed.
        mtp_pattern: Kind of each layer of the MTP head that the config announces.
        residual_in_float32: Whether what the layers add to is kept in float32.
    """

    WITHOUT_EFFECT: ClassVar = frozenset({
        # No reference reads them: attention has no positions, the inner width is heads times their
        # size, and activations have names of their own.
        "rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor", "expand",
        "mamba_expand", "hidden_act",
        # Into how many tokens the reference cuts a scan, and what computes what.
        "chunk_size", "mamba_chunk_size", "use_mamba_kernels", "moe_shared_expert_overlap",
        # See `--state-dtype`.
        "mamba_ssm_cache_dtype",
        # Of how many tokens a call of the reference returns logits.
        "num_logits_to_keep",
        # In a training run alone; of the first see above.
        "time_step_min", "time_step_max", "time_step_floor", "mamba_dt_min", "mamba_dt_max",
        "mamba_dt_init_floor", "rescale_prenorm_residual",
    })  # fmt: skip

    mamba: Mamba2Sizes
    has_conv_bias: bool
    intermediate_size: int
    num_experts: int
    num_chosen_experts: int
    expert_size: int
    shared_size: int
    latent_size: int | None
    routing: Routing
    mtp_pattern: tuple[str, ...]
    residual_in_float32: bool

    @property
    def counts(self) -> Counts:
        """Heads, groups and inner widths; see `ModelConfig`."""
        return attention_counts(self).with_divided(
            **self.mamba.counts,
            intermediate_size=self.intermediate_size,
            moe_intermediate_size=self.expert_size,
            moe_shared_expert_intermediate_size=self.shared_size,
        )

    def part(self, size: int) -> Self:
        """Return a rank's sizes; see `ModelConfig`."""
        return replace(
            attention_part(self, size),
            mamba=self.mamba.part(size),
            intermediate_size=self.intermediate_size // size,
            expert_size=self.expert_size // size,
            shared_size=self.shared_size // size,
        )

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> NemotronHConfig:
        """Parse a `config.json`; see `ModelConfig.from_dict`.

        Args:
            raw: Contents of the file.
            architecture: Class name.

        Returns:
            The validated config.
        """
        raw = raw.under_one_name(_OTHER_NAMES)
        _refuse_other_maths(raw)
        layer_types = _decoder_layers(raw)
        mtp = _mtp_layers(raw)
        common = common_fields(
            raw.with_defaults(head_dim=128, num_key_value_heads=8),
            layer_types,
            eps=("layer_norm_epsilon", 1e-5),
        )
        common |= {"num_mtp_layers": int(bool(mtp))}
        has_experts = MOE in layer_types + mtp
        num_experts, chosen = experts(raw, "n_routed_experts", (8, 2)) if has_experts else (0, 0)
        latent = raw.get("moe_latent_size")
        if not has_experts:
            raw.leave_out(*_OF_EXPERTS)
        if MLP not in layer_types + mtp:
            raw.leave_out("intermediate_size")
        return cls(
            **common,
            architecture=architecture,
            model_type="nemotron_h",
            rotary_dim=0,
            rope_theta=1e4,
            mamba=mamba2_sizes(
                raw, norm_eps=common["rms_norm_eps"], inner=None, fields=_FIELDS
            ),
            has_conv_bias=boolean(raw, "use_conv_bias", default=True),
            intermediate_size=(
                positive(raw, "intermediate_size", 21504) if MLP in layer_types + mtp else 0
            ),
            num_experts=num_experts,
            num_chosen_experts=chosen,
            expert_size=positive(raw, "moe_intermediate_size", 7688) if has_experts else 0,
            shared_size=(
                positive(raw, "moe_shared_expert_intermediate_size", 7688) if has_experts else 0
            ),
            latent_size=None if latent is None else positive(raw, "moe_latent_size"),
            routing=_routing(raw, num_experts, chosen) if has_experts else Routing(),
            mtp_pattern=mtp,
            residual_in_float32=boolean(raw, "residual_in_fp32"),
        )

    @property
    def mtp_layer_types(self) -> tuple[str, ...]:
        """Kind of each layer of the MTP head, none for a checkpoint without."""
        return self.mtp_pattern if self.num_mtp_layers else ()


def _refuse_other_maths(raw: ConfigObject) -> None:
    """Raise for every known setting whose value changes the maths and is not implemented."""
    require(raw, "mlp_hidden_act", ["relu2"])
    require(raw, "mamba_hidden_act", ["silu"])
    for name in ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"):
        require(raw, name, [False])
    require(raw, "sliding_window", [None])
    require(raw, "n_shared_experts", [1])
    require_free_time_steps(raw)


def _layers(raw: ConfigObject, pattern_name: str, list_name: str) -> tuple[str, ...]:
    """Read layer kinds from a list of words or a pattern of letters, which must agree."""
    letters = raw.get(pattern_name)
    words = raw.get(list_name)
    if letters is None and words is None:
        refuse(pattern_name, None, "a pattern of M, *, - and E")
    for letter in letters or ():
        if letter not in _LETTERS:
            refuse(pattern_name, letter, " and ".join(repr(known) for known in _LETTERS))
    spelled = None if letters is None else tuple(_LETTERS[letter] for letter in letters)
    own = {list_name: words, "num_hidden_layers": len(words or ())}
    listed = None if words is None or words == [] else listed_layers(own, list_name, _KINDS)
    if spelled and listed and spelled != listed:
        raise ModelError(f"config.json: {pattern_name} and {list_name} name different layers")
    return spelled or listed or ()


def _decoder_layers(raw: ConfigObject) -> tuple[str, ...]:
    layers = _layers(raw, "hybrid_override_pattern", "layers_block_type")
    given = raw.get("num_hidden_layers")
    if given is not None and given != len(layers):
        raise ModelError(
            f"config.json: num_hidden_layers is {given!r} but hybrid_override_pattern or "
            f"layers_block_type has {len(layers)} layers"
        )
    return layers


def _mtp_layers(raw: ConfigObject) -> tuple[str, ...]:
    names = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
    number_name = "num_nextn_predict_layers"
    if raw.get(number_name) is None or not count(raw, number_name, 0):
        raw.leave_out(*names)
        return ()
    require(raw, number_name, [1])
    if all(raw.get(name) is None for name in names):
        return FULL, MOE
    layers = _layers(raw, *names)
    if MAMBA2 in layers or not layers:
        used = next(name for name in names if raw.get(name) is not None)
        refuse(used, raw[used], "layers of attention, MLP and experts")
    return layers


def _routing(raw: ConfigObject, num_experts: int, chosen: int) -> Routing:
    groups, kept = positive(raw, "n_group", 1), positive(raw, "topk_group", 1)
    if num_experts % groups or kept > groups or kept * (num_experts // groups) < chosen:
        raise ModelError(
            f"config.json: n_group {groups} and topk_group {kept} do not fit {num_experts} "
            f"experts of which {chosen} are chosen"
        )
    if kept < groups and num_experts // groups < 2:  # noqa: PLR2004
        raise ModelError(f"config.json: n_group {groups} leaves less than 2 experts in each group")
    return Routing(
        scoring="sigmoid",
        is_normalised=boolean(raw, "norm_topk_prob", default=True),
        scale=number(raw, "routed_scaling_factor", 1.0),
        eps=1e-20,
        num_groups=groups,
        num_chosen_groups=kept,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MtpWeights:
    """The MTP head; norms [C] f32, in_proj [C, 2C]."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    in_proj: Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor


class NemotronHModel(Mamba2Decoder[NemotronHConfig]):
    """A Nemotron-H text model; see `HybridDecoder`.

    Args:
        config: The model's sizes.
        weights: Its weights.
        state_dtype: Dtype name of the recurrent states.
        mtp: Its MTP head, if it has one.
        shard: Which part of the model this is; config and weights are the part's.
    """

    def __init__(
        self,
        config: NemotronHConfig,
        weights: DecoderWeights,
        state_dtype: str,
        mtp: MtpWeights | None,
        shard: Shard = WHOLE,
    ) -> None:
        in_float32 = config.residual_in_float32
        super().__init__(
            config, weights, state_dtype, Multipliers(), residual_in_float32=in_float32,
            shard=shard,
        )
        self._mtp = mtp

    @classmethod
    def from_weights(
        cls,
        config: NemotronHConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        state_dtype: str = "float32",
        shard: Shard = WHOLE,
    ) -> NemotronHModel:
        """Build the model from tensors under their checkpoint names.

        Args:
            config: The model's sizes.
            weights: All tensors, under `backbone.` or `model.`; experts each or stacked.
            dtype: Compute dtype.
            state_dtype: Dtype name of the recurrent states.
            shard: Which part of a model it is; sizes and tensors are the part's.

        Returns:
            The model, on the device of the tensors.

        Raises:
            WeightsError: A tensor is missing, unexpected or of the wrong shape.
        """
        source = CheckedTensors(config, cls.expected_tensors(config, weights), weights, dtype)
        root = _root(weights)
        joined = DecoderWeights.read(
            config,
            source,
            layers=tuple(
                _layer(config, source, f"{root}layers.{i}.", kind)
                for i, kind in enumerate(config.layer_types)
            ),
            final_norm=root + "norm_f.weight",
            embedding=root + "embeddings.weight",
        )
        mtp = _load_mtp(config, source) if config.num_mtp_layers else None
        return cls(config, joined, state_dtype, mtp, shard)

    @staticmethod
    def segments(config: NemotronHConfig, name: str) -> tuple[int, ...] | None:
        """Return the sizes of the matrices that a tensor holds; see `HybridModel`."""
        return config.mamba.segments(name)

    @staticmethod
    def expected_tensors(config: NemotronHConfig, on_disk: Collection[str] = ()) -> Shapes:
        """Return every tensor that a checkpoint must hold; see `HybridDecoder`."""
        root, width = _root(on_disk), config.hidden_size
        shapes = outer_shapes(config, root + "norm_f.weight", root + "embeddings.weight")
        for i, kind in enumerate(config.layer_types):
            shapes |= _layer_shapes(config, f"{root}layers.{i}.", kind, on_disk)
        mtp = config.mtp_layer_types
        for i, kind in enumerate(mtp):
            shapes |= _layer_shapes(config, f"mtp.layers.{i}.", kind, on_disk)
        if mtp:
            shapes |= {
                "mtp.layers.0.enorm.weight": (width,),
                "mtp.layers.0.hnorm.weight": (width,),
                "mtp.layers.0.eh_proj.weight": (width, 2 * width),
                f"mtp.layers.{len(mtp) - 1}.final_layernorm.weight": (width,),
            }
        return shapes

    @property
    def _sizes(self) -> Mamba2Sizes:
        return self.config.mamba

    @property
    def num_kv_layers(self) -> int:
        """Layers of the KV pools: attention layers, then those of the MTP head."""
        return len(self.config.attention_layers) + self.config.mtp_layer_types.count(FULL)

    def mtp(
        self, batch: StepBatch, caches: Caches, hidden: Tensor, next_token_ids: Tensor
    ) -> Tensor:
        """Run the MTP head over a step's tokens; writes its layers' keys and values.

        Args:
            batch: The step; its positions are those of `hidden`. `token_ids` and states are not
                used.
            caches: The pools.
            hidden: From `forward` or `mtp`, [T, C].
            next_token_ids: The token after each of the step's tokens, [T] i64.

        Returns:
            Hidden states after the head's norm, [T, C]; `logits` of them predict the token after
            next_token_ids.
        """
        head = self._mtp
        assert head is not None, "this checkpoint has no MTP head"
        kernels = batch.kernels
        embedded = self.shard.embed(self._weights.embedding, next_token_ids)
        step = self._plan(batch, caches, embedded, with_states=False)
        pairs = (embedded, head.embedding_norm), (hidden, head.hidden_norm)
        both = [self._norm(rows, scale, kernels) for rows, scale in pairs]
        x = linear(torch.cat(both, -1), head.in_proj)
        at = len(self.config.attention_layers)
        for kind, layer in zip(self.config.mtp_layer_types, head.layers, strict=True):
            normed = self._norm(x, layer.input_norm, kernels)
            if kind == FULL:
                x = self._add(x, self._run_attention(at, layer.mixer, normed, step))
                at += 1
            else:
                x = self._add(x, feed_forward(normed, layer.mixer, kernels, step.slots))
        return self._norm(x, head.final_norm, kernels)

    def _run_mixer(self, i: int, layer: DecoderLayer, x: Tensor, step: DecoderStep) -> Tensor:
        if self.config.layer_types[i] in (MLP, MOE):
            return feed_forward(x, layer.mixer, step.kernels, step.slots)
        return super()._run_mixer(i, layer, x, step)


def _root(on_disk: Collection[str]) -> str:
    """What the names of the decoder's tensors begin with: as published, or as in transformers."""
    return "model." if "model.embeddings.weight" in on_disk else "backbone."


def _layer_shapes(
    config: NemotronHConfig, prefix: str, kind: str, on_disk: Collection[str]
) -> Shapes:
    width, own = config.hidden_size, prefix + "mixer."
    shapes: Shapes = {prefix + "norm.weight": (width,)}
    if kind == FULL:
        return shapes | attention_shapes(own, config)
    if kind == MAMBA2:
        return shapes | mamba2_shapes(own, config.mamba, width, has_conv_bias=config.has_conv_bias)
    if kind == MLP:
        return shapes | _mlp_shapes(own, width, config.intermediate_size)
    inner, inside = config.expert_size, config.latent_size or width
    shapes |= _mlp_shapes(own + "shared_experts.", width, config.shared_size)
    shapes |= {
        own + "gate.weight": (config.num_experts, width),
        own + "gate.e_score_correction_bias": (config.num_experts,),
    }
    if config.latent_size is not None:
        shapes |= {
            own + "fc1_latent_proj.weight": (inside, width),
            own + "fc2_latent_proj.weight": (width, inside),
        }
    if own + "experts.up_proj" in on_disk:
        shapes[own + "experts.up_proj"] = (config.num_experts, inner, inside)
        shapes[own + "experts.down_proj"] = (config.num_experts, inside, inner)
        return shapes
    for i in range(config.num_experts):
        shapes |= _mlp_shapes(f"{own}experts.{i}.", inside, inner)
    return shapes


def _mlp_shapes(prefix: str, width: int, inner: int) -> Shapes:
    return {prefix + "up_proj.weight": (inner, width), prefix + "down_proj.weight": (width, inner)}


def _layer(config: NemotronHConfig, source: CheckedTensors, prefix: str, kind: str) -> DecoderLayer:
    own = prefix + "mixer."
    mixer: object
    if kind == FULL:
        mixer = load_attention(source, own)
    elif kind == MAMBA2:
        mixer = load_mamba2(source, own, config.mamba)
    elif kind == MLP:
        mixer = _load_mlp(source, own)
    else:
        mixer = _load_experts(config, source, own)
    norm = source.full(prefix + "norm.weight")
    return DecoderLayer(input_norm=norm, mixer=mixer, feed_norm=None, feed_forward=None)


def _load_mlp(source: CheckedTensors, prefix: str) -> MlpWeights:
    return MlpWeights(
        gate_up=source.matrix(prefix + "up_proj.weight"),
        down=source.matrix(prefix + "down_proj.weight"),
        activation="relu2",
    )


def _load_experts(config: NemotronHConfig, source: CheckedTensors, prefix: str) -> MoeWeights:
    latent = None
    if config.latent_size is not None:
        names = (f"{prefix}fc{n}_latent_proj.weight" for n in (1, 2))
        into, out_of = (source.matrix(name) for name in names)
        latent = into, out_of
    return MoeWeights(
        router=source.full(prefix + "gate.weight"),
        gate_up=_stacked(config, source, prefix + "experts.", "up_proj"),
        down=_stacked(config, source, prefix + "experts.", "down_proj"),
        num_chosen=config.num_chosen_experts,
        shared=_load_mlp(source, prefix + "shared_experts."),
        shared_gate=None,
        routing=config.routing,
        choice_bias=source.full(prefix + "gate.e_score_correction_bias"),
        activation="relu2",
        latent=latent,
    )


def _stacked(config: NemotronHConfig, source: CheckedTensors, prefix: str, name: str) -> Tensor:
    """Return one projection of all experts, [E, ..]."""
    if source.has(prefix + name):
        return source.matrix(prefix + name)
    return source.stack(*((f"{prefix}{i}.{name}.weight",) for i in range(config.num_experts)))


def _load_mtp(config: NemotronHConfig, source: CheckedTensors) -> MtpWeights:
    kinds = config.mtp_layer_types
    return MtpWeights(
        embedding_norm=source.full("mtp.layers.0.enorm.weight"),
        hidden_norm=source.full("mtp.layers.0.hnorm.weight"),
        in_proj=source.matrix("mtp.layers.0.eh_proj.weight"),
        layers=tuple(
            _layer(config, source, f"mtp.layers.{i}.", kind) for i, kind in enumerate(kinds)
        ),
        final_norm=source.full(f"mtp.layers.{len(kinds) - 1}.final_layernorm.weight"),
    )
