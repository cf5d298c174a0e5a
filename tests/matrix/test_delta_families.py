"""The engine's features with the states of linear attention's relatives: the same bits.

OLMo hybrid has learning rates up to 2, Kimi Linear decays by channel and latents in place of keys
and values, MiniMax a state without a convolution window, and here its attention has a window. Few
mixtures run by default, since what differs from the families of `test_families.py` is arithmetic;
all of them by `-m full`.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import astuple
from typing import Any

import pytest
from conformance import VOCAB, Case, check_family_case, make_jobs

from headrace.testing import tiny_family

LENGTHS = (1, 17, 33, 48)
CASES = (
    Case(scheme="columns", drafts="scripted:3", mode="sync", pools="preempt"),
    Case(scheme="replay", drafts="draft:same:3", layout="compact", budget=37),
    Case(scheme="replay:8", drafts="scripted:7", layout="compact", pools="tight"),
    Case(scheme="columns", drafts="ngram:3", layout="compact", pools="tight"),
    Case(scheme="replay", drafts="scripted:1", mode="sync", cache="none"),
    Case(scheme="columns", drafts="none", budget=48, pools="preempt"),
)
NUM_DEFAULT = 3
MARKED = [
    pytest.param(
        case,
        marks=[pytest.mark.matrix, *([] if i < NUM_DEFAULT else [pytest.mark.full])],
        id="-".join(map(str, astuple(case))),
    )
    for i, case in enumerate(CASES)
]
FAMILIES: dict[str, dict[str, Any]] = {
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "head_dim": 12,
            "num_heads": 3,
        },
    },
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "sliding_window": 21},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def bench(request: pytest.FixtureRequest) -> tuple[Any, list[Any]]:
    seed = secrets.randbits(32)
    print(f"model and prompts of seed {seed}")
    changes = {"vocab_size": VOCAB, "num_hidden_layers": 2} | FAMILIES[request.param]
    model = tiny_family(request.param, seed, **changes)
    return model, make_jobs(model, random.Random(seed), LENGTHS)


@pytest.mark.parametrize("case", MARKED)
def test_relatives_give_the_bits_of_plain_decoding(
    bench: tuple[Any, list[Any]], case: Case
) -> None:
    check_family_case(*bench, case)
