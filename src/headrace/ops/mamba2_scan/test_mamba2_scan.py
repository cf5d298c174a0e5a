"""The chunked scan against the recurrence, and its bits under any split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.ops.mamba2_scan import mamba2_scan
from headrace.ops.mamba2_scan.reference import mamba2_reference

pytestmark = pytest.mark.usefixtures("seeded")


SIZES = [
    (1, 4, 8, 12), (2, 4, 12, 8), (1, 2, 64, 128), (1, 1, 8, 8), (2, 6, 4, 20), (1, 3, 3, 11),
    (1, 1, 2, 65),
]
"""Groups G, heads H, head size P, state size D."""


def draw(tokens: int, groups: int, heads: int, p: int, d: int) -> dict[str, Tensor]:
    return {
        "b": torch.randn(tokens, groups, d),
        "c": torch.randn(tokens, groups, d),
        "value": torch.randn(tokens, heads, p),
        "log_decay": -torch.rand(tokens, heads) * 0.5,
    }


def pieces(inputs: dict[str, Tensor], grid: int) -> dict[str, Tensor]:
    """Cut a sequence that starts on the grid and pad its last piece with zeros."""
    out = {}
    for name, x in inputs.items():
        padded = torch.cat([x, x.new_zeros(-x.shape[0] % grid, *x.shape[1:])])
        out[name] = padded.view(-1, grid, *x.shape[1:])
    return out


def run(
    inputs: dict[str, Tensor], state: Tensor, grid: int, snapshots: tuple[int, ...] = ()
) -> tuple[Tensor, list[Tensor]]:
    """Scan one sequence; the state is overwritten."""
    cut = pieces(inputs, grid)
    out, taken = mamba2_scan(
        state[None],
        cut["b"],
        cut["c"],
        cut["value"],
        log_decay=cut["log_decay"],
        rows_per_round=(1,) * cut["b"].shape[0],
        snapshots=tuple((j, 0) for j in snapshots),
    )
    return out.flatten(0, 1)[: inputs["b"].shape[0]], taken


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("grid", "tokens"), [(16, 1), (16, 63), (64, 64), (64, 150)])
def test_it_agrees_with_the_recurrence(
    sizes: tuple[int, int, int, int], grid: int, tokens: int
) -> None:
    inputs = draw(tokens, *sizes)
    state = torch.randn(*sizes[1:])
    want, states = mamba2_reference(
        state, inputs["b"], inputs["c"], inputs["value"], decay=inputs["log_decay"].exp()
    )
    got, taken = run(inputs, state, grid, snapshots=(0,))
    tolerance = 1e-5 * float(want.std())
    assert float((got - want).abs().max()) < tolerance
    assert float((state - states[-1]).abs().max()) < tolerance
    assert float((taken[0] - states[min(grid, tokens) - 1]).abs().max()) < tolerance


def test_strong_decay_does_not_overflow() -> None:
    inputs = draw(64, 1, 2, 8, 12)
    inputs["log_decay"] *= 60.0
    got, _ = run(inputs, torch.randn(2, 8, 12), 64)
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("sizes", SIZES)
def test_a_prompt_has_the_same_bits_whole_and_split_on_the_grid(
    sizes: tuple[int, int, int, int],
) -> None:
    inputs = draw(150, *sizes)
    start = torch.randn(*sizes[1:])
    whole_state = start.clone()
    whole, _ = run(inputs, whole_state, 16)
    state = start.clone()
    parts = []
    for begin, end in ((0, 16), (16, 112), (112, 150)):
        part = {name: x[begin:end] for name, x in inputs.items()}
        parts.append(run(part, state, 16)[0])
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state, whole_state)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_sequence_has_the_same_bits_alone_and_with_mates(
    sizes: tuple[int, int, int, int],
) -> None:
    lengths = (80, 64, 31, 16, 5)
    inputs = [draw(n, *sizes) for n in lengths]
    states = torch.randn(5, *sizes[1:])
    cut = [pieces(x, 16) for x in inputs]
    counts = [c["b"].shape[0] for c in cut]
    places = [(j, i) for j in range(max(counts)) for i, n in enumerate(counts) if n > j]
    joined = {name: torch.stack([cut[i][name][j] for j, i in places]) for name in cut[0]}
    together = states.clone()
    out, _ = mamba2_scan(
        together,
        joined["b"],
        joined["c"],
        joined["value"],
        log_decay=joined["log_decay"],
        rows_per_round=tuple(sum(n > j for n in counts) for j in range(max(counts))),
    )
    for i, n in enumerate(lengths):
        alone_state = states[i].clone()
        alone, _ = run(inputs[i], alone_state, 16)
        mine = torch.cat([out[at] for at, (_, row) in enumerate(places) if row == i])[:n]
        assert torch.equal(mine, alone)
        assert torch.equal(together[i], alone_state)
