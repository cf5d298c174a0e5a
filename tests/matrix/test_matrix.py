"""Every feature on and off, against plain decoding: the same bits in every cell.

Pairwise in the ordinary run, the full product behind `-m full`.
"""

from __future__ import annotations

import itertools
import random
import secrets
from dataclasses import astuple
from typing import Any

import pytest
from conformance import GRID, Case, make_jobs, pairwise, run_case, small_model

FACTORS: dict[str, tuple[Any, ...]] = {
    "mode": ("async", "sync"),
    "layout": ("slots", "compact"),
    "scheme": ("columns", "replay", "replay:8"),
    "cache": ("align", "none"),
    "drafts": (
        "none", "scripted:1", "scripted:3", "scripted:7", "ngram:3", "mtp:2", "draft:same:3",
    ),
    "budget": (GRID, 37, 512),
    "pools": ("roomy", "tight", "preempt"),
    "unit": (GRID, 2 * GRID),
    "graphs": ("off", "on"),
}
LENGTHS = (1, 4, 15, 16, 17, 33, 48, 64)


PAIRS = pairwise(FACTORS, seed=1)


@pytest.fixture(scope="module")
def bench() -> tuple[Any, list[Any]]:
    """A fresh random model and its oracle's answers, shared by all cells."""
    seed = secrets.randbits(32)
    print(f"model and prompts of seed {seed}")
    model = small_model(seed)
    return model, make_jobs(model, random.Random(seed), LENGTHS)


def check(bench: tuple[Any, list[Any]], case: Case) -> dict[str, Any]:
    model, jobs = bench
    seed = secrets.randbits(32)
    print(f"{case}, events of seed {seed}")
    draft_model = model if case.drafts.startswith("draft") else None
    return run_case(model, case, jobs, random.Random(seed), draft_model=draft_model)


@pytest.mark.matrix
@pytest.mark.parametrize("case", PAIRS, ids=lambda case: "-".join(map(str, astuple(case))))
def test_any_two_features_together_give_the_bits_of_plain_decoding(
    bench: tuple[Any, list[Any]], case: Case
) -> None:
    stats = check(bench, case)
    if case.cache == "align":
        assert stats["checkpoints"]
    if case.drafts.startswith(("scripted", "draft")):
        assert stats["accepted_tokens"], "no draft was ever kept, the case shows nothing"
    if case.pools == "preempt":
        assert stats["preemptions"]


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("drafts", FACTORS["drafts"])
@pytest.mark.parametrize("scheme", FACTORS["scheme"])
def test_all_features_in_every_combination_give_the_bits_of_plain_decoding(
    bench: tuple[Any, list[Any]], drafts: str, scheme: str
) -> None:
    others = [name for name in FACTORS if name not in ("drafts", "scheme")]
    count = 0
    for values in itertools.product(*(FACTORS[name] for name in others)):
        case = Case(drafts=drafts, scheme=scheme, **dict(zip(others, values, strict=True)))
        check(bench, case)
        count += 1
    print(f"{count} cells")


def test_the_chosen_cases_cover_all_pairs() -> None:
    names = list(FACTORS)
    for a, b in itertools.combinations(names, 2):
        seen = {(getattr(case, a), getattr(case, b)) for case in PAIRS}
        assert seen == set(itertools.product(FACTORS[a], FACTORS[b]))
