"""Mamba and FalconMamba: every layer is one Mamba-1 mixer, and nothing attends.

Source: Mamba and FalconMamba as in transformers (models/mamba, models/falcon_mamba).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from headrace.models.checkpoint import CheckedTensors, Shapes, outer_shapes
from headrace.models.config import (
    MAMBA1,
    ModelConfig,
    attention_free_fields,
    boolean,
    conv_taps,
    number,
    positive,
    require,
)
from headrace.models.decoder import ConvolvedDecoder, DecoderLayer, DecoderWeights, Multipliers
from headrace.models.layers.mamba1 import (
    Mamba1Sizes,
    load_mamba1,
    mamba1,
    time_rank,
)
from headrace.models.mamba2 import embedding_name

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from torch import Tensor

    from headrace.models.config_keys import ConfigObject


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(ModelConfig):
    """A Mamba or FalconMamba text model.

    Attributes:
        mamba: Sizes of the layers.
        residual_in_float32: Whether what the layers add to is kept in float32.
    """

    WITHOUT_EFFECT: ClassVar = frozenset({
        # How the reference computes a scan and a norm.
        "use_mambapy", "use_falcon_mambapy", "use_associative_scan", "fused_add_norm",
        # Sizes that the first published files say once more, and what vocab_size was rounded to.
        "d_model", "d_inner", "n_layer", "pad_vocab_size_multiple",
        # In a training run alone.
        "time_step_scale", "time_step_min", "time_step_max", "time_step_floor",
        "time_step_init_scheme", "rescale_prenorm_residual",
    })  # fmt: skip

    mamba: Mamba1Sizes
    residual_in_float32: bool

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> MambaConfig:
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
        require(raw, "ssm_cfg", [None, {}])
        model_type = str(raw["model_type"])
        layer_types = (MAMBA1,) * positive(raw, "num_hidden_layers")
        return cls(
            **attention_free_fields(raw, layer_types, eps=("layer_norm_epsilon", 1e-5))
            | {"tie_word_embeddings": boolean(raw, "tie_word_embeddings", default=True)},
            architecture=architecture,
            model_type=model_type,
            mamba=_sizes(raw, has_norms=model_type == "falcon_mamba"),
            residual_in_float32=boolean(raw, "residual_in_fp32", default=True),
        )


def _sizes(raw: ConfigObject, *, has_norms: bool) -> Mamba1Sizes:
    if raw.get("intermediate_size") is None:
        channels = positive(raw, "expand", 2) * positive(raw, "hidden_size")
    else:
        channels = positive(raw, "intermediate_size")
        # Published files have one that does not fit.
        raw.leave_out("expand")
    return Mamba1Sizes(
        channels=channels,
        state_dim=positive(raw, "state_size", 16),
        time_rank=time_rank(raw, "time_step_rank"),
        conv_kernel=conv_taps(raw, "conv_kernel", 4),
        has_conv_bias=boolean(raw, "use_conv_bias", default=True),
        norm_eps=number(raw, "mixer_rms_eps", 1e-6) if has_norms else None,
    )


class MambaModel(ConvolvedDecoder[MambaConfig]):
    """A Mamba or FalconMamba text model; see `HybridDecoder`."""

    _mixer = staticmethod(mamba1)

    @classmethod
    def from_weights(
        cls,
        config: MambaConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        state_dtype: str = "float32",
    ) -> MambaModel:
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
            layers=tuple(
                DecoderLayer(
                    input_norm=source.full(f"backbone.layers.{i}.norm.weight"),
                    mixer=load_mamba1(source, f"backbone.layers.{i}.mixer.", config.mamba),
                )
                for i in range(config.num_layers)
            ),
            final_norm="backbone.norm_f.weight",
            embedding=embedding_name(weights),
        )
        is_wide = config.residual_in_float32
        return cls(config, joined, state_dtype, Multipliers(), residual_in_float32=is_wide)

    @staticmethod
    def expected_tensors(config: MambaConfig, on_disk: Collection[str] = ()) -> Shapes:
        """Return every tensor that a checkpoint must hold; see `HybridDecoder`."""
        shapes = outer_shapes(config, "backbone.norm_f.weight", embedding_name(on_disk))
        for i in range(config.num_layers):
            own = f"backbone.layers.{i}."
            shapes[own + "norm.weight"] = (config.hidden_size,)
            shapes |= config.mamba.tensor_shapes(own + "mixer.", config.hidden_size)
        return shapes

    @property
    def _sizes(self) -> Mamba1Sizes:
        return self.config.mamba

