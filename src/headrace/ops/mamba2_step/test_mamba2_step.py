"""The recurrence, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.ops.mamba2_step import mamba2_step
from headrace.ops.mamba2_step.reference import mamba2_reference

pytestmark = pytest.mark.usefixtures("seeded")


def draw(n: int, tokens: int, groups: int, heads: int, *, p: int, d: int) -> dict[str, Tensor]:
    return {
        "b": torch.randn(n, tokens, groups, d),
        "value": torch.randn(n, tokens, groups, heads, p),
        "decay": torch.rand(n, tokens, groups, heads) * 0.3 + 0.7,
        "c": torch.randn(n, tokens, groups, d),
    }


def run(state: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    outputs = [
        mamba2_step(state, **{name: x[:, t] for name, x in inputs.items()})
        for t in range(inputs["b"].shape[1])
    ]
    return torch.stack([out for out in outputs if out is not None], 1)


@pytest.mark.parametrize(("groups", "heads", "p", "d"), [(1, 1, 4, 6), (2, 3, 8, 5), (1, 4, 16, 8)])
@pytest.mark.parametrize("tokens", [1, 7])
def test_it_agrees_with_the_reference(groups: int, heads: int, p: int, d: int, tokens: int) -> None:
    inputs = draw(1, tokens, groups, heads, p=p, d=d)
    state = torch.randn(1, groups, heads, p, d)
    want, states = mamba2_reference(
        state[0].flatten(0, 1),
        inputs["b"][0],
        inputs["c"][0],
        inputs["value"][0].flatten(1, 2),
        decay=inputs["decay"][0].flatten(1, 2),
    )
    got = run(state, inputs)
    assert torch.allclose(got[0].flatten(1, 2).double(), want, atol=2e-5)
    assert torch.allclose(state[0].flatten(0, 1).double(), states[-1], atol=2e-5)


@pytest.mark.parametrize(
    ("groups", "heads", "p", "d"), [(1, 1, 8, 12), (2, 2, 12, 8), (1, 8, 64, 128), (3, 1, 5, 7)]
)
def test_a_row_has_the_same_bits_among_any_others(groups: int, heads: int, p: int, d: int) -> None:
    inputs = draw(19, 3, groups, heads, p=p, d=d)
    state = torch.randn(19, groups, heads, p, d)
    whole_state = state.clone()
    whole = run(whole_state, inputs)
    for size in (1, 2, 16):
        for i in range(0, 19, size):
            rows = slice(i, i + size)
            part_state = state[rows].clone()
            part = run(part_state, {name: x[rows] for name, x in inputs.items()})
            assert torch.equal(part, whole[rows])
            assert torch.equal(part_state, whole_state[rows])


def test_a_neutral_token_leaves_the_state_as_it_is() -> None:
    inputs = draw(3, 1, 2, 2, p=8, d=12)
    state = torch.randn(3, 2, 2, 8, 12)
    before = state.clone()
    inputs["b"].zero_()
    inputs["value"].zero_()
    inputs["decay"].fill_(1.0)
    run(state, inputs)
    assert torch.equal(state, before)
