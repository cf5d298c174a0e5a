"""LFM2-MoE: LFM2 whose layers, but for the first few, have a mixture of experts.

Source: LFM2-MoE as in transformers (models/lfm2_moe).

The width of an MLP is `intermediate_size` itself, which LFM2 adjusts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.errors import ModelError
from headrace.models.config import boolean, count, experts, number, positive
from headrace.models.layers.moe import MoeWeights, Routing, load_experts
from headrace.models.lfm2 import MLP_NAMES, Lfm2Config, Lfm2Model, lfm2_fields, mlp_shapes

if TYPE_CHECKING:
    from typing import Self

    from headrace.models.checkpoint import CheckedTensors, Shapes
    from headrace.models.config_keys import ConfigObject
    from headrace.models.layers.mlp import MlpWeights
    from headrace.models.shard import Counts

_ROUTING_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config):
    """An LFM2-MoE text model.

    Attributes:
        num_dense_layers: Layers at the beginning that have one MLP.
        num_experts: Experts of the others.
        num_chosen_experts: Experts of each token.
        expert_size: Inner width of an expert.
        has_choice_bias: Whether a bias takes part in the choice of experts.
        routing: How they are weighed.
    """

    num_dense_layers: int
    num_experts: int
    num_chosen_experts: int
    expert_size: int
    has_choice_bias: bool
    routing: Routing

    @property
    def counts(self) -> Counts:
        """Those of `Lfm2Config`, and the experts' width."""
        # A dataclass with slots is another class than the one that a bare super() means.
        whole = super(Lfm2MoeConfig, self).counts
        return whole.with_divided(moe_intermediate_size=self.expert_size)

    def part(self, size: int) -> Self:
        """Return a rank's sizes; see `ModelConfig`."""
        own = super(Lfm2MoeConfig, self).part(size)
        return replace(own, expert_size=self.expert_size // size)

    @classmethod
    def parse(cls, raw: ConfigObject, architecture: str) -> Lfm2MoeConfig:
        """Parse a `config.json`; see `ModelConfig.from_dict`.

        Args:
            raw: Contents of the file.
            architecture: Class name.

        Returns:
            The validated config.
        """
        num_experts, num_chosen = experts(raw, "num_experts", (32, 4))
        if not num_experts:
            raise ModelError(
                "config.json: num_experts is 0; a model without a mixture is model_type lfm2"
            )
        return cls(
            **lfm2_fields(raw),
            architecture=architecture,
            model_type="lfm2_moe",
            intermediate_size=positive(raw, "intermediate_size", 7168),
            num_dense_layers=count(raw, "num_dense_layers", 2),
            num_experts=num_experts,
            num_chosen_experts=num_chosen,
            expert_size=positive(raw, "moe_intermediate_size", 1792),
            has_choice_bias=boolean(raw, "use_expert_bias", default=True),
            routing=Routing(
                scoring="sigmoid",
                is_normalised=boolean(raw, "norm_topk_prob", default=True),
                scale=number(raw, "routed_scaling_factor", 1.0),
                eps=_ROUTING_EPS,
            ),
        )


class Lfm2MoeModel(Lfm2Model):
    """An LFM2-MoE text model; see `HybridDecoder`."""

    @staticmethod
    def _feed_shapes(config: Lfm2Config, i: int) -> Shapes:
        assert isinstance(config, Lfm2MoeConfig)
        if i < config.num_dense_layers:
            return Lfm2Model._feed_shapes(config, i)  # noqa: SLF001 - what it overrides
        width, count = config.hidden_size, config.num_experts
        shapes: Shapes = {"feed_forward.gate.weight": (count, width)}
        if config.has_choice_bias:
            shapes["feed_forward.expert_bias"] = (count,)
        for expert in range(count):
            own = f"feed_forward.experts.{expert}."
            shapes |= mlp_shapes(own, width, config.expert_size)
        return shapes

    @staticmethod
    def _read_feed(config: Lfm2Config, source: CheckedTensors, i: int) -> MlpWeights | MoeWeights:
        assert isinstance(config, Lfm2MoeConfig)
        if i < config.num_dense_layers:
            return Lfm2Model._read_feed(config, source, i)  # noqa: SLF001
        own = f"model.layers.{i}.feed_forward."
        gate_up, down = load_experts(source, own + "experts.", config.num_experts, MLP_NAMES)
        bias = source.full(own + "expert_bias") if config.has_choice_bias else None
        return MoeWeights(
            router=source.matrix(own + "gate.weight"),
            gate_up=gate_up,
            down=down,
            num_chosen=config.num_chosen_experts,
            shared=None,
            shared_gate=None,
            routing=config.routing,
            choice_bias=bias,
        )
