"""The engine's features with every kind of state, against plain decoding: the same bits.

`test_matrix.py` runs all pairs of features on Gated DeltaNet. Here a few mixtures of them run on
what differs from it: another recurrence with a mixture of experts, layers whose only state is a
window, a model with several state groups, and an MTP head with experts.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

import pytest
from conformance import GRID, VOCAB, Case, check_family_case, make_jobs

from headrace.models.granite import GraniteModel
from headrace.testing import tiny_family

if TYPE_CHECKING:
    from headrace.models.batch import StateGroupSpec

LENGTHS = (1, 15, 17, 33, 48)
CASES = (
    Case(scheme="columns", drafts="scripted:3", pools="preempt"),
    Case(scheme="replay", drafts="scripted:7", layout="compact", budget=37),
    Case(scheme="replay:8", drafts="ngram:3", mode="sync", pools="tight"),
    Case(scheme="columns", drafts="draft:same:3", mode="sync", layout="compact", cache="none"),
    Case(scheme="columns", drafts="scripted:1", layout="compact", pools="tight", unit=2 * GRID),
    Case(scheme="replay", drafts="draft:same:3", budget=48, pools="preempt"),
    Case(scheme="replay", drafts="none", mode="sync", layout="compact", budget=512),
)


class GroupPerLayer(GraniteModel):
    """A model whose recurrent layers have a state group each."""

    def state_groups(self, max_draft_tokens: int) -> tuple[StateGroupSpec, ...]:
        (group,) = super().state_groups(max_draft_tokens)
        return tuple(replace(group, layers=(layer,)) for layer in group.layers)


SHAPES: dict[str, dict[str, Any]] = {
    "lfm2": {"full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_moe": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2},
    "falcon_mamba": {},
    "mamba2": {},
}
"""Two layers of each family: one with a state, and one with attention if the family has any."""


def build(kind: str, seed: int) -> Any:  # noqa: ANN401
    common: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 2}
    if kind in SHAPES:
        return tiny_family(kind, seed, **common, **SHAPES[kind])
    layers = ["mamba", "attention"]
    if kind == "granite":
        return tiny_family("granite", seed, layer_types=layers, **common)
    common["num_hidden_layers"] = 3
    model = tiny_family("granite", seed, layer_types=["mamba", *layers], **common)
    assert isinstance(model, GraniteModel)
    split = GroupPerLayer(model.config, model._weights, "float32", model._multipliers)
    assert len(split.state_groups(0)) == 2
    return split


CASES_OF_KIND = {
    "granite": range(7),
    "granite_two_groups": (0, 1, 2),
    "lfm2": (0, 1, 2, 3, 4),
    "qwen3_5_moe": (1, 2, 5),
    "falcon_mamba": (0, 1, 2, 4),
    "jamba": (2, 4),
    "lfm2_moe": (1, 3),
    "mamba2": (3, 6),
}
"""Cases that run by default; kinds that share a state's code share the cases. `full` runs all."""

RUNS = [
    pytest.param(
        kind,
        case,
        id="-".join([kind, *map(str, astuple(case))]),
        marks=() if i in chosen else pytest.mark.full,
    )
    for kind, chosen in CASES_OF_KIND.items()
    for i, case in enumerate(CASES)
]


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> tuple[Any, list[Any]]:
    seed = secrets.randbits(32)
    print(f"model and prompts of seed {seed}")
    model = build(request.param, seed)
    return model, make_jobs(model, random.Random(seed), LENGTHS)


@pytest.mark.matrix
@pytest.mark.parametrize(("bench", "case"), RUNS, indirect=["bench"])
def test_every_kind_of_state_gives_the_bits_of_plain_decoding(
    bench: tuple[Any, list[Any]], case: Case
) -> None:
    model, jobs = bench
    if model.config.num_mtp_layers:
        # Its own drafter in the place of a second model.
        case = replace(case, drafts=case.drafts.replace("draft:same:3", "mtp:2"))
    check_family_case(model, jobs, case)
