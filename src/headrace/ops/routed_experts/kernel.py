"""Products of tiles with their experts' weights, and the weighted sum of a token's experts."""

# ruff: noqa: ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expert_product_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    pairs_ptr,
    tile_experts_ptr,
    x_stride,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_UP: tl.constexpr,
    IS_GATED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One tile and some columns of what its expert gives.

    The first product (IS_UP) reads tokens [T, WIDTH] through the tile's pairs, applies the
    activation and writes slots [tiles * TILE, OUT]; the second one reads slots and writes pairs
    [T * K, OUT]. Weights are [E, OUT, WIDTH], gate rows before value rows with IS_GATED: then half
    of COLUMNS are of either.

    Weight rows are the product's rows: tensor cores take 64 of them, and as few tokens as 16. WIDE
    multiplies in float32: the interpreter cannot multiply bfloat16.
    """
    block = tl.program_id(0)
    tile = tl.program_id(1)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        slot = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        pair = tl.load(pairs_ptr + slot).to(tl.int64)
        is_row = pair >= 0
        OWN: tl.constexpr = COLUMNS // 2 if IS_GATED else COLUMNS
        row = tl.arange(0, COLUMNS)
        column = block * OWN + row % OWN
        is_column = column < OUT
        rows: tl.constexpr = 2 * OUT if IS_GATED else OUT
        source = pair // K if IS_UP else slot
        k = tl.arange(0, STEP)
        weight_row = (row // OWN) * OUT + column
        weight = weight_ptr + expert * (rows * WIDTH) + weight_row[:, None] * WIDTH + k[None, :]
        x = x_ptr + source[None, :] * x_stride + k[:, None]
        acc = tl.zeros([COLUMNS, TILE], tl.float32)
        for start in range(0, WIDTH, STEP):
            if WIDTH % STEP == 0:
                w_tile = tl.load(weight, mask=is_column[:, None], other=0.0)
                x_tile = tl.load(x, mask=is_row[None, :], other=0.0)
            else:
                is_k = start + k < WIDTH
                w_tile = tl.load(weight, mask=is_column[:, None] & is_k[None, :], other=0.0)
                x_tile = tl.load(x, mask=is_row[None, :] & is_k[:, None], other=0.0)
            if WIDE:
                w_tile = w_tile.to(tl.float32)
                x_tile = x_tile.to(tl.float32)
            acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")
            weight += STEP
            x += STEP
        column = block * OWN + tl.arange(0, OWN)
        if IS_UP:
            if IS_GATED:
                halves = tl.permute(tl.reshape(acc, (2, OWN, TILE)), (1, 2, 0))
                gate, value = tl.split(halves)
                # Of the absolute value, which cannot overflow.
                small = tl.exp(-tl.abs(gate))
                made = gate * (tl.where(gate >= 0, 1.0, small) / (1.0 + small)) * value
            else:
                positive = tl.maximum(acc, 0.0)
                made = positive * positive
            target = slot
        else:
            made = acc
            target = pair
        out = out_ptr + target[None, :] * OUT + column[:, None]
        tl.store(
            out,
            made.to(out_ptr.dtype.element_ty),
            mask=is_row[None, :] & (column < OUT)[:, None],
        )


@triton.jit
def add_experts_kernel(
    pair_out_ptr,
    experts_ptr,
    factors_ptr,
    shared_ptr,
    out_ptr,
    shared_stride,
    C: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weighted sum of a token's experts, in their order, and of the shared one, if there is one."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < C
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        expert = tl.load(experts_ptr + t * K + j)
        factor = tl.load(factors_ptr + t * (K + 1) + j)
        # A block: the interpreter makes a number of a scalar condition.
        is_given = is_column & (expert + tl.zeros([BLOCK], tl.int32) >= 0)
        row = tl.load(pair_out_ptr + (t * K + j) * C + column, mask=is_given, other=0.0)
        total += factor * row.to(tl.float32)
    if shared_ptr is not None:
        factor = tl.load(factors_ptr + t * (K + 1) + K)
        row = tl.load(shared_ptr + t * shared_stride + column, mask=is_column, other=0.0)
        total += factor * row.to(tl.float32)
    tl.store(out_ptr + t * C + column, total.to(out_ptr.dtype.element_ty), mask=is_column)
