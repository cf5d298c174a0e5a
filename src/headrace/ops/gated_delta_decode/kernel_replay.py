"""bfloat16 states of the replay scheme on tensor cores: a step asks its states, and moves few.

A step of T tokens needs `S x` for its T keys and T queries x, not its state S. With the base B that
is stored, and the keys k_j and changes c_j of the tokens since, each decayed by what came after it
(w_j, and D for the base),

    S x = D (B x) + sum_j w_j c_j (k_j . x)

The step's tokens then change those 2T vectors P one after another, where decay d, rate r, key k and
value v are a token's, and X all keys and queries of the step:

    P <- d P;   c = r (v - P[k]);   P <- P + c (k . X);   output = P[q]

All of that is linear in the vectors B x, c_j and v, with numbers that are the same for all value
rows. So the first launch works those numbers out for each head: `asked`, the keys and queries mixed
as the answers need them, and `shares`, what each change and value adds to each answer. The second
one is two products over a state and the ring:

    answers = B asked^T + [c_j; v]^T shares^T

which are the step's changes and its outputs. It ends with the gated norm, and with the new base
where one is due: a rounded state; inside a step nothing is rounded. Between the two launches the
values of a step's tokens lie in the ring, where their changes will be.

`asked` goes through as two bfloat16 parts side by side against the state, which is bfloat16 itself;
all else in tf32 with its remainder, but for the sum that makes a base, which is rounded after it.
"""

# Names exist where their branch does.
# ruff: noqa: ANN201, PLR2004
# mypy: disable-error-code="possibly-undefined"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _convolve(
    inputs_ptr,
    ring_inputs,
    window_row,
    conv_ptr,
    tokens_at,
    inputs_stride,
    channel,
    t,
    query_len,
    pending,
    origin,
    TAPS: tl.constexpr,
    F: tl.constexpr,
    RING: tl.constexpr,
):
    """Inputs of a row's tokens t, and their convolutions after SiLU, both [t, channel]."""
    CARRIED: tl.constexpr = TAPS - 1
    is_token = t < query_len
    made = tl.zeros([t.shape[0], channel.shape[0]], tl.float32)
    for w in tl.static_range(TAPS):
        back = t + w - CARRIED
        token = tl.load(tokens_at + back, mask=is_token & (back >= 0), other=0)
        # A tap is the step's own, the ring's or the window's.
        x_at = tl.where(
            back >= -pending,
            ring_inputs + (origin + pending + back + RING) % RING * F,
            window_row + (pending + back + CARRIED) * F,
        )
        x_at = tl.where(back >= 0, inputs_ptr + token * inputs_stride, x_at)
        x_at = tl.multiple_of(x_at, 16)[:, None] + channel[None, :]
        x = tl.load(x_at, mask=is_token[:, None], other=0.0)
        weight = tl.load(conv_ptr + w * F + channel).to(tl.float32)
        made += x.to(tl.float32) * weight[None, :]
    # The last tap is the token itself.
    return x, made / (1.0 + tl.exp(-made))


@triton.jit
def _asked_at(
    entries,
    queries_ptr,
    token_index_ptr,
    term,
    query_len,
    behind,
    head,
    QUERY_WIDTH,
    UPDATE: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Where each asked vector is: the step's keys in the ring, then its queries."""
    token = term % WIDTH
    index = tl.load(token_index_ptr + token, mask=token < query_len, other=0)
    key = entries + (behind + token) % RING * UPDATE
    return tl.multiple_of(
        tl.where(term < WIDTH, key, queries_ptr + index * QUERY_WIDTH) + head, 16
    )


@triton.jit
def replay_prepare_kernel(
    inputs_ptr,
    logits_ptr,
    conv_ptr,
    gate_bias_ptr,
    gate_factor_ptr,
    unit_scale_ptr,
    window_ptr,
    token_index_ptr,
    query_lens_ptr,
    base_block_ptr,
    base_len_ptr,
    computed_ptr,
    write_block_ptr,
    write_len_ptr,
    ring_block_ptr,
    ring_input_ptr,
    ring_update_ptr,
    queries_ptr,
    asked_ptr,
    shares_ptr,
    inputs_stride,
    logits_stride,
    window_stride,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TAPS: tl.constexpr,
    QUERY: tl.constexpr,
    TOKENS: tl.constexpr,
    TERMS: tl.constexpr,
    ANSWERS: tl.constexpr,
    PENDING: tl.constexpr,
    RING: tl.constexpr,
    ENTRIES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Convolutions, norms and gates to the ring; `asked` and `shares` of a row and a key head.

    HEADS, TOKENS, PENDING and ENTRIES are GROUP, QUERY, the ring and TAPS - 1 filled up to what
    products and blocks take. ANSWERS are twice the tokens of a row: changes, then outputs. They
    follow from TERMS: a quarter each for products with keys, with queries, for values, for nothing.
    CHUNK channels of keys and queries are multiplied at a time.
    """
    HV: tl.constexpr = HK * GROUP
    F: tl.constexpr = 2 * HK * K + HV * V
    UPDATE: tl.constexpr = HK * K + HV * V + 2 * HV
    CARRIED: tl.constexpr = TAPS - 1
    WIDTH: tl.constexpr = TERMS // 4

    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    query_len = tl.load(query_lens_ptr + n).to(tl.int32)
    source = tl.load(base_block_ptr + n).to(tl.int64)
    ring = tl.load(ring_block_ptr + n).to(tl.int64)
    base_len = tl.load(base_len_ptr + n).to(tl.int64)
    computed = tl.load(computed_ptr + n).to(tl.int64)
    write_block = tl.load(write_block_ptr + n).to(tl.int64)
    write_len = tl.load(write_len_ptr + n).to(tl.int64)
    # The last condition always holds: so the lengths are loaded with the others, not after them.
    if (query_len > 0) & (source > 0) & (ring > 0) & (computed >= base_len):
        pending = (computed - base_len).to(tl.int32)
        origin = (base_len % RING).to(tl.int32)
        entries = ring_update_ptr + ring * RING * UPDATE
        ring_inputs = ring_input_ptr + ring * RING * F
        window_row = window_ptr + source * window_stride
        t = tl.arange(0, TOKENS)
        k_index = tl.arange(0, K)
        v_index = tl.arange(0, V)
        is_token = t < query_len
        slot = (origin + pending + t) % RING
        q_channel = h * K + k_index
        k_channel = HK * K + h * K + k_index

        place = tl.arange(0, PENDING)
        is_old = place < pending
        g = tl.arange(0, HEADS)
        is_head = g < GROUP
        old_decays = entries + UPDATE - HV + (h * GROUP + g)[:, None]
        own = tl.load(
            old_decays + ((origin + place) % RING * UPDATE)[None, :],
            mask=is_head[:, None] & ((place == 0) & is_old)[None, :],
            other=1.0,
        )
        later = tl.load(
            old_decays + ((origin + place + 1) % RING * UPDATE)[None, :],
            mask=is_head[:, None] & (place + 1 < pending)[None, :],
            other=1.0,
        )

        tokens_at = token_index_ptr + n * QUERY
        x_q, q = _convolve(
            inputs_ptr, ring_inputs, window_row, conv_ptr, tokens_at, inputs_stride, q_channel, t,
            query_len, pending, origin, TAPS, F, RING,
        )  # fmt: skip
        x_k, k = _convolve(
            inputs_ptr, ring_inputs, window_row, conv_ptr, tokens_at, inputs_stride, k_channel, t,
            query_len, pending, origin, TAPS, F, RING,
        )  # fmt: skip
        q_scale = tl.rsqrt(tl.sum(q * q, 1) + 1e-6) * tl.load(unit_scale_ptr + h)
        k_scale = tl.rsqrt(tl.sum(k * k, 1) + 1e-6) * tl.load(unit_scale_ptr + HK + h)
        q = q * q_scale[:, None]
        k = k * k_scale[:, None]
        kept = ring_inputs + (slot * F)[:, None]
        entry = entries + (slot * UPDATE)[:, None]
        tl.store(kept + q_channel[None, :], x_q, mask=is_token[:, None])
        tl.store(kept + k_channel[None, :], x_k, mask=is_token[:, None])
        tl.store(entry + q_channel[None, :], k, mask=is_token[:, None])
        token = tl.load(tokens_at + t, mask=is_token, other=0)
        query = queries_ptr + (token * HK * K)[:, None] + q_channel[None, :]
        tl.store(query, q, mask=is_token[:, None])
        for group in tl.static_range(GROUP):
            value = (h * GROUP + group) * V + v_index
            x_v, v = _convolve(
                inputs_ptr, ring_inputs, window_row, conv_ptr, tokens_at, inputs_stride,
                2 * HK * K + value, t, query_len, pending, origin, TAPS, F, RING,
            )  # fmt: skip
            tl.store(kept + (2 * HK * K + value)[None, :], x_v, mask=is_token[:, None])
            tl.store(entry + (HK * K + value)[None, :], v, mask=is_token[:, None])

        head = h * GROUP + g
        is_gate = is_head[:, None] & is_token[None, :]
        logit = logits_ptr + (token * logits_stride)[None, :] + head[:, None]
        r = tl.load(logit, mask=is_gate, other=0.0).to(tl.float32)
        d = tl.load(logit + HV, mask=is_gate, other=0.0).to(tl.float32)
        r += tl.load(gate_bias_ptr + head, mask=is_head, other=0.0)[:, None]
        d += tl.load(gate_bias_ptr + HV + head, mask=is_head, other=0.0)[:, None]
        r = tl.log(1.0 + tl.exp(-tl.abs(r))) + tl.maximum(r, 0.0)
        d = tl.log(1.0 + tl.exp(-tl.abs(d))) + tl.maximum(d, 0.0)
        rates = tl.exp(r * tl.load(gate_factor_ptr + head, mask=is_head, other=0.0)[:, None])
        decays = tl.exp(d * tl.load(gate_factor_ptr + HV + head, mask=is_head, other=0.0)[:, None])
        gates = entries + (slot * UPDATE + HK * K + HV * V)[None, :] + head[:, None]
        tl.store(gates, rates, mask=is_gate)
        tl.store(gates + HV, decays, mask=is_gate)

        # Products of all keys in the ring, the step's own behind the old ones, with what is asked.
        tl.debug_barrier()
        term = tl.arange(0, TERMS)
        column = tl.arange(0, 2 * WIDTH)
        asked_at = _asked_at(
            entries, queries_ptr, token_index_ptr + n * QUERY, column, query_len,
            origin + pending, h * K, HK * K, UPDATE, RING, WIDTH,
        )  # fmt: skip
        is_asked = (column % WIDTH < query_len)[:, None]
        key_at = entries + ((origin + place) % RING * UPDATE + h * K)[:, None]
        seen = tl.zeros([PENDING, 2 * WIDTH], tl.float32)
        for first in range(0, K, CHUNK):
            channel = (first + tl.arange(0, CHUNK))[None, :]
            keys = tl.load(
                key_at + channel, mask=(place < pending + query_len)[:, None], other=0.0
            )
            asked = tl.load(asked_at[:, None] + channel, mask=is_asked, other=0.0)
            seen = tl.dot(keys, tl.trans(asked), acc=seen, input_precision="tf32x3")

        # How the answers follow from the products P = S x and the values, token by token.
        later = tl.cumprod(later, 1, reverse=True)  # [HEADS, PENDING], 1 for what is not pending
        whole = tl.sum(tl.where((place == 0)[None, :], later * own, 0.0), 1)
        answer = tl.arange(0, ANSWERS)
        known = (column[:, None] == term[None, :]).to(tl.float32)
        known = tl.broadcast_to(known[None, :, :], (HEADS, 2 * WIDTH, TERMS))
        mixed = tl.zeros([HEADS, ANSWERS, TERMS], tl.float32)
        for step in range(query_len):
            decay = tl.sum(tl.where((t == step)[None, :], decays, 0.0), 1)
            rate = tl.sum(tl.where((t == step)[None, :], rates, 0.0), 1)
            gram = tl.sum(tl.where((place == pending + step)[:, None], seen, 0.0), 0)
            known = known * decay[:, None, None]
            said = tl.sum(tl.where((column == step)[None, :, None], known, 0.0), 1)
            told = (term == 2 * WIDTH + step).to(tl.float32)[None, :]
            change = rate[:, None] * (told - said)  # [HEADS, TERMS]
            known = known + gram[None, :, None] * change[:, None, :]
            out = tl.sum(tl.where((column == WIDTH + step)[None, :, None], known, 0.0), 1)
            mixed = tl.where((answer == step)[None, :, None], change[:, None, :], mixed)
            mixed = tl.where(
                (answer == ANSWERS // 2 + step)[None, :, None], out[:, None, :], mixed
            )
        mixed = tl.reshape(mixed, (HEADS * ANSWERS, TERMS))

        # What each pending change, and each value behind them, adds to each answer.
        fresh = (place[:, None] == pending + column[None, :]) & (column < query_len)[None, :]
        seen = tl.join(tl.where(is_old[:, None], seen, 0.0), fresh.to(tl.float32))
        seen = tl.reshape(tl.permute(seen, (0, 2, 1)), (PENDING, TERMS))
        shares = tl.dot(mixed, tl.trans(seen), input_precision="tf32x3")
        shares = tl.reshape(shares, (HEADS, ANSWERS, PENDING)) * later[:, None, :]
        answer_at = (n * HV + head)[:, None] * ANSWERS + answer[None, :]
        tl.store(
            shares_ptr + answer_at[:, :, None] * PENDING + place[None, None, :],
            shares,
            mask=is_head[:, None, None],
        )

        # Keys and queries as the answers need them, in two parts of bfloat16.
        asked_at = _asked_at(
            entries, queries_ptr, token_index_ptr + n * QUERY, term, query_len,
            origin + pending, h * K, HK * K, UPDATE, RING, WIDTH,
        )  # fmt: skip
        is_asked = ((term % WIDTH < query_len) & (term < 2 * WIDTH))[:, None]
        answer_at = (n * HV + head)[:, None] * (2 * ANSWERS) + answer[None, :]  # [HEADS, ANSWERS]
        for first in range(0, K, CHUNK):
            channel = first + tl.arange(0, CHUNK)
            asked = tl.load(asked_at[:, None] + channel[None, :], mask=is_asked, other=0.0)
            wanted = tl.dot(mixed, asked, input_precision="tf32x3")
            wanted = tl.reshape(wanted, (HEADS, ANSWERS, CHUNK)) * whole[:, None, None]
            most = wanted.to(tl.bfloat16)
            rest = (wanted - most.to(tl.float32)).to(tl.bfloat16)
            at = asked_ptr + answer_at[:, :, None] * K + channel[None, None, :]
            tl.store(at, most, mask=is_head[:, None, None])
            tl.store(at + ANSWERS * K, rest, mask=is_head[:, None, None])

        if (write_block > 0) & (computed >= write_len):
            # The window before the new base: committed inputs all. Every load by any lane lies
            # before a barrier, since it may be where the old one is.
            e = tl.arange(0, ENTRIES)[:, None]
            behind = (write_len - base_len).to(tl.int32) - CARRIED + e
            before = tl.where(
                behind >= 0,
                ring_inputs + (origin + behind + RING) % RING * F,
                window_row + (behind + CARRIED) * F,
            )
            new = window_ptr + write_block * window_stride + e * F
            for segment in tl.static_range(2 + GROUP):
                if segment < 2:
                    channel = (segment * HK * K + h * K + k_index)[None, :]
                else:
                    channel = (2 * HK * K + (h * GROUP + segment - 2) * V + v_index)[None, :]
                moved = tl.load(before + channel, mask=e < CARRIED, other=0.0)
                tl.debug_barrier()
                tl.store(new + channel, moved, mask=e < CARRIED)


@triton.jit
def replay_answer_kernel(
    state_ptr,
    asked_ptr,
    shares_ptr,
    gate_ptr,
    norm_ptr,
    out_ptr,
    token_index_ptr,
    query_lens_ptr,
    base_block_ptr,
    base_len_ptr,
    computed_ptr,
    write_block_ptr,
    write_len_ptr,
    ring_block_ptr,
    ring_update_ptr,
    gate_stride,
    out_stride,
    state_stride,
    eps,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    QUERY: tl.constexpr,
    ANSWERS: tl.constexpr,
    PENDING: tl.constexpr,
    RING: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Changes to the ring, outputs after the gated norm, and bases that are due, of a row's head.

    ROWS are the value rows of a base that are made at a time.
    """
    HV: tl.constexpr = HK * GROUP
    UPDATE: tl.constexpr = HK * K + HV * V + 2 * HV
    WIDTH: tl.constexpr = ANSWERS // 2

    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    query_len = tl.load(query_lens_ptr + n).to(tl.int32)
    source = tl.load(base_block_ptr + n).to(tl.int64)
    ring = tl.load(ring_block_ptr + n).to(tl.int64)
    base_len = tl.load(base_len_ptr + n).to(tl.int64)
    computed = tl.load(computed_ptr + n).to(tl.int64)
    write_block = tl.load(write_block_ptr + n).to(tl.int64)
    write_len = tl.load(write_len_ptr + n).to(tl.int64)
    t = tl.arange(0, WIDTH)
    is_token = t < query_len
    token = tl.load(token_index_ptr + n * QUERY + t, mask=is_token, other=0)
    # The last condition always holds: so the lengths are loaded with the others, not after them.
    if (query_len > 0) & (source > 0) & (ring > 0) & (computed >= base_len):
        k_index = tl.arange(0, K)
        v_index = tl.arange(0, V)
        base = state_ptr + source * state_stride + head * V * K
        state = tl.load(base + v_index[:, None] * K + k_index[None, :])
        column = tl.arange(0, 2 * ANSWERS)
        asked = asked_ptr + ((n * HV + head) * (2 * ANSWERS) + column)[:, None] * K
        asked = tl.load(asked + k_index[None, :])  # [2 * ANSWERS, K]
        pending = (computed - base_len).to(tl.int32)
        origin = (base_len % RING).to(tl.int32)
        place = tl.arange(0, PENDING)
        entries = ring_update_ptr + ring * RING * UPDATE
        own = entries + HK * K + head * V
        entry = (origin + place) % RING * UPDATE
        # The values of the step's tokens lie behind the changes.
        changes = tl.load(
            own + entry[:, None] + v_index[None, :],
            mask=(place < pending + query_len)[:, None],
            other=0.0,
        )
        shares = shares_ptr + ((n * HV + head) * ANSWERS + column % ANSWERS)[:, None] * PENDING
        shares = tl.load(shares + place[None, :], mask=(column < ANSWERS)[:, None], other=0.0)
        gate = gate_ptr + (token * gate_stride)[:, None] + (head * V + v_index)[None, :]
        gate = tl.load(gate, mask=is_token[:, None], other=0.0).to(tl.float32)
        norm = tl.load(norm_ptr + v_index).to(tl.float32)
        if IS_INTERPRETED:
            # The interpreter has no products of bfloat16.
            state = state.to(tl.float32)
            asked = asked.to(tl.float32)
        answers = tl.dot(state, tl.trans(asked))
        answers = tl.dot(
            tl.trans(changes), tl.trans(shares), acc=answers, input_precision="tf32x3"
        )
        answers = tl.sum(tl.reshape(answers, (V, 2, ANSWERS)), 1)  # both parts
        answers = tl.permute(tl.reshape(answers, (V, 2, WIDTH)), (2, 0, 1))
        fresh, out = tl.split(answers)  # [WIDTH, V]
        out = out * tl.rsqrt(tl.sum(out * out, 1) / V + eps)[:, None] * norm[None, :]
        out = out * (gate / (1.0 + tl.exp(-gate)))
        out_at = out_ptr + (token * out_stride)[:, None] + (head * V + v_index)[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_token[:, None])
        # Where the values are: every load of those lies before the products.
        slot = (origin + pending + t) % RING * UPDATE
        tl.debug_barrier()
        tl.store(own + slot[:, None] + v_index[None, :], fresh, mask=is_token[:, None])

        if (write_block > 0) & (computed >= write_len):
            count = (write_len - base_len).to(tl.int32)
            is_due = place < count
            decays = entries + UPDATE - HV + head
            first = tl.load(decays + origin * UPDATE)
            later = tl.load(
                decays + (origin + place + 1) % RING * UPDATE, mask=place + 1 < count, other=1.0
            )
            later = tl.cumprod(later, 0, reverse=True)
            whole = tl.sum(tl.where(place == 0, later, 0.0), 0) * first
            keys = tl.load(
                entries + entry[:, None] + (head // GROUP * K + k_index)[None, :],
                mask=is_due[:, None],
                other=0.0,
            )
            new = state_ptr + write_block * state_stride + head * V * K
            for row in range(0, V, ROWS):
                v_at = row + tl.arange(0, ROWS)
                tile = v_at[:, None] * K + k_index[None, :]
                old = tl.load(base + tile).to(tl.float32)
                part = tl.load(
                    own + entry[:, None] + v_at[None, :], mask=is_due[:, None], other=0.0
                )
                part = tl.trans(part * later[:, None])
                moved = old * whole + tl.dot(part, keys, input_precision="tf32")
                # It may be where the old one is.
                tl.debug_barrier()
                tl.store(new + tile, moved.to(state_ptr.dtype.element_ty))
