"""Decode and verify of Mamba-2 in three launches: convolution, state, gate and norm.

No program reads what another one of its launch writes, although windows, rings and states are
updated in place: a program of the first owns channels, one of the second rows of a head's state.

Bits of a token do not depend on how tokens are grouped into steps: a state is always brought
forward by the same multiply and fused multiply-add, and where states are stored in less than
float32, the running state is rounded exactly where a store may happen.
"""

# Conditions on constants stay apart from those on values, and names exist where their scheme does.
# ruff: noqa: ANN201, C901, PLR0912, SIM102
# mypy: disable-error-code="possibly-undefined"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_row(
    n,
    query_lens_ptr,
    blocks_ptr,
    accepted_ptr,
    base_block_ptr,
    ring_block_ptr,
    blocks_stride,
    IS_REPLAY: tl.constexpr,
):
    """Tokens of row n, 0 if it takes no part; blocks of its window and state; ring, or offset."""
    query_len = tl.load(query_lens_ptr + n).to(tl.int64)
    if IS_REPLAY:
        source = tl.load(base_block_ptr + n).to(tl.int64)
        place = tl.load(ring_block_ptr + n).to(tl.int64)
        window_block = source
        is_row = (source > 0) & (place > 0)
    else:
        place = tl.load(accepted_ptr + n).to(tl.int64) - 1
        window_block = tl.load(blocks_ptr + n * blocks_stride).to(tl.int64)
        source = tl.load(blocks_ptr + n * blocks_stride + place, mask=place >= 0, other=0)
        source = source.to(tl.int64)
        is_row = (window_block > 0) & (source > 0)
    return tl.where(is_row, query_len, 0), window_block, source, place


@triton.jit
def convolve_kernel(
    inputs_ptr,
    conv_ptr,
    conv_bias_ptr,
    window_ptr,
    token_index_ptr,
    query_lens_ptr,
    blocks_ptr,
    accepted_ptr,
    base_block_ptr,
    base_len_ptr,
    computed_ptr,
    write_block_ptr,
    write_len_ptr,
    ring_block_ptr,
    ring_input_ptr,
    ring_update_ptr,
    made_ptr,
    inputs_stride,
    blocks_stride,
    window_stride,
    F: tl.constexpr,
    INNER: tl.constexpr,
    SHARED: tl.constexpr,
    UPDATE: tl.constexpr,
    MADE: tl.constexpr,
    TAPS: tl.constexpr,
    QUERY: tl.constexpr,
    ENTRIES_PADDED: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_REPLAY: tl.constexpr,
):
    """BLOCK channels of one row: convolution and SiLU to `made` [T, MADE], then the new window."""
    CARRIED: tl.constexpr = TAPS - 1
    n = tl.program_id(0).to(tl.int64)
    query_len, window_block, _, place = find_row(
        n, query_lens_ptr, blocks_ptr, accepted_ptr, base_block_ptr, ring_block_ptr,
        blocks_stride, IS_REPLAY,
    )  # fmt: skip
    if query_len > 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_channel = channel < F
        no_channel = tl.zeros([BLOCK], tl.int64)
        window_row = window_ptr + window_block * window_stride
        if IS_REPLAY:
            base_len = tl.load(base_len_ptr + n).to(tl.int64)
            computed = tl.load(computed_ptr + n).to(tl.int64)
        for step in range(query_len):
            t = tl.cast(step, tl.int64)
            token = tl.load(token_index_ptr + n * QUERY + t)
            mixed = tl.zeros([BLOCK], tl.float32)
            for w in tl.static_range(TAPS):
                # Tap by tap from the step's inputs, the ring or the window. Conditions are blocks:
                # the interpreter makes numbers of a scalar condition.
                back = t + w - CARRIED
                new = tl.load(token_index_ptr + n * QUERY + back, mask=back >= 0, other=0)
                back_of = back + no_channel
                x = tl.load(
                    inputs_ptr + new * inputs_stride + channel,
                    mask=is_channel & (back_of >= 0),
                    other=0.0,
                ).to(tl.float32)
                if w < CARRIED:
                    is_old = is_channel & (back_of < 0)
                    if IS_REPLAY:
                        at = computed + back
                        kept = ring_input_ptr + (place * RING + at % RING) * F
                        old = window_row + (at - base_len + CARRIED) * F
                        is_ring = is_old & (back_of >= base_len - computed)
                        x += tl.load(kept + channel, mask=is_ring, other=0.0).to(tl.float32)
                        is_old = is_old & (back_of < base_len - computed)
                    else:
                        old = window_row + (place + t + w) * F
                    x += tl.load(old + channel, mask=is_old, other=0.0).to(tl.float32)
                tap = tl.load(conv_ptr + w * F + channel, mask=is_channel, other=0.0)
                mixed += x * tap.to(tl.float32)
            if conv_bias_ptr is not None:
                bias = tl.load(conv_bias_ptr + channel, mask=is_channel, other=0.0)
                mixed += bias.to(tl.float32)
            mixed = mixed / (1.0 + tl.exp(-mixed))
            tl.store(made_ptr + token * MADE + channel, mixed, mask=is_channel)
            if IS_REPLAY:
                # The last tap is the token itself.
                slot = place * RING + (computed + t) % RING
                kept = ring_input_ptr + slot * F + channel
                tl.store(kept, x.to(ring_input_ptr.dtype.element_ty), mask=is_channel)
                is_b = (channel >= INNER) & (channel < INNER + SHARED)
                tl.store(ring_update_ptr + slot * UPDATE + channel - INNER, mixed, mask=is_b)

        # The window last: every load of it by any lane lies before a barrier.
        e = tl.arange(0, ENTRIES_PADDED)[:, None]
        column = channel[None, :]
        is_column = is_channel[None, :]
        if IS_REPLAY:
            write_block = tl.load(write_block_ptr + n).to(tl.int64)
            write_len = tl.load(write_len_ptr + n).to(tl.int64)
            if (computed >= write_len) & (write_block > 0):
                # The inputs before the new base, committed ones all.
                at = write_len - CARRIED + e
                is_kept = (e < CARRIED) & is_column
                is_ring = is_kept & (at >= base_len)
                old = window_row + (at - base_len + CARRIED) * F + column
                x = tl.load(old, mask=is_kept & (at < base_len), other=0.0)
                kept = ring_input_ptr + (place * RING + at % RING) * F + column
                x = tl.where(is_ring, tl.load(kept, mask=is_ring, other=0.0), x)
                tl.debug_barrier()
                new = window_ptr + write_block * window_stride + e * F + column
                tl.store(new, x, mask=is_kept)
        else:
            # The old window from its offset, then the inputs, without the oldest entry.
            back = e + 1 - CARRIED
            is_token = (back >= 0) & (back < query_len)
            is_new = is_token & is_column
            is_old = (back < 0) & is_column
            token = tl.load(token_index_ptr + n * QUERY + back, mask=is_token, other=0)
            x = tl.load(window_row + (place + e + 1) * F + column, mask=is_old, other=0.0)
            new = tl.load(inputs_ptr + token * inputs_stride + column, mask=is_new, other=0.0)
            x = tl.where(is_new, new.to(x.dtype), x)
            tl.debug_barrier()
            tl.store(window_row + e * F + column, x, mask=is_new | is_old)


@triton.jit
def state_kernel(
    dt_ptr,
    dt_bias_ptr,
    decay_rate_ptr,
    skip_ptr,
    state_ptr,
    token_index_ptr,
    query_lens_ptr,
    blocks_ptr,
    accepted_ptr,
    base_block_ptr,
    base_len_ptr,
    computed_ptr,
    write_block_ptr,
    write_len_ptr,
    ring_block_ptr,
    ring_update_ptr,
    made_ptr,
    dt_stride,
    blocks_stride,
    state_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    MADE: tl.constexpr,
    ROWS: tl.constexpr,
    BATCH: tl.constexpr,
    QUERY: tl.constexpr,
    RING: tl.constexpr,
    INTERVAL: tl.constexpr,
    IS_REPLAY: tl.constexpr,
):
    """ROWS rows of one head's state: pending tokens, then the step's, and what the state answers.

    `made` [T, MADE] has x, B and C of each token; outputs with the skip go behind them.
    """
    INNER: tl.constexpr = H * P
    SHARED: tl.constexpr = GROUPS * D
    F: tl.constexpr = INNER + 2 * SHARED
    UPDATE: tl.constexpr = SHARED + INNER + H
    # Stored in less than float32?
    ROUNDS: tl.constexpr = state_ptr.dtype.element_ty != tl.float32
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    query_len, _, source, place = find_row(
        n, query_lens_ptr, blocks_ptr, accepted_ptr, base_block_ptr, ring_block_ptr,
        blocks_stride, IS_REPLAY,
    )  # fmt: skip
    if query_len > 0:
        d = tl.arange(0, D)
        row = head * P + tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        tile = row[:, None] * D + d[None, :]  # [ROWS, D]
        shared = head // (H // GROUPS) * D + d
        state = tl.load(state_ptr + source * state_stride + tile).to(tl.float32)
        if IS_REPLAY:
            # Committed tokens that are not in the base yet. A few at a time, so that their loads
            # are on the way together; a token that is not there changes no bit of the state.
            base_len = tl.load(base_len_ptr + n).to(tl.int64)
            computed = tl.load(computed_ptr + n).to(tl.int64)
            write_block = tl.load(write_block_ptr + n).to(tl.int64)
            write_len = tl.load(write_len_ptr + n).to(tl.int64)
            no_d = tl.zeros([D], tl.int64)
            no_row = tl.zeros([ROWS], tl.int64)
            for j in range(0, computed - base_len, BATCH):
                for i in tl.static_range(BATCH):
                    at = base_len + tl.cast(j, tl.int64) + i
                    entry = ring_update_ptr + (place * RING + at % RING) * UPDATE
                    b = tl.load(entry + shared, mask=at + no_d < computed, other=0.0)
                    value = tl.load(entry + SHARED + row, mask=at + no_row < computed, other=0.0)
                    decay = tl.load(entry + SHARED + INNER + head, mask=at < computed, other=0.0)
                    state = tl.fma(value[:, None], b[None, :], state * tl.exp(decay))
                    if (at + 1 == write_len) & (at < computed):
                        state = state.to(state_ptr.dtype.element_ty).to(tl.float32)
                        if write_block > 0:
                            new = state_ptr + write_block * state_stride
                            tl.store(new + tile, state.to(state_ptr.dtype.element_ty))
                    elif ROUNDS:
                        if ((at + 1 - write_len) % INTERVAL == 0) & (at < computed):
                            state = state.to(state_ptr.dtype.element_ty).to(tl.float32)
        dt_bias = tl.load(dt_bias_ptr + head)
        decay_rate = tl.load(decay_rate_ptr + head)
        skip = tl.load(skip_ptr + head)
        for step in range(query_len):
            t = tl.cast(step, tl.int64)
            token = tl.load(token_index_ptr + n * QUERY + t)
            made = made_ptr + token * MADE
            x = tl.load(made + row)
            b = tl.load(made + INNER + shared)
            c = tl.load(made + INNER + SHARED + shared)
            dt = tl.load(dt_ptr + token * dt_stride + head).to(tl.float32) + dt_bias
            # log(1 + small), exact where small is lost beside the 1: time steps are often tiny.
            small = tl.exp(-tl.abs(dt))
            whole = 1.0 + small
            rest = tl.where(whole == 1.0, 1.0, whole - 1.0)
            tail = tl.where(whole == 1.0, small, tl.log(whole) * (small / rest))
            dt = tail + tl.maximum(dt, 0.0)
            decay = dt * decay_rate
            value = x * dt
            state = tl.fma(value[:, None], b[None, :], state * tl.exp(decay))
            tl.store(made + F + row, tl.sum(state * c[None, :], 1) + skip * x)
            if IS_REPLAY:
                at = computed + t
                if ROUNDS:
                    if (at + 1) % INTERVAL == 0:
                        state = state.to(state_ptr.dtype.element_ty).to(tl.float32)
                entry = ring_update_ptr + (place * RING + at % RING) * UPDATE
                tl.store(entry + SHARED + row, value)
                if tl.program_id(2) == 0:
                    tl.store(entry + SHARED + INNER + head, decay)
            else:
                if ROUNDS:
                    state = state.to(state_ptr.dtype.element_ty).to(tl.float32)
                block = tl.load(blocks_ptr + n * blocks_stride + t).to(tl.int64)
                if block > 0:
                    new = state_ptr + block * state_stride
                    tl.store(new + tile, state.to(state_ptr.dtype.element_ty))


@triton.jit
def gate_norm_kernel(
    made_ptr,
    gate_ptr,
    norm_ptr,
    out_ptr,
    token_index_ptr,
    query_lens_ptr,
    blocks_ptr,
    accepted_ptr,
    base_block_ptr,
    ring_block_ptr,
    gate_stride,
    out_stride,
    blocks_stride,
    eps,
    F: tl.constexpr,
    INNER: tl.constexpr,
    PART: tl.constexpr,
    PART_PADDED: tl.constexpr,
    MADE: tl.constexpr,
    QUERY: tl.constexpr,
    GATES_AFTER: tl.constexpr,
    IS_REPLAY: tl.constexpr,
):
    """One token's part of PART columns: gate and norm, or, where norm_ptr is None, the gate."""
    n = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1)
    query_len, _, _, _ = find_row(
        n, query_lens_ptr, blocks_ptr, accepted_ptr, base_block_ptr, ring_block_ptr,
        blocks_stride, IS_REPLAY,
    )  # fmt: skip
    if t < query_len:
        lane = tl.arange(0, PART_PADDED)
        column = tl.program_id(2) * PART + lane
        is_column = (lane < PART) & (column < INNER)
        token = tl.load(token_index_ptr + n * QUERY + t)
        y = tl.load(made_ptr + token * MADE + F + column, mask=is_column, other=0.0)
        z = tl.load(gate_ptr + token * gate_stride + column, mask=is_column, other=0.0)
        z = z.to(tl.float32)
        opened = z / (1.0 + tl.exp(-z))
        if norm_ptr is None:
            y = y * opened
        else:
            if not GATES_AFTER:
                y = y * opened
            norm = tl.load(norm_ptr + column, mask=is_column, other=0.0)
            y = y * tl.rsqrt(tl.sum(y * y, 0) / PART + eps) * norm
            if GATES_AFTER:
                y = y * opened
        out = out_ptr + token * out_stride + column
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=is_column)
