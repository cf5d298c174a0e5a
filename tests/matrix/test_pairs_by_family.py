"""Layouts, schemes, asynchrony, prefix cache and drafters on every family: the same bits, pairwise.

Every two values of any two of these features run together on every family of the registry, by
`-m full`. What runs by default is in the files beside this one, a few mixtures of each family.
"""

from __future__ import annotations

import itertools
import random
import secrets
from dataclasses import astuple, replace
from typing import Any

import pytest
from conformance import VOCAB, Case, check_family_case, make_jobs, pairwise

from headrace.testing import TINY_DICTS, tiny_family

FACTORS: dict[str, tuple[str, ...]] = {
    "mode": ("async", "sync"),
    "layout": ("slots", "compact"),
    "scheme": ("columns", "replay", "replay:8"),
    "cache": ("align", "none"),
    "drafts": ("none", "scripted:3", "ngram:3", "draft:same:2"),
}
LENGTHS = (1, 17, 33, 48)
PAIRS = pairwise(FACTORS, seed=3)


@pytest.fixture(scope="module")
def benches() -> dict[str, tuple[Any, list[Any]]]:
    """Models and jobs by family, made when a family's first case runs."""
    return {}


@pytest.mark.matrix
def test_the_chosen_cases_cover_all_pairs() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        seen = {(getattr(case, a), getattr(case, b)) for case in PAIRS}
        assert seen == set(itertools.product(FACTORS[a], FACTORS[b]))


@pytest.mark.matrix
@pytest.mark.full
@pytest.mark.parametrize("case", PAIRS, ids=lambda case: "-".join(map(str, astuple(case))))
@pytest.mark.parametrize("family", sorted(TINY_DICTS))
def test_any_two_features_together_give_the_bits_of_plain_decoding_in_every_family(
    benches: dict[str, tuple[Any, list[Any]]], family: str, case: Case
) -> None:
    if family not in benches:
        seed = secrets.randbits(32)
        print(f"model and prompts of seed {seed}")
        made = tiny_family(family, seed, vocab_size=VOCAB)
        benches[family] = made, make_jobs(made, random.Random(seed), LENGTHS)
    model, jobs = benches[family]
    if model.config.num_mtp_layers:
        # Its own drafter in the place of a second model.
        case = replace(case, drafts=case.drafts.replace("draft:same", "mtp"))
    check_family_case(model, jobs, case)
