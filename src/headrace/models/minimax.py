"""MiniMax-Text-01 and M1: lightning and softmax attention layers, mixtures of experts.

The sums of a layer go on from what the norms give, with a factor for each side:

    x = norm(h);  h = a * x + b * attention(x)
    x = norm(h);  h = c * x + d * experts(x)

Checkpoints come in two spellings: MiniMax's own (minimax_text_01, minimax_m1) and that of
transformers (minimax).

Source: MiniMax-01, arXiv:2501.08313, and MiniMax as in transformers (models/minimax).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace.errors import ModelError, WeightsError
from headrace.models.checkpoint import CheckedTensors, Shapes, outer_shapes
from headrace.models.config import (
    FULL,
    LIGHTNING,
    LINEAR,
    ModelConfig,
    common_fields,
    experts,
    listed_layers,
    number,
    positive,
    refuse,
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
from headrace.models.layers.attention import attention_shapes, load_attention
from headrace.models.layers.lightning import (
    LightningSizes,
    LightningWeights,
    lightning_attention,
)
from headrace.models.layers.moe import MoeWeights, feed_forward, load_experts

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from headrace.models.batch import StateCache, StateGroupSpec
    from headrace.models.config_keys import ConfigObject
    from headrace.models.layers.attention import PlainAttentionWeights
    from headrace.models.layers.state_plan import StatePlan

_OTHER_NAMES = {
    "layernorm_full_attention_alpha": "full_attn_alpha_factor",
    "layernorm_full_attention_beta": "full_attn_beta_factor",
    "layernorm_linear_attention_alpha": "linear_attn_alpha_factor",
    "layernorm_linear_attention_beta": "linear_attn_beta_factor",
    "layernorm_mlp_alpha": "mlp_alpha_factor",
    "layernorm_mlp_beta": "mlp_beta_factor",
    "num_experts": "num_local_experts",
}
"""Names of MiniMax's own files, and one that transformers takes as well, to those it writes."""

_LIGHTNING_NORM_EPS = 1e-6
"""Of the norm after lightning attention, whatever `rms_norm_eps` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Factors of what a sum goes on from, and of what is added, by kind of block."""

    attention: tuple[float, float]
    lightning: tuple[float, float]
    feed: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxConfig(ModelConfig):
    """A MiniMax text model.

    Attributes:
        lightning: Sizes of the lightning attention layers.
        sums: Factors of the layers' sums.
        sliding_window: Newest positions that softmax attention sees; None for all.
        slopes: Decay rates of the heads of each layer, layers by heads.
        decay_block: Tokens that transformers' stored decay tables are made for.
        num_experts: Experts of each layer.
        num_chosen_experts: Experts of each token.
        expert_size: Inner width of an expert.
    """

    WITHOUT_EFFECT: ClassVar = frozenset({
        # Of an expert for every token, which a model that is supported has not.
        "shared_moe_mode",
        # In a training run alone.
        "router_jitter_noise",
    })

    lightning: LightningSizes
    sums: Sums
    sliding_window: int | None
    slopes: tuple[tuple[float, ...], ...]
    decay_block: int
    num_experts: int
    num_chosen_experts: int
    expert_size: int

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> MiniMaxConfig:
        """Parse a `config.json`; see `ModelConfig.from_dict`.

        Args:
            raw: Contents of the file.
            architecture: Class name.

        Returns:
            The validated config.
        """
        is_own = raw["model_type"] != "minimax"
        raw = raw.under_one_name(_OTHER_NAMES)
        _refuse_other_maths(raw, is_own=is_own)
        raw = raw.with_defaults(num_key_value_heads=8)
        common = common_fields(raw, _layer_types(raw), eps=("rms_norm_eps", 1e-5))
        rotary_dim, rope_theta = rope_whole_heads(raw, default_theta=1e6)
        if is_own and raw.get("rotary_dim") is not None:
            rotary_dim = _rotary_dim(raw, common["head_dim"])
        heads, num_layers = common["num_attention_heads"], len(common["layer_types"])
        window = raw.get("sliding_window")
        num_experts, num_chosen = experts(raw, "num_local_experts", (8, 2))
        return cls(
            **common,
            architecture=architecture,
            model_type=raw["model_type"],
            rotary_dim=rotary_dim,
            rope_theta=rope_theta,
            lightning=LightningSizes(
                num_heads=heads, head_dim=common["head_dim"], norm_eps=_LIGHTNING_NORM_EPS
            ),
            sums=Sums(
                attention=_factors(raw, "full_attn"),
                lightning=_factors(raw, "linear_attn"),
                feed=_factors(raw, "mlp"),
            ),
            sliding_window=None if window is None else positive(raw, "sliding_window"),
            slopes=tuple(_slopes(heads, i, num_layers, is_own=is_own) for i in range(num_layers)),
            decay_block=positive(raw, "block_size", 256),
            num_experts=num_experts,
            num_chosen_experts=num_chosen,
            expert_size=positive(raw, "intermediate_size"),
        )


def _rotary_dim(raw: ConfigObject, head_dim: int) -> int:
    size = positive(raw, "rotary_dim")
    if size % 2 or size > head_dim:
        raise ModelError(
            f"config.json: rotary_dim is {size}, it must be even and at most head_dim {head_dim}"
        )
    return size


def _refuse_other_maths(raw: ConfigObject, *, is_own: bool) -> None:
    """Raise for every known setting whose value changes the maths and is not implemented."""
    require(raw, "hidden_act", ["silu"])
    require(raw, "attention_bias", [False])
    require(raw, "shared_intermediate_size", [None, 0, []])
    if not raw.get("num_local_experts", 8):
        refuse("num_local_experts", raw["num_local_experts"], "1 or more")
    if is_own:
        # Sums that go on from before the norm are the default of MiniMax's own code.
        require(raw.with_defaults(postnorm=False), "postnorm", [True])
    heads = positive(raw, "num_attention_heads")
    if heads & (heads - 1):
        # Readers disagree on the decay rates of other numbers.
        refuse("num_attention_heads", heads, "a power of 2")


def _layer_types(raw: ConfigObject) -> tuple[str, ...]:
    own = listed_layers(raw, "attn_type_list", {0: LIGHTNING, 1: FULL})
    later = listed_layers(raw, "layer_types", {LINEAR: LIGHTNING, FULL: FULL})
    if own and later and own != later:
        refuse("layer_types", raw["layer_types"], "what attn_type_list says")
    if own or later:
        return own or later or ()
    num_layers = positive(raw, "num_hidden_layers")
    return tuple(LIGHTNING if i % 2 else FULL for i in range(num_layers))


def _factors(raw: ConfigObject, block: str) -> tuple[float, float]:
    """Read the factors of both sides of a sum."""
    alpha, beta = (number(raw, f"{block}_{side}_factor", 1.0) for side in ("alpha", "beta"))
    return alpha, beta


def _slopes(heads: int, layer: int, num_layers: int, *, is_own: bool) -> tuple[float, ...]:
    """Decay rates of a layer's heads, slower in later layers."""
    last = num_layers - 1 + (0.0 if is_own and num_layers > 1 else 1e-5)
    factor = 1.0 - layer / last + 1e-5
    return tuple(2.0 ** (-8.0 * (head + 1) / heads) * factor for head in range(heads))


class MiniMaxModel(HybridDecoder[MiniMaxConfig]):
    """A MiniMax text model; see `HybridDecoder`."""

    @classmethod
    def from_weights(
        cls,
        config: MiniMaxConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        state_dtype: str = "float32",
    ) -> MiniMaxModel:
        """Build the model from tensors under their checkpoint names.

        Args:
            config: The model's sizes.
            weights: All tensors.
            dtype: Compute dtype.
            state_dtype: Dtype name of the recurrent states.

        Returns:
            The model, on the device of the tensors.

        Raises:
            WeightsError: A tensor is missing, unexpected or of the wrong shape, or stored decay
                rates are not those that config.json means.
        """
        source = CheckedTensors(config, cls.expected_tensors(config, weights), weights, dtype)
        joined = DecoderWeights.read(
            config,
            source,
            layers=tuple(_layer(config, source, i) for i in range(config.num_layers)),
            final_norm="model.norm.weight",
        )
        return cls(config, joined, state_dtype, Multipliers())

    @staticmethod
    def expected_tensors(config: MiniMaxConfig, on_disk: Collection[str] = ()) -> Shapes:
        """Return every tensor that a checkpoint must hold; see `HybridDecoder`."""
        shapes = outer_shapes(config, "model.norm.weight")
        width, inner, size = config.hidden_size, config.lightning.inner, config.expert_size
        heads, block = config.num_attention_heads, config.decay_block
        for i, kind in enumerate(config.layer_types):
            prefix = f"model.layers.{i}."
            own = prefix + "self_attn."
            if kind == FULL:
                shapes |= attention_shapes(own, config)
            else:
                shapes |= {
                    own + "qkv_proj.weight": (3 * inner, width),
                    own + "output_gate.weight": (inner, width),
                    own + "norm.weight": (inner,),
                    own + "out_proj.weight": (width, inner),
                }
                # What transformers stores beside the weights follows from config.json.
                tables = {
                    own + "slope_rate": (heads, 1, 1),
                    own + "query_decay": (heads, block, 1),
                    own + "key_decay": (heads, block, 1),
                    own + "diagonal_decay": (1, heads, block, block),
                }
                shapes |= {name: shape for name, shape in tables.items() if name in on_disk}
            shapes |= {
                prefix + "input_layernorm.weight": (width,),
                prefix + "post_attention_layernorm.weight": (width,),
                prefix + "block_sparse_moe.gate.weight": (config.num_experts, width),
            }
            for expert in range(config.num_experts):
                own = f"{prefix}block_sparse_moe.experts.{expert}."
                shapes |= {own + f"{name}.weight": (size, width) for name in ("w1", "w3")}
                shapes[own + "w2.weight"] = (width, size)
        return shapes

    def state_groups(self, max_draft_tokens: int) -> tuple[StateGroupSpec, ...]:
        """Describe the state pools: one group, all lightning attention layers."""
        del max_draft_tokens  # there are no windows
        layers = self.config.linear_layers
        return (self.config.lightning.state_group(layers, self._state_dtype),)

    @property
    def _conv_kernel(self) -> int:
        return 1

    @property
    def _window(self) -> int | None:
        return self.config.sliding_window

    def _run_layer(self, i: int, layer: DecoderLayer, hidden: Tensor, step: DecoderStep) -> Tensor:
        sums = self.config.sums
        is_full = self.config.layer_types[i] == FULL
        keep, add = sums.attention if is_full else sums.lightning
        x = self._norm(hidden, layer.input_norm, step.kernels)
        hidden = x * keep + self._run_mixer(i, layer, x, step) * add
        assert layer.feed_norm is not None
        x = self._norm(hidden, layer.feed_norm, step.kernels)
        keep, add = sums.feed
        return x * keep + self._feed(x, layer.feed_forward, step) * add

    def _mix(
        self,
        normed: Tensor,
        weights: LightningWeights,
        cache: StateCache,
        index: int,
        plan: StatePlan,
    ) -> Tensor:
        sizes = self.config.lightning
        return lightning_attention(normed, weights, sizes, cache=cache, index=index, plan=plan)

    def _feed(self, normed: Tensor, weights: MoeWeights, step: DecoderStep) -> Tensor:
        return feed_forward(normed, weights, step.kernels, step.slots)


def _layer(config: MiniMaxConfig, source: CheckedTensors, i: int) -> DecoderLayer:
    prefix = f"model.layers.{i}."
    mixer: PlainAttentionWeights | LightningWeights
    if config.layer_types[i] == FULL:
        mixer = load_attention(source, prefix + "self_attn.")
    else:
        mixer = _lightning(config, source, prefix + "self_attn.", config.slopes[i])
    own = prefix + "block_sparse_moe."
    experts = load_experts(source, own + "experts.", config.num_experts, ("w1", "w3", "w2"))
    return DecoderLayer(
        input_norm=source.full(prefix + "input_layernorm.weight"),
        mixer=mixer,
        feed_norm=source.full(prefix + "post_attention_layernorm.weight"),
        feed_forward=MoeWeights(
            router=source.matrix(own + "gate.weight"),
            gate_up=experts[0],
            down=experts[1],
            num_chosen=config.num_chosen_experts,
            shared=None,
            shared_gate=None,
        ),
    )


def _lightning(
    config: MiniMaxConfig, source: CheckedTensors, prefix: str, slopes: tuple[float, ...]
) -> LightningWeights:
    heads, dim = config.num_attention_heads, config.head_dim
    # qkv_proj holds query, key and value of each head in turn.
    qkv = source.matrix(prefix + "qkv_proj.weight").view(heads, 3, dim, -1).transpose(0, 1)
    gate = source.matrix(prefix + "output_gate.weight")
    rates = torch.tensor(slopes, dtype=torch.float32, device=gate.device)
    if source.has(prefix + "slope_rate"):
        stored = source.full(prefix + "slope_rate").view(heads)
        # As close as bfloat16 can be.
        if not torch.allclose(stored, rates, rtol=2**-7, atol=0.0):
            raise WeightsError(
                f"tensor {prefix + 'slope_rate'!r} holds other decay rates than "
                f"{heads} heads in {config.num_layers} layers have; config.json and the weight "
                "files do not belong together"
            )
    return LightningWeights(
        in_proj=torch.cat((qkv.reshape(3 * heads * dim, -1), gate)),
        log_decay=-rates,
        norm=source.full(prefix + "norm.weight"),
        out_proj=source.matrix(prefix + "out_proj.weight"),
    )
