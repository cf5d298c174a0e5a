"""The demo model does what its card says, and its answers break when a memory is damaged."""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from headrace import evals

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "headrace" / "assets" / "demo"
sys.path.insert(0, str(ROOT))

from tools.demo_model import gate  # noqa: E402
from tools.demo_model.demo_data import render  # noqa: E402
from tools.demo_model.evaluate import score  # noqa: E402
from tools.demo_model.files import load  # noqa: E402
from tools.demo_model.golden import continue_greedily  # noqa: E402
from tools.demo_model.model import DEMO, Model  # noqa: E402

MOST_BYTES = 12_000_000
CPU = torch.device("cpu")
SHORT_TASKS = ("arithmetic", "stories", "tools", "json", "facts", "copy", "reverse", "sort")


@pytest.fixture(scope="module")
def model() -> Model:
    torch.set_num_threads(1)
    return load(FOLDER, DEMO, CPU)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture
def first_seed() -> int:
    seed = int(os.environ.get("HEADRACE_TEST_SEED") or secrets.randbelow(10**9))
    print(f"HEADRACE_TEST_SEED={seed}")
    return seed


# `test_demo_engine.py` has all tasks answered by the engine; this is the training code itself.
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("arithmetic", "tools") else pytest.param(name, marks=pytest.mark.full)
        for name in SHORT_TASKS
    ],
)
def test_demo_answers_fresh_questions(
    name: str, model: Model, tokenizer: Tokenizer, first_seed: int
) -> None:
    task = evals.suite("demo")[name]

    result = score(
        model, tokenizer, task, count=24, first_seed=first_seed, device=CPU, render=render, batch=16
    )

    # The card's scores come from 256 examples; 24 fresh ones may fall three deviations short.
    spread = (task.threshold * (1 - task.threshold) / 24) ** 0.5
    assert result.accuracy >= task.threshold - 3 * spread, f"{result=} {first_seed=}"


def test_copying_drafts_are_nearly_always_accepted(
    model: Model, tokenizer: Tokenizer, first_seed: int
) -> None:
    task = evals.suite("demo")["copy"]

    result = score(
        model, tokenizer, task, count=16, first_seed=first_seed, device=CPU, render=render, batch=16
    )

    assert result.acceptance >= 0.9, f"{result=} {first_seed=}"


@pytest.mark.full
def test_zeroing_any_memory_of_any_layer_costs_answers(
    model: Model, tokenizer: Tokenizer, first_seed: int
) -> None:
    table = gate.matrix(model, tokenizer, CPU, count=24, seed=first_seed, how=("zero",))

    lost = gate.losses_of(table)
    assert min(table["none"].values()) >= 0.9, f"{table['none']=} {first_seed=}"
    # The card has 0.38 as the least of 128; with 24 the bound leaves room for chance.
    assert len(lost) == 10
    assert min(lost.values()) >= 0.1, f"{lost=} {first_seed=}"


def test_gate_asks_one_of_two_damages_and_tells_the_cheap_one() -> None:
    lost = {"1 state zero": 0.6, "1 state swap": 0.0, "5 kv zero": 0.1, "5 kv swap": 0.2}

    assert gate.best_of_each(lost) == {"1 state": 0.6, "5 kv": 0.2}


def test_golden_continuations_come_out_again(model: Model, tokenizer: Tokenizer) -> None:
    golden = json.loads((FOLDER / "golden.json").read_text())["prompts"]
    assert len(golden) == 100
    short = [entry for entry in golden if len(entry["prompt"]) < 300]

    for entry in secrets.SystemRandom().sample(short, 5):
        ids = tokenizer.encode(entry["prompt"], add_special_tokens=False).ids
        token_ids, logprobs = continue_greedily(model, ids, len(entry["token_ids"]))
        assert token_ids == entry["token_ids"], entry["prompt"]
        assert logprobs == pytest.approx(entry["logprobs"], abs=1e-3), entry["prompt"]


def test_transformers_gives_the_same_logits(model: Model, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    example = evals.suite("demo")["stories"].generate(11)
    ids = torch.tensor([tokenizer.encode(render(example), add_special_tokens=False).ids])

    with torch.no_grad():
        ours = model.logits(model.hidden(ids))
        theirs = reference(ids).logits

    assert (ours - theirs).abs().max() <= 2e-4 * theirs.std()


def test_chat_template_writes_what_the_model_was_trained_on(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    published = transformers.AutoTokenizer.from_pretrained(FOLDER)
    example = next(
        e for e in map(evals.suite("demo")["tools"].generate, range(20)) if len(e.tools) > 1
    )

    text = published.apply_chat_template(
        example.messages, tools=example.tools, tokenize=False, add_generation_prompt=True
    )

    assert text == render(example)
    assert published(text)["input_ids"] == tokenizer.encode(text, add_special_tokens=False).ids


def test_all_files_together_stay_under_twelve_megabytes() -> None:
    sizes = {p.name: p.stat().st_size for p in FOLDER.iterdir() if p.suffix != ".py"}

    assert sum(sizes.values()) < MOST_BYTES, sizes
