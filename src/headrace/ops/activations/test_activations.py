"""An element's value does not depend on its place."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from headrace.ops import activations
from headrace.ops.activations import reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NAMES = ["gelu", "relu2", "sigmoid", "silu", "softplus"]


@pytest.fixture(params=NAMES)
def functions(
    request: pytest.FixtureRequest,
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    seed = random.SystemRandom().randrange(2**31)
    print(f"{seed=}")
    torch.manual_seed(seed)
    name = request.param
    return getattr(activations, name), getattr(reference, f"{name}_reference")


def test_an_element_has_the_same_bits_at_any_place(
    functions: tuple[Callable[..., Tensor], Callable[..., Tensor]],
) -> None:
    function, _ = functions
    x = torch.randn(4099) * 6
    whole = function(x)
    for size in (1, 3, 7, 16, 100):
        parts = [function(part) for part in x[:600].split(size)]
        assert torch.equal(torch.cat(parts), whole[:600]), size
    assert torch.equal(function(x[1::2]), whole[1::2])
    matrix = x[:4096].view(64, 64)
    assert torch.equal(function(matrix[:, 3:30]), whole[:4096].view(64, 64)[:, 3:30])


def test_it_agrees_with_the_reference(
    functions: tuple[Callable[..., Tensor], Callable[..., Tensor]],
) -> None:
    function, definition = functions
    x = torch.cat([torch.randn(1000) * 8, torch.tensor([0.0, -80.0, 80.0, -0.0])])
    want = definition(x)
    # Where 1 + erf is almost 0, a unit of its last place is all that is left of it.
    limit = 1e-5 * want.abs() + 2e-7 * x.abs().clamp(min=1.0)
    assert bool(((function(x).double() - want).abs() <= limit).all())


def test_a_gated_product_uses_the_first_half_as_gate() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 14)
    for name in ("silu", "gelu"):
        want = getattr(reference, f"{name}_reference")(x[:, :7]) * x[:, 7:]
        assert torch.allclose(getattr(activations, f"{name}_mul")(x).double(), want, atol=1e-6)
