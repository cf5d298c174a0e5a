"""What the requests of a benchmark look like and when they come."""

from __future__ import annotations

import numpy as np


def random_tokens(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    """Draw token ids uniformly."""
    tokens: list[int] = rng.integers(0, vocab_size, count).tolist()
    return tokens


def random_prompts(
    rng: np.random.Generator, count: int, prompt_tokens: int, vocab_size: int, prefix: list[int]
) -> list[list[int]]:
    """Draw prompts that share nothing but the prefix.

    Args:
        rng: Of the draws.
        count: Prompts.
        prompt_tokens: Own tokens of each.
        vocab_size: Ids are below it.
        prefix: What all of them begin with.
    """
    return [prefix + random_tokens(rng, prompt_tokens, vocab_size) for _ in range(count)]


def arrival_times(rng: np.random.Generator, count: int, rate: float | None) -> list[float]:
    """Draw when requests come, in seconds from the start: a Poisson process, or all at once."""
    if rate is None:
        return [0.0] * count
    times: list[float] = np.cumsum(rng.exponential(1.0 / rate, count)).tolist()
    return times


def percentiles(values: list[float], points: tuple[int, ...] = (50, 90, 99)) -> dict[str, float]:
    """Percentiles by name (`p50`), empty without values."""
    if not values:
        return {}
    found = np.percentile(np.asarray(values), points)
    return {f"p{point}": float(value) for point, value in zip(points, found, strict=True)}
