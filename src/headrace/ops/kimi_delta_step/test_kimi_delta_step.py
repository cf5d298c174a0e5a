"""The delta rule with a decay for each channel, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.ops.kimi_delta_step import kimi_delta_step
from headrace.ops.kimi_delta_step.reference import kimi_delta_reference

pytestmark = pytest.mark.usefixtures("seeded")


def draw(n: int, tokens: int, heads: int, *, k: int, v: int) -> dict[str, Tensor]:
    key = torch.randn(n, tokens, heads, k)
    return {
        "key": key / key.norm(dim=-1, keepdim=True),
        "value": torch.randn(n, tokens, heads, v),
        "decay": torch.rand(n, tokens, heads, k) * 0.5 + 0.5,
        "rate": torch.rand(n, tokens, heads),
        "query": torch.randn(n, tokens, heads, k) * k**-0.5,
    }


def run(state: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    tokens = inputs["key"].shape[1]
    outputs = [
        kimi_delta_step(state, **{name: x[:, t] for name, x in inputs.items()})
        for t in range(tokens)
    ]
    return torch.stack([out for out in outputs if out is not None], 1)


@pytest.mark.parametrize(("heads", "k", "v"), [(1, 4, 6), (3, 8, 5), (2, 16, 16)])
@pytest.mark.parametrize("tokens", [1, 7])
def test_it_agrees_with_the_reference(heads: int, k: int, v: int, tokens: int) -> None:
    inputs = draw(1, tokens, heads, k=k, v=v)
    state = torch.randn(1, heads, v, k)
    want, states = kimi_delta_reference(state[0], **{name: x[0] for name, x in inputs.items()})
    got = run(state, inputs)
    assert torch.allclose(got[0].double(), want, atol=1e-5)
    assert torch.allclose(state[0].double(), states[-1], atol=1e-5)


@pytest.mark.parametrize(("heads", "k", "v"), [(1, 8, 12), (4, 8, 12), (4, 32, 16)])
def test_a_row_has_the_same_bits_among_any_others(heads: int, k: int, v: int) -> None:
    inputs = draw(37, 5, heads, k=k, v=v)
    state = torch.randn(37, heads, v, k)
    whole_state = state.clone()
    whole = run(whole_state, inputs)
    for size in (1, 2, 16):
        for i in range(0, 37, size):
            rows = slice(i, i + size)
            part_state = state[rows].clone()
            part = run(part_state, {name: x[rows] for name, x in inputs.items()})
            assert torch.equal(part, whole[rows])
            assert torch.equal(part_state, whole_state[rows])


def test_a_neutral_token_leaves_the_state_as_it_is() -> None:
    inputs = draw(3, 1, 2, k=8, v=12)
    state = torch.randn(3, 2, 12, 8)
    before = state.clone()
    for name in ("key", "value"):
        inputs[name].zero_()
    inputs["decay"].fill_(1.0)
    run(state, inputs)
    assert torch.equal(state, before)
