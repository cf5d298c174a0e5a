"""Where a step's attention reads: indices that all attention layers of a step share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.models.layers.row_plan import count_verify_tokens
from headrace.ops.paged_attention import attend_chunk, attend_rows, key_rows
from headrace.ops.paged_decode import paged_decode

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import KnownRow, StepBatch
    from headrace.models.layers.row_plan import RowPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyAttention:
    """Indices of the generating rows.

    Attributes:
        rows: The rows.
        positions: [N, Q] i64.
        keys: Their keys, [runs, N, G, KEY_BLOCK] i64.
    """

    rows: RowPlan
    positions: Tensor
    keys: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedAttention:
    """Generating rows that a kernel attends from.

    Attributes:
        token_index: Packed index of each row's tokens, [N, Q] i64.
        query_lens: [N] i64.
        seq_lens: Tokens in each sequence after this step, [N] i64.
        max_seq_len: Host-known upper bound of them.
        block_table: [N, M] i32.
        num_tokens: Packed tokens of these rows; they come first.
        out: What each attention layer in turn writes its real tokens' outputs to, [T, H, D]. Made
            once a step, as zeros: those of padding stay.
    """

    token_index: Tensor
    query_lens: Tensor
    seq_lens: Tensor
    max_seq_len: int
    block_table: Tensor
    num_tokens: int
    out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownAttention:
    """Indices of one known row: its packed tokens, their positions and its keys.

    Attributes:
        is_scan: Whether its tokens are a prompt's.
        token_offset: First packed token.
        start: Position of that token.
        length: Tokens.
        positions: [1, length] i64.
        keys: Its keys, [runs, 1, G, KEY_BLOCK] i64.
    """

    is_scan: bool
    token_offset: int
    start: int
    length: int
    positions: Tensor
    keys: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionPlan:
    """One step's attention indices; window is the newest positions that a token sees, or None."""

    verify: VerifyAttention | FusedAttention | None
    known: tuple[KnownAttention, ...]
    window: int | None = None


def plan_attention(
    batch: StepBatch,
    rows: RowPlan | None,
    block_size: int,
    num_kv_heads: int,
    window: int | None = None,
) -> AttentionPlan:
    """Compute the indices once for all attention layers of a step.

    Args:
        batch: The step.
        rows: Its generating rows.
        block_size: Tokens per KV block, P.
        num_kv_heads: G.
        window: Newest positions that a token sees, its own included; None for all.

    Returns:
        The plan.
    """
    verify = None
    if rows is not None:
        assert batch.verify is not None
        verify = VerifyAttention(
            rows=rows,
            positions=batch.positions.index_select(0, rows.token_index).view(rows.shape),
            keys=key_rows(
                batch.verify.block_table,
                batch.verify.seq_lens,
                batch.verify.max_seq_len,
                block_size,
                num_kv_heads,
            ),
        )
    known = tuple(_plan_known(batch, row, block_size, num_kv_heads) for row in batch.known)
    return AttentionPlan(verify=verify, known=known, window=window)


def plan_fused_attention(
    batch: StepBatch, block_size: int, num_kv_heads: int, out: Tensor
) -> AttentionPlan:
    """Compute the indices where a kernel attends from the generating rows; no layer has a window.

    Args:
        batch: The step; it has generating rows.
        block_size: Tokens per KV block, P.
        num_kv_heads: G.
        out: Zeros, [T, H, D].

    Returns:
        The plan.
    """
    rows = batch.verify
    assert rows is not None
    verify = FusedAttention(
        token_index=rows.token_index,
        query_lens=rows.query_lens,
        seq_lens=rows.seq_lens,
        max_seq_len=rows.max_seq_len,
        block_table=rows.block_table,
        num_tokens=count_verify_tokens(batch),
        out=out,
    )
    known = tuple(_plan_known(batch, row, block_size, num_kv_heads) for row in batch.known)
    return AttentionPlan(verify=verify, known=known)


def _plan_known(
    batch: StepBatch, row: KnownRow, block_size: int, num_kv_heads: int
) -> KnownAttention:
    end = row.start + row.length
    positions = batch.positions[row.token_offset : row.token_offset + row.length]
    seq_lens = torch.full((1,), end, device=positions.device)
    return KnownAttention(
        is_scan=row.path == "scan",
        token_offset=row.token_offset,
        start=row.start,
        length=row.length,
        positions=positions[None],
        keys=key_rows(row.block_table[None], seq_lens, end, block_size, num_kv_heads),
    )


def attend(query: Tensor, k_pool: Tensor, v_pool: Tensor, plan: AttentionPlan) -> Tensor:
    """Attend from all tokens of a step.

    Args:
        query: Packed queries after rotation, [T, H, D].
        k_pool: [B, P, G, D].
        v_pool: [B, P, G, D].
        plan: The step's indices.

    Returns:
        [T, H, D], contiguous; 0 for padding.
    """
    if isinstance(plan.verify, FusedAttention):
        return _attend_fused(query, k_pool, v_pool, plan.verify, plan.known)
    parts = []
    tokens, num_heads, head_dim = query.shape
    done = 0
    if plan.verify is not None:
        rows = plan.verify.rows
        q = query.index_select(0, rows.token_index).view(*rows.shape, num_heads, head_dim)
        keys, positions = plan.verify.keys, plan.verify.positions
        out = attend_rows(q, k_pool, v_pool, keys, positions, window=plan.window)
        parts.append(out.view(-1, num_heads, head_dim).index_select(0, rows.places))
        done = rows.num_tokens
    for row in plan.known:
        parts.append(_attend_known(query, k_pool, v_pool, row, plan.window))
        done += row.length
    if done < tokens:
        parts.append(query.new_zeros(tokens - done, num_heads, head_dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_known(
    query: Tensor, k_pool: Tensor, v_pool: Tensor, row: KnownAttention, window: int | None
) -> Tensor:
    """Attend from one known row, [length, H, D]."""
    q = query[row.token_offset : row.token_offset + row.length]
    if row.is_scan:
        return attend_chunk(q, k_pool, v_pool, row.keys, row.start, window=window)
    return attend_rows(q[None], k_pool, v_pool, row.keys, row.positions, window=window)[0]


def _attend_fused(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows: FusedAttention,
    known: tuple[KnownAttention, ...],
) -> Tensor:
    """Attend from the generating rows in a kernel, and from each known row."""
    paged_decode(
        query,
        k_pool,
        v_pool,
        rows.block_table,
        rows.token_index,
        rows.query_lens,
        rows.seq_lens,
        rows.max_seq_len,
        rows.out,
    )
    for row in known:
        part = slice(row.token_offset, row.token_offset + row.length)
        rows.out[part] = _attend_known(query, k_pool, v_pool, row, None)
    return rows.out
