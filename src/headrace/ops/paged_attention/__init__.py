"""Causal attention of queries over keys and values in KV blocks.

Bits of a query's output depend on its own sequence alone: queries are multiplied in tiles of one
fixed height, keys in runs of KEY_BLOCK absolute positions, the softmax takes its maximum over all
keys first, and the runs' sums are added one after another from position 0. A run that lies behind a
query, or before its window, adds exact zeros, so neither the length of a longer batch mate nor a
draft changes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

KEY_BLOCK = 64
"""Absolute positions whose weights are summed together."""

DECODE_TILE = 16
"""Rows (tokens x query heads of a KV head) of one product for generated tokens."""

PREFILL_TILE = 64
"""Tokens of one tile of a prompt."""


def write_kv(k_pool: Tensor, v_pool: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write each token's key and value into its slot; slot 0 means nowhere.

    Args:
        k_pool: [B, P, G, D].
        v_pool: [B, P, G, D].
        key: [T, G, D].
        value: [T, G, D].
        slots: block * P + offset, [T] i64; 0 for padding, distinct otherwise.
    """
    for pool, new in ((k_pool, key), (v_pool, value)):
        write_rows(pool, new, slots)


def write_rows(pool: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write each token's row [T, G, D] into its slot of a pool; see `write_kv`."""
    is_real = (slots > 0)[:, None, None]
    rows = pool.view(-1, *pool.shape[2:])
    # Padding puts the null slot's own bytes there: it never changes.
    rows.index_copy_(0, slots, torch.where(is_real, new, rows[:1]))


def key_rows(
    block_table: Tensor, seq_lens: Tensor, max_seq_len: int, block_size: int, num_kv_heads: int
) -> Tensor:
    """Where the keys of each sequence lie, for the gathers of `attend_rows` and `attend_chunk`.

    Positions behind the end of a sequence point at its last token: finite values that are masked,
    whatever the pool holds elsewhere.

    Args:
        block_table: [N, M], M * P >= max_seq_len.
        seq_lens: [N] i64.
        max_seq_len: Upper bound of seq_lens, at least 1.
        block_size: Tokens per KV block, P.
        num_kv_heads: G.

    Returns:
        Row of the pool seen as [B * P * G, D], for runs of KEY_BLOCK positions,
        [runs, N, G, KEY_BLOCK] i64.
    """
    device = block_table.device
    runs = -(-max_seq_len // KEY_BLOCK)
    position = torch.arange(runs * KEY_BLOCK, device=device)
    position = torch.minimum(position, (seq_lens[:, None] - 1).clamp_(min=0))  # [N, runs * 64]
    block = block_table.long().gather(1, position.div(block_size, rounding_mode="floor"))
    slot = block.mul_(block_size).add_(position.remainder(block_size))
    slot = slot.view(-1, runs, KEY_BLOCK).transpose(0, 1)[:, :, None]
    return slot * num_kv_heads + torch.arange(num_kv_heads, device=device)[:, None]


def attend_rows(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    window: int | None = None,
) -> Tensor:
    """Attend from up to a few tokens of each sequence.

    Args:
        query: Queries after rotation, [N, Q, H, D].
        k_pool: [B, P, G, D].
        v_pool: [B, P, G, D].
        rows: From `key_rows`, [runs, N, G, KEY_BLOCK].
        positions: Position of each query, [N, Q] i64.
        window: Newest positions that a query sees, its own included; None for all.

    Returns:
        [N, Q, H, D], contiguous.
    """
    n, q_len, num_heads, head_dim = query.shape
    runs, _, num_kv_heads, _ = rows.shape
    group = num_heads // num_kv_heads
    k, v = _gather(k_pool, rows), _gather(v_pool, rows)
    # [N, Q, G, group, D] to one matrix of tokens x group per sequence and KV head.
    q = query.view(n, q_len, num_kv_heads, group, head_dim).transpose(1, 2)
    q = q.reshape(n, num_kv_heads, q_len * group, head_dim) * head_dim**-0.5
    q = functional.pad(q, (0, 0, 0, -(q_len * group) % DECODE_TILE))
    q_position = positions[:, :, None].expand(-1, -1, group).reshape(n, 1, -1, 1)
    key_position = torch.arange(runs * KEY_BLOCK, device=query.device)
    is_hidden = _is_hidden(key_position.view(runs, 1, 1, 1, KEY_BLOCK), q_position, window)
    outputs = [
        _attend(q[:, :, at : at + DECODE_TILE], k, v, is_hidden[..., at : at + DECODE_TILE, :])
        for at in range(0, q_len * group, DECODE_TILE)
    ]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    out = out.view(n, num_kv_heads, q_len, group, head_dim).transpose(1, 2)
    # With as many KV heads as heads the reshape alone would give a view of transposed rows.
    return out.reshape(n, q_len, num_heads, head_dim).contiguous()


def attend_chunk(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    rows: Tensor,
    start: int,
    *,
    window: int | None = None,
) -> Tensor:
    """Attend from the tokens of a chunk of one prompt.

    Args:
        query: Queries after rotation, [T, H, D], at positions start, start + 1, ...
        k_pool: [B, P, G, D].
        v_pool: [B, P, G, D].
        rows: From `key_rows` for this sequence, [runs, 1, G, KEY_BLOCK].
        start: Position of the first query.
        window: Newest positions that a query sees, its own included; None for all.

    Returns:
        [T, H, D].
    """
    tokens, num_heads, head_dim = query.shape
    num_kv_heads = rows.shape[2]
    group = num_heads // num_kv_heads
    k, v = _gather(k_pool, rows), _gather(v_pool, rows)
    key_position = torch.arange(rows.shape[0] * KEY_BLOCK, device=query.device)
    tile_rows = PREFILL_TILE * group
    q = functional.pad(query, (0, 0, 0, 0, 0, -tokens % PREFILL_TILE)) * head_dim**-0.5
    outputs = []
    for at in range(0, tokens, PREFILL_TILE):
        runs = -(-(start + min(at + PREFILL_TILE, tokens)) // KEY_BLOCK)
        q_tile = q[at : at + PREFILL_TILE].view(PREFILL_TILE, num_kv_heads, group, head_dim)
        q_tile = q_tile.transpose(0, 1).reshape(1, num_kv_heads, tile_rows, head_dim)
        q_position = torch.arange(start + at, start + at + PREFILL_TILE, device=query.device)
        key_at = key_position[: runs * KEY_BLOCK].view(runs, 1, 1, 1, KEY_BLOCK)
        hidden = _is_hidden(key_at, q_position.repeat_interleave(group)[:, None], window)
        out = _attend(q_tile, k[:runs], v[:runs], hidden)
        out = out.view(num_kv_heads, PREFILL_TILE, group, head_dim).transpose(0, 1)
        outputs.append(out.reshape(PREFILL_TILE, num_heads, head_dim))
    return torch.cat(outputs)[:tokens]


def _is_hidden(key_position: Tensor, q_position: Tensor, window: int | None) -> Tensor:
    """Return which keys lie behind a query, or before its window; the two broadcast."""
    is_behind = key_position > q_position
    return is_behind if window is None else is_behind | (key_position <= q_position - window)


def _gather(pool: Tensor, rows: Tensor) -> Tensor:
    """Return the keys or values at `rows`, [runs, N, G, KEY_BLOCK, D]."""
    flat = pool.view(-1, pool.shape[-1]).index_select(0, rows.reshape(-1))
    return flat.view(*rows.shape, -1)


def _attend(query: Tensor, key: Tensor, value: Tensor, is_hidden: Tensor) -> Tensor:
    """Attend from one tile per sequence and KV head.

    Args:
        query: [N, G, m, D], scaled.
        key: [runs, N, G, KEY_BLOCK, D].
        value: [runs, N, G, KEY_BLOCK, D].
        is_hidden: Keys that a query must not see, [runs, N or 1, 1, u, KEY_BLOCK] bool. Only the
            first u of the m rows are wanted; the rest are there for the product's shape.

    Returns:
        [N, G, u, D].
    """
    runs, n, num_kv_heads, _, head_dim = key.shape
    z, m, wanted = runs * n * num_kv_heads, query.shape[2], is_hidden.shape[3]
    q = query.expand(runs, n, num_kv_heads, m, head_dim).reshape(z, m, head_dim)
    scores = torch.bmm(q, key.view(z, KEY_BLOCK, head_dim).transpose(1, 2)).float()
    weights = scores.view(runs, n, num_kv_heads, m, KEY_BLOCK)[..., :wanted, :]
    weights.masked_fill_(is_hidden, float("-inf"))
    weights.sub_(weights.amax((0, 4), keepdim=True)).exp_()
    run_sums = weights.sum(-1)  # [runs, N, G, u]
    run_outputs = torch.bmm(scores.to(value.dtype), value.view(z, KEY_BLOCK, head_dim))
    run_outputs = run_outputs.view(runs, n, num_kv_heads, m, head_dim)[..., :wanted, :]
    total, out = run_sums[0], run_outputs[0].float()
    for j in range(1, runs):
        total = total + run_sums[j]
        out = out + run_outputs[j]
    return (out / total[..., None]).to(query.dtype)
