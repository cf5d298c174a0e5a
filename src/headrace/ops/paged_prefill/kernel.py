"""Attention of known tokens over paged keys and values: one tile of queries a program.

A row of a tile is one token and one query head: the query heads of a KV head share the keys that
are read for them. Keys are taken in runs of KEYS from the tile's first one on, and a run of which a
row sees nothing leaves the row's sums as they are: so its bits do not depend on the tile it is in.
"""

# ruff: noqa: ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def paged_prefill_kernel(
    query_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    tiles_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    query_stride,
    block_stride,
    scale,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    SLOT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Outputs of a tile's rows, or its part of them: one of partial [parts, G, ROWS, D].

    Row r of a program is token r // GROUP of its tile and head r % GROUP of its KV head. The
    scale includes log2(e): powers are of 2. WIDE multiplies in float32: the interpreter cannot
    multiply bfloat16.
    """
    tile = tiles_ptr + tl.program_id(0).to(tl.int64) * FIELDS
    g = tl.program_id(1)
    token = tl.load(tile).to(tl.int64)
    tokens = tl.load(tile + 1)
    position = tl.load(tile + 2)
    table = tl.load(tile + 3)
    first = tl.load(tile + 4)
    end = tl.load(tile + 5)
    d = tl.arange(0, D)
    key = tl.arange(0, KEYS)
    row = tl.arange(0, ROWS)
    t = row // GROUP
    is_row = t < tokens
    seen = position + t  # The last key that a row sees.
    at = t * query_stride + row % GROUP * D
    q = tl.load(
        query_ptr + token * query_stride + g * (GROUP * D) + at[:, None] + d[None, :],
        mask=is_row[:, None],
        other=0.0,
    )  # [ROWS, D]
    if WIDE:
        q = q.to(tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    # Runs of keys that all rows see whole: they need no mask.
    whole = tl.minimum(end, position + 1)
    whole = first + tl.maximum(whole - first, 0) // KEYS * KEYS
    for is_last in tl.static_range(2):
        begin = whole if is_last else first
        stop = end if is_last else whole
        for start in range(begin, stop, KEYS):
            p = start + key
            if is_last:
                # What lies behind the end is not the row's: its last key stands there, unseen.
                p = tl.minimum(p, end - 1)
            # One block for all keys where they cannot lie in two.
            page = start // P if P % KEYS == 0 else p // P
            block = tl.load(tables_ptr + table + page).to(tl.int64)
            slot = block * block_stride + (p - page * P).to(tl.int64) * SLOT + g * D
            kv = slot[:, None] + d[None, :]
            k = tl.load(k_ptr + kv)  # [KEYS, D]
            v = tl.load(v_ptr + kv)
            if WIDE:
                k = k.to(tl.float32)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, KEYS]
            if is_last:
                is_seen = (start + key)[None, :] <= seen[:, None]
                scores = tl.where(is_seen, scores, float("-inf"))
            new = tl.maximum(best, tl.max(scores, 1) * scale)
            neutral = new
            if is_last:
                # A row that has seen no key yet keeps its neutral maximum.
                neutral = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.math.exp2(scores * scale - neutral[:, None])
            shrink = tl.math.exp2(best - neutral)
            total = total * shrink + tl.sum(weights, 1)
            weights = weights.to(v.dtype)
            if WIDE:
                weights = weights.to(tl.float32)
                v = v.to(tl.float32)
            acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
            best = new
    if PARTS:
        part = (tl.load(tile + 6).to(tl.int64) * G + g) * ROWS + row
        tl.store(partial_ptr + part[:, None] * D + d[None, :], acc, mask=is_row[:, None])
        tl.store(stats_ptr + part * 2, best, mask=is_row)
        tl.store(stats_ptr + part * 2 + 1, total, mask=is_row)
    else:
        at = t * (G * GROUP * D) + row % GROUP * D
        tl.store(
            out_ptr + (token * G + g) * (GROUP * D) + at[:, None] + d[None, :],
            (acc / total[:, None]).to(out_ptr.dtype.element_ty),
            mask=is_row[:, None],
        )


@triton.jit
def add_parts_kernel(
    partial_ptr,
    stats_ptr,
    tiles_ptr,
    out_ptr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    ADDED: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Add the parts of ADDED rows of a tile, from the first one on.

    A part of which a row has seen no key has the maximum -inf and sums of 0: it changes nothing.
    The first part has the first key, which all see.
    """
    tile = tiles_ptr + tl.program_id(0).to(tl.int64) * FIELDS
    g = tl.program_id(1)
    token = tl.load(tile).to(tl.int64)
    tokens = tl.load(tile + 1)
    first = tl.load(tile + 2).to(tl.int64)
    parts = tl.load(tile + 3)
    d = tl.arange(0, D)
    row = tl.program_id(2) * ADDED + tl.arange(0, ADDED)
    t = row // GROUP
    is_row = t < tokens
    place = (first * G + g) * ROWS + row
    best = tl.load(stats_ptr + place * 2, mask=is_row, other=0.0)
    total = tl.load(stats_ptr + place * 2 + 1, mask=is_row, other=1.0)
    acc = tl.load(partial_ptr + place[:, None] * D + d[None, :], mask=is_row[:, None], other=0.0)
    for part in range(1, parts):
        other = place + tl.cast(part, tl.int64) * (G * ROWS)
        peak = tl.load(stats_ptr + other * 2, mask=is_row, other=0.0)
        new = tl.maximum(best, peak)
        mine = tl.math.exp2(best - new)
        its = tl.math.exp2(peak - new)
        total = total * mine + tl.load(stats_ptr + other * 2 + 1, mask=is_row, other=0.0) * its
        sums = tl.load(
            partial_ptr + other[:, None] * D + d[None, :], mask=is_row[:, None], other=0.0
        )
        acc = acc * mine[:, None] + sums * its[:, None]
        best = new
    at = t * (G * GROUP * D) + row % GROUP * D
    tl.store(
        out_ptr + (token * G + g) * (GROUP * D) + at[:, None] + d[None, :],
        (acc / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=is_row[:, None],
    )
