"""Zamba2: Mamba-2 layers, and a few attention blocks that many of them share in turn.

    h = h + mamba(norm(h))                                              a plain layer
    h = h + mamba(norm(h + linear(mlp(norm(attend(norm([h ; e])))))))   a hybrid layer

e are the embedded tokens, so a block is twice as wide at its entry. Hybrid layer j uses block
j mod `num_mem_blocks`, with low-rank adapters of its own beside the block's projections, and has
keys and values of its own. Scores are scaled by (D/2)^-1/2. Time steps are not clamped, as in the
published inference code (transformers clamps those of prompts from below, at `time_step_min`, which
otherwise only initialises a training run).

Source: Zamba2 as in transformers (models/zamba2), arXiv:2411.15242.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace.errors import ModelError, WeightsError
from headrace.models.checkpoint import CheckedTensors, Shapes, outer_shapes
from headrace.models.config import (
    MAMBA2,
    MAMBA2_AND_ATTENTION,
    ROPE_KEYS,
    ModelConfig,
    boolean,
    common_fields,
    listed_layers,
    positive,
    refuse,
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
    Mamba2Fields,
    expanded,
    load_mamba2,
    mamba2_shapes,
    mamba2_sizes,
)
from headrace.models.mamba2_decoder import Mamba2Decoder
from headrace.ops.activations import gelu_mul
from headrace.ops.linear import linear

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from headrace.models.config_keys import ConfigObject
    from headrace.models.layers.mamba2 import Mamba2Sizes, Mamba2Weights

_KINDS = {
    "mamba": MAMBA2,
    "linear_attention": MAMBA2,
    "hybrid": MAMBA2_AND_ATTENTION,
}
_FIELDS = Mamba2Fields(
    heads=("n_mamba_heads", 8),
    head_dim=("mamba_headdim", None),
    groups=("mamba_ngroups", 1),
    state_dim=("mamba_d_state", 64),
)
_OTHER_NAMES = {
    "attention_head_dim": "head_dim",
    "conv_dimension": "mamba_d_conv",
    "expansion_factor": "mamba_expand",
    "ffn_hidden_size": "intermediate_size",
    "layer_types": "layers_block_type",
    "lora_rank": "adapter_rank",
    "state_size": "mamba_d_state",
    "use_shared_attention_lora": "use_shared_attention_adapter",
}
"""Names that published files use beside or in the place of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zamba2Config(ModelConfig):
    """A Zamba2 text model.

    Attributes:
        mamba: Sizes of the Mamba-2 layers.
        intermediate_size: Inner width of the shared blocks' MLPs.
        num_blocks: Shared blocks.
        adapter_rank: Columns of an adapter, r.
        has_attention_adapters: Whether queries, keys and values have adapters, as MLPs always do.
    """

    WITHOUT_EFFECT: ClassVar = frozenset({
        # Into how many tokens the reference cuts a scan, and what computes it.
        "chunk_size", "use_mamba_kernels", "use_mem_eff_path",
        # No reference reads them; they follow from the width and the heads.
        "kv_channels", "num_query_groups",
        # Of how many tokens a call of the reference returns logits.
        "num_logits_to_keep",
        # In a training run alone; of the first see above.
        "time_step_min", "time_step_max", "time_step_floor",
    })  # fmt: skip

    mamba: Mamba2Sizes
    intermediate_size: int
    num_blocks: int
    adapter_rank: int
    has_attention_adapters: bool

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> Zamba2Config:
        """Parse a `config.json`; see `ModelConfig.from_dict`.

        Args:
            raw: Contents of the file.
            architecture: Class name.

        Returns:
            The validated config.
        """
        raw = raw.under_one_name(_OTHER_NAMES)
        _refuse_other_maths(raw)
        layer_types = listed_layers(raw, "layers_block_type", _KINDS)
        if layer_types is None:
            refuse("layers_block_type", None, "a list")
            raise AssertionError
        width = positive(raw, "hidden_size")
        raw = raw.replaced(head_dim=_head_dim(raw, width))
        common = common_fields(raw, layer_types, eps=("rms_norm_eps", 1e-5))
        common |= {"tie_word_embeddings": boolean(raw, "tie_word_embeddings", default=True)}
        rotary_dim, rope_theta = 0, 1e4
        if boolean(raw, "use_mem_rope"):
            rotary_dim, rope_theta = rope_whole_heads(raw)
        else:
            raw.leave_out(*ROPE_KEYS)
        hybrid = [i for i, kind in enumerate(layer_types) if kind == MAMBA2_AND_ATTENTION]
        if raw.get("hybrid_layer_ids") not in (None, hybrid):
            raise ModelError(
                f"config.json: hybrid_layer_ids is {raw['hybrid_layer_ids']!r} but "
                f"layers_block_type says {hybrid}"
            )
        has_adapters = boolean(raw, "use_shared_attention_adapter")
        if has_adapters and common["num_kv_heads"] != common["num_attention_heads"]:
            refuse(
                "num_key_value_heads", common["num_kv_heads"], "num_attention_heads with adapters"
            )
        return cls(
            **common,
            architecture=architecture,
            model_type="zamba2",
            rotary_dim=rotary_dim,
            rope_theta=rope_theta,
            mamba=mamba2_sizes(raw, norm_eps=1e-5, inner=expanded(raw), fields=_FIELDS),
            intermediate_size=positive(raw, "intermediate_size", 4 * width),
            num_blocks=positive(raw, "num_mem_blocks", 1),
            adapter_rank=positive(raw, "adapter_rank", 128),
            has_attention_adapters=has_adapters,
        )

    @property
    def block_homes(self) -> tuple[int, ...]:
        """Layers under whose names the shared blocks are kept: the first with attention."""
        return self.attention_layers[: self.num_blocks]


def _refuse_other_maths(raw: ConfigObject) -> None:
    """Raise for every known setting whose value changes the maths and is not implemented."""
    require(raw, "hidden_act", ["gelu"])
    require(raw, "add_bias_linear", [False])
    require(raw, "use_conv_bias", [True])
    require(raw, "use_long_context", [False])
    require(raw, "sliding_window", [None])
    require(raw, "ft_lora", [False])
    for name in ("gated_linear_unit", "use_shared_block_lora", "use_shared_mlp_lora"):
        require(raw, name, [True])
    require_free_time_steps(raw)


def _head_dim(raw: ConfigObject, width: int) -> int:
    """Size of a head of the shared attention, whose input is twice as wide as the model."""
    heads = positive(raw, "num_attention_heads")
    if 2 * width % heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} does not divide 2 * hidden_size {2 * width}"
        )
    require(raw, "head_dim", [None, 2 * width // heads])
    require(raw, "attention_hidden_size", [2 * width])
    return 2 * width // heads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedMlp:
    """A shared block's MLP with one layer's adapter.

    Attributes:
        gate_up: [2I, C].
        adapter: Beside gate_up: [r, C] and [2I, r].
        down: [C, I].
    """

    gate_up: Tensor
    adapter: tuple[Tensor, Tensor]
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedBlock:
    """A shared block as one hybrid layer uses it.

    Attributes:
        input_norm: [2C] f32.
        attention: Its in_proj takes 2C columns.
        feed_norm: [C] f32.
        feed_forward: The MLP.
        out_proj: The layer's own projection of what the block gives, [C, C].
    """

    input_norm: Tensor
    attention: PlainAttentionWeights
    feed_norm: Tensor
    feed_forward: SharedMlp
    out_proj: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ZambaLayer:
    """One layer: input_norm [C] f32, the recurrent mixer, and a shared block in hybrid layers."""

    input_norm: Tensor
    mamba: Mamba2Weights
    shared: SharedBlock | None


class Zamba2Model(Mamba2Decoder[Zamba2Config]):
    """A Zamba2 text model; see `HybridDecoder`."""

    @classmethod
    def from_weights(
        cls,
        config: Zamba2Config,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        state_dtype: str = "float32",
    ) -> Zamba2Model:
        """Build the model from tensors under their checkpoint names.

        Args:
            config: The model's sizes.
            weights: All tensors; shared blocks may be repeated at every layer that uses them.
            dtype: Compute dtype.
            state_dtype: Dtype name of the recurrent states.

        Returns:
            The model, on the device of the tensors.

        Raises:
            WeightsError: A tensor is missing, unexpected or of the wrong shape, or a repeated block
                differs from its first copy.
        """
        source = CheckedTensors(config, cls.expected_tensors(config, weights), weights, dtype)
        _check_copies(config, source)
        blocks = [_Block.load(source, f"model.layers.{home}.") for home in config.block_homes]
        layers = []
        for i in range(config.num_layers):
            prefix, shared = f"model.layers.{i}.", None
            if i in config.attention_layers:
                place = config.attention_layers.index(i)
                out_proj = source.matrix(prefix + "linear.weight")
                shared = blocks[place % config.num_blocks].with_adapters(config, place, out_proj)
                prefix += "mamba_decoder."
            layers.append(
                ZambaLayer(
                    input_norm=source.full(prefix + "input_layernorm.weight"),
                    mamba=load_mamba2(source, prefix + "mamba.", config.mamba),
                    shared=shared,
                )
            )
        joined = DecoderWeights.read(
            config, source, layers=tuple(layers), final_norm="model.final_layernorm.weight"
        )
        return cls(config, joined, state_dtype, Multipliers(query=2.0**0.5))

    @staticmethod
    def expected_tensors(config: Zamba2Config, on_disk: Collection[str] = ()) -> Shapes:
        """Return every tensor that a checkpoint must hold; see `HybridDecoder`."""
        shapes = outer_shapes(config, "model.final_layernorm.weight")
        width = config.hidden_size
        for i in range(config.num_layers):
            prefix = f"model.layers.{i}."
            if i in config.attention_layers:
                shapes[prefix + "linear.weight"] = (width, width)
                if i in config.block_homes or prefix + _MARK in on_disk:
                    shapes |= _block_shapes(config, i)
                prefix += "mamba_decoder."
            shapes[prefix + "input_layernorm.weight"] = (width,)
            shapes |= mamba2_shapes(prefix + "mamba.", config.mamba, width, has_conv_bias=True)
        return shapes

    @property
    def _sizes(self) -> Mamba2Sizes:
        return self.config.mamba

    def _run_layer(self, i: int, layer: ZambaLayer, hidden: Tensor, step: DecoderStep) -> Tensor:
        inputs = hidden
        if layer.shared is not None:
            block = layer.shared
            joined = torch.cat((hidden, step.embedded), -1)
            normed = self._norm(joined, block.input_norm, step.kernels)
            out = self._run_attention(self._kv_places[i], block.attention, normed, step)
            normed = self._norm(out, block.feed_norm, step.kernels)
            out = _shared_mlp(normed, block.feed_forward)
            inputs = hidden + linear(out, block.out_proj)
        normed = self._norm(inputs, layer.input_norm, step.kernels)
        return hidden + self._run_recurrent(i, layer.mamba, normed, step)


def _shared_mlp(x: Tensor, weights: SharedMlp) -> Tensor:
    narrow, wide = weights.adapter
    gate_up = linear(x, weights.gate_up) + linear(linear(x, narrow), wide)
    return linear(gelu_mul(gate_up), weights.down)


_MARK = "shared_transformer.input_layernorm.weight"
"""A tensor that is there wherever a shared block is repeated."""


def _adapter_shapes(prefix: str, width: int, rank: int, out: int) -> Shapes:
    return {prefix + "0.weight": (rank, width), prefix + "1.weight": (out, rank)}


def _block_shapes(config: Zamba2Config, layer: int) -> Shapes:
    """List the tensors of the block that a layer shares, with the adapters of all its users."""
    width, inner, rank = config.hidden_size, config.intermediate_size, config.adapter_rank
    own = f"model.layers.{layer}.shared_transformer."
    feed = own + "feed_forward."
    shapes: Shapes = {
        own + "input_layernorm.weight": (2 * width,),
        own + "pre_ff_layernorm.weight": (width,),
        feed + "gate_up_proj.weight": (2 * inner, width),
        feed + "down_proj.weight": (width, inner),
    }
    shapes |= attention_shapes(own + "self_attn.", config, 2 * width)
    first = config.attention_layers.index(layer) % config.num_blocks
    for user in range(first, len(config.attention_layers), config.num_blocks):
        adapter = f"{feed}gate_up_proj_adapter_list.{user}."
        shapes |= _adapter_shapes(adapter, width, rank, 2 * inner)
        if config.has_attention_adapters:
            for name in "qkv":
                adapter = f"{own}self_attn.linear_{name}_adapter_list.{user}."
                shapes |= _adapter_shapes(adapter, 2 * width, rank, 2 * width)
    return shapes


def _check_copies(config: Zamba2Config, source: CheckedTensors) -> None:
    """Raise if a block that is repeated differs from the one that is used."""
    for place, layer in enumerate(config.attention_layers):
        home = config.block_homes[place % config.num_blocks]
        if layer == home or not source.has(f"model.layers.{layer}.{_MARK}"):
            continue
        for name in _block_shapes(config, layer):
            first = name.replace(f".{layer}.", f".{home}.", 1)
            if not torch.equal(source.full(name), source.full(first)):
                raise WeightsError(f"tensor {name!r} differs from {first!r}, whose copy it must be")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """A shared block without adapters, and where to find those."""

    source: CheckedTensors
    prefix: str
    attention: PlainAttentionWeights
    input_norm: Tensor
    feed_norm: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def load(cls, source: CheckedTensors, prefix: str) -> _Block:
        own = prefix + "shared_transformer."
        return cls(
            source=source,
            prefix=own,
            attention=load_attention(source, own + "self_attn."),
            input_norm=source.full(own + "input_layernorm.weight"),
            feed_norm=source.full(own + "pre_ff_layernorm.weight"),
            gate_up=source.matrix(own + "feed_forward.gate_up_proj.weight"),
            down=source.matrix(own + "feed_forward.down_proj.weight"),
        )

    def with_adapters(self, config: Zamba2Config, place: int, out_proj: Tensor) -> SharedBlock:
        """Return the block as the hybrid layer at a place among them uses it."""
        attention = self.attention
        if config.has_attention_adapters:
            own = [f"{self.prefix}self_attn.linear_{name}_adapter_list.{place}." for name in "qkv"]
            attention = PlainAttentionWeights(
                in_proj=attention.in_proj,
                head_scale=None,
                out_proj=attention.out_proj,
                adapter=(
                    self.source.matrix(*(name + "0.weight" for name in own)),
                    tuple(self.source.matrix(name + "1.weight") for name in own),
                ),
            )
        feed = f"{self.prefix}feed_forward.gate_up_proj_adapter_list.{place}."
        return SharedBlock(
            input_norm=self.input_norm,
            attention=attention,
            feed_norm=self.feed_norm,
            feed_forward=SharedMlp(
                gate_up=self.gate_up,
                adapter=(
                    self.source.matrix(feed + "0.weight"),
                    self.source.matrix(feed + "1.weight"),
                ),
                down=self.down,
            ),
            out_proj=out_proj,
        )
