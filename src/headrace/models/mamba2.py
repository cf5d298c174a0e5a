"""Mamba-2 by itself: every layer is one mixer, and nothing attends.

Source: Mamba2 as in transformers (models/mamba2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from headrace.models.checkpoint import CheckedTensors, Shapes, outer_shapes
from headrace.models.config import (
    MAMBA2,
    ModelConfig,
    attention_free_fields,
    boolean,
    positive,
    require,
    require_free_time_steps,
)
from headrace.models.decoder import DecoderLayer, DecoderWeights, Multipliers
from headrace.models.layers.mamba2_weights import (
    Mamba2Fields,
    load_mamba2,
    mamba2_shapes,
    mamba2_sizes,
)
from headrace.models.mamba2_decoder import Mamba2Decoder
from headrace.models.shard import WHOLE, Counts, Shard, attention_counts, attention_part

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Self

    import torch
    from torch import Tensor

    from headrace.models.config_keys import ConfigObject
    from headrace.models.layers.mamba2 import Mamba2Sizes

EMBEDDINGS = ("backbone.embeddings.weight", "backbone.embedding.weight")
"""Names of the embedding, today's and that of the first published files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(ModelConfig):
    """A Mamba-2 text model.

    Attributes:
        mamba: Sizes of the layers.
        has_conv_bias: Whether their convolutions have a bias.
        residual_in_float32: Whether what the layers add to is kept in float32.
    """

    WITHOUT_EFFECT: ClassVar = frozenset({
        # Into how many tokens the reference cuts a scan.
        "chunk_size",
        # Published files say true where the reference gates first, whatever they say.
        "norm_before_gate",
        # In a training run alone.
        "time_step_rank", "time_step_min", "time_step_max", "time_step_floor",
        "rescale_prenorm_residual",
    })  # fmt: skip

    mamba: Mamba2Sizes
    has_conv_bias: bool
    residual_in_float32: bool

    @property
    def counts(self) -> Counts:
        """Heads, groups and inner widths; see `ModelConfig`."""
        return attention_counts(self).with_divided(**self.mamba.counts)

    def part(self, size: int) -> Self:
        """Return a rank's sizes; see `ModelConfig`."""
        return replace(
            attention_part(self, size),
            mamba=self.mamba.part(size),
        )

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> Mamba2Config:
        """Parse a `config.json`; see `ModelConfig.from_dict`.

        Args:
            raw: Contents of the file.
            architecture: Class name.

        Returns:
            The validated config.
        """
        require(raw, "hidden_act", ["silu", "swish"])
        require(raw, "use_bias", [False])
        require(raw, "rms_norm", [True])
        require_free_time_steps(raw)
        inner = positive(raw, "expand", 2) * positive(raw, "hidden_size")
        layer_types = (MAMBA2,) * positive(raw, "num_hidden_layers")
        common = attention_free_fields(raw, layer_types, eps=("layer_norm_epsilon", 1e-5))
        return cls(
            **common,
            architecture=architecture,
            model_type="mamba2",
            mamba=mamba2_sizes(
                raw,
                norm_eps=common["rms_norm_eps"],
                inner=("expand times hidden_size", inner),
                fields=_FIELDS,
            ),
            has_conv_bias=boolean(raw, "use_conv_bias", default=True),
            residual_in_float32=boolean(raw, "residual_in_fp32", default=True),
        )


_FIELDS = Mamba2Fields(
    heads=("num_heads", 128),
    head_dim=("head_dim", 64),
    groups=("n_groups", 8),
    state_dim=("state_size", 128),
    taps=("conv_kernel", 4),
)


class Mamba2Model(Mamba2Decoder[Mamba2Config]):
    """A Mamba-2 text model; see `HybridDecoder`."""

    @classmethod
    def from_weights(
        cls,
        config: Mamba2Config,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        state_dtype: str = "float32",
        shard: Shard = WHOLE,
    ) -> Mamba2Model:
        """Build the model from tensors under their checkpoint names.

        Args:
            config: The model's sizes.
            weights: All tensors.
            dtype: Compute dtype.
            state_dtype: Dtype name of the recurrent states.
            shard: Which part of a model it is; sizes and tensors are the part's.

        Returns:
            The model, on the device of the tensors.

        Raises:
            WeightsError: A tensor is missing, unexpected or of the wrong shape.
        """
        source = CheckedTensors(config, cls.expected_tensors(config, weights), weights, dtype)
        joined = DecoderWeights.read(
            config,
            source,
            layers=tuple(
                DecoderLayer(
                    input_norm=source.full(f"backbone.layers.{i}.norm.weight"),
                    mixer=load_mamba2(source, f"backbone.layers.{i}.mixer.", config.mamba),
                )
                for i in range(config.num_layers)
            ),
            final_norm="backbone.norm_f.weight",
            embedding=embedding_name(weights),
        )
        return cls(
            config,
            joined,
            state_dtype,
            Multipliers(),
            residual_in_float32=config.residual_in_float32,
            shard=shard,
        )

    @staticmethod
    def segments(config: Mamba2Config, name: str) -> tuple[int, ...] | None:
        """Return the sizes of the matrices that a tensor holds; see `HybridModel`."""
        return config.mamba.segments(name)

    @staticmethod
    def expected_tensors(config: Mamba2Config, on_disk: Collection[str] = ()) -> Shapes:
        """Return every tensor that a checkpoint must hold; see `HybridDecoder`."""
        shapes = outer_shapes(config, "backbone.norm_f.weight", embedding_name(on_disk))
        width, has_bias = config.hidden_size, config.has_conv_bias
        for i in range(config.num_layers):
            own = f"backbone.layers.{i}."
            shapes[own + "norm.weight"] = (width,)
            shapes |= mamba2_shapes(own + "mixer.", config.mamba, width, has_conv_bias=has_bias)
        return shapes

    @property
    def _sizes(self) -> Mamba2Sizes:
        return self.config.mamba


def embedding_name(on_disk: Collection[str]) -> str:
    """Name of the embedding among the tensors that there are."""
    today, old = EMBEDDINGS
    return old if old in on_disk else today
