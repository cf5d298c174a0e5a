"""The recurrence, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.ops.mamba1_step import mamba1_step
from headrace.ops.mamba1_step.reference import mamba1_reference

pytestmark = pytest.mark.usefixtures("seeded")


def draw(n: int, tokens: int, channels: int, d: int) -> dict[str, Tensor]:
    return {
        "dt": torch.rand(n, tokens, channels) * 0.5,
        "value": torch.randn(n, tokens, channels) * 0.5,
        "b": torch.randn(n, tokens, d),
        "c": torch.randn(n, tokens, d),
    }


def draw_rate(channels: int, d: int) -> Tensor:
    return -torch.rand(channels, d) - 0.05


def run(state: Tensor, inputs: dict[str, Tensor], rate: Tensor) -> Tensor:
    outputs = [
        mamba1_step(state, **{name: x[:, t] for name, x in inputs.items()}, rate=rate)
        for t in range(inputs["b"].shape[1])
    ]
    return torch.stack([out for out in outputs if out is not None], 1)


@pytest.mark.parametrize(("channels", "d"), [(4, 6), (7, 16), (24, 5)])
@pytest.mark.parametrize("tokens", [1, 7])
def test_it_agrees_with_the_reference(channels: int, d: int, tokens: int) -> None:
    inputs, rate = draw(1, tokens, channels, d), draw_rate(channels, d)
    inputs["dt"].add_(0.01)
    state = torch.randn(1, channels, d)
    own = {name: x[0] for name, x in inputs.items()}
    want, states = mamba1_reference(
        state[0], own["dt"], own["value"] / own["dt"], own["b"], own["c"], rate=rate
    )
    got = run(state, inputs, rate)
    assert torch.allclose(got[0].double(), want, atol=2e-5)
    assert torch.allclose(state[0].double(), states[-1], atol=2e-5)


@pytest.mark.parametrize(("channels", "d"), [(8, 12), (96, 16), (5, 7), (33, 8)])
def test_a_row_has_the_same_bits_among_any_others(channels: int, d: int) -> None:
    inputs, rate = draw(19, 3, channels, d), draw_rate(channels, d)
    state = torch.randn(19, channels, d)
    whole_state = state.clone()
    whole = run(whole_state, inputs, rate)
    for size in (1, 2, 16):
        for i in range(0, 19, size):
            rows = slice(i, i + size)
            part_state = state[rows].clone()
            part = run(part_state, {name: x[rows] for name, x in inputs.items()}, rate)
            assert torch.equal(part, whole[rows])
            assert torch.equal(part_state, whole_state[rows])


def test_a_neutral_token_leaves_the_state_as_it_is() -> None:
    inputs = draw(3, 1, 8, 12)
    state = torch.randn(3, 8, 12)
    before = state.clone()
    for name in ("dt", "value", "b"):
        inputs[name].zero_()
    run(state, inputs, draw_rate(8, 12))
    assert torch.equal(state, before)
