"""Attention of the generating rows, token by token: the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def paged_decode(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    token_index: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor,
) -> None:
    """Attend from the generating rows of a step; see the package."""
    group = query.shape[1] // k_pool.shape[2]
    page = k_pool.shape[1]
    for n in range(token_index.shape[0]):
        length, queries = int(seq_lens[n]), int(query_lens[n])
        assert length <= max_seq_len, f"{length=} exceeds {max_seq_len=}"
        at = torch.arange(length, device=query.device)
        blocks = block_table[n, at // page].long()
        keys = k_pool[blocks, at % page].float().repeat_interleave(group, 1)  # [L, H, D]
        values = v_pool[blocks, at % page].float().repeat_interleave(group, 1)
        for t in range(queries):
            seen = length - queries + t + 1
            q = query[token_index[n, t]].float() * query.shape[2] ** -0.5
            weights = torch.softmax((keys[:seen] * q).sum(-1), 0)
            out[token_index[n, t]] = (weights[..., None] * values[:seen]).sum(0).to(out.dtype)
