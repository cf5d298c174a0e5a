"""The demo model's training: the same batches every time, and memories that change hands."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "headrace" / "assets" / "demo"
sys.path.insert(0, str(ROOT))

from tools.demo_model.data import Batch, Feed, Plan  # noqa: E402
from tools.demo_model.demo_data import DemoMixture  # noqa: E402
from tools.demo_model.model import DEMO, Model  # noqa: E402
from tools.demo_model.training import swapped_loss  # noqa: E402

PLAN = Plan(steps=20, stages=((0.8, 2, 192), (1.0, 1, 384)))
SPLIT = 24


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def batches(tokenizer: Tokenizer, num_workers: int) -> list[Batch]:
    lines = [f"Sentence {word} stands here for prose." for word in "abcdefghij"]
    mixture = DemoMixture([lines * 9] * 4, lines)
    feed = Feed(tokenizer, mixture, plan=PLAN, num_workers=num_workers, seed=3)
    try:
        return [feed.get(PLAN.shape(step / PLAN.steps)) for step in range(PLAN.steps)]
    finally:
        feed.close()


def test_batches_do_not_depend_on_the_number_of_workers(tokenizer: Tokenizer) -> None:
    for one, three in zip(batches(tokenizer, 1), batches(tokenizer, 3), strict=True):
        assert one.pairs is not None
        assert three.pairs is not None
        for a, b in zip((*one.rows, *one.pairs), (*three.rows, *three.pairs), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def small() -> Model:
    shape = dataclasses.replace(
        DEMO,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=("linear_attention", "full_attention"),
    )
    torch.manual_seed(5)
    model = Model(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.4)
            elif name.endswith("A_log"):
                parameter.fill_(-3.0)
    return model


@torch.no_grad()
def loss_of(model: Model, ids: torch.Tensor, taken: list[int]) -> float:
    weights = torch.ones(ids.shape)
    return float(swapped_loss(model, ids, weights, torch.tensor(taken, dtype=torch.int32), SPLIT))


@torch.no_grad()
def plain_loss(model: Model, ids: torch.Tensor) -> float:
    logits = model.logits(model.hidden(ids))[:, SPLIT - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, SPLIT:].flatten()))


def test_rows_that_take_nothing_over_are_plain_rows(small: Model) -> None:
    ids = torch.randint(64, (4, SPLIT + 6), generator=torch.Generator().manual_seed(1))

    assert loss_of(small, ids, [0] * 4) == pytest.approx(plain_loss(small, ids), rel=1e-5)


def test_rows_that_take_all_memories_over_go_on_where_their_partners_were(small: Model) -> None:
    ids = torch.randint(64, (4, SPLIT + 6), generator=torch.Generator().manual_seed(2))
    everything = 0b11 | 0b11 << 8
    # The token at the split is predicted before memories change hands, so it is left out.
    same = ids[:, SPLIT - 1 : SPLIT + 1]
    ids[:, SPLIT - 1 : SPLIT + 1] = same[:1]
    heads, tails = ids[:, :SPLIT], ids[:, SPLIT:]
    crossed = torch.cat([heads.unflatten(0, (-1, 2)).flip(1).flatten(0, 1), tails], 1)

    weights = torch.ones(ids.shape)
    weights[:, SPLIT] = 0.0
    taken = torch.full((4,), everything, dtype=torch.int32)
    with torch.no_grad():
        swapped = float(swapped_loss(small, ids, weights, taken, SPLIT))
        plain = float(swapped_loss(small, crossed, weights, taken * 0, SPLIT))
        own = float(swapped_loss(small, ids, weights, taken * 0, SPLIT))

    assert swapped == pytest.approx(plain, rel=1e-5)
    assert abs(swapped - own) > 1e-3


def test_one_memory_taken_over_matters_for_every_layer_and_part(small: Model) -> None:
    ids = torch.randint(64, (4, SPLIT + 6), generator=torch.Generator().manual_seed(3))
    own = loss_of(small, ids, [0] * 4)

    for bit in (0, 1, 8):
        assert abs(loss_of(small, ids, [1 << bit] * 4) - own) > 1e-3, bit


def test_pairs_ask_for_the_value_of_whoever_holds_the_memory(tokenizer: Tokenizer) -> None:
    mixture = DemoMixture([["x"]], ["A line of prose."])
    pairs = mixture.pairs(random.Random(4), 1.0, tokenizer)
    from tools.demo_model import demo_data  # noqa: PLC0415

    split = demo_data.SWAP_SPLIT
    found = {"own": 0, "partner": 0}
    for row in range(demo_data.SWAP_ROWS):
        texts = [tokenizer.decode(pairs.ids[r].tolist()) for r in (row, row ^ 1)]
        heads = [tokenizer.decode(pairs.ids[r, :split].tolist()) for r in (row, row ^ 1)]
        word = next(w for w in demo_data.LEDGERS if f"\n{w} " in heads[0])
        books = [dict(_entries(head, word)) for head in heads]
        last = _entries(texts[0][len(heads[0]) - 40 :], word)[-1]
        takes_state = pairs.taken[row] >> demo_data.LEDGERS.index(word) & 1
        holder = books[takes_state]
        assert holder.get(last[0]) == last[1], (texts, bin(pairs.taken[row]))
        found["partner" if takes_state else "own"] += books[0].get(last[0]) != books[1].get(last[0])
    assert min(found.values()) > 4, found


def _entries(text: str, word: str) -> list[tuple[str, str]]:
    lines = [line for line in text.split("\n") if line.startswith(f"{word} ")]
    split = [line.removeprefix(f"{word} ").rpartition(" ") for line in lines]
    return [(name, value) for name, _, value in split if len(value) == 2 and value.isdigit()]
