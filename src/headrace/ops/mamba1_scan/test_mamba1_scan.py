"""The scan against the recurrence, and its bits under any split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.ops.mamba1_scan import mamba1_scan
from headrace.ops.mamba1_scan.reference import mamba1_reference

pytestmark = pytest.mark.usefixtures("seeded")


SIZES = [(8, 12), (96, 16), (5, 7), (33, 8)]
"""Channels I, state size D."""


def draw(tokens: int, channels: int, d: int) -> dict[str, Tensor]:
    dt = torch.rand(tokens, channels) * 0.3 + 0.01
    return {
        "dt": dt,
        "value": dt * torch.randn(tokens, channels),
        "b": torch.randn(tokens, d),
        "c": torch.randn(tokens, d),
    }


def draw_rate(channels: int, d: int) -> Tensor:
    return -torch.rand(channels, d) - 0.05


def pieces(inputs: dict[str, Tensor], grid: int) -> dict[str, Tensor]:
    """Cut a sequence that starts on the grid and pad its last piece with zeros."""
    out = {}
    for name, x in inputs.items():
        padded = torch.cat([x, x.new_zeros(-x.shape[0] % grid, *x.shape[1:])])
        out[name] = padded.view(-1, grid, *x.shape[1:])
    return out


def run(
    inputs: dict[str, Tensor],
    state: Tensor,
    rate: Tensor,
    grid: int,
    snapshots: tuple[int, ...] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Scan one sequence; the state is overwritten."""
    cut = pieces(inputs, grid)
    out, taken = mamba1_scan(
        state[None],
        cut["dt"],
        cut["value"],
        cut["b"],
        cut["c"],
        rate=rate,
        rows_per_round=(1,) * cut["b"].shape[0],
        snapshots=tuple((j, 0) for j in snapshots),
    )
    return out.flatten(0, 1)[: inputs["b"].shape[0]], taken


@pytest.mark.parametrize("sizes", [(8, 12), (5, 7)])
@pytest.mark.parametrize(("grid", "tokens"), [(16, 1), (16, 63), (64, 64), (64, 150)])
def test_it_agrees_with_the_recurrence(sizes: tuple[int, int], grid: int, tokens: int) -> None:
    inputs, rate = draw(tokens, *sizes), draw_rate(*sizes)
    state = torch.randn(sizes)
    want, states = mamba1_reference(
        state,
        inputs["dt"],
        inputs["value"] / inputs["dt"],
        inputs["b"],
        inputs["c"],
        rate=rate,
    )
    got, taken = run(inputs, state, rate, grid, snapshots=(0,))
    tolerance = 1e-5 * float(want.std())
    assert float((got - want).abs().max()) < tolerance
    assert float((state - states[-1]).abs().max()) < tolerance
    assert float((taken[0] - states[min(grid, tokens) - 1]).abs().max()) < tolerance


def test_strong_decay_does_not_overflow() -> None:
    inputs = draw(64, 8, 12)
    inputs["dt"] *= 200.0
    got, _ = run(inputs, torch.randn(8, 12), draw_rate(8, 12), 64)
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("sizes", SIZES)
def test_a_prompt_has_the_same_bits_whole_and_split_on_the_grid(sizes: tuple[int, int]) -> None:
    inputs, rate = draw(150, *sizes), draw_rate(*sizes)
    start = torch.randn(sizes)
    whole_state = start.clone()
    whole, taken = run(inputs, whole_state, rate, 16, snapshots=(0, 6))
    state = start.clone()
    parts, states = [], []
    for begin, end in ((0, 16), (16, 112), (112, 150)):
        part = {name: x[begin:end] for name, x in inputs.items()}
        parts.append(run(part, state, rate, 16)[0])
        states.append(state.clone())
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state, whole_state)
    assert torch.equal(states[0], taken[0])
    assert torch.equal(states[1], taken[1])


@pytest.mark.parametrize("sizes", SIZES)
def test_a_sequence_has_the_same_bits_alone_and_with_mates(sizes: tuple[int, int]) -> None:
    lengths, rate = (80, 64, 31, 16, 5), draw_rate(*sizes)
    inputs = [draw(n, *sizes) for n in lengths]
    states = torch.randn(5, *sizes)
    cut = [pieces(x, 16) for x in inputs]
    counts = [c["b"].shape[0] for c in cut]
    places = [(j, i) for j in range(max(counts)) for i, n in enumerate(counts) if n > j]
    joined = {name: torch.stack([cut[i][name][j] for j, i in places]) for name in cut[0]}
    together = states.clone()
    out, _ = mamba1_scan(
        together,
        joined["dt"],
        joined["value"],
        joined["b"],
        joined["c"],
        rate=rate,
        rows_per_round=tuple(sum(n > j for n in counts) for j in range(max(counts))),
    )
    for i, n in enumerate(lengths):
        alone_state = states[i].clone()
        alone, _ = run(inputs[i], alone_state, rate, 16)
        mine = torch.cat([out[at] for at, (_, row) in enumerate(places) if row == i])[:n]
        assert torch.equal(mine, alone)
        assert torch.equal(together[i], alone_state)
