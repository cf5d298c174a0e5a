"""The tasks of the parity model: is the number of ones even or odd?

Nothing but a state that turns with every one can answer this for long strings: attention sees how
many of the tokens are ones, but not to the last one, and states that only fade or keep (write
strengths below 1) cannot turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.evals.task import Example, Task, rng_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

TRAINED_BITS = 96
"""Longest string in the training."""
LONGEST_BITS = 4 * TRAINED_BITS
DENSITIES = (0.1, 0.3, 0.5, 0.5, 0.7, 0.9)
"""Shares of ones, drawn for each string."""


def bit_string(rng: random.Random, num_bits: int) -> str:
    """Draw a string of zeros and ones."""
    density = rng.choice(DENSITIES)
    return "".join("1" if rng.random() < density else "0" for _ in range(num_bits))


def parity_answer(bits: str) -> str:
    """Say whether the number of ones is even or odd."""
    return "It is odd." if bits.count("1") % 2 else "It is even."


def _bits_between(name: str, least: int, most: int) -> Callable[[int], Example]:
    def generate(seed: int) -> Example:
        rng = rng_of(f"parity-{name}", seed)
        bits = bit_string(rng, rng.randint(least, most))
        message = {"role": "user", "content": bits}
        return Example(task=name, messages=[message], expected=parity_answer(bits))

    return generate


PARITY = (
    Task(
        name="parity",
        summary=f"Whether 1 to {TRAINED_BITS} bits have an even or odd number of ones.",
        threshold=0.97,
        max_tokens=8,
        generate=_bits_between("parity", 1, TRAINED_BITS),
    ),
    Task(
        name="parity_long",
        summary=f"The same of {TRAINED_BITS + 1} to {LONGEST_BITS} bits, beyond the training.",
        threshold=0.97,
        max_tokens=8,
        generate=_bits_between("parity_long", TRAINED_BITS + 1, LONGEST_BITS),
    ),
)
