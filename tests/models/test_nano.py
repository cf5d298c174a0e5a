"""The nano model does what it was made for, and other implementations agree on its numbers.

The thresholds were written here and in `headrace.evals` before the model was trained.
"""

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
FOLDER = ROOT / "src" / "headrace" / "assets" / "nano"
sys.path.insert(0, str(ROOT))

from tools.demo_model.evaluate import prompt_text, score  # noqa: E402
from tools.demo_model.files import load  # noqa: E402
from tools.demo_model.model import NANO, Model  # noqa: E402

REGISTERS_AT_LEAST = 0.95
PHONEBOOK_AT_LEAST = 0.80
DRAFT_ACCEPTANCE_AT_LEAST = 0.5
MOST_BYTES = 1_000_000
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Model:
    torch.set_num_threads(1)
    return load(FOLDER, NANO, CPU)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture
def first_seed() -> int:
    seed = int(os.environ.get("HEADRACE_TEST_SEED") or secrets.randbelow(10**9))
    print(f"HEADRACE_TEST_SEED={seed}")
    return seed


def test_thresholds_of_the_installed_tasks_are_those_of_this_test() -> None:
    tasks = evals.suite("nano")

    assert tasks["registers"].threshold == REGISTERS_AT_LEAST
    assert tasks["phonebook"].threshold == PHONEBOOK_AT_LEAST


@pytest.mark.parametrize(
    ("name", "at_least"), [("registers", REGISTERS_AT_LEAST), ("phonebook", PHONEBOOK_AT_LEAST)]
)
def test_nano_answers_fresh_questions(
    name: str, at_least: float, model: Model, tokenizer: Tokenizer, first_seed: int
) -> None:
    task = evals.suite("nano")[name]

    result = score(model, tokenizer, task, count=32, first_seed=first_seed, device=CPU, batch=8)

    assert result.accuracy >= at_least, f"{result=} {first_seed=}"
    assert result.acceptance >= DRAFT_ACCEPTANCE_AT_LEAST, f"{result=} {first_seed=}"


def test_all_files_together_stay_under_a_megabyte() -> None:
    sizes = {p.name: p.stat().st_size for p in FOLDER.iterdir() if p.suffix != ".py"}

    assert sum(sizes.values()) < MOST_BYTES, sizes


def test_transformers_gives_the_same_logits(model: Model, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    example = evals.suite("nano")["registers"].generate(11)
    ids = torch.tensor([tokenizer.encode(prompt_text(example), add_special_tokens=False).ids])

    with torch.no_grad():
        ours = model.logits(model.hidden(ids))
        theirs = reference(ids).logits
        erased = model.logits(model.hidden(ids[:, 64:]))

    assert (ours - theirs).abs().max() <= 2e-4 * theirs.std()
    assert (erased[:, -1] - ours[:, -1]).abs().max() > 0.1, "the prompt's start does not matter"


def test_chat_template_writes_what_the_model_was_trained_on(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    published = transformers.AutoTokenizer.from_pretrained(FOLDER)
    example = evals.suite("nano")["phonebook"].generate(3)

    text = published.apply_chat_template(
        example.messages, tokenize=False, add_generation_prompt=True
    )

    assert text == prompt_text(example)
    assert published(text)["input_ids"] == tokenizer.encode(text, add_special_tokens=False).ids
    assert (
        published.eos_token_id == json.loads((FOLDER / "config.json").read_text())["eos_token_id"]
    )
