"""What the shipped models can and cannot do, in words for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What to tell somebody who meets a model.

    Args:
        can: What it was made for.
        cannot: What to expect otherwise.
        ask: Questions that it answers, to be typed as they are, in this order or alone.
        answers: What must be in the answer to each of them.
    """

    can: str
    cannot: str
    ask: tuple[str, ...]
    answers: tuple[str, ...]


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
            "Story: Tom went to the kitchen. Tom picked up the lamp. Tom went to the garden. "
            "Where is the lamp?",
            "Give name, age as JSON: Ann Fox is 31 years old, lives in Lima and has a cat.",
            "Sort: 52 17 90 33",
        ),
        answers=(
            "347 + 586 = 933.",
            "The capital of Peru is Lima.",
            "The lamp is with Tom. Tom is in the garden.",
            '{"name": "Ann Fox", "age": 31}',
            "Sorted: 17 33 52 90",
        ),
    ),
    "nano": Abilities(
        can="It looks up codes in notes and numbers in a phone book.",
        cannot="It has half a million parameters and can do nothing else.",
        ask=(
            "Who are you?",
            "What can you do?",
            "Phone book: Ann Fox is 2846, Bob Hill is 9071. What is the number of Bob Hill?",
            "Notes: The code of Ann is 4711. The code of Bob is 0815. What is the code of Ann?",
            "Notes: The code of Eve is 2206. The code of Eve is now 9134. What is the code of Eve?",
        ),
        answers=(
            "I am nano",
            "codes in notes",
            "The number of Bob Hill is 9071.",
            "The code of Ann is 4711.",
            "The code of Eve is 9134.",
        ),
    ),
    "parity": Abilities(
        can=(
            "It says whether a string of up to 384 zeros and ones has an even or an odd number of "
            "ones, counting by twos in its recurrent state."
        ),
        cannot="It has a tenth of a million parameters and knows only the words of that answer.",
        ask=(
            "1",
            "1011",
            "0110100110010110",
            "11111111111111111111111111111111111",
            "10100111011001010111000110100110110011010100101101110010011010111001",
        ),
        answers=("It is odd.", "It is odd.", "It is even.", "It is odd.", "It is odd."),
    ),
}
"""Name of a shipped model to what it can do."""
