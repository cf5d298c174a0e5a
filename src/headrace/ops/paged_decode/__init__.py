"""Attention of generating rows: 1 to 8 tokens a sequence, keys and values in KV blocks.

The keys and values of the step's own tokens are in the pools already. Head sizes 64, 128 and 256,
any number of query heads for each KV head. The bits of a row's result depend on its own sequence
alone: keys are split at fixed absolute positions and the splits are added in order. Rows see all
keys before them: layers with a window cannot use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.paged_decode import reference
from headrace.rt.kernels import can_launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_heads", "paged_decode"]


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
    """Attend from the generating rows of a step.

    Args:
        query: Queries after rotation, [T, H, D]; rows may be strided.
        k_pool: Keys after rotation, [B, P, G, D].
        v_pool: [B, P, G, D].
        block_table: KV blocks of each row, [N, M] i32.
        token_index: Packed index of each row's tokens, [N, Q] i64.
        query_lens: [N]; 0 for padded rows.
        seq_lens: Tokens in each sequence after this step, drafts included, [N].
        max_seq_len: Host-known upper bound of seq_lens; decides only how many programs run.
        out: [T, H, D]; overwritten at the rows' tokens.

    Raises:
        ValueError: Sizes that do not fit each other.
    """
    check_heads(query, k_pool, v_pool)
    if query.shape[2] & (query.shape[2] - 1):
        msg = f"head size must be a power of 2, not {query.shape[2]}"
        raise ValueError(msg)
    run = reference.paged_decode
    if can_launch(query):
        from headrace.ops.paged_decode import fused  # noqa: PLC0415  needs Triton

        run = fused.paged_decode
    run(query, k_pool, v_pool, block_table, token_index, query_lens, seq_lens, max_seq_len, out)


def check_heads(query: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Refuse queries [T, H, D] and pools [B, P, G, D] that do not fit each other.

    Raises:
        ValueError: With the sizes.
    """
    if k_pool.shape != v_pool.shape or k_pool.stride() != v_pool.stride():
        msg = f"keys {tuple(k_pool.shape)} and values {tuple(v_pool.shape)} differ in layout"
        raise ValueError(msg)
    if query.shape[1] % k_pool.shape[2] or query.shape[2] != k_pool.shape[3]:
        msg = f"queries {tuple(query.shape)} do not fit keys {tuple(k_pool.shape)}"
        raise ValueError(msg)
    if query.stride()[1:] != (query.shape[2], 1) or k_pool.stride()[2:] != (query.shape[2], 1):
        msg = "heads of a token must be adjacent in memory"
        raise ValueError(msg)
