"""Where a step's attention reads: indices that all attention layers of a step share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.models.layers.recomputed import (
    DecodeRows,
    filled_up,
    plan_recomputed_attention,
)
from headrace.ops.paged_attention import attend_chunk, attend_rows, key_rows
from headrace.ops.paged_decode import paged_decode
from headrace.ops.paged_prefill import Tiling, paged_prefill, tiling

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import Kernels, KnownRow, StepBatch, VerifyRows
    from headrace.models.config import ModelConfig
    from headrace.models.layers.row_plan import RowPlan
    from headrace.models.model import HybridModel
    from headrace.ops.paged_prefill import PrefillTiles


_MIN_HEAD, _MAX_HEAD = 16, 256
"""Head sizes of attention that its kernels are compiled for in the tests."""

_MAX_GROUP = 32
"""Query heads for each KV head that fit a tile of a prompt, in any dtype."""


def head_obstacle(config: ModelConfig) -> str | None:
    """Return why the kernels cannot attend with a model's heads, or None if they can."""
    head_dim, group = config.head_dim, config.num_attention_heads // config.num_kv_heads
    if head_dim & (head_dim - 1):
        return f"head_dim is {head_dim}, and the kernels need a power of 2"
    if not _MIN_HEAD <= head_dim <= _MAX_HEAD:
        return f"head_dim is {head_dim}, and the kernels need {_MIN_HEAD}..{_MAX_HEAD}"
    if group > _MAX_GROUP:
        return f"a KV head has {group} query heads, and the kernels take {_MAX_GROUP} at most"
    return None


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

    verify: VerifyAttention | None
    known: tuple[KnownAttention, ...]
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedAttention:
    """One step whose tokens kernels attend from.

    Attributes:
        decode: Rows of the kernel for generated tokens.
        prefill: Tiles of its other rows.
        out: What each attention layer in turn writes its real tokens' outputs to, [T, H, D]. Made
            once a step, as zeros: those of padding stay.
    """

    decode: tuple[VerifyRows | DecodeRows, ...]
    prefill: PrefillTiles | None
    out: Tensor


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


def tiling_of(model: HybridModel, kernels: Kernels) -> Tiling | None:
    """Return how a model's known rows are cut into `StepBatch.prefill`; None if they are not."""
    if kernels == "torch" or not model.num_kv_layers:
        return None
    config = model.config
    return tiling(
        config.num_attention_heads, config.num_kv_heads, config.head_dim, model.dtype.itemsize,
        is_fixed=kernels == "fixed",
    )  # fmt: skip


def plan_fused_attention(batch: StepBatch, out: Tensor) -> FusedAttention:
    """Gather what the kernels need where they attend from all rows; no layer has a window.

    Args:
        batch: The step.
        out: Zeros, [T, H, D].

    Returns:
        The plan.
    """
    verify: VerifyRows | DecodeRows | None = batch.verify
    again = None
    tiled = batch.known
    if batch.kernels == "fixed":
        verify = None if batch.verify is None else filled_up(batch.verify)
        again = plan_recomputed_attention(batch)
        tiled = tuple(row for row in batch.known if row.path == "scan")
    assert (batch.prefill is None) == (not tiled), f"{len(tiled)} known rows, no tiles"
    decode = tuple(rows for rows in (verify, again) if rows is not None)
    return FusedAttention(decode=decode, prefill=batch.prefill, out=out)


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


def attend(
    query: Tensor, k_pool: Tensor, v_pool: Tensor, plan: AttentionPlan | FusedAttention
) -> Tensor:
    """Attend from all tokens of a step.

    Args:
        query: Packed queries after rotation, [T, H, D].
        k_pool: [B, P, G, D].
        v_pool: [B, P, G, D].
        plan: The step's indices.

    Returns:
        [T, H, D], contiguous; 0 for padding.
    """
    if isinstance(plan, FusedAttention):
        return _attend_fused(query, k_pool, v_pool, plan)
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


def _attend_fused(query: Tensor, k_pool: Tensor, v_pool: Tensor, plan: FusedAttention) -> Tensor:
    """Attend from generated tokens and from the others, each in kernels of their own."""
    for rows in plan.decode:
        paged_decode(
            query,
            k_pool,
            v_pool,
            rows.block_table,
            rows.token_index,
            rows.query_lens,
            rows.seq_lens,
            rows.max_seq_len,
            plan.out,
        )
    if plan.prefill is not None:
        paged_prefill(query, k_pool, v_pool, plan.prefill, plan.out)
    return plan.out
