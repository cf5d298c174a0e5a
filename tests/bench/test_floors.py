"""Floors against figures that were worked out by hand, for an H200 and published shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench.ceilings import Ceilings, measure_ceilings
from headrace.bench.floors import (
    Experts,
    ModelCosts,
    StateTraffic,
    costs_of,
    decode_floor,
    prefill_floor,
)
from headrace.bench.random_weights import read_shape
from headrace.models.registry import model_class
from headrace.testing import tiny_family

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
H200 = Ceilings(copy_bytes_per_s=4.3e12, matmul_flops_per_s=790e12, matmul_dtype="bfloat16")
COLUMNS, REPLAY = StateTraffic(interval=None), StateTraffic(interval=16)
KEPT = 1 + 0.8 + 0.64 + 0.512


def costs(size: str, state_dtype: str = "float32") -> ModelCosts:
    """Build a model without memory and take its costs."""
    config = read_shape(SHAPES / f"qwen3.5-{size}-text.json")
    cls: Any = model_class(config)
    weights = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, shape in cls.expected_tensors(config).items()
    }
    return costs_of(cls.from_weights(config, weights, torch.bfloat16, state_dtype))


@pytest.mark.parametrize(
    ("size", "batch", "columns", "replay"),
    [
        ("0.8b", 1, 2763, 2795), ("0.8b", 256, 71848, 102121),
        ("4b", 1, 503, 506), ("4b", 32, 10765, 12212), ("4b", 256, 23580, 31841),
        ("9b", 1, 269, 269), ("9b", 128, 16501, 20162),
    ],
)  # fmt: skip
def test_plain_decode_at_a_thousand_tokens(
    size: str, batch: int, columns: float, replay: float
) -> None:
    model = costs(size)
    for state, expected in ((COLUMNS, columns), (REPLAY, replay)):
        floor = decode_floor(model, H200, state, batch=batch, context=1024)
        assert floor.tokens_per_s == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("size", "batch", "columns", "replay"),
    [("0.8b", 1, 3892, 3980), ("4b", 1, 959, 973), ("4b", 128, 25079, 40411),
     ("9b", 32, 12446, 15333)],
)  # fmt: skip
def test_three_drafts(size: str, batch: int, columns: float, replay: float) -> None:
    model = costs(size)
    for state, expected in ((COLUMNS, columns), (REPLAY, replay)):
        floor = decode_floor(
            model, H200, state, batch=batch, context=1024, num_drafts=3, tokens_per_step=KEPT,
            has_mtp=True,
        )  # fmt: skip
        assert floor.tokens_per_s == pytest.approx(expected, rel=2e-3)


def test_bfloat16_state_halves_its_traffic() -> None:
    floor = decode_floor(costs("4b", "bfloat16"), H200, COLUMNS, batch=256, context=256)

    assert floor.tokens_per_s == pytest.approx(40225, rel=2e-3)


@pytest.mark.parametrize(("tokens", "expected"), [(8192, 101_000), (65536, 68_000)])
def test_prefill(tokens: int, expected: float) -> None:
    floor = prefill_floor(costs("4b"), H200, batch=1, tokens=tokens)

    assert floor.tokens_per_s == pytest.approx(expected, rel=1e-2)


def test_cached_prefix_costs_attention_but_no_products() -> None:
    cold = prefill_floor(costs("4b"), H200, batch=32, tokens=16384 + 128)
    warm = prefill_floor(costs("4b"), H200, batch=32, tokens=128, cached=16384)

    assert warm.seconds < cold.seconds / 50
    assert warm.parts_ms["attention"] > 0


def test_only_the_experts_that_a_batch_uses_are_read() -> None:
    experts = Experts(count=256, per_token=8, params=32_000)
    dense = costs("0.8b")

    assert experts.touched(1) == pytest.approx(8 / 256)
    assert experts.touched(512) > 0.99
    sparse = ModelCosts(
        **{name: getattr(dense, name) for name in ModelCosts.__slots__ if name != "experts"},
        experts=experts,
    )
    assert sparse.active_params == dense.body_params + 1000
    assert sparse.bytes_of_step(1) == pytest.approx(dense.bytes_of_step(1) + 2 * 1000)


@pytest.mark.parametrize("family", ["qwen3_5", "mamba", "nemotron_h"])
def test_a_tied_head_is_the_embedding_under_any_name(family: str) -> None:
    model = costs_of(tiny_family(family, vocab_size=50, hidden_size=48, tie_word_embeddings=True))
    assert model.head_params == 50 * 48


@pytest.mark.parametrize(
    ("family", "experts", "per_token", "params"),
    [
        ("granite", 5, 2, 4 * 5 * 3 * 20 * 48),
        ("qwen3_5_moe", 5, 2, 4 * 5 * 3 * 20 * 48),
        # One layer beside the MTP head's, whose experts work in a width of 32 and have no gate.
        ("nemotron_h", 8, 3, 8 * 2 * 20 * 32),
    ],
)
def test_experts_are_found_in_every_spelling(
    family: str, experts: int, per_token: int, params: int
) -> None:
    routed = costs_of(tiny_family(family)).experts
    assert routed == Experts(count=experts, per_token=per_token, params=params)


def test_ceilings_of_this_machine_are_measured() -> None:
    found = measure_ceilings("cpu", "float32", copy_bytes=2**16, matmul_size=16)

    assert found.copy_bytes_per_s > 0
    assert found.matmul_flops_per_s > 0
    assert found.is_measured
