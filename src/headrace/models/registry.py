"""Model types of config.json, and the configs and classes that they mean."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, UnsupportedModelError
from headrace.models.bamba import BambaConfig, BambaModel
from headrace.models.config import ModelConfig, refuse
from headrace.models.falcon_h1 import FalconH1Config, FalconH1Model
from headrace.models.granite import GraniteConfig, GraniteModel
from headrace.models.jamba import JambaConfig, JambaModel
from headrace.models.kimi_linear import KimiLinearConfig, KimiLinearModel
from headrace.models.lfm2 import Lfm2Config, Lfm2Model
from headrace.models.lfm2_moe import Lfm2MoeConfig, Lfm2MoeModel
from headrace.models.mamba import MambaConfig, MambaModel
from headrace.models.mamba2 import Mamba2Config, Mamba2Model
from headrace.models.minimax import MiniMaxConfig, MiniMaxModel
from headrace.models.nemotron_h import NemotronHConfig, NemotronHModel
from headrace.models.olmo_hybrid import OlmoHybridConfig, OlmoHybridModel
from headrace.models.qwen3_5 import Qwen35Model
from headrace.models.qwen3_5_config import Qwen35Config
from headrace.models.zamba2 import Zamba2Config, Zamba2Model
from headrace.weights.cuts import cuts

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from headrace.models.config_keys import ConfigObject
    from headrace.models.shard import Shard
    from headrace.weights.cuts import Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that share a config and a class.

    Attributes:
        config_class: Its `parse` reads config.json.
        model_class: What runs it.
        architectures: Names that a config.json of each model type may give, the usual one first.
    """

    config_class: Any
    model_class: Any
    architectures: dict[str, tuple[str, ...]]

    def parse(self, raw: ConfigObject) -> ModelConfig:
        """Parse a config.json whose model type belongs to this family.

        Raises:
            UnsupportedModelError: It names an architecture that is not one of its model type: two
                readers would run two different models.
            ModelError: See `ModelConfig.from_dict`.
        """
        config: ModelConfig = self.config_class.parse(raw, self._architecture(raw))
        return config

    def _architecture(self, raw: ConfigObject) -> str:
        names = self.architectures[raw["model_type"]]
        given = raw.get("architectures")
        if given is None or given == []:
            return names[0]
        if not isinstance(given, list) or given[0] not in names:
            one_of = " or ".join(repr([name]) for name in names)
            refuse("architectures", given, f"{one_of} for model_type {raw['model_type']!r}")
        return str(given[0])


FAMILIES = (
    Family(
        config_class=Qwen35Config,
        model_class=Qwen35Model,
        architectures={
            # The text model is the same with images beside it and without.
            "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
            "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
            "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
            "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
            "qwen3_next": ("Qwen3NextForCausalLM",),
        },
    ),
    Family(
        config_class=GraniteConfig,
        model_class=GraniteModel,
        architectures={"granitemoehybrid": ("GraniteMoeHybridForCausalLM",)},
    ),
    Family(
        config_class=BambaConfig,
        model_class=BambaModel,
        architectures={"bamba": ("BambaForCausalLM",)},
    ),
    Family(
        config_class=FalconH1Config,
        model_class=FalconH1Model,
        architectures={"falcon_h1": ("FalconH1ForCausalLM",)},
    ),
    Family(
        config_class=Lfm2Config,
        model_class=Lfm2Model,
        architectures={"lfm2": ("Lfm2ForCausalLM",)},
    ),
    Family(
        config_class=NemotronHConfig,
        model_class=NemotronHModel,
        architectures={"nemotron_h": ("NemotronHForCausalLM",)},
    ),
    Family(
        config_class=Lfm2MoeConfig,
        model_class=Lfm2MoeModel,
        architectures={"lfm2_moe": ("Lfm2MoeForCausalLM",)},
    ),
    Family(
        config_class=JambaConfig,
        model_class=JambaModel,
        architectures={"jamba": ("JambaForCausalLM",)},
    ),
    Family(
        config_class=Zamba2Config,
        model_class=Zamba2Model,
        architectures={"zamba2": ("Zamba2ForCausalLM",)},
    ),
    Family(
        config_class=Mamba2Config,
        model_class=Mamba2Model,
        architectures={"mamba2": ("Mamba2ForCausalLM",)},
    ),
    Family(
        config_class=MambaConfig,
        model_class=MambaModel,
        architectures={"mamba": ("MambaForCausalLM",), "falcon_mamba": ("FalconMambaForCausalLM",)},
    ),
    Family(
        config_class=KimiLinearConfig,
        model_class=KimiLinearModel,
        architectures={"kimi_linear": ("KimiLinearForCausalLM",)},
    ),
    Family(
        config_class=MiniMaxConfig,
        model_class=MiniMaxModel,
        architectures={
            "minimax": ("MiniMaxForCausalLM",),
            "minimax_text_01": ("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
            "minimax_m1": ("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM"),
        },
    ),
    Family(
        config_class=OlmoHybridConfig,
        model_class=OlmoHybridModel,
        architectures={"olmo_hybrid": ("OlmoHybridForCausalLM",)},
    ),
)

def family(raw: Mapping[str, Any]) -> Family:
    """Find the family of a config.json.

    Args:
        raw: The parsed JSON object.

    Returns:
        The family.

    Raises:
        UnsupportedModelError: No family has this model type.
    """
    model_type = raw.get("model_type")
    for found in FAMILIES:
        if model_type in found.architectures:
            return found
    known = sorted(name for each in FAMILIES for name in each.architectures)
    raise UnsupportedModelError(
        f"config.json: model_type is {model_type!r}; supported are {', '.join(known)}"
    )


def model_class(config: ModelConfig) -> Any:  # noqa: ANN401 - a class that makes a HybridModel
    """Find the class for a config.

    Args:
        config: What `ModelConfig.from_dict` made.

    Returns:
        The model class of the family that the config is of: `from_weights(config, weights, dtype,
        state_dtype)` makes a `headrace.models.model.HybridModel`, `expected_tensors(config)` lists
        its checkpoint.
    """
    return next(each.model_class for each in FAMILIES if each.config_class is type(config))


def check_parts(config: ModelConfig, size: int) -> None:
    """Refuse a number of ranks that cannot share a model.

    Args:
        config: The whole model.
        size: Ranks.

    Raises:
        ConfigError: Its layers are not divided at all yet, or not into so many parts.
    """
    if size == 1:
        return
    if config.counts is None:
        families = ", ".join(_divided_architectures())
        raise ConfigError(
            f"tensor_parallel_size is {size} but {config.architecture} is not divided among "
            f"devices yet; use 1, or a model of {families}"
        )
    config.counts.check(size)


def _divided_architectures() -> list[str]:
    """Architectures whose configs say what ranks have parts of."""
    return sorted(
        name
        for each in FAMILIES
        if each.config_class.counts is not ModelConfig.counts
        for names in each.architectures.values()
        for name in names[:1]
    )


def tensor_cuts(
    config: ModelConfig, shard: Shard, on_disk: Collection[str] = ()
) -> dict[str, Cut]:
    """Find what a rank reads of a checkpoint.

    Args:
        config: The whole model.
        shard: The rank's part.
        on_disk: Names that there are.

    Returns:
        Cuts by name, of the tensors that the rank does not read whole.
    """
    if shard.size == 1:
        return {}
    cls, own = model_class(config), config.part(shard.size)
    return cuts(
        cls.expected_tensors(config, on_disk),
        cls.expected_tensors(own, on_disk),
        rank=shard.rank,
        size=shard.size,
        segments=(partial(cls.segments, config), partial(cls.segments, own)),
    )
