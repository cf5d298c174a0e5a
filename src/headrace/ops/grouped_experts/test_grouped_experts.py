"""A row's bits depend on the row and its experts alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headrace.ops.activations import relu2
from headrace.ops.activations.reference import relu2_reference
from headrace.ops.grouped_experts import grouped_experts
from headrace.ops.grouped_experts.reference import grouped_experts_reference

SIZES = [(4, 2, 48, 24), (8, 3, 33, 17), (3, 1, 256, 100), (1, 1, 16, 16), (40, 6, 32, 20)]
"""Experts E, chosen k, width C, inner width I."""


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**31)
    print(f"{seed=}")
    torch.manual_seed(seed)
    return random.Random(seed)


def draw(rows: int, num_experts: int, k: int, width: int, inner: int) -> dict[str, Any]:
    scores = torch.randn(rows, num_experts)
    # Some experts are liked by all rows, so that tiles are full, part full and missing.
    scores[:, 0] += 2.0
    best = scores.topk(k)
    return {
        "x": torch.randn(rows, width),
        "gate_up": torch.randn(num_experts, 2 * inner, width) * 0.2,
        "down": torch.randn(num_experts, width, inner) * 0.2,
        "experts": best.indices,
        "factors": best.values.softmax(-1),
    }


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [1, 16, 45])
def test_it_agrees_with_the_reference(
    rng: random.Random, sizes: tuple[int, int, int, int], rows: int
) -> None:
    del rng
    inputs = draw(rows, *sizes)
    want = grouped_experts_reference(**inputs)
    error = (grouped_experts(**inputs) - want).abs().max()
    assert float(error) < 1e-5 * float(want.abs().max())


def test_experts_without_a_gate_agree_with_the_reference(rng: random.Random) -> None:
    del rng
    inputs = draw(45, 8, 3, 33, 17)
    inputs["gate_up"] = inputs["gate_up"][:, :17].contiguous()
    want = grouped_experts_reference(**inputs, activate=relu2_reference)
    error = (grouped_experts(**inputs, activate=relu2) - want).abs().max()
    assert float(error) < 1e-5 * float(want.abs().max())


@pytest.mark.parametrize("sizes", SIZES)
def test_a_row_has_the_same_bits_among_any_others(
    rng: random.Random, sizes: tuple[int, int, int, int]
) -> None:
    inputs = draw(90, *sizes)
    whole = grouped_experts(**inputs)
    for _ in range(8):
        order = torch.tensor(rng.sample(range(90), rng.choice([1, 2, rng.randrange(1, 90)])))
        part = dict(inputs)
        for name in ("x", "experts", "factors"):
            part[name] = inputs[name][order]
        assert torch.equal(grouped_experts(**part), whole[order])
