"""Forced acceptance keeps as many drafts as it was told to, in the mean."""

from __future__ import annotations

import torch

from headrace.worker.forced_acceptance import forced_counts

SHARES = (0.8, 0.64, 0.512)


def test_shares_of_kept_drafts_are_those_that_were_asked_for() -> None:
    count = 20_000
    slots = torch.arange(count) % 256
    computed = torch.arange(count) // 256 + 128
    lengths = torch.full((count,), 4)

    kept = forced_counts(torch.ones(count, dtype=torch.int64), lengths, slots, computed, SHARES)

    for place, share in enumerate(SHARES):
        assert abs((kept > place + 1).float().mean().item() - share) < 0.02


def test_rows_keep_no_more_than_they_have_and_padding_nothing() -> None:
    lengths = torch.tensor([1, 2, 0, 4])
    kept = torch.tensor([1, 1, 0, 1])

    forced = forced_counts(kept, lengths, torch.arange(4), torch.arange(4), (1.0, 1.0, 1.0))

    assert forced.tolist() == [1, 2, 0, 4]


def test_draws_depend_on_slot_and_position_alone() -> None:
    lengths, ones = torch.full((64,), 4), torch.ones(64, dtype=torch.int64)
    slots, computed = torch.arange(64), torch.arange(64) + 7

    both = forced_counts(ones, lengths, slots, computed, SHARES)
    half = forced_counts(ones[32:], lengths[32:], slots[32:], computed[32:], SHARES)

    assert torch.equal(both[32:], half)
