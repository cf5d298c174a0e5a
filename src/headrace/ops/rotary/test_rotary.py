"""Rotation of the leading dimensions."""

from __future__ import annotations

import pytest
import torch

from headrace.ops.rotary import rotary_tables, rotate_
from headrace.ops.rotary.reference import rotate_reference

pytestmark = pytest.mark.usefixtures("seeded")


THETA = 10000.0


def frequencies(rotary_dim: int) -> torch.Tensor:
    return 1.0 / THETA ** (torch.arange(0, rotary_dim, 2) / rotary_dim)


@pytest.mark.parametrize("rotary_dim", [2, 6, 16])
def test_it_agrees_with_the_reference_and_leaves_the_rest_alone(rotary_dim: int) -> None:
    x, positions = torch.randn(7, 3, 16), torch.randint(0, 3000, (7,))
    got = rotate_(x.clone(), *rotary_tables(positions, frequencies(rotary_dim)))
    want = rotate_reference(x, positions, rotary_dim, THETA)
    assert torch.allclose(got.double(), want, atol=2e-3)
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    near = rotate_(x.clone(), *rotary_tables(positions % 5, frequencies(rotary_dim)))
    want = rotate_reference(x, positions % 5, rotary_dim, THETA)
    assert torch.allclose(near.double(), want, atol=1e-5)


def test_a_token_has_the_same_bits_among_any_others() -> None:
    x, positions = torch.randn(40, 3, 16), torch.randint(0, 3000, (40,))
    whole = rotate_(x.clone(), *rotary_tables(positions, frequencies(6)))
    for size in (1, 3, 16):
        for i in range(0, 40, size):
            rows = slice(i, i + size)
            part = rotate_(x[rows].clone(), *rotary_tables(positions[rows], frequencies(6)))
            assert torch.equal(part, whole[rows])
