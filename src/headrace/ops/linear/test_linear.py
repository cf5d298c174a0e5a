"""A product's row depends on the row alone."""

from __future__ import annotations

import random

import pytest
import torch

from headrace.ops.linear import ROW_TILE, head_linear, linear, pad_rows
from headrace.ops.linear.reference import linear_reference


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**31)
    print(f"{seed=}")
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.mark.parametrize(("width", "outputs"), [(48, 160), (96, 7), (256, 1024), (33, 65)])
def test_a_row_has_the_same_bits_among_any_others(
    rng: random.Random, width: int, outputs: int
) -> None:
    x, weight = torch.randn(96, width), torch.randn(outputs, width)
    whole = linear(x, weight)
    for _ in range(8):
        order = torch.tensor(rng.sample(range(96), rng.randrange(1, 90)))
        part = linear(pad_rows(x[order]), weight)[: len(order)]
        assert torch.equal(part, whole[order])


@pytest.mark.parametrize("rows", [1, 15, 16, 63])
def test_it_agrees_with_the_reference(rng: random.Random, rows: int) -> None:
    del rng
    x, weight = torch.randn(rows, 40), torch.randn(24, 40)
    got = linear(pad_rows(x), weight)[:rows]
    assert torch.allclose(got, linear_reference(x, weight), atol=1e-5)


@pytest.mark.parametrize("rows", [16, 48])
def test_an_output_that_is_given_gets_the_same_bits_and_keeps_the_rows_behind(
    rng: random.Random, rows: int
) -> None:
    del rng
    x, weight, out = torch.randn(rows, 40), torch.randn(24, 40), torch.full((64, 24), torch.nan)
    assert linear(x, weight, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out[:rows], linear(x, weight))
    assert out[rows:].isnan().all()


@pytest.mark.parametrize(("heads", "width", "outputs"), [(4, 12, 20), (3, 20, 16), (8, 64, 512)])
def test_a_row_of_heads_has_the_same_bits_among_any_others(
    rng: random.Random, heads: int, width: int, outputs: int
) -> None:
    x, weight = torch.randn(48, heads, width), torch.randn(heads, outputs, width)
    whole = head_linear(x, weight)
    assert torch.allclose(whole, torch.einsum("tha,hoa->tho", x, weight), atol=1e-4)
    for _ in range(8):
        order = torch.tensor(rng.sample(range(48), rng.randrange(1, 48)))
        rows = pad_rows(x[order].flatten(1)).view(-1, heads, width)
        assert torch.equal(head_linear(rows, weight)[: len(order)], whole[order])


def test_padding_reaches_the_next_tile() -> None:
    assert pad_rows(torch.ones(1, 2)).shape[0] == ROW_TILE
    full = torch.ones(ROW_TILE, 2)
    assert pad_rows(full) is full
