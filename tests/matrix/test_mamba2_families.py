"""The engine's features with the many ways in which families build layers around Mamba-2.

Attention and a state in one layer (Falcon-H1), one mixer a layer and an MTP head of several layers
(Nemotron-H), blocks that layers share (Zamba2), and rotary attention beside it (Bamba): the same
bits as plain decoding. By default every case but one runs on one of them, and all by `-m full`.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import astuple, replace
from typing import Any

import pytest
from conformance import GRID, VOCAB, Case, check_family_case, make_jobs

from headrace.testing import tiny_family

LENGTHS = (1, 15, 17, 33, 48)
CASES = (
    Case(scheme="columns", drafts="scripted:3", pools="preempt"),
    Case(scheme="replay", drafts="scripted:7", layout="compact", budget=37),
    Case(scheme="replay:8", drafts="ngram:3", mode="sync", pools="tight"),
    Case(scheme="columns", drafts="draft:same:2", mode="sync", layout="compact", cache="none"),
    Case(scheme="columns", drafts="scripted:1", layout="compact", pools="tight", unit=2 * GRID),
    Case(scheme="replay", drafts="draft:same:2", budget=48, pools="preempt"),
    Case(scheme="replay", drafts="none", mode="sync", layout="compact", budget=512),
)
FAMILIES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "bamba": ({"num_hidden_layers": 2, "attn_layer_indices": [1]}, (6,)),
    "falcon_h1": ({"num_hidden_layers": 2}, (1, 4)),
    "nemotron_h": ({}, (2, 5)),
    "zamba2": (
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "hybrid_layer_ids": [1, 2],
        },
        (0,),
    ),
}
"""Changes to a family's small config, and its default cases."""


def runs() -> list[Any]:
    """Every family with every case; those that are not default are marked."""
    return [
        pytest.param(
            family,
            case,
            marks=[pytest.mark.matrix, *([] if i in defaults else [pytest.mark.full])],
            id="-".join((family, *map(str, astuple(case)))),
        )
        for family, (_, defaults) in FAMILIES.items()
        for i, case in enumerate(CASES)
    ]


@pytest.fixture(scope="module")
def benches() -> dict[str, tuple[Any, list[Any]]]:
    """Models and jobs by family, made when a family's first case runs."""
    return {}


@pytest.mark.parametrize(("family", "case"), runs())
def test_every_way_to_build_a_layer_gives_the_bits_of_plain_decoding(
    benches: dict[str, tuple[Any, list[Any]]], family: str, case: Case
) -> None:
    if family not in benches:
        seed = secrets.randbits(32)
        print(f"model and prompts of seed {seed}")
        changes, _ = FAMILIES[family]
        made = tiny_family(family, seed, vocab_size=VOCAB, **changes)
        benches[family] = made, make_jobs(made, random.Random(seed), LENGTHS)
    model, jobs = benches[family]
    if model.config.num_mtp_layers:
        # Its own drafter in the place of a second model.
        case = replace(case, drafts=case.drafts.replace("draft:same", "mtp"))
    check_family_case(model, jobs, case)
