"""Attention of 1 to 8 tokens a sequence over paged keys and values, split over the keys.

A program owns one row, one KV head and one split: a fixed run of absolute positions. So the bits of
a row's result depend neither on its batch mates nor on how many splits a longer one has. A second
kernel adds the splits of a row in order.
"""

# ruff: noqa: ANN201

from __future__ import annotations

import triton
import triton.language as tl


# Numbers that change from step to step: one machine code for all of their values.
@triton.jit(do_not_specialize=["table_stride"])
def paged_decode_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    token_index_ptr,
    query_lens_ptr,
    seq_lens_ptr,
    partial_ptr,
    stats_ptr,
    query_stride,
    block_stride,
    slot_stride,
    table_stride,
    scale,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    QUERY: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Partial outputs [N, splits, G, ROWS, D] and their maxima and sums [N, splits, G, ROWS, 2].

    Row r of a program is query token r // GROUP and head r % GROUP of its KV head. WIDE multiplies
    in float32: the interpreter cannot multiply bfloat16.
    """
    n = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    split = tl.program_id(2)
    query_len = tl.load(query_lens_ptr + n).to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + n).to(tl.int32)
    first = split * SPLIT
    if (query_len > 0) & (first < seq_len):
        row = tl.arange(0, ROWS)
        d = tl.arange(0, D)
        key = tl.arange(0, KEYS)
        t = row // GROUP
        is_row = t < query_len
        token = tl.load(token_index_ptr + n * QUERY + t, mask=is_row, other=0)
        head = g * GROUP + row % GROUP
        at = query_ptr + token[:, None] * query_stride + (head * D)[:, None] + d[None, :]
        q = tl.load(at, mask=is_row[:, None], other=0.0)  # [ROWS, D]
        if WIDE:
            q = q.to(tl.float32)
        position = seq_len - query_len + t
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        for start in range(first, tl.minimum(first + SPLIT, seq_len), KEYS):
            p = tl.cast(start, tl.int32) + key
            is_key = p < seq_len
            block = tl.load(table_ptr + n * table_stride + p // P, mask=is_key, other=0)
            slot = block.to(tl.int64) * block_stride + (p % P) * slot_stride + g * D
            k = tl.load(k_ptr + slot[None, :] + d[:, None], mask=is_key[None, :], other=0.0)
            if WIDE:
                k = k.to(tl.float32)
            scores = tl.dot(q, k, input_precision="ieee") * scale  # [ROWS, KEYS]
            scores = tl.where(
                is_key[None, :] & (p[None, :] <= position[:, None]), scores, float("-inf")
            )
            new = tl.maximum(best, tl.max(scores, 1))
            # A row that has seen no key yet keeps its neutral maximum.
            safe = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp(scores - safe[:, None])
            shrink = tl.exp(best - safe)
            total = total * shrink + tl.sum(weights, 1)
            v = tl.load(v_ptr + slot[:, None] + d[None, :], mask=is_key[:, None], other=0.0)
            weights = weights.to(v.dtype)
            if WIDE:
                weights = weights.to(tl.float32)
                v = v.to(tl.float32)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights, v, acc, input_precision="ieee")
            best = new
        place = ((n * tl.num_programs(2) + split) * G + g) * ROWS + row
        tl.store(partial_ptr + place[:, None] * D + d[None, :], acc, mask=is_row[:, None])
        tl.store(stats_ptr + place * 2, best, mask=is_row)
        tl.store(stats_ptr + place * 2 + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["splits"])
def combine_splits_kernel(
    partial_ptr,
    stats_ptr,
    token_index_ptr,
    query_lens_ptr,
    seq_lens_ptr,
    out_ptr,
    out_stride,
    splits,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    QUERY: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Add the splits of one row, token and head, from the first one on."""
    n = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1)
    head = tl.program_id(2)
    query_len = tl.load(query_lens_ptr + n).to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + n).to(tl.int32)
    if t < query_len:
        d = tl.arange(0, D)
        token = tl.load(token_index_ptr + n * QUERY + t).to(tl.int64)
        row = (head // GROUP) * ROWS + t * GROUP + head % GROUP
        # Splits behind the token hold nothing that it sees.
        count = (seq_len - query_len + t) // SPLIT + 1
        place = n * splits * G * ROWS + row
        best = tl.load(stats_ptr + place * 2)
        total = tl.load(stats_ptr + place * 2 + 1)
        acc = tl.load(partial_ptr + place * D + d)
        for split in range(1, count):
            other = place + tl.cast(split, tl.int64) * (G * ROWS)
            peak = tl.load(stats_ptr + other * 2)
            new = tl.maximum(best, peak)
            mine = tl.exp(best - new)
            its = tl.exp(peak - new)
            total = total * mine + tl.load(stats_ptr + other * 2 + 1) * its
            acc = acc * mine + tl.load(partial_ptr + other * D + d) * its
            best = new
        tl.store(
            out_ptr + token * out_stride + head * D + d,
            (acc / total).to(out_ptr.dtype.element_ty),
        )
