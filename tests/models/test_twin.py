"""A random-weight twin of the demo model notices every damage, swaps among them."""

from __future__ import annotations

import dataclasses
import secrets
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.demo_model import gate, twin
from tools.demo_model.model import DEMO, Model

# As many layers, but a tenth of the width.
NARROW = dataclasses.replace(
    DEMO,
    vocab_size=96,
    hidden_size=32,
    intermediate_size=32,
    head_dim=16,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)


@pytest.fixture(scope="module")
def moved() -> dict[str, float]:
    torch.set_num_threads(1)
    seed = secrets.randbelow(2**31)
    print(f"{seed=}")
    return twin.moved_by(seed, torch.device("cpu"))


def test_every_damage_moves_some_log_probability_and_caches_do_not(
    moved: dict[str, float],
) -> None:
    assert len(moved) == 21
    assert not twin.failures(moved), moved


def test_a_twin_blind_to_a_damage_is_refused() -> None:
    assert twin.failures({"none": 0.06, "2 kv swap": 0.4, "0 conv zero": 0.6}) == [
        "twin: damage 2 kv swap moves 0.40 < 0.5",
        "twin: caches move 0.060 > 0.05",
    ]


def test_the_engine_computes_what_the_twin_does_and_shows_every_damage(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    # Of narrow twins one in five moves by less than the whole shape's bound; this one does not.
    seed = 10

    moved = twin.moved_in_engine(seed, tmp_path, shape=NARROW, prompt=40, after=2)

    assert set(moved) == {"everything", *gate.damages(Model(NARROW))}
    assert not twin.failures(moved), moved


def test_an_engine_that_differs_with_everything_on_is_refused() -> None:
    assert twin.failures({"none": 0.01, "everything": 0.06}, "twin in the engine") == [
        "twin in the engine: caches move 0.060 > 0.05"
    ]
