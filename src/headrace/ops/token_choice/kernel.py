"""The choice in one read of the logits: the best of each part of a row, then the best of those.

A part's best entry travels as one number that orders as the choice does: the logit's bits as an
ordered integer above, the entry counted down below. So how rows are cut into parts changes nothing.
"""

# Conditions on constants stay apart from those on values, and only NaN differs from itself.
# ruff: noqa: ANN201, PLR0124, SIM102
# mypy: disable-error-code="possibly-undefined"

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.token_choice import reference

_GOLDEN = tl.constexpr(reference.GOLDEN)
_MIX_1 = tl.constexpr(reference.MIX_1)
_MIX_2 = tl.constexpr(reference.MIX_2)
_NOISE_SHIFT = tl.constexpr(reference.NOISE_SHIFT)
_NOISE_MASK = tl.constexpr(reference.NOISE_MASK)


@triton.jit
def _mix(value):
    """SplitMix64's finaliser, as in the reference."""
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _MIX_1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["part_blocks"])
def best_of_parts_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    best_ptr,
    logits_stride,
    part_blocks,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best entry of part_blocks * BLOCK entries of a row; nothing is sampled without seeds."""
    LAST: tl.constexpr = 2**31 - 1
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    start = part * part_blocks * BLOCK
    lane = tl.arange(0, BLOCK)
    if seed_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        key = _mix(tl.load(seed_ptr + row)) + tl.load(position_ptr + row) * _GOLDEN
        key = _mix(key)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    found = tl.zeros([BLOCK], tl.int32)  # block of each lane's best
    for block in range(part_blocks):
        entry = start + block * BLOCK + lane
        logit = tl.load(
            logits_ptr + row * logits_stride + entry, mask=entry < V, other=float("-inf")
        ).to(tl.float32)
        if seed_ptr is not None:
            if temperature != 0.0:
                bits = (_mix(key + entry.to(tl.int64) * _GOLDEN) >> _NOISE_SHIFT) & _NOISE_MASK
                uniform = (bits.to(tl.int32).to(tl.float32) + 0.5) * 0.00000011920928955078125
                logit = tl.div_rn(logit, temperature) - tl.log(-tl.log(uniform))
        # The first of equal ones stays, and nothing is larger than NaN.
        is_better = ~(logit <= best) & (best == best)
        best = tl.where(is_better, logit, best)
        found = tl.where(is_better, block, found)
    bits = best.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ LAST, bits)
    # Both zeros are equal, and all NaN.
    order = tl.where(best == 0.0, 0, tl.where(best == best, order, LAST))
    entry = start + found * BLOCK + lane
    packed = (order.to(tl.int64) << 32) | (LAST - entry).to(tl.int64)
    tl.store(best_ptr + row * tl.num_programs(1) + part, tl.max(packed, 0))


@triton.jit(do_not_specialize=["num_parts"])
def best_of_row_kernel(best_ptr, chosen_ptr, num_parts, PARTS: tl.constexpr):
    """The best entry of a row, of at most PARTS parts."""
    LAST: tl.constexpr = 2**31 - 1
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    best = tl.load(best_ptr + row * num_parts + part, mask=part < num_parts, other=-(2**63))
    chosen = LAST - (tl.max(best, 0) & LAST)
    tl.store(chosen_ptr + row, chosen)
