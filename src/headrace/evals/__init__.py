"""The shipped models' tasks: questions whose answers a program can check.

Every task is a generator: a seed gives one example, the same one on every machine. The training
tools draw from the same generators with other seeds, so a score says how well a model does what it
was made for, on examples it has not seen. Nothing here needs torch.

    for task in suite("nano").values():
        example = task.generate(7)
        answer = ...  # ask the model for example.messages (or example.prompt)
        right = example.is_right(answer)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.evals.abilities import ABILITIES, Abilities
from headrace.evals.demo import DEMO
from headrace.evals.lookup import (
    FIRST_NAMES,
    LAST_NAMES,
    Notebook,
    digits,
    filler,
    phonebook,
    registers,
)
from headrace.evals.nano import NANO, NANO_FIRST_NAMES, NANO_LAST_NAMES
from headrace.evals.parity import PARITY
from headrace.evals.task import Example, Task

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ABILITIES",
    "FIRST_NAMES",
    "LAST_NAMES",
    "NANO_FIRST_NAMES",
    "NANO_LAST_NAMES",
    "Abilities",
    "Example",
    "Notebook",
    "Task",
    "digits",
    "filler",
    "phonebook",
    "registers",
    "suite",
    "tasks",
]
_SUITES = {"nano": NANO, "demo": DEMO, "parity": PARITY}


def suite(model: str) -> dict[str, Task]:
    """Give the tasks of a shipped model, name to task.

    Args:
        model: "demo", "nano" or "parity".

    Raises:
        KeyError: No tasks belong to a model of that name.
    """
    if model not in _SUITES:
        raise KeyError(f"no tasks for model {model!r}; models with tasks: {', '.join(_SUITES)}")
    return {task.name: task for task in _SUITES[model]}


def tasks() -> dict[str, Callable[[int], Example]]:
    """Give every task of every shipped model: `model/name` to its generator."""
    return {
        f"{model}/{name}": task.generate for model in _SUITES for name, task in suite(model).items()
    }
