"""What the `config.json` of Qwen3.5 and Qwen3-Next may say, dense or with experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from headrace.errors import ModelError
from headrace.models.config import (
    FULL,
    LINEAR,
    ModelConfig,
    common_fields,
    count,
    experts,
    listed_layers,
    positive,
    refuse,
    require,
    rope,
)
from headrace.models.config_keys import ConfigObject
from headrace.models.layers.gated_delta_net import DeltaSizes
from headrace.models.shard import Counts, copied_part

if TYPE_CHECKING:
    from typing import Self

DEFAULT_PARTIAL_ROTARY_FACTOR = 0.25
DEFAULT_FULL_ATTENTION_INTERVAL = 4
_DEFAULT_KV_HEADS = {"qwen3_5_text": 4, "qwen3_5": 4}
_DEFAULT_EXPERTS = {
    "qwen3_next": (512, 10),
    "qwen3_5_moe": (256, 8),
    "qwen3_5_moe_text": (256, 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config(ModelConfig):
    """A Qwen3.5 or Qwen3-Next text model.

    Attributes:
        intermediate_size: Width of the MLP, 0 with experts.
        num_experts: Experts of each layer, 0 for a dense model.
        num_chosen_experts: Experts of each token.
        expert_size: Inner width of an expert.
        shared_size: Inner width of the expert that every token goes through.
        conv_kernel: Taps of the causal convolution, W.
        linear_num_key_heads: HK.
        linear_num_value_heads: HV, a multiple of HK.
        linear_key_head_dim: K.
        linear_value_head_dim: V.
    """

    WITHOUT_EFFECT: ClassVar = frozenset({
        # Images and videos, which no prompt here has. Tokens of a text have one position, whichever
        # of its three parts a frequency belongs to.
        "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
        "vision_end_token_id", "rope_parameters.mrope_section", "rope_parameters.mrope_interleaved",
        "rope_scaling.mrope_section", "rope_scaling.mrope_interleaved",
        # See `--state-dtype`.
        "mamba_ssm_dtype",
        # Which layers would have the window that a model that is supported has not.
        "max_window_layers",
    })  # fmt: skip

    intermediate_size: int
    num_experts: int
    num_chosen_experts: int
    expert_size: int
    shared_size: int
    conv_kernel: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> Qwen35Config:
        """Parse a `config.json`; see `ModelConfig.from_dict`.

        Args:
            raw: Contents of the file; a multimodal one holds the text model in `text_config`.
            architecture: Class name.

        Returns:
            The validated config.
        """
        outer_type = raw["model_type"]
        text = _text_config(raw) if outer_type in {"qwen3_5", "qwen3_5_moe"} else raw
        text = text.with_defaults(
            head_dim=256, num_key_value_heads=_DEFAULT_KV_HEADS.get(outer_type, 2)
        )
        _refuse_other_maths(text)
        # A Qwen3-Next is a mixture unless its config says otherwise.
        default = _DEFAULT_EXPERTS.get(outer_type, (0, 0))
        if text.get("num_experts") and not default[0]:
            refuse("num_experts", text["num_experts"], f"0 for model_type {outer_type!r}")
        num_experts, num_chosen = experts(text, "num_experts", default)
        if not num_experts and outer_type.startswith("qwen3_5_moe"):
            refuse("num_experts", num_experts, f"1 or more for model_type {outer_type!r}")
        if num_experts:
            text.leave_out("intermediate_size")
        else:
            text.leave_out("moe_intermediate_size", "shared_expert_intermediate_size")
        rotary_dim, rope_theta = rope(text, default_factor=DEFAULT_PARTIAL_ROTARY_FACTOR)
        common = common_fields(text, _layer_types(text)) | {"num_mtp_layers": _mtp_layers(text)}
        config = cls(
            **common,
            architecture=architecture,
            model_type="qwen3_next" if outer_type == "qwen3_next" else "qwen3_5_text",
            rotary_dim=rotary_dim,
            rope_theta=rope_theta,
            intermediate_size=0 if num_experts else positive(text, "intermediate_size"),
            num_experts=num_experts,
            num_chosen_experts=num_chosen,
            expert_size=positive(text, "moe_intermediate_size", 512) if num_experts else 0,
            shared_size=(
                positive(text, "shared_expert_intermediate_size", 512) if num_experts else 0
            ),
            conv_kernel=positive(text, "linear_conv_kernel_dim"),
            linear_num_key_heads=positive(text, "linear_num_key_heads"),
            linear_num_value_heads=positive(text, "linear_num_value_heads"),
            linear_key_head_dim=positive(text, "linear_key_head_dim"),
            linear_value_head_dim=positive(text, "linear_value_head_dim"),
        )
        _check_sizes(config)
        return config

    @property
    def counts(self) -> Counts:
        """Heads and inner widths; see `ModelConfig`."""
        divided = {
            "num_attention_heads": self.num_attention_heads,
            "linear_num_value_heads": self.linear_num_value_heads,
        }
        copied = {"num_key_value_heads": self.num_kv_heads}
        # Qwen3-Next's projections are grouped by key head, so each goes to one rank.
        of_keys = divided if self.model_type == "qwen3_next" else copied
        of_keys["linear_num_key_heads"] = self.linear_num_key_heads
        if self.num_experts:
            divided["moe_intermediate_size"] = self.expert_size
            divided["shared_expert_intermediate_size"] = self.shared_size
        else:
            divided["intermediate_size"] = self.intermediate_size
        return Counts(divided=divided, copied=copied)

    def part(self, size: int) -> Self:
        """Return a rank's sizes; see `ModelConfig`."""
        return replace(
            self,
            num_shards=size,
            num_attention_heads=self.num_attention_heads // size,
            num_kv_heads=copied_part(self.num_kv_heads, size),
            intermediate_size=self.intermediate_size // size,
            expert_size=self.expert_size // size,
            shared_size=self.shared_size // size,
            linear_num_key_heads=copied_part(self.linear_num_key_heads, size),
            linear_num_value_heads=self.linear_num_value_heads // size,
        )

    @property
    def delta(self) -> DeltaSizes:
        """Sizes of the Gated DeltaNet layers."""
        return DeltaSizes(
            num_key_heads=self.linear_num_key_heads,
            num_value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_kernel=self.conv_kernel,
            norm_eps=self.rms_norm_eps,
        )

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution, F: queries, keys and values of a linear layer."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim


def _text_config(raw: ConfigObject) -> ConfigObject:
    """Return the text model's part of a multimodal file."""
    nested = raw.get("text_config")
    if not isinstance(nested, ConfigObject):
        raise ModelError(f"config.json: model_type {raw['model_type']!r} needs a text_config")
    text_type = raw["model_type"] + "_text"
    if nested.get("model_type") not in {None, text_type}:
        supported = f"{text_type!r} for model_type {raw['model_type']!r}"
        refuse("text_config.model_type", nested["model_type"], supported)
    name = "tie_word_embeddings"
    if name in raw and name in nested and raw[name] != nested[name]:
        # Some readers believe the one, some the other.
        raise ModelError(
            f"config.json: {name} is {raw[name]!r} but text_config.{name} is {nested[name]!r}"
        )
    # The outer object decides only what it alone holds.
    return nested.with_outer(raw, [name, "bos_token_id", "eos_token_id", "dtype", "torch_dtype"])


def _refuse_other_maths(text: ConfigObject) -> None:
    """Raise for every known setting whose value changes the maths and is not implemented."""
    require(text, "hidden_act", ["silu"])
    require(text, "attention_bias", [False])
    require(text, "norm_topk_prob", [True])
    require(text, "decoder_sparse_step", [1])
    require(text, "mlp_only_layers", [None, []])
    require(text, "sliding_window", [None])
    require(text, "use_sliding_window", [False])
    require(text, "attn_output_gate", [True])
    require(text, "mtp_use_dedicated_embeddings", [False])


def _layer_types(text: ConfigObject) -> tuple[str, ...]:
    listed = listed_layers(text, "layer_types", {LINEAR: LINEAR, FULL: FULL})
    if listed is not None:
        text.leave_out("full_attention_interval")
        return listed
    interval = text.get("full_attention_interval", DEFAULT_FULL_ATTENTION_INTERVAL)
    if not isinstance(interval, int) or interval < 1:
        raise ModelError(
            f"config.json: full_attention_interval is {interval!r}, it must be at least 1"
        )
    num_layers = positive(text, "num_hidden_layers")
    return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers))


def _mtp_layers(text: ConfigObject) -> int:
    name = "mtp_num_hidden_layers"
    if text.get(name) is None:
        name = "num_nextn_predict_layers"
    else:
        text.leave_out("num_nextn_predict_layers")
    layers = 0 if text.get(name) is None else count(text, name, 0)
    if layers > 1:
        refuse(name, layers, "0 or 1")
    return layers


def _check_sizes(config: Qwen35Config) -> None:
    if config.linear_num_value_heads % config.linear_num_key_heads:
        raise ModelError(
            f"config.json: linear_num_value_heads {config.linear_num_value_heads} is no multiple "
            f"of linear_num_key_heads {config.linear_num_key_heads}"
        )
    if config.conv_kernel < 2:  # noqa: PLR2004
        refuse("linear_conv_kernel_dim", config.conv_kernel, "2 or more")
