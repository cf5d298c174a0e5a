"""Choosing tokens: the noise, the filters, ties, what drafts are kept."""

from __future__ import annotations

import math
import secrets

import numpy as np
import pytest
import torch

from headrace.ops import token_choice
from headrace.ops.token_choice import gumbel_noise
from headrace.ops.token_choice.reference import _gumbel
from headrace.worker.sampler import (
    SamplingTensors,
    _filter,
    count_accepted,
    likeliest,
    lowest_argmax,
    sample,
    top_logprobs,
)

EULER = 0.5772156649015329
UNLIKELY = 1e-7


def fresh_seed() -> int:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return seed


def parameters(
    rows: int, *, temperature: float = 1.0, top_k: int = 1 << 30, top_p: float = 2.0,
    min_p: float = 0.0, seed: int = 0,
) -> SamplingTensors:
    return SamplingTensors(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        seed=torch.full((rows,), seed),
        position=torch.arange(rows),
    )


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of the chi-square test; categories below 5 are taken together."""
    is_big = expected >= 5
    counts = np.append(counts[is_big], counts[~is_big].sum())
    expected = np.append(expected[is_big], expected[~is_big].sum())
    is_possible = expected > 0
    assert not counts[~is_possible].any()
    statistic = ((counts - expected) ** 2)[is_possible] / expected[is_possible]
    halves = torch.tensor([is_possible.sum() - 1, statistic.sum()], dtype=torch.float64) / 2
    return torch.special.gammaincc(halves[0], halves[1]).item()


def test_noise_has_the_moments_of_the_gumbel_distribution() -> None:
    seed = fresh_seed()
    noise = gumbel_noise(torch.full((2000,), seed), torch.arange(2000), 500).double()
    assert torch.isfinite(noise).all()
    # A million draws: five standard errors of mean and of variance.
    assert abs(noise.mean().item() - EULER) < 5 * 1.2825 / 1000
    assert abs(noise.var().item() - math.pi**2 / 6) < 5 * 3.5 / 1000


def test_noise_is_finite_and_strictly_ordered_at_its_ends() -> None:
    ends = torch.tensor([0, 1, 2**22, 2**23 - 2, 2**23 - 1])
    noise = _gumbel(ends)
    assert torch.isfinite(noise).all()
    assert (noise.diff() > 0).all()
    exact = -torch.log(-torch.log((ends.double() + 0.5) * 2.0**-23))
    assert torch.allclose(noise.double(), exact, rtol=1e-6)


@pytest.mark.parametrize("lag", ["entry", "position", "seed"])
def test_noise_of_neighbours_is_uncorrelated(lag: str) -> None:
    seed = fresh_seed()
    base = gumbel_noise(torch.full((1000,), seed), torch.arange(1000), 401).double()
    if lag == "entry":
        first, second = base[:, :-1], base[:, 1:]
    elif lag == "position":
        first, second = base[:-1], base[1:]
    else:
        first = base
        second = gumbel_noise(torch.full((1000,), seed + 1), torch.arange(1000), 401).double()
    together = torch.stack((first.reshape(-1), second.reshape(-1)))
    assert abs(torch.corrcoef(together)[0, 1].item()) < 5 / math.sqrt(together.shape[1])


def test_noise_depends_on_seed_position_and_entry_alone() -> None:
    seeds = torch.tensor([3, -9, 3, 2**62])
    positions = torch.tensor([7, 7, 8, 0])
    noise = gumbel_noise(seeds, positions, 300)
    for row in range(4):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 300)
        assert torch.equal(noise[row], alone[0])
    assert torch.equal(gumbel_noise(seeds, positions, 100), noise[:, :100])
    assert len({tuple(row.tolist()) for row in noise}) == 4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature: float) -> None:
    seed, draws = fresh_seed(), 40_000
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(60, generator=generator) * 2
    chosen = sample(
        logits.expand(draws, 60), parameters(draws, temperature=temperature, seed=seed),
        is_all_greedy=False, filters=False,
    )
    counts = np.bincount(chosen.numpy(), minlength=60)
    expected = (logits.double() / temperature).softmax(0).numpy() * draws
    assert p_value(counts, expected) > UNLIKELY


def naive_filter(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Probabilities left, in float64: top_k, then top_p of those, then min_p of the likeliest."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    kept = set(order[:top_k].tolist())
    weights = np.exp(scaled - scaled.max())
    total = sum(weights[token] for token in kept)
    nucleus, mass = set(), 0.0
    for token in order:
        if token not in kept or mass >= top_p:
            break
        nucleus.add(int(token))
        mass += weights[token] / total
    left = {token for token in nucleus if weights[token] >= min_p}
    return np.array([weights[t] if t in left else 0.0 for t in range(len(logits))])


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (1, 1.0, 0.0), (80, 0.6, 0.0), (80, 1.0, 0.2), (9, 0.7, 0.05), (80, 1e-6, 0)],
)
def test_filters_keep_what_a_naive_loop_keeps(top_k: int, top_p: float, min_p: float) -> None:
    seed, draws = fresh_seed(), 20_000
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(80, generator=generator) * 2
    params = parameters(
        draws, temperature=0.8, top_k=top_k, top_p=top_p if top_p < 1 else 2.0, min_p=min_p,
        seed=seed,
    )
    chosen = sample(logits.expand(draws, 80), params, is_all_greedy=False, filters=True)
    counts = np.bincount(chosen.numpy(), minlength=80)
    weights = naive_filter(logits.numpy(), 0.8, top_k, top_p, min_p)
    assert not counts[weights == 0].any()
    if (weights > 0).sum() > 1:
        assert p_value(counts, weights / weights.sum() * draws) > UNLIKELY


def test_ties_go_to_the_lowest_id() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-torch.inf] * 4, [0.0, 0.0, -1.0, 0.0]])
    assert lowest_argmax(values).tolist() == [1, 0, 0]
    chosen = sample(values, parameters(3, temperature=0.0), is_all_greedy=True, filters=False)
    assert chosen.tolist() == [1, 0, 0]


def test_ties_at_the_threshold_of_top_k_all_stay() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0]).expand(4000, 4)
    chosen = sample(logits, parameters(4000, top_k=2), is_all_greedy=False, filters=True)
    assert set(chosen.tolist()) == {0, 1, 2}


def test_masked_entries_are_never_sampled() -> None:
    logits = torch.full((3000, 6), -torch.inf)
    logits[:, 2], logits[:, 5] = 0.0, -30.0
    chosen = sample(logits, parameters(3000, temperature=100.0), is_all_greedy=False, filters=True)
    assert set(chosen.tolist()) == {2, 5}


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, 333, generator=generator)
    params = SamplingTensors(
        temperature=torch.rand(40, generator=generator).masked_fill(torch.arange(40) % 4 == 0, 0.0),
        top_k=torch.randint(1, 334, (40,), generator=generator),
        top_p=torch.rand(40, generator=generator),
        min_p=torch.rand(40, generator=generator) * 0.2,
        seed=torch.randint(-(2**60), 2**60, (40,), generator=generator),
        position=torch.randint(0, 9999, (40,), generator=generator),
    )
    together = sample(logits, params, is_all_greedy=False, filters=True)
    for row in range(40):
        mine = SamplingTensors(
            **{name: getattr(params, name)[row : row + 1] for name in params.__slots__}
        )
        alone = sample(logits[row : row + 1], mine, is_all_greedy=False, filters=True)
        assert alone.item() == together[row].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("filters", [False, True])
def test_kernels_are_asked_for_the_same_choice(
    filters: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch  # noqa: FBT001
) -> None:
    """Their specification in their place; the kernel's own tests compare it with that."""
    monkeypatch.setattr(token_choice, "can_launch", lambda _: False)
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, 333, generator=generator).to(dtype)
    params = parameters(40, temperature=0.7, seed=seed, top_k=9 if filters else 333)
    params.temperature[::3] = 0.0
    by_kernel, by_torch = (
        sample(logits, params, is_all_greedy=False, filters=filters, kernels=kernels)
        for kernels in ("triton", "torch")
    )
    assert torch.equal(by_kernel, by_torch)
    assert torch.equal(by_torch[::3], logits[::3].float().argmax(-1))
    assert torch.equal(likeliest(logits, "triton"), likeliest(logits, "torch"))


def test_drafts_are_kept_from_the_left_while_equal() -> None:
    chosen = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [1, 1, 1, 1]])
    drafts = torch.tensor([[5, 6, 7], [5, 9, 7], [5, 6, 7], [-1, -1, -1], [1, 1, 1]])
    lengths = torch.tensor([4, 4, 2, 4, 0])
    assert count_accepted(chosen, drafts, lengths).tolist() == [4, 2, 2, 1, 0]


def test_logprobs_of_the_chosen_token_are_those_of_the_softmax() -> None:
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 50, generator=generator)
    chosen = torch.randint(0, 50, (7,), generator=generator)
    own, rank, values, ids = top_logprobs(logits, chosen, 4)
    exact = logits.double().log_softmax(-1)
    for row in range(7):
        token = int(chosen[row])
        assert abs(own[row].item() - exact[row, token].item()) < 1e-5
        assert rank[row].item() == 1 + (logits[row] > logits[row, token]).sum().item()
        assert ids[row].tolist() == logits[row].argsort(descending=True)[:4].tolist()
        assert torch.allclose(values[row].double(), exact[row, ids[row]], atol=1e-5)


def test_logprobs_and_nuclei_do_not_depend_on_the_order_of_their_sums() -> None:
    """What a GPU may change with the number of rows: here entries change places."""
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 5000, generator=generator) * 3
    rows = [top_logprobs(logits, logits.argmax(-1), 8)]
    kept = [torch.isfinite(_filter(logits, parameters(1, top_k=5000, top_p=0.7)))]
    for _ in range(8):
        order = torch.randperm(5000, generator=generator)
        mixed = logits[:, order]
        rows.append(top_logprobs(mixed, mixed.argmax(-1), 8))
        own = torch.isfinite(_filter(mixed, parameters(1, top_k=5000, top_p=0.7)))
        kept.append(own[:, order.argsort()])
    for (own, _, values, _), entries in zip(rows, kept, strict=True):
        assert torch.equal(own, rows[0][0])
        assert torch.equal(values, rows[0][2])
        assert torch.equal(entries, kept[0])
