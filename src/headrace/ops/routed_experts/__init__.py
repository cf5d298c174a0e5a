"""A mixture of experts, fused: the router's choice, and everything between it and the weighted sum.

Five launches, none of which waits for the host or adds atomically:

1. route: a token's k experts, their factors, and the sigmoid of the shared expert's gate;
2. tiles: pairs of token and expert, sorted by expert in the order of tokens, filled up to tiles;
3. products of each tile with its expert's gate and value rows, the activation behind them;
4. products with the expert's down rows, one row for each pair;
5. the weighted sum of a token's rows and of the shared expert's.

The number of tiles has a bound that the host knows; tiles behind the last one leave at once. An
expert's weights are read once for each of its tiles, so in small batches once. Tokens of padding
have no expert: weights are not read for them.

Every sum of products runs over the columns in one order, whatever the size of the tiles, and a
token's rows are added in the order of its choice. So a token's bits do not depend on its batch
mates, but where a tile's size is another a device may sum inside an instruction as it likes: with
`is_fixed` there is one size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from headrace.ops.routed_experts import reference
from headrace.rt.kernels import can_launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ACTIVATIONS", "Routes", "RoutingRule", "route_tokens", "routed_experts"]

ACTIVATIONS = ("silu_mul", "relu2")
"""What can be between the products: silu(gate) * value, or each value's positive part squared."""


class RoutingRule(Protocol):
    """How a token's experts are weighed; `models.layers.moe.Routing` is one."""

    @property
    def scoring(self) -> Literal["softmax", "sigmoid"]:
        """Of the router's logits, over all experts."""

    @property
    def is_normalised(self) -> bool:
        """Whether the factors of a token's experts are divided by their sum."""

    @property
    def scale(self) -> float:
        """What the factors are multiplied by in the end."""

    @property
    def eps(self) -> float:
        """Added to the sum that they are divided by."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Where tokens go.

    Attributes:
        experts: [T, k] i32, distinct in a token; -1 for tokens of padding.
        factors: Of the experts, then of the shared one, [T, k+1] f32.
    """

    experts: Tensor
    factors: Tensor


def route_tokens(
    logits: Tensor,
    num_chosen: int,
    rule: RoutingRule,
    *,
    choice_bias: Tensor | None = None,
    x: Tensor | None = None,
    shared_gate: Tensor | None = None,
    slots: Tensor | None = None,
) -> Routes:
    """Choose each token's experts, of equal ones the first.

    Args:
        logits: The router's, [T, E].
        num_chosen: k.
        rule: How they are weighed.
        choice_bias: Added to the scores when experts are chosen, not when they are weighed, [E]
            f32; None without.
        x: What the gate is multiplied with, [T, C]; needed with a gate.
        shared_gate: The shared expert's gate, [1, C]: its factor is the sigmoid of their product;
            None for a factor of 1.
        slots: [T] i64, 0 for tokens of padding; None if there are none.

    Returns:
        The routes.

    Raises:
        ValueError: Sizes that do not fit each other.
    """
    rows, num_experts = logits.shape
    if not 1 <= num_chosen <= num_experts:
        msg = f"{num_chosen} experts a token cannot be chosen of {num_experts}"
        raise ValueError(msg)
    if (x is None) != (shared_gate is None):
        msg = "a gate of the shared expert and what it is multiplied with come together"
        raise ValueError(msg)
    if x is not None and shared_gate is not None and shared_gate.shape[1] != x.shape[1]:
        msg = f"the gate has {shared_gate.shape[1]} columns and the tokens {x.shape[1]}"
        raise ValueError(msg)
    routes = Routes(
        experts=logits.new_empty(rows, num_chosen, dtype=reference.EXPERT_DTYPE),
        factors=logits.new_empty(rows, num_chosen + 1, dtype=reference.FACTOR_DTYPE),
    )
    run = reference.route_tokens
    if can_launch(logits):
        from headrace.ops.routed_experts import fused  # noqa: PLC0415  needs Triton

        run = fused.route_tokens
    run(logits, rule, choice_bias, x, shared_gate, slots, routes)
    return routes


def routed_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routes: Routes,
    *,
    shared: Tensor | None = None,
    activation: str = "silu_mul",
    is_fixed: bool = False,
) -> Tensor:
    """Send each token through its experts and add up their weighted outputs.

    Args:
        x: Tokens, [T, C]; rows may be strided.
        gate_up: Gate rows, then value rows of each expert, [E, 2I, C]; for an activation without
            gate, value rows alone, [E, I, C]. Of the dtype of x, contiguous.
        down: [E, C, I], of the dtype of x, contiguous.
        routes: Where they go.
        shared: What the shared expert gives, [T, C]; None without.
        activation: One of `ACTIVATIONS`.
        is_fixed: Cut products the same way for any number of tokens.

    Returns:
        [T, C], the dtype of x: sum over k of factor * down(activation(gate_up x)), plus the last
        factor times shared.

    Raises:
        ValueError: Sizes that do not fit each other, or an activation that there is not.
    """
    if activation not in ACTIVATIONS:
        msg = f"activation is {activation!r}; choose one of {', '.join(ACTIVATIONS)}"
        raise ValueError(msg)
    num_experts, width, inner = down.shape
    rows = 2 * inner if activation == "silu_mul" else inner
    for name, got, wanted in (
        ("x", x.shape[1:], (width,)),
        ("gate_up", gate_up.shape, (num_experts, rows, width)),
        ("shared", (x if shared is None else shared).shape, x.shape),
        ("factors", routes.factors.shape, (x.shape[0], routes.experts.shape[1] + 1)),
    ):
        if tuple(got) != tuple(wanted):
            msg = f"{name} is {tuple(got)} where down {tuple(down.shape)} needs {tuple(wanted)}"
            raise ValueError(msg)
    if not (gate_up.is_contiguous() and down.is_contiguous() and x.stride(1) == 1):
        msg = f"columns of x (strides {x.stride()}) and all of the weights must be adjacent"
        raise ValueError(msg)
    out = x.new_empty(x.shape)
    run = reference.routed_experts
    if can_launch(x):
        from headrace.ops.routed_experts import fused  # noqa: PLC0415  needs Triton

        run = fused.routed_experts
    run(x, gate_up, down, routes, shared, activation, out, is_fixed=is_fixed)
    return out
