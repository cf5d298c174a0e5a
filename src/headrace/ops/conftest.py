"""What tests of operations share."""

from __future__ import annotations

import random

import pytest
import torch


@pytest.fixture
def seeded() -> None:
    """Draw from a fresh seed; its number is among what a failing test prints."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"{seed=}")
    torch.manual_seed(seed)
