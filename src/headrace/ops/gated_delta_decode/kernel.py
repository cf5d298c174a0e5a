"""Decode and verify of Gated DeltaNet in two launches: conv, gates, norms; delta rule, gated norm.

In the first one a program owns one row and one key head with its value heads. It alone reads and
writes their channels of the row's conv window and ring, so no program reads what another one
writes, although windows are updated in place. (With one program for each value head, the heads of a
key head would share its window: the second founding fault again.) In the second one a program owns
one row and one value head, with its state.

Bits of a token do not depend on how tokens are grouped into steps: a state is always brought
forward by the same multiply and fused multiply-add, and where states are stored in less than
float32, the running state is rounded exactly where a store may happen.

The kernel is one function on purpose: the interpreter spends milliseconds on every call of another.
"""

# Conditions on constants stay apart from those on values, and names exist where their scheme does.
# ruff: noqa: ANN201, C901, PLR0912, PLR2004, SIM102
# mypy: disable-error-code="possibly-undefined"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_delta_decode_kernel(
    inputs_ptr,
    gate_ptr,
    logits_ptr,
    out_ptr,
    conv_ptr,
    gate_bias_ptr,
    gate_factor_ptr,
    unit_scale_ptr,
    norm_ptr,
    window_ptr,
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
    ring_input_ptr,
    ring_update_ptr,
    scratch_ptr,
    inputs_stride,
    gate_stride,
    logits_stride,
    out_stride,
    blocks_stride,
    window_stride,
    state_stride,
    eps,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BATCH: tl.constexpr,
    TAPS: tl.constexpr,
    QUERY: tl.constexpr,
    ENTRIES_PADDED: tl.constexpr,
    RING: tl.constexpr,
    INTERVAL: tl.constexpr,
    IS_REPLAY: tl.constexpr,
    PHASE: tl.constexpr,
):
    """See the module and the package.

    QUERY is the width of token_index, ROWS the value rows that a program holds at a time, BATCH the
    pending tokens whose loads go together. PHASE 1 is a launch of programs (row, key head): the
    convolutions, norms and gates, and the windows. PHASE 2 is one of programs (row, value head):
    the states and the gated norm.
    """
    HV: tl.constexpr = HK * GROUP
    F: tl.constexpr = 2 * HK * K + HV * V
    UPDATE: tl.constexpr = HK * K + HV * V + 2 * HV
    # Queries, keys, values, rates, decays, outputs of a token.
    SCRATCH: tl.constexpr = F + 2 * HV + HV * V
    CARRIED: tl.constexpr = TAPS - 1
    # Stored in less than float32?
    ROUNDS: tl.constexpr = state_ptr.dtype.element_ty != tl.float32

    n = tl.program_id(0).to(tl.int64)
    # Value heads of this program: those of its key head, or one.
    if PHASE == 2:
        h = tl.program_id(1) // GROUP
        first_head = tl.program_id(1) % GROUP
        last_head = first_head + 1
    else:
        h = tl.program_id(1)
        first_head = 0
        last_head = GROUP
    query_len = tl.load(query_lens_ptr + n).to(tl.int64)
    if IS_REPLAY:
        source = tl.load(base_block_ptr + n).to(tl.int64)
        ring = tl.load(ring_block_ptr + n).to(tl.int64)
        base_len = tl.load(base_len_ptr + n).to(tl.int64)
        computed = tl.load(computed_ptr + n).to(tl.int64)
        write_block = tl.load(write_block_ptr + n).to(tl.int64)
        write_len = tl.load(write_len_ptr + n).to(tl.int64)
        writes = (computed >= write_len) & (write_block > 0)
        pending = computed - base_len
        window_block = source
        is_row = (query_len > 0) & (source > 0) & (ring > 0)
    else:
        accepted = tl.load(accepted_ptr + n).to(tl.int64)
        offset = accepted - 1
        window_block = tl.load(blocks_ptr + n * blocks_stride).to(tl.int64)
        source = tl.load(blocks_ptr + n * blocks_stride + offset, mask=accepted > 0, other=0)
        source = source.to(tl.int64)
        is_row = (query_len > 0) & (window_block > 0) & (source > 0)

    if is_row:
        k_index = tl.arange(0, K)
        v_index = tl.arange(0, V)
        no_k = tl.zeros([K], tl.int64)
        no_v = tl.zeros([V], tl.int64)
        no_row = tl.zeros([ROWS], tl.int64)
        q_channel = h * K + k_index
        k_channel = HK * K + h * K + k_index
        q_scale = tl.load(unit_scale_ptr + h)
        k_scale = tl.load(unit_scale_ptr + HK + h)
        window_row = window_ptr + window_block * window_stride

        if PHASE == 1:
            # First the convolutions, norms and gates of the step's tokens, as vectors, to scratch.
            for step in range(query_len):
                t = tl.cast(step, tl.int64)
                token = tl.load(token_index_ptr + n * QUERY + t)
                made = scratch_ptr + token * SCRATCH
                q = tl.zeros([K], tl.float32)
                k = tl.zeros([K], tl.float32)
                for w in tl.static_range(TAPS):
                    back = t + w - CARRIED
                    new = tl.load(token_index_ptr + n * QUERY + back, mask=back >= 0, other=0)
                    new = inputs_ptr + new * inputs_stride
                    # Tap by tap from the step's inputs, the ring or the window. Conditions are
                    # blocks: the interpreter makes numbers of a scalar condition.
                    back_k = back + no_k
                    x_q = tl.load(new + q_channel, mask=back_k >= 0, other=0.0).to(tl.float32)
                    x_k = tl.load(new + k_channel, mask=back_k >= 0, other=0.0).to(tl.float32)
                    if w < CARRIED:
                        is_old = back_k < 0
                        if IS_REPLAY:
                            at = computed + back
                            kept = ring_input_ptr + (ring * RING + at % RING) * F
                            old = window_row + (at - base_len + CARRIED) * F
                            is_ring = is_old & (back_k >= base_len - computed)
                            x_q += tl.load(kept + q_channel, mask=is_ring, other=0.0).to(tl.float32)
                            x_k += tl.load(kept + k_channel, mask=is_ring, other=0.0).to(tl.float32)
                            is_old = is_old & (back_k < base_len - computed)
                        else:
                            old = window_row + (offset + t + w) * F
                        x_q += tl.load(old + q_channel, mask=is_old, other=0.0).to(tl.float32)
                        x_k += tl.load(old + k_channel, mask=is_old, other=0.0).to(tl.float32)
                    q += x_q * tl.load(conv_ptr + w * F + q_channel).to(tl.float32)
                    k += x_k * tl.load(conv_ptr + w * F + k_channel).to(tl.float32)
                q = q / (1.0 + tl.exp(-q))
                k = k / (1.0 + tl.exp(-k))
                q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * q_scale)
                k = k * (tl.rsqrt(tl.sum(k * k, 0) + 1e-6) * k_scale)
                tl.store(made + q_channel, q)
                tl.store(made + k_channel, k)
                if IS_REPLAY:
                    # The last tap is the token itself.
                    at = computed + t
                    kept = ring_input_ptr + (ring * RING + at % RING) * F
                    entry = ring_update_ptr + (ring * RING + at % RING) * UPDATE
                    tl.store(kept + q_channel, x_q.to(ring_input_ptr.dtype.element_ty))
                    tl.store(kept + k_channel, x_k.to(ring_input_ptr.dtype.element_ty))
                    tl.store(entry + h * K + k_index, k)
                for g in range(GROUP):
                    head = h * GROUP + g
                    v_channel = 2 * HK * K + head * V + v_index
                    v = tl.zeros([V], tl.float32)
                    # Names of their own: a loop's variables keep their shape, and V may not be K.
                    for w in tl.static_range(TAPS):
                        back = t + w - CARRIED
                        new = tl.load(token_index_ptr + n * QUERY + back, mask=back >= 0, other=0)
                        new = inputs_ptr + new * inputs_stride
                        back_v = back + no_v
                        x_v = tl.load(new + v_channel, mask=back_v >= 0, other=0.0).to(tl.float32)
                        if w < CARRIED:
                            is_old_v = back_v < 0
                            if IS_REPLAY:
                                at = computed + back
                                kept = ring_input_ptr + (ring * RING + at % RING) * F
                                old = window_row + (at - base_len + CARRIED) * F
                                is_ring_v = is_old_v & (back_v >= base_len - computed)
                                x_v += tl.load(kept + v_channel, mask=is_ring_v, other=0.0).to(
                                    tl.float32
                                )
                                is_old_v = is_old_v & (back_v < base_len - computed)
                            else:
                                old = window_row + (offset + t + w) * F
                            x_v += tl.load(old + v_channel, mask=is_old_v, other=0.0).to(tl.float32)
                        v += x_v * tl.load(conv_ptr + w * F + v_channel).to(tl.float32)
                    tl.store(made + v_channel, v / (1.0 + tl.exp(-v)))
                    logit = logits_ptr + token * logits_stride + head
                    r = tl.load(logit).to(tl.float32) + tl.load(gate_bias_ptr + head)
                    d = tl.load(logit + HV).to(tl.float32) + tl.load(gate_bias_ptr + HV + head)
                    r = tl.log(1.0 + tl.exp(-tl.abs(r))) + tl.maximum(r, 0.0)
                    d = tl.log(1.0 + tl.exp(-tl.abs(d))) + tl.maximum(d, 0.0)
                    rate = tl.exp(r * tl.load(gate_factor_ptr + head))
                    decay = tl.exp(d * tl.load(gate_factor_ptr + HV + head))
                    tl.store(made + F + head, rate)
                    tl.store(made + F + HV + head, decay)
                    if IS_REPLAY:
                        at = computed + t
                        kept = ring_input_ptr + (ring * RING + at % RING) * F
                        entry = ring_update_ptr + (ring * RING + at % RING) * UPDATE
                        tl.store(kept + v_channel, x_v.to(ring_input_ptr.dtype.element_ty))
                        tl.store(entry + HK * K + HV * V + head, rate)
                        tl.store(entry + HK * K + HV * V + HV + head, decay)
        if PHASE == 2:
            # Then the states, a few value rows at a time: what a program holds is small, so several
            # programs share a multiprocessor and one's loads run while another computes. The next
            # rows are on their way while these are worked on.
            PARTS: tl.constexpr = V // ROWS
            row_index = tl.arange(0, ROWS)
            states = state_ptr + source * state_stride + h * GROUP * V * K
            tile = row_index[:, None] * K + k_index[None, :]  # [ROWS, K]
            ahead = tl.load(states + first_head * V * K + tile)
            for part in range(first_head * PARTS, last_head * PARTS):
                row = part * ROWS  # among the value rows of this key head
                head = h * GROUP + row // V
                v_at = h * GROUP * V + row + row_index
                state = ahead.to(tl.float32)
                is_more = (row + ROWS + row_index < last_head * V)[:, None]
                ahead = tl.load(states + (row + ROWS) * K + tile, mask=is_more, other=0.0)
                tile_at = h * GROUP * V * K + row * K + tile
                if IS_REPLAY:
                    # Committed tokens that are not in the base yet: their change of the state is
                    # known. A few at a time, so that their loads are on the way together; a token
                    # that is not there changes no bit of the state.
                    for j in range(0, pending, BATCH):
                        for b in tl.static_range(BATCH):
                            at = base_len + tl.cast(j, tl.int64) + b
                            entry = ring_update_ptr + (ring * RING + at % RING) * UPDATE
                            key = tl.load(
                                entry + h * K + k_index, mask=at + no_k < computed, other=0.0
                            )
                            change = tl.load(
                                entry + HK * K + v_at, mask=at + no_row < computed, other=0.0
                            )
                            decay = tl.load(
                                entry + HK * K + HV * V + HV + head, mask=at < computed, other=1.0
                            )
                            state = tl.fma(change[:, None], key[None, :], state * decay)
                            if (at + 1 == write_len) & (at < computed):
                                state = state.to(state_ptr.dtype.element_ty).to(tl.float32)
                                if writes:
                                    new = state_ptr + write_block * state_stride
                                    tl.store(new + tile_at, state.to(state_ptr.dtype.element_ty))
                            elif ROUNDS:
                                if ((at + 1 - write_len) % INTERVAL == 0) & (at < computed):
                                    state = state.to(state_ptr.dtype.element_ty).to(tl.float32)
                for step in range(query_len):
                    t = tl.cast(step, tl.int64)
                    token = tl.load(token_index_ptr + n * QUERY + t)
                    made = scratch_ptr + token * SCRATCH
                    q = tl.load(made + q_channel)
                    k = tl.load(made + k_channel)
                    v = tl.load(made + 2 * HK * K + v_at)
                    rate = tl.load(made + F + head)
                    decay = tl.load(made + F + HV + head)
                    state = state * decay
                    change = (v - tl.sum(state * k[None, :], 1)) * rate
                    state = tl.fma(change[:, None], k[None, :], state)
                    tl.store(made + F + 2 * HV + v_at, tl.sum(state * q[None, :], 1))
                    if IS_REPLAY:
                        at = computed + t
                        if ROUNDS:
                            if (at + 1) % INTERVAL == 0:
                                state = state.to(state_ptr.dtype.element_ty).to(tl.float32)
                        entry = ring_update_ptr + (ring * RING + at % RING) * UPDATE
                        tl.store(entry + HK * K + v_at, change)
                    else:
                        if ROUNDS:
                            state = state.to(state_ptr.dtype.element_ty).to(tl.float32)
                        block = tl.load(blocks_ptr + n * blocks_stride + t).to(tl.int64)
                        if block > 0:
                            new = state_ptr + block * state_stride
                            tl.store(new + tile_at, state.to(state_ptr.dtype.element_ty))
            tl.debug_barrier()

            # Then the gated norm, which needs all value rows of a head.
            norm = tl.load(norm_ptr + v_index).to(tl.float32)
            for step in range(query_len):
                token = tl.load(token_index_ptr + n * QUERY + tl.cast(step, tl.int64))
                for g in range(first_head, last_head):
                    channel = (h * GROUP + g) * V + v_index
                    o = tl.load(scratch_ptr + token * SCRATCH + F + 2 * HV + channel)
                    z = tl.load(gate_ptr + token * gate_stride + channel).to(tl.float32)
                    o = o * tl.rsqrt(tl.sum(o * o, 0) / V + eps) * norm
                    o = o * (z / (1.0 + tl.exp(-z)))
                    out = out_ptr + token * out_stride + channel
                    tl.store(out, o.to(out_ptr.dtype.element_ty))

        if PHASE == 1:
            # The window last: every load of it by any lane lies before a barrier.
            e = tl.arange(0, ENTRIES_PADDED)[:, None]
            if IS_REPLAY:
                if writes:
                    # The inputs before the new base, committed ones all.
                    at = write_len - CARRIED + e
                    is_ring = (e < CARRIED) & (at >= base_len)
                    is_old = (e < CARRIED) & (at < base_len)
                    for segment in tl.static_range(2 + GROUP):
                        if segment < 2:
                            channel = (segment * HK * K + h * K + k_index)[None, :]
                        else:
                            channel = (2 * HK * K + (h * GROUP + segment - 2) * V + v_index)[
                                None, :
                            ]
                        x = tl.load(
                            window_row + (at - base_len + CARRIED) * F + channel,
                            mask=is_old,
                            other=0.0,
                        )
                        kept = ring_input_ptr + (ring * RING + at % RING) * F + channel
                        x = tl.where(is_ring, tl.load(kept, mask=is_ring, other=0.0), x)
                        tl.debug_barrier()
                        tl.store(
                            window_ptr + write_block * window_stride + e * F + channel,
                            x,
                            mask=e < CARRIED,
                        )
            else:
                # The old window from its offset, then the inputs, without the oldest entry.
                back = e + 1 - CARRIED
                is_new = (back >= 0) & (back < query_len)
                is_old = back < 0
                token = tl.load(token_index_ptr + n * QUERY + back, mask=is_new, other=0)
                for segment in tl.static_range(2 + GROUP):
                    if segment < 2:
                        channel = (segment * HK * K + h * K + k_index)[None, :]
                    else:
                        channel = (2 * HK * K + (h * GROUP + segment - 2) * V + v_index)[None, :]
                    x = tl.load(window_row + (offset + e + 1) * F + channel, mask=is_old, other=0.0)
                    new = tl.load(
                        inputs_ptr + token * inputs_stride + channel, mask=is_new, other=0.0
                    )
                    x = tl.where(is_new, new.to(x.dtype), x)
                    tl.debug_barrier()
                    tl.store(window_row + e * F + channel, x, mask=is_new | is_old)
