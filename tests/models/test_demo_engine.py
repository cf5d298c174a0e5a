"""The demo model in the real engine: drafts, cache and batching on, off, and damaged."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

import pytest
import torch

from headrace import LLM, SamplingParams, evals
from headrace.engine.damage import damageable, damaged_answers
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.engine.damage import Damaged

PLAIN = {"speculative": "none", "prefix_cache": "none", "async_scheduling": False}
TASKS = ("arithmetic", "stories", "tools", "json", "facts", "copy", "reverse", "sort", "ledger")
MAX_TOKENS = 200


def open_demo(**options: str | bool) -> LLM:
    return LLM("demo", device="cpu", max_num_seqs=16, max_model_len=1024, **options)


@pytest.fixture(scope="module")
def everything_on() -> Iterator[LLM]:
    torch.set_num_threads(1)
    with open_demo() as llm:
        yield llm


@pytest.fixture
def first_seed() -> int:
    seed = int(os.environ.get("HEADRACE_TEST_SEED") or secrets.randbelow(10**9))
    print(f"HEADRACE_TEST_SEED={seed}")
    return seed


def prompts_of(llm: LLM, examples: list[evals.Example]) -> list[list[int]]:
    return [
        llm.chat_prompt(example.messages, tools=example.tools or None)
        if example.messages
        else llm.get_tokenizer().encode(example.prompt)
        for example in examples
    ]


def greedy(tasks: list[evals.Task]) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=min(task.max_tokens, MAX_TOKENS)) for task in tasks
    ]


def test_answers_are_right_and_the_same_with_everything_on_and_off(
    everything_on: LLM, first_seed: int
) -> None:
    tasks = [evals.suite("demo")[name] for name in TASKS for _ in range(2)]
    examples = [task.generate(first_seed + index) for index, task in enumerate(tasks)]
    prompts = prompts_of(everything_on, examples)

    on = everything_on.generate(prompts, greedy(tasks))
    figures = everything_on.stats()
    with open_demo(**PLAIN) as plain:
        off = plain.generate(prompts, greedy(tasks))
        assert plain.stats()["draft_tokens"] == 0

    assert [o.outputs[0].token_ids for o in on] == [o.outputs[0].token_ids for o in off]
    wrong = [
        (example.task, output.outputs[0].text, example.expected)
        for example, output in zip(examples, on, strict=True)
        if not example.is_right(output.outputs[0].text)
    ]
    # Of 256 examples of each task the card has at most three wrong.
    assert len(wrong) <= 2, f"{wrong=} {first_seed=}"
    assert figures["accepted_tokens"] >= 0.8 * figures["draft_tokens"] > 0


def test_document_asked_about_again_comes_from_the_cache(
    everything_on: LLM, first_seed: int
) -> None:
    notes = evals.registers(
        evals.task.rng_of("cached", first_seed), num_names=4, num_writes=8, filler_sentences=30
    )
    params = SamplingParams(temperature=0, max_tokens=24)
    asked = [notes.ask(key) for key in notes.facts]

    for index, (question, expected) in enumerate(asked):
        message = {"role": "user", "content": f"{notes.text}\n{question}"}
        (output,) = everything_on.chat([message], params)
        assert output.outputs[0].text == expected, f"{first_seed=}"
        assert (output.num_cached_tokens > 0) == (index > 0)


@pytest.mark.parametrize("what", ["state", "conv", "kv"])
def test_damage_needs_an_engine_that_neither_runs_ahead_nor_shares(
    what: Damaged, everything_on: LLM
) -> None:
    with pytest.raises(ConfigError, match="async_scheduling off and prefix_cache none"):
        damaged_answers(everything_on.engine, [[1]], SamplingParams(), what)


def test_unknown_damage_is_refused(everything_on: LLM) -> None:
    with pytest.raises(ConfigError, match="damage is 'weights'; choose one of state, conv, kv"):
        damaged_answers(everything_on.engine, [[1]], SamplingParams(), "weights")  # type: ignore[arg-type]


def test_a_damaged_sequence_leaves_the_next_ones_whole(everything_on: LLM, first_seed: int) -> None:
    task = evals.suite("demo")["ledger"]
    examples = [task.generate(first_seed + index) for index in range(8)]
    prompts = prompts_of(everything_on, examples)
    params = SamplingParams(temperature=0, max_tokens=task.max_tokens)
    with LLM(config=damageable(everything_on.config)) as llm:
        before = [output.outputs[0].text for output in llm.generate(prompts, params)]
        hurt = damaged_answers(llm.engine, prompts, params, "state")
        after = [output.outputs[0].text for output in llm.generate(prompts, params)]

    assert before == after
    assert sum(a != b for a, b in zip(before, hurt, strict=True)) >= 4, f"{first_seed=}"
