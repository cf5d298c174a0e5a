"""The launches of the choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.token_choice.kernel import best_of_parts_kernel, best_of_row_kernel
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.token_choice.rows import SampledRows

BLOCK, SAMPLED_BLOCK, NUM_WARPS = 2048, 1024, 4
"""Entries of a program at a time: two loads of 16 bytes for each thread, if they are bfloat16.

Hashes of 64 bits need more registers, so fewer entries are sampled at a time.
"""

MAX_PARTS = 128
"""Parts of a row; the last launch takes all of them at once."""

PROGRAMS = 4096
"""Programs that keep a device busy; with more rows than this a row is one part."""


def choose_tokens(logits: Tensor, sampled: SampledRows | None) -> Tensor:
    """Choose; see the package."""
    rows, entries = logits.shape
    block = BLOCK if sampled is None else SAMPLED_BLOCK
    blocks = -(-entries // block)
    parts = max(1, min(blocks, MAX_PARTS, PROGRAMS // max(rows, 1)))
    part_blocks = -(-blocks // parts)
    # None of the parts is empty.
    parts = -(-blocks // part_blocks)
    best = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    keys = (None,) * 3
    if sampled is not None:
        keys = (sampled.temperature, sampled.seed, sampled.position)  # type: ignore[assignment]
    launch_kernel(
        best_of_parts_kernel,
        (rows, parts),
        logits,
        *keys,
        best,
        logits.stride(0),
        part_blocks,
        V=entries,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
    launch_kernel(best_of_row_kernel, (rows,), best, chosen, parts, PARTS=MAX_PARTS, num_warps=1)
    return chosen
