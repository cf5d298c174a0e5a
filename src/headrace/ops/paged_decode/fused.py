"""The launches of the split kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.paged_decode.kernel import combine_splits_kernel, paged_decode_kernel
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from torch import Tensor

SPLIT, KEYS = 512, 64
"""Absolute positions of one split; keys that a program loads at a time."""

_WIDE_KEY = 512
"""Bytes of a key above which a program loads half as many, so that two loads fit in its memory."""

_MIN_ROWS = 16
"""Rows of the smallest matrix product on tensor cores."""


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
    num_heads, head_dim = query.shape[1:]
    page, kv_heads = k_pool.shape[1:3]
    n, width = token_index.shape
    group = num_heads // kv_heads
    rows = max(_MIN_ROWS, 1 << (width * group - 1).bit_length())
    splits = -(-max_seq_len // SPLIT)
    is_wide = head_dim * k_pool.element_size() > _WIDE_KEY
    device = query.device
    partial = torch.empty(n, splits, kv_heads, rows, head_dim, dtype=torch.float32, device=device)
    stats = torch.empty(n, splits, kv_heads, rows, 2, dtype=torch.float32, device=device)
    launch_kernel(
        paged_decode_kernel,
        (n, kv_heads, splits),
        query,
        k_pool,
        v_pool,
        block_table,
        token_index,
        query_lens,
        seq_lens,
        partial,
        stats,
        query.stride(0),
        k_pool.stride(0),
        k_pool.stride(1),
        block_table.stride(0),
        head_dim**-0.5,
        GROUP=group,
        G=kv_heads,
        D=head_dim,
        P=page,
        QUERY=width,
        ROWS=rows,
        SPLIT=SPLIT,
        KEYS=KEYS // 2 if is_wide else KEYS,
        WIDE=query.device.type == "cpu",
        # More rows are more sums to hold: over four warps they spill.
        num_warps=4 if rows == _MIN_ROWS else 8,
        num_stages=2,
    )
    launch_kernel(
        combine_splits_kernel,
        (n, width, num_heads),
        partial,
        stats,
        token_index,
        query_lens,
        seq_lens,
        out,
        out.stride(0),
        splits,
        GROUP=group,
        G=kv_heads,
        D=head_dim,
        QUERY=width,
        ROWS=rows,
        SPLIT=SPLIT,
        num_warps=1,
    )
