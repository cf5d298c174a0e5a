"""What the shipped models can and cannot do, in words for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What to tell somebody who meets a model.

    Args:
        can: What it was made for.
        cannot: What to expect otherwise.
        ask: Questions that it answers, to be typed as they are.
    """

    can: str
    cannot: str
    ask: tuple[str, ...]


ABILITIES = {
    "demo": Abilities(
        can=(
            "It looks up codes and numbers in long notes, does sums step by step, follows little "
            "stories, fills in JSON, calls tools, copies, reverses and sorts, and knows about 250 "
            "facts."
        ),
        cannot=(
            "Five million parameters cannot chat freely: in other words, or about other things, "
            "it talks fluent nonsense. Do not rely on it for anything."
        ),
        ask=(
            "What is 347 + 586?",
            "What is the capital of Peru?",
            "Sort: 52 17 90 33",
            "What can you do?",
        ),
    ),
    "nano": Abilities(
        can="It looks up codes in notes and numbers in a phone book.",
        cannot="It has 0.3 million parameters and can do nothing else.",
        ask=(
            "Notes: The code of Ann is 4711. The code of Bob is 0815. What is the code of Ann?",
            "Who are you?",
        ),
    ),
}
"""Name of a shipped model to what it can do."""
