"""A random-weight twin of the demo model notices every damage, swaps among them.

The trained model answers some questions although a memory was swapped; random weights have no
such preference, so each part of each layer moves the log-probabilities of what follows.
"""

from __future__ import annotations

import math
import secrets
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.demo_model.gate import damage, damages
from tools.demo_model.model import DEMO, Model

MOVED_AT_LEAST = 0.5
MOVED_AT_MOST = 0.05


def sensitive_model(seed: int) -> Model:
    """Give random weights under which every memory matters: slow decay, strong projections."""
    torch.manual_seed(seed)
    model = Model(DEMO)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(math.log(0.02))
            elif "conv1d" in name:
                parameter.normal_(std=0.5)
            elif parameter.ndim == 2:
                parameter.normal_(std=0.02 if "embed" in name else 0.08)
    # A head of small embeddings would flatten every difference.
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(24.0)
    return model.eval()


@pytest.fixture(scope="module")
def moved() -> dict[str, float]:
    """Largest change of a log-probability by each damage, and by cutting the run in two."""
    torch.set_num_threads(1)
    seed = secrets.randbelow(2**31)
    print(f"{seed=}")
    model = sensitive_model(seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, DEMO.vocab_size, (3, 104), generator=generator)
    with torch.no_grad():
        whole = model.logits(model.hidden(ids))[:, 96:].log_softmax(-1)
        caches = model.new_caches()
        model.hidden(ids[:, :96], caches=caches)
        return {
            name: float(
                model.logits(model.hidden(ids[:, 96:], caches=damage(caches, name)))
                .log_softmax(-1)
                .sub(whole)
                .abs()
                .max()
            )
            for name in damages(model)
        }


def test_an_undamaged_cache_changes_nothing(moved: dict[str, float]) -> None:
    assert moved["none"] < MOVED_AT_MOST, moved


def test_every_damage_moves_some_log_probability(moved: dict[str, float]) -> None:
    blind = {name: by for name, by in moved.items() if name != "none" and by < MOVED_AT_LEAST}

    assert not blind, f"{blind=} {moved=}"
