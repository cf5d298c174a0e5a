"""A mixture of experts token by token in float32: the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.routed_experts import Routes, RoutingRule

EXPERT_DTYPE, FACTOR_DTYPE = torch.int32, torch.float32


def route_tokens(
    logits: Tensor,
    rule: RoutingRule,
    choice_bias: Tensor | None,
    x: Tensor | None,
    shared_gate: Tensor | None,
    slots: Tensor | None,
    routes: Routes,
) -> None:
    """Choose each token's experts; see the package."""
    wide = logits.float()
    scores = wide.softmax(-1) if rule.scoring == "softmax" else wide.sigmoid()
    # Softmax keeps the order of logits, but may make two of them equal.
    ranked = wide if rule.scoring == "softmax" else scores
    if choice_bias is not None:
        ranked = scores + choice_bias
    k = routes.experts.shape[1]
    # The first of equal ones: sorting is stable.
    chosen = torch.sort(ranked, stable=True, dim=-1, descending=True).indices[:, :k]
    factors = scores.gather(1, chosen)
    if rule.is_normalised:
        factors = factors / (factors.sum(-1, keepdim=True) + rule.eps)
    routes.factors[:, :k] = factors * rule.scale
    routes.factors[:, k] = 1.0
    if x is not None and shared_gate is not None:
        routes.factors[:, k] = (x.float() * shared_gate.float()).sum(-1).sigmoid()
    routes.experts.copy_(chosen)
    if slots is not None:
        routes.experts[slots == 0] = -1


def routed_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routes: Routes,
    shared: Tensor | None,
    activation: str,
    out: Tensor,
    *,
    is_fixed: bool = False,  # noqa: ARG001  tokens go one by one
) -> None:
    """Weighted sums of the experts' outputs; see the package."""
    for t, row in enumerate(x.float()):
        total = torch.zeros(x.shape[1], device=x.device)
        for j in range(routes.experts.shape[1]):
            expert = int(routes.experts[t, j])
            if expert < 0:
                continue
            product = gate_up[expert].float() @ row
            if activation == "silu_mul":
                gate, value = product.chunk(2)
                hidden = functional.silu(gate) * value
            else:
                hidden = product.relu().square()
            total += routes.factors[t, j] * (down[expert].float() @ hidden)
        if shared is not None:
            total += routes.factors[t, -1] * shared[t].float()
        out[t] = total.to(out.dtype)
