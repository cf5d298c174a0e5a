"""A mixture of experts: kernels against PyTorch's operations, with the sizes of Qwen3.5-35B-A3B.

Checked is the error of both against float32 operations, in bfloat16 and float32, for shapes of
several families, and that a token has the same bits alone and among others. Timed are the choice
and the experts of one layer, without the router's product and the shared expert's, over a few
layers in turn. The floor is the larger of the bytes of the experts that were hit over the copy
rate, and of the products over the rate of a large bfloat16 product.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from fusions import report
from timing import time_us

from headrace.ops.activations import relu2, silu_mul
from headrace.ops.grouped_experts import grouped_experts
from headrace.ops.routed_experts import Routes, route_tokens, routed_experts

if TYPE_CHECKING:
    from torch import Tensor

EXPERTS, CHOSEN, WIDTH, INNER = 256, 8, 2048, 512
LAYERS = 3
TOKENS = (1, 4, 16, 32, 64, 128, 256, 2048, 8192)
MOST_FACTOR_ERROR = 1e-5
PADDED = 16
"""Tokens of a step are a multiple of this; those that are missing have slot 0."""

SLOW = 256
"""Tokens up to which PyTorch's operations are timed: they copy weights for every tile."""

PRODUCTS_PER_S = 790e12
"""Floating-point operations of a large bfloat16 product, one H200."""

CHECKS = {
    "qwen": (64, 8, 2048, 512, "silu_mul"),
    "granite": (72, 10, 1024, 768, "silu_mul"),
    "lfm2": (32, 4, 2048, 1792, "silu_mul"),
    "nemotron": (128, 6, 1344, 1856, "relu2"),
}
"""Experts, chosen ones, width, inner width, activation; some smaller than the families'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Softmax over the chosen experts."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = True
    scale: float = 1.0
    eps: float = 0.0


def weights(
    count: int, width: int, inner: int, rows: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Random experts."""
    gate_up = torch.empty(count, rows, width, device=device, dtype=dtype)
    down = torch.empty(count, width, inner, device=device, dtype=dtype)
    return gate_up.normal_(std=width**-0.5), down.normal_(std=inner**-0.5)


def by_operations(
    x: Tensor, gate_up: Tensor, down: Tensor, routes: Routes, activation: str
) -> Tensor:
    """The experts by PyTorch's operations."""
    activate = silu_mul if activation == "silu_mul" else relu2
    experts, factors = routes.experts.long(), routes.factors[:, :-1]
    return grouped_experts(x, gate_up, down, experts, factors, activate)


def check_experts(device: str = "cuda", tokens: int = 96) -> list[dict[str, Any]]:
    """Errors of the kernels in both dtypes, and the bits of a token in any company."""
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for name, (count, k, width, inner, activation) in CHECKS.items():
            inner_rows = 2 * inner if activation == "silu_mul" else inner
            pair = weights(count, width, inner, inner_rows, device, dtype)
            x = torch.randn(tokens, width, device=device).to(dtype)
            routes = route_tokens(torch.randn(tokens, count, device=device), k, Rule())

            def run(
                chosen: list[int] | slice,
                x: Tensor = x,
                routes: Routes = routes,
                pair: tuple[Tensor, Tensor] = pair,
                activation: str = activation,
            ) -> Tensor:
                part = Routes(experts=routes.experts[chosen], factors=routes.factors[chosen])
                return routed_experts(x[chosen], *pair, part, activation=activation)

            got = run(slice(None))
            precise = torch.float64 if dtype == torch.float32 else torch.float32
            wide = (part.to(precise) for part in (x, *pair))
            want = by_operations(*wide, routes, activation).double()
            own = by_operations(x, *pair, routes, activation)
            rows.append(report(f"routed_experts {name}", dtype, got, own, want))
            rows[-1]["equal_bits_alone"] = torch.equal(run([7]), got[7:8])
            rows[-1]["passed"] &= rows[-1]["equal_bits_alone"]
            # In larger tiles: no promise, but good to know.
            rows[-1]["equal_bits_in_larger_tiles"] = torch.equal(run([7] * 64 * count)[-1], got[7])
            print(json.dumps(rows[-1]), flush=True)
    return [*rows, check_choice(device)]


def check_choice(device: str, tokens: int = 4096) -> dict[str, Any]:
    """The choice against PyTorch's."""
    logits = torch.randn(tokens, EXPERTS, device=device)
    x, gate = torch.randn(tokens, WIDTH, device=device), torch.randn(1, WIDTH, device=device) / 64
    slots = torch.arange(tokens, device=device)
    got = route_tokens(logits, CHOSEN, Rule(), x=x, shared_gate=gate, slots=slots)
    best = logits.topk(CHOSEN)
    factors = torch.cat((best.values.softmax(-1), torch.sigmoid(x @ gate.t())), 1)
    error = float((got.factors - factors).abs().max())
    same = torch.equal(got.experts[1:].long(), best.indices[1:])
    same &= bool((got.experts[0] < 0).all())
    row = {"case": "route_tokens", "same_experts": same, "error": f"{error:.1e}"}
    row["passed"] = same and error < MOST_FACTOR_ERROR
    print(json.dumps(row), flush=True)
    return row


def bench_experts(
    rate: float, device: str = "cuda", counts: tuple[int, ...] = TOKENS
) -> list[dict[str, Any]]:
    """Times a layer in bfloat16."""
    results = []
    layers = [
        weights(EXPERTS, WIDTH, INNER, 2 * INNER, device, torch.bfloat16) for _ in range(LAYERS)
    ]
    for count in counts:
        tokens = -(-count // PADDED) * PADDED
        x = torch.randn(tokens, WIDTH, device=device).to(torch.bfloat16)
        logits = torch.randn(LAYERS, tokens, EXPERTS, device=device).to(torch.bfloat16)
        gate = torch.randn(1, WIDTH, device=device).to(torch.bfloat16)
        slots = (torch.arange(tokens, device=device) < count).long()

        def route(layer: int, x: Any = (x, logits, gate, slots)) -> Routes:  # noqa: ANN401
            tokens, logits, gate, slots = x
            return route_tokens(
                logits[layer], CHOSEN, Rule(), x=tokens, shared_gate=gate, slots=slots
            )

        def run(x: Tensor = x, route: Any = route) -> None:  # noqa: ANN401
            for layer, pair in enumerate(layers):
                routed_experts(x, *pair, route(layer), shared=x)

        def operations(x: Tensor = x[:count], route: Any = route) -> None:  # noqa: ANN401
            for layer, pair in enumerate(layers):
                routes = route(layer)
                part = Routes(experts=routes.experts[: len(x)], factors=routes.factors[: len(x)])
                by_operations(x, *pair, part, "silu_mul")

        hit = sum(int((route(i).experts.unique() >= 0).sum()) for i in range(LAYERS)) / LAYERS
        size = hit * 2 * 3 * WIDTH * INNER + count * 2 * 3 * WIDTH
        products = count * CHOSEN * 2 * 3 * WIDTH * INNER
        us = time_us(run) / LAYERS
        floor = max(size / rate, products / PRODUCTS_PER_S) * 1e6
        results.append(
            {
                "case": "routed_experts",
                "tokens": count,
                "experts_hit": round(hit, 1),
                "us_per_layer": round(us, 2),
                "us_of_pytorch": round(time_us(operations, repeats=3) / LAYERS, 2)
                if count <= SLOW
                else None,
                "floor_us": round(floor, 2),
                "share_of_floor": round(floor / us, 3),
            }
        )
        print(json.dumps(results[-1]), flush=True)
    return results
