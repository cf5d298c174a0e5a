"""The delta rule over the pieces of prompts: what is within a piece, then from piece to piece.

With c the running sum of log decays inside a piece, b the rates and S the state before it:

    A = tril(b_i k_i.k_j e^(c_i - c_j), -1)         M = tril(q_i.k_j e^(c_i - c_j))
    r = (I + A)^-1 b (v - e^c k S^T)                o = e^c q S^T + M r
    S := S e^(c_g) + (r e^(c_g - c))^T k

The inverse and M need no state: one launch makes them for all pieces at once. The other one goes
along each row with the state in registers, as few products as there can be. What a token changes,
v - e^c k S^T, is a difference of float32 before it is rounded for the next product.
"""

# ruff: noqa: ANN201, PLR2004

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _product(a, b, PRECISION: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Multiply matrices to float32; the interpreter has no products of bfloat16."""
    if IS_INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _is_between(r, SIZE: tl.constexpr):
    """Where a matrix lies between the two blocks of a pair of blocks of SIZE on the diagonal."""
    is_pair = (r[:, None] // (2 * SIZE)) == (r[None, :] // (2 * SIZE))
    return is_pair & ((r[:, None] // SIZE) > (r[None, :] // SIZE))


@triton.jit
def _join(x, whole, r, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of blocks of twice the size from those of SIZE on the diagonal."""
    between = tl.where(_is_between(r, SIZE), whole, 0.0)
    between = tl.dot(x, between, input_precision=PRECISION)
    return x - tl.dot(between, x, input_precision=PRECISION)


@triton.jit
def _inverse(lower, PIECE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of A strictly lower, [PIECE, PIECE] f32.

    From the diagonal on, blocks of twice the size from pairs of blocks: X - X B X, with B between
    the pair. Only inverses are multiplied, so it errs no more than it must however alike the keys
    are. Up to 16 that is done in the blocks on the diagonal alone.
    """
    BLOCKS: tl.constexpr = PIECE // 16
    i = tl.arange(0, 16)
    r = tl.arange(0, PIECE)
    is_block = (r[:, None] // 16) == (r[None, :] // 16)
    own = tl.reshape(tl.where(is_block, lower, 0.0), (BLOCKS, 16, BLOCKS, 16))
    own = tl.sum(own, 2)  # [BLOCKS, 16, 16]
    x = tl.where((i[:, None] == i[None, :])[None, :, :], 1.0, tl.zeros_like(own))
    # Of blocks of one token the inverses are 1.
    x -= tl.where(_is_between(i, 1)[None, :, :], own, 0.0)
    for n in tl.static_range(1, 4):
        between = tl.where(_is_between(i, 1 << n)[None, :, :], own, 0.0)
        between = tl.dot(x, between, input_precision=PRECISION)
        x -= tl.dot(between, x, input_precision=PRECISION)
    x = tl.broadcast_to(x[:, :, None, :], (BLOCKS, 16, BLOCKS, 16))
    x = tl.where(is_block, tl.reshape(x, (PIECE, PIECE)), 0.0)
    if PIECE > 16:
        x = _join(x, lower, r, 16, PRECISION)
    if PIECE > 32:
        x = _join(x, lower, r, 32, PRECISION)
    return x


@triton.jit
def prefill_within_kernel(
    mixed_ptr,
    gates_ptr,
    pieces_ptr,
    inverse_ptr,
    attention_ptr,
    gates_stride,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HEADS: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """(I + A)^-1 and M of a piece and HEADS value heads of one key head, each [T, HV, PIECE]."""
    HV: tl.constexpr = HK * GROUP
    F: tl.constexpr = 2 * HK * K + HV * V
    piece = pieces_ptr + tl.program_id(0) * 4
    first_head = tl.program_id(1) * HEADS
    begin = tl.load(piece).to(tl.int64)
    length = tl.load(piece + 1)
    t = tl.arange(0, PIECE)
    is_token = t < length
    channel = (first_head // GROUP) * K + tl.arange(0, K)
    query = mixed_ptr + (begin + t)[:, None] * F + channel[None, :]
    q = tl.load(query, mask=is_token[:, None], other=0.0)  # [PIECE, K]
    k = tl.load(query + HK * K, mask=is_token[:, None], other=0.0)
    across = tl.trans(k)
    for g in tl.static_range(HEADS):
        head = first_head + g
        gate = gates_ptr + head * gates_stride + begin + t
        rate = tl.load(gate, mask=is_token, other=0.0)
        decay = tl.load(gate + HV * gates_stride, mask=is_token, other=0.0)
        # Before exp: on the other side of the diagonal differences are positive and may overflow.
        is_seen = (t[:, None] >= t[None, :]) & is_token[:, None]
        since = tl.exp(tl.where(is_seen, decay[:, None] - decay[None, :], float("-inf")))
        to = ((begin + t) * HV + head)[:, None] * PIECE + t[None, :]
        # Products are made again for each value head: registers are dearer here.
        m = _product(q, across, PRECISION, IS_INTERPRETED) * since
        tl.store(attention_ptr + to, m.to(attention_ptr.dtype.element_ty), mask=is_token[:, None])
        keys = _product(k, across, PRECISION, IS_INTERPRETED)  # [PIECE, PIECE]
        lower = tl.where(t[:, None] > t[None, :], keys * since, 0.0) * rate[:, None]
        x = _inverse(lower, PIECE, PRECISION)
        tl.store(inverse_ptr + to, x.to(inverse_ptr.dtype.element_ty), mask=is_token[:, None])


@triton.jit
def prefill_along_kernel(
    mixed_ptr,
    gates_ptr,
    inverse_ptr,
    attention_ptr,
    pieces_ptr,
    rows_ptr,
    state_ptr,
    out_ptr,
    gates_stride,
    state_stride,
    out_stride,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    VALUES: tl.constexpr,
    MOST: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Outputs before the norm and states of a row, for VALUES values of one head.

    MOST is the grid: what a piece has at most; PIECE is what it is computed as.
    """
    HV: tl.constexpr = HK * GROUP
    F: tl.constexpr = 2 * HK * K + HV * V
    row = rows_ptr + tl.program_id(0) * 6
    head = tl.program_id(1)
    first = tl.load(row).to(tl.int64)
    tokens = tl.load(row + 1)
    least = tl.load(row + 2)  # tokens of the first piece
    source = tl.load(row + 3).to(tl.int64)
    target = tl.load(row + 4).to(tl.int64)
    piece = pieces_ptr + tl.load(row + 5) * 4

    t = tl.arange(0, PIECE)
    k_index = tl.arange(0, K)
    v_index = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    # Of the state's transpose, [K, VALUES].
    tile = (head * V + v_index)[None, :] * K + k_index[:, None]
    state = tl.zeros([K, VALUES], tl.float32)
    if source > 0:
        state = tl.load(state_ptr + source * state_stride + tile).to(tl.float32)
    num_pieces = 1 + tl.cdiv(tokens - least, MOST)
    for j in tl.range(0, num_pieces, num_stages=STAGES):
        at_piece = tl.cast(j, tl.int32)
        skipped = tl.where(at_piece == 0, 0, least + (at_piece - 1) * MOST)
        length = tl.where(at_piece == 0, least, tl.minimum(tokens - skipped, MOST))
        is_token = t < length
        at = first + skipped + t
        query = mixed_ptr + at[:, None] * F + (head // GROUP) * K + k_index[None, :]
        q = tl.load(query, mask=is_token[:, None], other=0.0)
        k = tl.load(query + HK * K, mask=is_token[:, None], other=0.0)
        value = mixed_ptr + at[:, None] * F + 2 * HK * K + (head * V + v_index)[None, :]
        v = tl.load(value, mask=is_token[:, None], other=0.0)
        pair = (at * HV + head)[:, None] * PIECE + t[None, :]
        inverse = tl.load(inverse_ptr + pair, mask=is_token[:, None], other=0.0)
        attention = tl.load(attention_ptr + pair, mask=is_token[:, None], other=0.0)
        gate = gates_ptr + head * gates_stride + at
        rate = tl.load(gate, mask=is_token, other=0.0)
        decay = tl.load(gate + HV * gates_stride, mask=is_token, other=0.0)
        # Of a falling sum the last one, which is the piece's.
        whole = tl.min(decay, 0)

        held = state.to(k.dtype)
        grown = tl.exp(decay)[:, None]
        told = v.to(tl.float32) - grown * _product(k, held, PRECISION, IS_INTERPRETED)
        told = (told * rate[:, None]).to(k.dtype)
        change = _product(inverse, told, PRECISION, IS_INTERPRETED)  # [PIECE, VALUES]
        o = grown * _product(q, held, PRECISION, IS_INTERPRETED)
        o += _product(attention, change.to(k.dtype), PRECISION, IS_INTERPRETED)
        out = out_ptr + at[:, None] * out_stride + (head * V + v_index)[None, :]
        tl.store(out, o.to(out_ptr.dtype.element_ty), mask=is_token[:, None])
        rest = (change * tl.exp(whole - decay)[:, None]).to(k.dtype)
        state = state * tl.exp(whole)
        state += _product(tl.trans(k), rest, PRECISION, IS_INTERPRETED)
        export = tl.load(piece + at_piece * 4 + 3).to(tl.int64)
        if export > 0:
            kept = state_ptr + export * state_stride + tile
            tl.store(kept, state.to(state_ptr.dtype.element_ty))
    # The source may be the target: every load of it by any lane lies before a barrier.
    tl.debug_barrier()
    tl.store(state_ptr + target * state_stride + tile, state.to(state_ptr.dtype.element_ty))
