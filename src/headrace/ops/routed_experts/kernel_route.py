"""The router's choice, and the order in which pairs of token and expert are computed."""

# ruff: noqa: ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    x_ptr,
    gate_ptr,
    slots_ptr,
    experts_ptr,
    factors_ptr,
    logits_stride,
    x_stride,
    scale,
    eps,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
):
    """One token: see `route_tokens` of the package. bias, x, gate and slots may be None."""
    t = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E_PADDED)
    is_expert = expert < E
    logits = tl.load(logits_ptr + t * logits_stride + expert, mask=is_expert, other=0.0)
    logits = tl.where(is_expert, logits.to(tl.float32), float("-inf"))
    if IS_SOFTMAX:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        # Of the absolute value, which cannot overflow.
        small = tl.exp(-tl.abs(logits))
        scores = tl.where(logits >= 0, 1.0, small) / (1.0 + small)
    if bias_ptr is not None:
        ranked = scores + tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    elif IS_SOFTMAX:
        ranked = logits
    else:
        ranked = scores
    ranked = tl.where(is_expert, ranked, float("-inf"))
    place = tl.arange(0, K_PADDED)
    chosen = tl.full([K_PADDED], -1, tl.int32)
    factors = tl.zeros([K_PADDED], tl.float32)
    for j in tl.static_range(K):
        is_best = ranked == tl.max(ranked, 0)
        # Always one that there is, even where the logits are no numbers.
        best = tl.minimum(tl.min(tl.where(is_best, expert, E_PADDED), 0), E - 1)
        chosen = tl.where(place == j, best, chosen)
        factors = tl.where(place == j, tl.sum(tl.where(expert == best, scores, 0.0), 0), factors)
        ranked = tl.where(expert == best, float("-inf"), ranked)
    if IS_NORMALISED:
        factors = factors / (tl.sum(factors, 0) + eps)
    if slots_ptr is not None:
        is_token = tl.load(slots_ptr + t) > 0
        chosen = tl.where(is_token, chosen, -1)
    tl.store(experts_ptr + t * K + place, chosen, mask=place < K)
    tl.store(factors_ptr + t * (K + 1) + place, factors * scale, mask=place < K)
    shared = 1.0
    if x_ptr is not None:
        column = tl.arange(0, C_PADDED)
        x = tl.load(x_ptr + t * x_stride + column, mask=column < C, other=0.0)
        gate = tl.load(gate_ptr + column, mask=column < C, other=0.0)
        logit = tl.sum(x.to(tl.float32) * gate.to(tl.float32), 0)
        shared = 1.0 / (1.0 + tl.exp(-logit))
    tl.store(factors_ptr + t * (K + 1) + K, shared)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def tiles_kernel(
    experts_ptr,
    pairs_ptr,
    tile_experts_ptr,
    num_pairs,
    num_tiles,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One expert: the pairs of its tiles, -1 where a tile is not full, and whose tiles they are.

    Every program counts the pairs of all experts: what that costs is less than a launch that does
    it once. Pairs are i32 [num_tiles * TILE]; tiles behind the last one have expert -1.
    """
    e = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros([E_PADDED], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + lane
        expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)
        counts += tl.histogram(tl.maximum(expert, 0), E_PADDED, mask=expert >= 0)
    tiles = (counts + TILE - 1) // TILE
    each = tl.arange(0, E_PADDED)
    first = tl.sum(tl.where(each < e, tiles, 0), 0)
    own = tl.sum(tl.where(each == e, tiles, 0), 0)
    done = 0
    if own > 0:
        for start in range(0, num_pairs, CHUNK):
            pair = start + lane
            expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)
            is_own = (expert == e).to(tl.int32)
            slot = first * TILE + done + tl.cumsum(is_own, 0) - 1
            tl.store(pairs_ptr + slot, pair, mask=is_own > 0)
            done += tl.sum(is_own, 0)
        rest = done + tl.arange(0, TILE)
        tl.store(pairs_ptr + first * TILE + rest, -1, mask=rest < own * TILE)
        for start in range(0, own, CHUNK):
            tile = start + lane
            tl.store(tile_experts_ptr + first + tile, e, mask=tile < own)
    if e == E - 1:
        for start in range(first + own, num_tiles, CHUNK):
            tile = start + lane
            tl.store(tile_experts_ptr + tile, -1, mask=tile < num_tiles)
