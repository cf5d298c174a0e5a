"""The fused mixture against its specification, and its order of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pytest
import torch

from headrace.ops import routed_experts as package
from headrace.ops.aot import MAX_SHARED_BYTES, KernelSpec, compile_kernels, spec_of
from headrace.ops.routed_experts import Routes, reference, route_tokens, routed_experts
from headrace.rt import Effect
from headrace.rt.detector import RowBound, assert_effects

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from headrace.rt.detector import Detector

pytestmark = pytest.mark.usefixtures("seeded")


E, K, C, I = 6, 2, 160, 40  # noqa: E741  the field's letter
"""Several steps and several programs for each product, none of them whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = True
    scale: float = 1.0
    eps: float = 0.0


RULES = [
    (Rule(), 0.0),
    (Rule(is_normalised=False), 0.0),
    (Rule(scoring="sigmoid", scale=2.5, eps=1e-20), 1.0),
    (Rule(scoring="sigmoid", is_normalised=False), 0.0),
    (Rule(is_normalised=False, scale=0.5), 1.0),
]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The launches, with small sizes until the test ends."""
    pytest.importorskip("triton")
    from headrace.ops.routed_experts import fused  # noqa: PLC0415  after the plugin's settings

    # Several rounds over the pairs.
    monkeypatch.setattr(fused, "CHUNK", 16)
    monkeypatch.setattr(fused, "BLOCK", 64)
    return fused


def _routes(tokens: int, num_experts: int = E, k: int = K) -> Routes:
    """All tokens like one expert, so tiles are full, part full and missing; one is padding."""
    scores = torch.randn(tokens, num_experts)
    scores[:, 1] += 3.0
    best = scores.topk(k)
    experts = best.indices.int()
    if tokens > 1:
        experts[tokens // 2] = -1
    return Routes(experts=experts, factors=torch.cat((best.values, torch.rand(tokens, 1)), 1))


def _weights(dtype: torch.dtype, *, is_gated: bool = True) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(E, 2 * I if is_gated else I, C) * C**-0.5
    return gate_up.to(dtype), (torch.randn(E, C, I) * I**-0.5).to(dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize(("rule", "bias_size"), RULES)
def test_routes_are_those_of_the_specification(
    rule: Rule, bias_size: float, fused: ModuleType
) -> None:
    del fused
    tokens = 5
    logits = torch.randn(tokens, 2 * E)[:, :E]
    # Of equal ones the first is chosen.
    logits[0] = 1.0
    x, gate = torch.randn(tokens, 50)[:, :33], torch.randn(1, 33) / 4
    bias = bias_size * torch.randn(E) if bias_size else None
    slots = torch.tensor([3, 0, 9, 1, 2])
    got = route_tokens(logits, K, rule, choice_bias=bias, x=x, shared_gate=gate, slots=slots)
    want = Routes(experts=torch.empty_like(got.experts), factors=torch.empty_like(got.factors))
    reference.route_tokens(logits, rule, bias, x, gate, slots, want)
    assert torch.equal(got.experts, want.experts)
    assert got.experts[1].tolist() == [-1] * K
    torch.testing.assert_close(got.factors, want.factors, rtol=1e-5, atol=1e-6)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:invalid value")
def test_logits_that_are_no_numbers_choose_experts_that_there_are(fused: ModuleType) -> None:
    del fused
    got = route_tokens(torch.full((1, E), float("nan")), K, Rule())
    assert ((got.experts >= 0) & (got.experts < E)).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("tokens", [1, 21])
def test_pairs_are_sorted_by_expert_in_the_order_of_tokens(tokens: int, fused: ModuleType) -> None:
    experts, tile = _routes(tokens).experts, 4
    pairs, tile_experts = fused.sort_pairs(experts, E, tile)
    want_pairs: list[int] = []
    want_experts: list[int] = []
    for expert in range(E):
        own = (experts.flatten() == expert).nonzero().flatten().tolist()
        own += [-1] * (-len(own) % tile)
        want_pairs += own
        want_experts += [expert] * (len(own) // tile)
    assert pairs[: len(want_pairs)].tolist() == want_pairs
    rest = len(tile_experts) - len(want_experts)
    assert rest >= 0
    assert tile_experts.tolist() == want_experts + [-1] * rest


@pytest.mark.interpreter
@pytest.mark.parametrize("activation", package.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_those_of_the_specification(
    dtype: torch.dtype, activation: str, fused: ModuleType
) -> None:
    del fused
    tokens = 19
    x = torch.randn(tokens, 2 * C).to(dtype)[:, :C]
    gate_up, down = _weights(dtype, is_gated=activation == "silu_mul")
    routes, shared = _routes(tokens), torch.randn(tokens, C).to(dtype)
    want = torch.empty(tokens, C)
    reference.routed_experts(x, gate_up, down, routes, shared, activation, want)
    got = routed_experts(x, gate_up, down, routes, shared=shared, activation=activation).float()
    # Hidden values, rows of pairs and sums are stored in the dtype, and the interpreter cuts what
    # does not fit into bfloat16 off.
    limit = 2e-6 if dtype == torch.float32 else 3 * 2**-8
    assert float((got - want).norm()) <= limit * float(want.norm())
    torch.testing.assert_close(
        got[tokens // 2],
        routes.factors[tokens // 2, -1] * shared[tokens // 2].float(),
        rtol=limit,
        atol=limit,
    )


@pytest.mark.interpreter
def test_a_token_has_the_same_bits_among_any_others(fused: ModuleType) -> None:
    del fused
    tokens = 19
    x, routes, (gate_up, down) = torch.randn(tokens, C), _routes(tokens), _weights(torch.float32)
    whole = routed_experts(x, gate_up, down, routes)
    for order in ([4], [18, 3, 7, 4]):
        part = Routes(experts=routes.experts[order], factors=routes.factors[order])
        assert torch.equal(routed_experts(x[order], gate_up, down, part), whole[order])


@pytest.mark.interpreter
def test_experts_that_nobody_chose_are_not_read(race_detector: Detector, fused: ModuleType) -> None:
    del fused
    experts = torch.tensor([[4, 1], [-1, -1], [1, 2]], dtype=torch.int32)
    routes = Routes(experts=experts, factors=torch.rand(3, K + 1))
    gate_up, down = _weights(torch.float32)
    x, shared = torch.randn(3, C), torch.randn(3, C)
    routed_experts(x, gate_up, down, routes, shared=shared)
    assert {launch.kernel for launch in race_detector.launches} == {
        "tiles_kernel",
        "expert_product_kernel",
        "add_experts_kernel",
    }
    names = {"x": x, "gate_up": gate_up, "down": down, "shared": shared}
    assert_effects(
        race_detector.launches,
        dict.fromkeys((*names, "routes"), Effect.READ),
        {**names, "routes": [routes.experts, routes.factors]},
        rows={
            "gate_up": RowBound(reads={1, 2, 4}),
            "down": RowBound(reads={1, 2, 4}),
            "x": RowBound(reads={0, 2}),
        },
    )


def test_what_does_not_fit_is_refused() -> None:
    routes, (gate_up, down) = _routes(3), _weights(torch.float32)
    x = torch.zeros(3, C)
    with pytest.raises(ValueError, match="activation is 'gelu'; choose one of silu_mul, relu2"):
        routed_experts(x, gate_up, down, routes, activation="gelu")
    with pytest.raises(ValueError, match=r"gate_up is \(6, 80, 160\) where down .* \(6, 40, 160\)"):
        routed_experts(x, gate_up, down, routes, activation="relu2")
    with pytest.raises(ValueError, match="must be adjacent"):
        routed_experts(torch.zeros(C, 3).t(), gate_up, down, routes)
    with pytest.raises(ValueError, match="7 experts a token cannot be chosen of 6"):
        route_tokens(torch.zeros(1, E), 7, Rule())
    with pytest.raises(ValueError, match="the gate has 5 columns and the tokens 6"):
        route_tokens(
            torch.zeros(1, E), 2, Rule(), x=torch.zeros(1, 6), shared_gate=torch.ones(1, 5)
        )
    with pytest.raises(ValueError, match="come together"):
        route_tokens(torch.zeros(1, E), 2, Rule(), x=torch.zeros(1, 6))


SHAPES = {
    "qwen3.5-35b-a3b": (256, 8, 2048, 512, "silu_mul"),
    "qwen3-next-80b-a3b": (512, 10, 2048, 512, "silu_mul"),
    "granite-4-small": (72, 10, 4096, 768, "silu_mul"),
    "lfm2-8b-a1b": (32, 4, 2048, 1792, "silu_mul"),
    "jamba-mini": (16, 2, 4096, 14336, "silu_mul"),
    "nemotron-3-nano": (128, 6, 2688, 1856, "relu2"),
}
"""Experts, chosen ones, width, inner width, activation."""


def _specs(
    name: str, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> list[KernelSpec]:
    pytest.importorskip("triton")
    from headrace.ops.routed_experts import fused  # noqa: PLC0415  after the plugin's settings

    specs: list[KernelSpec] = []
    monkeypatch.setattr(
        fused,
        "launch_kernel",
        lambda kernel, _grid, *args, **options: specs.append(spec_of(kernel, args, options)),
    )
    num_experts, k, width, inner, activation = SHAPES[name]
    with torch.device("meta"):
        x = torch.empty(tokens, width, dtype=dtype)
        rows = 2 * inner if activation == "silu_mul" else inner
        gate_up = torch.empty(num_experts, rows, width, dtype=dtype)
        down = torch.empty(num_experts, width, inner, dtype=dtype)
        logits, slots = torch.empty(tokens, num_experts, dtype=dtype), torch.empty(tokens).long()
        gate = torch.empty(1, width, dtype=dtype)
        routes = route_tokens(logits, k, Rule(), x=x, shared_gate=gate, slots=slots)
        routed_experts(x, gate_up, down, routes, shared=x, activation=activation)
    return specs


@pytest.mark.parametrize(
    "name",
    [name if "35b" in name else pytest.param(name, marks=pytest.mark.full) for name in SHAPES],
)
def test_they_compile_for_hopper_with_tensor_cores_and_without_spills(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = []
    for tokens in (16, 1024, 8192):
        specs += _specs(name, tokens, torch.bfloat16, monkeypatch)
    specs += _specs(name, 16, torch.float32, monkeypatch)
    specs = list({str(spec): spec for spec in specs}.values())
    for spec, compiled in zip(specs, compile_kernels(specs), strict=True):
        assert compiled.spill_bytes == 0, spec
        assert compiled.shared_bytes <= MAX_SHARED_BYTES, spec
        if "product" in spec.kernel and spec.signature["x_ptr"] == "*bf16":
            assert compiled.tensor_core > 0, spec
            # Weights are on their way asynchronously, 16 bytes at a time.
            loads = [name for name in compiled.instructions if name.startswith("LDGSTS")]
            assert not compiled.instructions or any(".128" in name for name in loads), spec
