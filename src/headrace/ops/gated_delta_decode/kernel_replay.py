"""bfloat16 states of the replay scheme on tensor cores: a step asks its states, and moves few.

A step of T tokens needs `S x` for its T keys and T queries x, not its state S. With the base B that
is stored, and the keys k_j and changes c_j of the tokens since, each decayed by what came after it
(w_j, and D for the base),

    S x = D (B x) + sum_j w_j c_j (k_j . x)

are small products. The step's tokens then change those 2T vectors one after another, where
decay d, rate r, key k and value v are a token's, and X all keys and queries of the step:

    P <- d P;   c = r (v - P[k]);   P <- P + c (k . X);   output = P[q]

so that a token costs a few sums over 2T columns and none over the state. `advance` runs before, for
rows whose base is due, and makes that base by a product too; rows then start from it. A base is the
rounded state; inside a step nothing is rounded.

A program owns some value rows of one head of one sequence, and their changes in the ring. Keys and
queries go through as two bfloat16 parts each against the state, which is bfloat16 itself, and as
tf32 against the ring: eight times the digits that are stored.
"""

# Names exist where their branch does.
# ruff: noqa: ANN201
# mypy: disable-error-code="possibly-undefined"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def replay_advance_kernel(
    state_ptr,
    query_lens_ptr,
    base_block_ptr,
    base_len_ptr,
    computed_ptr,
    write_block_ptr,
    write_len_ptr,
    ring_block_ptr,
    ring_update_ptr,
    state_stride,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    PENDING: tl.constexpr,
    RING: tl.constexpr,
):
    """Make the bases that are due; ROWS value rows a program, PENDING tokens at most."""
    HV: tl.constexpr = HK * GROUP
    UPDATE: tl.constexpr = HK * K + HV * V + 2 * HV

    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    row = tl.program_id(2) * ROWS  # among the value rows of this key head
    query_len = tl.load(query_lens_ptr + n).to(tl.int64)
    source = tl.load(base_block_ptr + n).to(tl.int64)
    ring = tl.load(ring_block_ptr + n).to(tl.int64)
    base_len = tl.load(base_len_ptr + n).to(tl.int64)
    computed = tl.load(computed_ptr + n).to(tl.int64)
    write_block = tl.load(write_block_ptr + n).to(tl.int64)
    write_len = tl.load(write_len_ptr + n).to(tl.int64)
    is_row = (query_len > 0) & (source > 0) & (ring > 0)
    if is_row & (write_block > 0) & (computed >= write_len):
        k_index = tl.arange(0, K)
        v_at = h * GROUP * V + row + tl.arange(0, ROWS)
        tile = v_at[:, None] * K + k_index[None, :]
        state = tl.load(state_ptr + source * state_stride + tile).to(tl.float32)
        count = (write_len - base_len).to(tl.int32)
        origin = (base_len % RING).to(tl.int32)
        place = tl.arange(0, PENDING)
        entry = (origin + place) % RING * UPDATE
        after = (origin + place + 1) % RING * UPDATE
        entries = ring_update_ptr + ring * RING * UPDATE
        decays = entries + UPDATE - HV + h * GROUP + row // V
        keys = tl.load(
            entries + entry[:, None] + (h * K + k_index)[None, :],
            mask=(place < count)[:, None],
            other=0.0,
        )
        changes = tl.load(
            entries + entry[:, None] + (HK * K + v_at)[None, :],
            mask=(place < count)[:, None],
            other=0.0,
        )
        later = tl.load(decays + after, mask=place + 1 < count, other=1.0)
        later = tl.cumprod(later, 0, reverse=True)
        whole = tl.sum(tl.where(place == 0, later, 0.0), 0) * tl.load(decays + origin * UPDATE)
        changes = tl.trans(changes * later[:, None])
        state = state * whole + tl.dot(changes, keys, input_precision="tf32")
        tl.store(
            state_ptr + write_block * state_stride + tile, state.to(state_ptr.dtype.element_ty)
        )


@triton.jit
def replay_answer_kernel(
    state_ptr,
    scratch_ptr,
    token_index_ptr,
    query_lens_ptr,
    base_block_ptr,
    base_len_ptr,
    computed_ptr,
    write_block_ptr,
    write_len_ptr,
    ring_block_ptr,
    ring_update_ptr,
    state_stride,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    PENDING: tl.constexpr,
    QUERY: tl.constexpr,
    COLUMNS: tl.constexpr,
    RING: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Outputs before the norm to scratch, changes to the ring; COLUMNS is 2 * QUERY or more."""
    HV: tl.constexpr = HK * GROUP
    F: tl.constexpr = 2 * HK * K + HV * V
    UPDATE: tl.constexpr = HK * K + HV * V + 2 * HV
    SCRATCH: tl.constexpr = F + 2 * HV + HV * V

    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    row = tl.program_id(2) * ROWS  # among the value rows of this key head
    query_len = tl.load(query_lens_ptr + n).to(tl.int32)
    source = tl.load(base_block_ptr + n).to(tl.int64)
    ring = tl.load(ring_block_ptr + n).to(tl.int64)
    start = tl.load(base_len_ptr + n).to(tl.int64)
    computed = tl.load(computed_ptr + n).to(tl.int64)
    write_block = tl.load(write_block_ptr + n).to(tl.int64)
    write_len = tl.load(write_len_ptr + n).to(tl.int64)
    # Columns: the step's keys, then its queries.
    column = tl.arange(0, COLUMNS)
    is_asked = (column % QUERY < query_len) & (column < 2 * QUERY)
    tokens = tl.load(token_index_ptr + n * QUERY + column % QUERY, mask=is_asked, other=0)
    if (query_len > 0) & (source > 0) & (ring > 0):
        if (write_block > 0) & (computed >= write_len):
            source = write_block
            start = write_len
        head = h * GROUP + row // V
        k_index = tl.arange(0, K)
        v_at = h * GROUP * V + row + tl.arange(0, ROWS)
        tile = v_at[:, None] * K + k_index[None, :]
        state = tl.load(state_ptr + source * state_stride + tile)
        # Offsets in a ring and in the scratch need 32 bits only.
        made = scratch_ptr + tokens.to(tl.int32) * SCRATCH
        channel = tl.where(column < QUERY, HK * K, 0) + h * K
        asked = tl.load(
            (made + channel)[:, None] + k_index[None, :], mask=is_asked[:, None], other=0.0
        )  # [COLUMNS, K]
        is_token = column < query_len
        values = tl.load(
            (made + 2 * HK * K)[:, None] + v_at[None, :], mask=is_token[:, None], other=0.0
        )
        values = tl.trans(values)  # [ROWS, COLUMNS]
        rates = tl.load(made + F + head, mask=is_token, other=0.0)
        decays = tl.load(made + F + HV + head, mask=is_token, other=1.0)

        pending = (computed - start).to(tl.int32)
        origin = (start % RING).to(tl.int32)
        place = tl.arange(0, PENDING)
        entry = (origin + place) % RING * UPDATE
        after = (origin + place + 1) % RING * UPDATE
        entries = ring_update_ptr + ring * RING * UPDATE
        old_decays = entries + UPDATE - HV + head
        keys = tl.load(
            entries + entry[:, None] + (h * K + k_index)[None, :],
            mask=(place < pending)[:, None],
            other=0.0,
        )
        changes = tl.load(
            entries + entry[:, None] + (HK * K + v_at)[None, :],
            mask=(place < pending)[:, None],
            other=0.0,
        )
        own = tl.load(old_decays + entry, mask=(place == 0) & (place < pending), other=1.0)
        later = tl.load(old_decays + after, mask=place + 1 < pending, other=1.0)
        later = tl.cumprod(later, 0, reverse=True)
        whole = tl.sum(tl.where(place == 0, later * own, 0.0), 0)
        changes = tl.trans(changes * later[:, None])  # [ROWS, PENDING]

        across = tl.trans(asked)
        most = across.to(tl.bfloat16)
        rest = (across - most.to(tl.float32)).to(tl.bfloat16)
        if IS_INTERPRETED:
            # The interpreter has no products of bfloat16.
            state = state.to(tl.float32)
            most = most.to(tl.float32)
            rest = rest.to(tl.float32)
        known = tl.dot(state, most)
        known = tl.dot(state, rest, acc=known) * whole  # [ROWS, COLUMNS]
        seen = tl.dot(keys, across, input_precision="tf32")
        known = tl.dot(changes, seen, acc=known, input_precision="tf32")
        grams = tl.dot(asked, across, input_precision="tf32")
        outs = tl.zeros([ROWS, COLUMNS], tl.float32)
        fresh = tl.zeros([ROWS, COLUMNS], tl.float32)
        for t in range(query_len):
            known = known * tl.sum(tl.where(column == t, decays, 0.0), 0)
            error = tl.sum(tl.where((column == t)[None, :], values - known, 0.0), 1)
            change = error * tl.sum(tl.where(column == t, rates, 0.0), 0)
            gram = tl.sum(tl.where((column == t)[:, None], grams, 0.0), 0)
            known = known + change[:, None] * gram[None, :]
            out = tl.sum(tl.where((column == QUERY + t)[None, :], known, 0.0), 1)
            outs = tl.where((column == t)[None, :], out[:, None], outs)
            fresh = tl.where((column == t)[None, :], change[:, None], fresh)
        tl.store(
            (made + F + 2 * HV)[:, None] + v_at[None, :], tl.trans(outs), mask=is_token[:, None]
        )
        slot = (origin + pending + column) % RING * UPDATE
        tl.store(
            entries + slot[:, None] + (HK * K + v_at)[None, :],
            tl.trans(fresh),
            mask=is_token[:, None],
        )
