"""Accepted counts drawn at will, for measuring speculation on weights that know nothing.

A drafter with random weights is never right, so a benchmark of it says nothing about speed. Here
everything runs as it always does (drafter, draft head, verify, sampler, save), and only then the
number of kept drafts is replaced. What is generated is meaningless; figures made so must say it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.token_choice import gumbel_noise

if TYPE_CHECKING:
    from torch import Tensor


def forced_counts(
    kept: Tensor, lengths: Tensor, slots: Tensor, computed: Tensor, shares: tuple[float, ...]
) -> Tensor:
    """Replace the tokens that verify rows keep by seeded draws.

    Args:
        kept: What verification kept, [N] i64; tells padded rows only.
        lengths: Tokens of each row, 1 + its drafts, [N] i64.
        slots: Seed of each row's draws, [N] i64.
        computed: Tokens before each row, [N] i64; a new draw at each position.
        shares: Chance that the drafts up to and including each place are kept, not rising.

    Returns:
        [N] i64, in 1..length; 0 where nothing was kept.
    """
    noise = gumbel_noise(slots.to(torch.int64), computed, 1)[:, 0]
    uniform = torch.exp(-torch.exp(-noise))
    drawn = torch.ones_like(kept)
    for share in shares:
        # One draw for all places: the first place that fails ends the row.
        drawn = drawn + (uniform < share)
    return torch.where(kept > 0, torch.minimum(drawn, lengths), 0)
