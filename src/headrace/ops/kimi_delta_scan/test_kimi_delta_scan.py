"""The chunked scan of decays by channel against the recurrence, and its bits under any split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.ops.kimi_delta_scan import kimi_delta_scan
from headrace.ops.kimi_delta_scan.reference import kimi_delta_reference

pytestmark = pytest.mark.usefixtures("seeded")


NAMES = ("query", "key", "value", "log_decay", "rate")


def draw(tokens: int, heads: int, k: int, v: int) -> dict[str, Tensor]:
    key = torch.randn(tokens, heads, k)
    return {
        "query": torch.randn(tokens, heads, k) * k**-0.5,
        "key": key / key.norm(dim=-1, keepdim=True),
        "value": torch.randn(tokens, heads, v),
        "log_decay": -torch.rand(tokens, heads, k) * 0.5,
        "rate": torch.rand(tokens, heads),
    }


def pieces(inputs: dict[str, Tensor], grid: int) -> dict[str, Tensor]:
    """Cut a sequence that starts on the grid and pad its last piece with zeros."""
    out = {}
    for name, x in inputs.items():
        missing = -x.shape[0] % grid
        padded = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
        out[name] = padded.view(-1, grid, *x.shape[1:])
    return out


def run(
    inputs: dict[str, Tensor], state: Tensor, grid: int, snapshots: tuple[int, ...] = ()
) -> tuple[Tensor, list[Tensor]]:
    """Scan one sequence; the state is overwritten."""
    cut = pieces(inputs, grid)
    tokens = inputs["key"].shape[0]
    out, taken = kimi_delta_scan(
        state[None],
        cut["query"],
        cut["key"],
        cut["value"],
        log_decay=cut["log_decay"],
        rate=cut["rate"],
        rows_per_round=(1,) * cut["key"].shape[0],
        snapshots=tuple((j, 0) for j in snapshots),
    )
    return out.flatten(0, 1)[:tokens], taken


@pytest.mark.parametrize("grid", [16, 40, 64])
@pytest.mark.parametrize("tokens", [1, 63, 64, 150])
@pytest.mark.parametrize("strength", [1.0, 20.0])
def test_it_agrees_with_the_recurrence(grid: int, tokens: int, strength: float) -> None:
    inputs = draw(tokens, 3, 8, 12)
    inputs["log_decay"] *= strength
    state = torch.randn(3, 12, 8)
    want, states = kimi_delta_reference(
        state,
        inputs["query"],
        inputs["key"],
        inputs["value"],
        decay=inputs["log_decay"].exp(),
        rate=inputs["rate"],
    )
    got, taken = run(inputs, state, grid, snapshots=(0,))
    assert torch.allclose(got.double(), want, atol=2e-5)
    assert torch.allclose(state.double(), states[-1], atol=2e-5)
    assert torch.allclose(taken[0].double(), states[min(grid, tokens) - 1], atol=2e-5)


def test_a_prompt_has_the_same_bits_whole_and_split_on_the_grid() -> None:
    inputs = draw(150, 4, 8, 12)
    start = torch.randn(4, 12, 8)
    whole_state = start.clone()
    whole, _ = run(inputs, whole_state, 32)
    state = start.clone()
    parts = []
    for begin, end in ((0, 32), (32, 96), (96, 150)):
        part = {name: x[begin:end] for name, x in inputs.items()}
        parts.append(run(part, state, 32)[0])
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state, whole_state)


def test_a_sequence_has_the_same_bits_alone_and_with_mates() -> None:
    lengths = (80, 64, 31, 16, 5)
    inputs = [draw(n, 4, 8, 12) for n in lengths]
    states = torch.randn(5, 4, 12, 8)
    cut = [pieces(x, 32) for x in inputs]
    counts = [c["key"].shape[0] for c in cut]
    rounds = max(counts)
    rows_per_round = tuple(sum(n > j for n in counts) for j in range(rounds))
    joined = {
        name: torch.stack(
            [cut[i][name][j] for j in range(rounds) for i in range(rows_per_round[j])]
        )
        for name in NAMES
    }
    together = states.clone()
    out, _ = kimi_delta_scan(
        together,
        joined["query"],
        joined["key"],
        joined["value"],
        log_decay=joined["log_decay"],
        rate=joined["rate"],
        rows_per_round=rows_per_round,
    )
    places = [(j, i) for j in range(rounds) for i in range(rows_per_round[j])]
    for i, n in enumerate(lengths):
        alone_state = states[i].clone()
        alone, _ = run(inputs[i], alone_state, 32)
        mine = torch.cat([out[at] for at, (_, row) in enumerate(places) if row == i])[:n]
        assert torch.equal(mine, alone)
        assert torch.equal(together[i], alone_state)
