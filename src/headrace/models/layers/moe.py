"""Feed-forward blocks: one gated MLP, or a mixture of experts, perhaps with one for all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from headrace.models.layers.mlp import Activation, MlpWeights, activation, mlp
from headrace.models.layers.product import product
from headrace.ops.activations import sigmoid
from headrace.ops.grouped_experts import grouped_experts
from headrace.ops.linear import linear
from headrace.ops.routed_experts import Routes, route_tokens, routed_experts

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import Kernels
    from headrace.models.checkpoint import CheckedTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token's experts are weighed.

    Attributes:
        scoring: Of the router's logits, over all experts: "softmax" or "sigmoid".
        is_normalised: Whether the factors of a token's experts are divided by their sum.
        scale: What the factors are multiplied by in the end.
        eps: Added to the sum that they are divided by.
        num_groups: Groups of equally many experts.
        num_chosen_groups: Groups that a token's experts come from: those with the highest sums of
            their two best scores.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = True
    scale: float = 1.0
    eps: float = 0.0
    num_groups: int = 1
    num_chosen_groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoeWeights:
    """Weights of one mixture of E experts.

    Attributes:
        router: [E, C]; its products are made in its dtype.
        gate_up: Gate rows, then value rows of each expert, [E, 2I, C]; value rows alone,
            [E, I, C], where the activation has no gate.
        down: [E, C, I].
        num_chosen: Experts of each token, k.
        shared: The MLP that every token goes through; None without.
        shared_gate: Its gate, [1, C]; None without.
        routing: How the experts are weighed.
        choice_bias: Added to the scores when the experts are chosen, not when they are weighed,
            [E] f32; None without.
        activation: Of the experts.
        latent: Projections into and out of the experts' own width L, [L, C] and [C, L]; None where
            it is the model's.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    num_chosen: int
    shared: MlpWeights | None
    shared_gate: Tensor | None
    routing: Routing = Routing()
    choice_bias: Tensor | None = None
    activation: Activation = "silu_mul"
    latent: tuple[Tensor, Tensor] | None = None


def load_experts(
    source: CheckedTensors,
    prefix: str,
    count: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Tensor, Tensor]:
    """Join experts whose projections are tensors of their own.

    Args:
        source: The checkpoint.
        prefix: Before the number of the expert.
        count: E.
        names: Of gate, up and down.

    Returns:
        `gate_up` and `down` of `MoeWeights`.
    """
    gate, up, down = names
    owns = [f"{prefix}{i}." for i in range(count)]
    gate_up = source.stack(*((f"{own}{gate}.weight", f"{own}{up}.weight") for own in owns))
    return gate_up, source.stack(*((f"{own}{down}.weight",) for own in owns))


def feed_forward(
    x: Tensor,
    weights: MlpWeights | MoeWeights,
    kernels: Kernels = "torch",
    slots: Tensor | None = None,
) -> Tensor:
    """Run the block over normed hidden states.

    A mixture sends each token through the k experts with the highest scores, weighs their outputs
    as its routing says, and adds the shared MLP's output, times the sigmoid of its gate.

    Args:
        x: [T, C].
        weights: The layer's.
        kernels: What computes between the products, and the experts.
        slots: KV slots, [T] i64: kernels read no expert for tokens of padding, whose slot is 0.
            None if there are none.

    Returns:
        [T, C].
    """
    if isinstance(weights, MlpWeights):
        return mlp(x, weights, kernels)
    if kernels != "torch":
        return _fused(x, weights, kernels, slots)
    chosen, factors = _route(x, weights)
    inputs = x if weights.latent is None else linear(x, weights.latent[0])
    activate = activation(weights.activation, kernels)
    out = grouped_experts(inputs, weights.gate_up, weights.down, chosen, factors, activate)
    if weights.latent is not None:
        out = linear(out, weights.latent[1])
    if weights.shared is None:
        return out
    shared = mlp(x, weights.shared, kernels)
    if weights.shared_gate is not None:
        shared = shared * sigmoid(linear(x, weights.shared_gate))
    return out + shared


def _fused(x: Tensor, weights: MoeWeights, kernels: Kernels, slots: Tensor | None) -> Tensor:
    """Run a mixture by kernels, [T, C]."""
    shared = None if weights.shared is None else mlp(x, weights.shared, kernels)
    routes = _fused_routes(x, weights, kernels, slots)
    experts = weights.gate_up, weights.down, routes
    if weights.latent is None:
        return routed_experts(
            x, *experts, shared=shared, activation=weights.activation, is_fixed=kernels == "fixed"
        )
    assert kernels == "triton", "experts of a width of their own have no fixed products"
    # The shared MLP has the model's width: it cannot be added before the projection.
    into, out_of = weights.latent
    out = linear(routed_experts(linear(x, into), *experts, activation=weights.activation), out_of)
    return out if shared is None else out.add_(shared * routes.factors[:, -1:].to(x.dtype))


def _fused_routes(
    x: Tensor, weights: MoeWeights, kernels: Kernels, slots: Tensor | None
) -> Routes:
    """Choose each token's experts; none for tokens of padding."""
    routing, gate = weights.routing, weights.shared_gate
    if routing.num_chosen_groups < routing.num_groups:
        # No kernel chooses groups; such routers are small.
        assert kernels == "triton", "PyTorch's reductions choose their order by the number of rows"
        assert gate is None, "no family has groups of experts and a gate of the shared one"
        chosen, factors = _route(x, weights)
        if slots is not None:
            chosen = chosen.masked_fill((slots == 0)[:, None], -1)
        ones = torch.ones_like(factors[:, :1])
        return Routes(experts=chosen.int(), factors=torch.cat((factors, ones), -1))
    return route_tokens(
        product(x.to(weights.router.dtype), weights.router, kernels),
        weights.num_chosen,
        routing,
        choice_bias=weights.choice_bias,
        x=None if gate is None else x,
        shared_gate=gate,
        slots=slots,
    )


def _route(x: Tensor, weights: MoeWeights) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Returns:
        The experts, [T, k] i64, and their factors, [T, k] f32.
    """
    routing, k = weights.routing, weights.num_chosen
    logits = linear(x.to(weights.router.dtype), weights.router).float()
    if routing == _CHOSEN_SOFTMAX and weights.choice_bias is None:
        # The softmax over all, normalised, is the softmax over the chosen.
        top = logits.topk(k, dim=-1)
        return top.indices, top.values.softmax(-1)
    scores = sigmoid(logits) if routing.scoring == "sigmoid" else logits.softmax(-1)
    ranked = scores if weights.choice_bias is None else scores + weights.choice_bias
    if routing.num_chosen_groups < routing.num_groups:
        ranked = _within_groups(ranked, routing)
    chosen = ranked.topk(k, dim=-1).indices
    factors = scores.gather(1, chosen)
    if routing.is_normalised:
        factors = factors / (factors.sum(-1, keepdim=True) + routing.eps)
    return chosen, factors if routing.scale == 1.0 else factors * routing.scale


def _within_groups(scores: Tensor, routing: Routing) -> Tensor:
    """Set the scores [T, E] of experts outside a token's best groups to minus infinity."""
    grouped = scores.unflatten(-1, (routing.num_groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(routing.num_chosen_groups, dim=-1).indices
    is_outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, value=False)
    return grouped.masked_fill(is_outside[..., None], float("-inf")).flatten(1)


_CHOSEN_SOFTMAX = Routing()
