"""The tasks of the nano model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.evals.lookup import FIRST_NAMES, LAST_NAMES, Notebook, phonebook, registers
from headrace.evals.task import Example, Task, rng_of

if TYPE_CHECKING:
    import random

NANO_FIRST_NAMES = FIRST_NAMES[:32]
NANO_LAST_NAMES = LAST_NAMES[:32]


def _example(task: str, rng: random.Random, book: Notebook) -> Example:
    question, expected = book.ask(rng.choice(list(book.facts)))
    content = f"{book.text}\n{question}"
    return Example(task=task, messages=[{"role": "user", "content": content}], expected=expected)


def _nano_registers(seed: int) -> Example:
    rng = rng_of("nano-registers", seed)
    num_names = rng.randint(2, 8)
    book = registers(
        rng,
        num_names=num_names,
        num_writes=num_names + rng.randint(0, 8),
        filler_sentences=rng.randint(0, 110),
        names=NANO_FIRST_NAMES,
    )
    return _example("registers", rng, book)


def _nano_phonebook(seed: int) -> Example:
    rng = rng_of("nano-phonebook", seed)
    book = phonebook(
        rng,
        num_pairs=rng.randint(8, 40),
        first_names=NANO_FIRST_NAMES,
        last_names=NANO_LAST_NAMES,
    )
    return _example("phonebook", rng, book)


NANO = (
    Task(
        name="registers",
        summary="Notes set the codes of 2 to 8 people, some more than once; ask for one.",
        threshold=0.95,
        max_tokens=24,
        generate=_nano_registers,
    ),
    Task(
        name="phonebook",
        summary="A list of 8 to 40 people with four-digit numbers; ask for one.",
        threshold=0.80,
        max_tokens=24,
        generate=_nano_phonebook,
    ),
)
