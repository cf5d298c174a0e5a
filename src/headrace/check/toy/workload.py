"""Seeded workloads: requests and what happens to them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.check.toy.model import VOCABULARY, reference_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class ToyRequest:
    """One request.

    Attributes:
        index: Its number.
        prompt: Tokens.
        max_new: Tokens to generate at most.
        arrival: Step at which it arrives.
    """

    index: int
    prompt: tuple[int, ...]
    max_new: int
    arrival: int

    def reference(self) -> list[int]:
        """Its answer, computed alone."""
        return reference_tokens(self.prompt, self.max_new)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and the steps at which some are aborted or preempted (and for how long).

    Attributes:
        requests: In the order of their arrival.
        aborts: Request to step.
        preemptions: Request to (step, steps it stays out).
    """

    requests: tuple[ToyRequest, ...]
    aborts: Mapping[int, int]
    preemptions: Mapping[int, tuple[int, int]]


def generate(seed: int) -> Workload:
    """A workload with at least one abort, preemption, prefix hit, chunked prompt and idle step."""
    draw = random.Random(seed)  # noqa: S311  a test case, not a secret

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCABULARY - 1) for _ in range(count))

    shared = tokens(8)
    other = tokens(4)
    requests = []
    arrival = 0
    for index in range(9):
        head = draw.choice((shared, shared, other, ()))
        if index in (1, 4, 7):
            head = shared
        tail = tokens(draw.randint(1, 7))
        # Long enough that slots, blocks and checkpoints are used again while steps are in flight.
        requests.append(ToyRequest(index, head + tail, draw.randint(5, 14), arrival))
        arrival += draw.choice((0, 0, 1, 1, 2, 3))
        if index == 6:  # noqa: PLR2004  a gap near the end: idle steps
            arrival += 12
    aborts = {index: requests[index].arrival + draw.randint(2, 5) for index in (3, 8)}
    first, second = draw.sample((0, 1, 2, 5, 6), 2)
    preemptions = {
        index: (requests[index].arrival + draw.randint(3, 5), draw.randint(1, 4))
        for index in (first, second)
    }
    return Workload(tuple(requests), aborts, preemptions)
