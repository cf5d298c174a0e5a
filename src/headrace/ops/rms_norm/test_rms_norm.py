"""Norms of a row depend on the row alone."""

from __future__ import annotations

import pytest
import torch

from headrace.ops.rms_norm import gated_rms_norm, l2_normalise, rms_norm
from headrace.ops.rms_norm.reference import gated_rms_norm_reference, rms_norm_reference

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("width", [8, 12, 48, 96, 256])
def test_a_row_has_the_same_bits_among_any_others(width: int) -> None:
    x, gate, scale = torch.randn(70, width), torch.randn(70, width), torch.randn(width)
    unit_scale = torch.ones(1)
    plain, gated = rms_norm(x, scale, 1e-6), gated_rms_norm(x, gate, scale, 1e-6)
    unit = l2_normalise(x, unit_scale)
    for size in (1, 3, 16, 33):
        for i in range(0, 70, size):
            rows = slice(i, i + size)
            assert torch.equal(rms_norm(x[rows], scale, 1e-6), plain[rows])
            assert torch.equal(gated_rms_norm(x[rows], gate[rows], scale, 1e-6), gated[rows])
            assert torch.equal(l2_normalise(x[rows], unit_scale), unit[rows])


def test_they_agree_with_the_references() -> None:
    x, gate, scale = torch.randn(9, 24), torch.randn(9, 24), torch.randn(24)
    got = rms_norm(x, scale, 1e-6).double()
    assert torch.allclose(got, rms_norm_reference(x, scale, 1e-6), atol=1e-5)
    got = gated_rms_norm(x, gate, scale, 1e-6).double()
    assert torch.allclose(got, gated_rms_norm_reference(x, gate, scale, 1e-6), atol=1e-5)


def test_a_unit_vector_has_the_asked_length() -> None:
    x = torch.randn(6, 2, 10) + 1.0
    lengths = l2_normalise(x, torch.tensor([[0.5], [2.0]])).norm(dim=-1)
    assert torch.allclose(lengths, torch.tensor([0.5, 2.0]).expand(6, 2), atol=1e-4)
