"""What an example and a task are."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question with its only right answer.

    Args:
        task: Name of the task it belongs to.
        messages: The conversation to send, each `{"role": ..., "content": ...}`; empty where
            `prompt` is given instead.
        prompt: Raw text for a completion, without a chat template; empty where `messages` is given.
        expected: The answer's text, stripped.
        tools: Tool descriptions in OpenAI's form, empty for most tasks.
        check: Judges an answer; None compares the stripped text with `expected`.
    """

    task: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: str = ""
    expected: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    check: Callable[[str], bool] | None = None

    def is_right(self, answer: str) -> bool:
        """Say whether a model's answer is right."""
        if self.check is not None:
            return self.check(answer)
        return answer.strip() == self.expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A family of examples and the score a shipped model must reach on it.

    Args:
        name: Short name, a key of `suite()`.
        summary: What is asked, in one sentence.
        threshold: Least share of right answers, in [0, 1].
        max_tokens: Enough new tokens for any right answer.
        generate: Gives the example of a seed.
        cost: About how many ordinary examples one of this task's takes the time of.
    """

    name: str
    summary: str
    threshold: float
    max_tokens: int
    generate: Callable[[int], Example]
    cost: int = 1


def rng_of(task: str, seed: int) -> random.Random:
    """Give the random source of one example.

    A string is hashed with SHA-512, so tasks draw independently and alike on every Python.
    """
    return random.Random(f"headrace:{task}:{seed}")  # noqa: S311 (test data, not a secret)
