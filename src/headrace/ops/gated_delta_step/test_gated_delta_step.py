"""The recurrence, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.ops.gated_delta_step import gated_delta_step, store_states
from headrace.ops.gated_delta_step.reference import gated_delta_reference

pytestmark = pytest.mark.usefixtures("seeded")


def draw(n: int, tokens: int, hk: int, group: int, *, k: int, v: int) -> dict[str, Tensor]:
    key = torch.randn(n, tokens, hk, k)
    return {
        "key": key / key.norm(dim=-1, keepdim=True),
        "value": torch.randn(n, tokens, hk, group, v),
        "decay": torch.rand(n, tokens, hk, group) * 0.3 + 0.7,
        "rate": torch.rand(n, tokens, hk, group),
        "query": torch.randn(n, tokens, hk, k) * k**-0.5,
    }


def run(state: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    tokens = inputs["key"].shape[1]
    outputs = [
        gated_delta_step(state, **{name: x[:, t] for name, x in inputs.items()})
        for t in range(tokens)
    ]
    return torch.stack([out for out in outputs if out is not None], 1)


@pytest.mark.parametrize(("hk", "group", "k", "v"), [(1, 1, 4, 6), (2, 3, 8, 5), (3, 2, 16, 16)])
@pytest.mark.parametrize("tokens", [1, 7])
def test_it_agrees_with_the_reference(hk: int, group: int, k: int, v: int, tokens: int) -> None:
    inputs = draw(1, tokens, hk, group, k=k, v=v)
    state = torch.randn(1, hk, group, v, k)
    flat = {name: x[0] for name, x in inputs.items()}
    want, states = gated_delta_reference(
        state[0].flatten(0, 1),
        flat["query"],
        flat["key"],
        flat["value"].flatten(1, 2),
        decay=flat["decay"].flatten(1, 2),
        rate=flat["rate"].flatten(1, 2),
    )
    got = run(state, inputs)
    assert torch.allclose(got[0].flatten(1, 2).double(), want, atol=1e-5)
    assert torch.allclose(state[0].flatten(0, 1).double(), states[-1], atol=1e-5)


@pytest.mark.parametrize(("hk", "group", "k", "v"), [(1, 1, 8, 12), (2, 2, 8, 12), (4, 2, 32, 16)])
def test_a_row_has_the_same_bits_among_any_others(hk: int, group: int, k: int, v: int) -> None:
    inputs = draw(37, 5, hk, group, k=k, v=v)
    state = torch.randn(37, hk, group, v, k)
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
    inputs = draw(3, 1, 2, 2, k=8, v=12)
    state = torch.randn(3, 2, 2, 12, 8)
    before = state.clone()
    for name in ("key", "value", "rate"):
        inputs[name].zero_()
    inputs["decay"].fill_(1.0)
    run(state, inputs)
    assert torch.equal(state, before)


def test_only_valid_rows_are_stored() -> None:
    pool = torch.randn(6, 4, 3)
    pool[0] = torch.nan
    before = pool.clone()
    states = torch.randn(3, 4, 3)
    store_states(pool, torch.tensor([2, 5, 4]), states, torch.tensor([True, False, True]))
    assert torch.equal(pool[2], states[0])
    assert torch.equal(pool[4], states[2])
    for block in (1, 3, 5):
        assert torch.equal(pool[block], before[block])
    assert bool(pool[0].isnan().all())
