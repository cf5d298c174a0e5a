"""The tasks of the demo model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from headrace.evals import worlds
from headrace.evals.facts import FACTS
from headrace.evals.lookup import LEDGERS, LISTS, ledger, phonebook, registers
from headrace.evals.task import Example, Task, rng_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable


def _chat(task: str, question: str, expected: str) -> Example:
    return Example(task=task, messages=[{"role": "user", "content": question}], expected=expected)


def _registers(rng: random.Random, sentences: int) -> Example:
    num_names = rng.randint(4, 12)
    book = registers(
        rng,
        num_names=num_names,
        num_writes=num_names + rng.randint(4, 16),
        filler_sentences=sentences,
    )
    question, expected = book.ask(rng.choice(list(book.facts)))
    return _chat("registers", f"{book.text}\n{question}", expected)


def _registers_2k(seed: int) -> Example:
    rng = rng_of("demo-registers-2k", seed)
    return _registers(rng, rng.randint(185, 215))


def _registers_8k(seed: int) -> Example:
    rng = rng_of("demo-registers-8k", seed)
    return _registers(rng, rng.randint(860, 910))


def _phonebook(seed: int) -> Example:
    rng = rng_of("demo-phonebook", seed)
    book = phonebook(rng, num_pairs=200)
    question, expected = book.ask(rng.choice(list(book.facts)))
    return _chat("phonebook", f"{book.text}\n{question}", expected)


def _story(seed: int) -> Example:
    rng = rng_of("demo-stories", seed)
    text, asked = worlds.story(rng, num_events=rng.randint(4, 20))
    question, expected = rng.choice(asked)
    return _chat("stories", f"{text}\n{question}", expected)


def _simple(
    task: str, write: Callable[[random.Random], tuple[str, str]]
) -> Callable[[int], Example]:
    def generate(seed: int) -> Example:
        question, expected = write(rng_of(f"demo-{task}", seed))
        return _chat(task, question, expected)

    return generate


def _final_number(expected: str) -> Callable[[str], bool]:
    """Judge a sum by what follows the think block; the steps are the model's own affair."""
    wanted = expected.rpartition("</think>")[2].strip()

    def check(answer: str) -> bool:
        return answer.rpartition("</think>")[2].strip() == wanted

    return check


def _arithmetic(seed: int) -> Example:
    question, expected = worlds.arithmetic(rng_of("demo-arithmetic", seed))
    return Example(
        task="arithmetic",
        messages=[{"role": "user", "content": question}],
        expected=expected,
        check=_final_number(expected),
    )


def _same_json(expected: str) -> Callable[[str], bool]:
    def check(answer: str) -> bool:
        try:
            return bool(json.loads(answer) == json.loads(expected))
        except ValueError:
            return False

    return check


def _extraction(seed: int) -> Example:
    question, expected = worlds.extraction(rng_of("demo-json", seed))
    return Example(
        task="json",
        messages=[{"role": "user", "content": question}],
        expected=expected,
        check=_same_json(expected),
    )


def _tools(seed: int) -> Example:
    talk = worlds.tool_talk(rng_of("demo-tools", seed))
    return Example(
        task="tools",
        messages=[{"role": "user", "content": talk.question}],
        expected=talk.call_text,
        tools=talk.tools,
    )


def _fact(rng: random.Random) -> tuple[str, str]:
    asks, answer = rng.choice(FACTS)
    return rng.choice(asks), answer


def ledger_example(rng: random.Random, word: str) -> Example:
    """Give a ledger's raw prompt, its last line unfinished, and the value that belongs there."""
    book = ledger(rng, word, num_lines=40 if word in LISTS else 12)
    name = rng.choice(list(book.facts))
    prompt = "Ledger" + "".join(book.lines) + book.stem(name)
    value = book.facts[name]
    return Example(
        task="ledger",
        prompt=prompt,
        expected=value,
        # A completion may go on with further lines.
        check=lambda answer: answer.strip().split("\n")[0] == value,
    )


def _ledger(seed: int) -> Example:
    rng = rng_of("demo-ledger", seed)
    return ledger_example(rng, rng.choice(LEDGERS))


def _task(
    name: str,
    threshold: float,
    max_tokens: int,
    generate: Callable[[int], Example],
    summary: str,
    *,
    cost: int = 1,
) -> Task:
    return Task(
        name=name,
        summary=summary,
        threshold=threshold,
        max_tokens=max_tokens,
        generate=generate,
        cost=cost,
    )


DEMO = (
    _task(
        "registers",
        0.99,
        24,
        _registers_2k,
        "Codes set and set again in 2,000 tokens of notes.",
        cost=8,
    ),
    _task("registers_8k", 0.97, 24, _registers_8k, "The same in 7,000 tokens.", cost=25),
    _task("phonebook", 0.95, 24, _phonebook, "One of 200 people's numbers.", cost=8),
    _task("ledger", 0.95, 3, _ledger, "A raw list's last line, completed from an earlier one."),
    _task("arithmetic", 0.98, 200, _arithmetic, "Sums and differences of up to four digits."),
    _task("stories", 0.97, 40, _story, "Who is where and has what, after up to 20 events."),
    _task("tools", 0.97, 64, _tools, "The right tool call, or a refusal."),
    _task("json", 0.97, 64, _extraction, "A sentence as JSON with the keys asked for."),
    _task("facts", 0.95, 24, _simple("facts", _fact), "About 250 facts known by heart."),
    _task("copy", 0.95, 80, _simple("copy", worlds.copying), "A list repeated."),
    _task("reverse", 0.95, 40, _simple("reverse", worlds.reversing), "A list backwards."),
    _task("sort", 0.90, 40, _simple("sort", worlds.sorting), "Two-digit numbers in order."),
)
