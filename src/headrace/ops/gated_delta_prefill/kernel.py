"""What is done for each token of a prompt by itself: before the delta rule and after it.

Sums over a token's neighbours run in one order, wherever the neighbours come from: a prompt gives
the same bits whole or cut at the grid, as far as this file goes.
"""

# ruff: noqa: ANN201, RUF005  (Triton has no unpacking)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _inputs(own_ptr, old_ptr, at, is_token, channel, has_old, stride, F: tl.constexpr):
    """Inputs of a row at places `at`, before 0 those of its old window, [runs, channels] f32.

    `own_ptr` is where place 0 is, `old_ptr` where it would be behind the old window; that is read
    only where has_old is not 0.
    """
    own = own_ptr + at[:, None] * stride + channel[None, :]
    x = tl.load(own, mask=((at >= 0) & is_token)[:, None], other=0.0).to(tl.float32)
    if has_old > 0:
        old = old_ptr + at[:, None] * F + channel[None, :]
        x += tl.load(old, mask=((at < 0) & is_token)[:, None], other=0.0).to(tl.float32)
    return x


@triton.jit
def _nothing():
    """Return a tuple that grows: its type is not that of an empty one."""
    return ()


@triton.jit
def _convolve(
    inputs_ptr,
    conv_ptr,
    window_ptr,
    mixed_ptr,
    scale_ptr,
    before,
    length,
    channel,
    has_old,
    inputs_stride,
    F: tl.constexpr,
    TAPS: tl.constexpr,
    PIECE: tl.constexpr,
    RUNS: tl.constexpr,
    IS_UNIT: tl.constexpr,
):
    """Convolution, SiLU and, if IS_UNIT, unit length of some channels of a piece's tokens.

    The piece is cut into runs that are done side by side, token after token: an input is loaded
    once for its run and stays in registers for as many tokens as there are taps.

    `inputs_ptr` is where the row's first token is, with `before` tokens between it and the piece;
    `window_ptr` is where it would be behind its old window, which counts where has_old is not 0;
    the piece's first token goes to `mixed_ptr`. Lengths are scaled by what lies at `scale_ptr`.
    """
    TOKENS: tl.constexpr = PIECE // RUNS
    start = tl.arange(0, RUNS) * TOKENS
    taps = _nothing()
    for w in tl.static_range(TAPS):
        taps = taps + (tl.load(conv_ptr + w * F + channel).to(tl.float32)[None, :],)
    held = _nothing()
    for w in tl.static_range(TAPS - 1):
        t = start + (w - (TAPS - 1))
        held = held + (
            _inputs(
                inputs_ptr, window_ptr, before + t, t < length, channel, has_old, inputs_stride, F
            ),
        )
    scale = tl.load(scale_ptr)
    for i in tl.static_range(TOKENS):
        t = start + i
        is_token = (t < length)[:, None]
        own = inputs_ptr + (before + t)[:, None] * inputs_stride + channel[None, :]
        held = held + (tl.load(own, mask=is_token, other=0.0).to(tl.float32),)
        x = held[i] * taps[0]
        for w in tl.static_range(1, TAPS):
            x += held[i + w] * taps[w]
        x = x / (1.0 + tl.exp(-x))
        if IS_UNIT:
            x = x * (tl.rsqrt(tl.sum(x * x, 1) + 1e-6) * scale)[:, None]
        mixed = mixed_ptr + t[:, None] * F + channel[None, :]
        tl.store(mixed, x.to(mixed_ptr.dtype.element_ty), mask=is_token)


@triton.jit
def prefill_inputs_kernel(
    inputs_ptr,
    logits_ptr,
    conv_ptr,
    gate_bias_ptr,
    gate_factor_ptr,
    unit_scale_ptr,
    window_ptr,
    pieces_ptr,
    rows_ptr,
    mixed_ptr,
    gates_ptr,
    inputs_stride,
    logits_stride,
    window_stride,
    gates_stride,
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TAPS: tl.constexpr,
    PIECE: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Queries, keys and values of a piece, and its gates: a program for each head of each kind.

    Rates and log decays go to gates [2*HV, T]; the decays as sums from the piece's first token on.
    """
    HV: tl.constexpr = HK * GROUP
    F: tl.constexpr = 2 * HK * K + HV * V
    piece = pieces_ptr + tl.program_id(0) * 4
    h = tl.program_id(1)
    begin = tl.load(piece).to(tl.int64)
    length = tl.load(piece + 1)
    row = rows_ptr + tl.load(piece + 2) * 6
    first = tl.load(row).to(tl.int64)
    source = tl.load(row + 3).to(tl.int64)
    before = begin - first  # tokens of the row before the piece
    row_inputs = inputs_ptr + first * inputs_stride
    old_window = window_ptr + source * window_stride + (TAPS - 1) * F
    mixed = mixed_ptr + begin * F
    has_old = tl.where(before < TAPS - 1, source, 0)
    if h < 2 * HK:
        channel = h * K + tl.arange(0, K)
        _convolve(
            row_inputs, conv_ptr, old_window, mixed, unit_scale_ptr + h, before, length, channel,
            has_old, inputs_stride, F, TAPS, PIECE, RUNS, IS_UNIT=True,
        )  # fmt: skip
    else:
        channel_v = 2 * HK * K + (h - 2 * HK) * V + tl.arange(0, V)
        _convolve(
            row_inputs, conv_ptr, old_window, mixed, unit_scale_ptr, before, length, channel_v,
            has_old, inputs_stride, F, TAPS, PIECE, RUNS, IS_UNIT=False,
        )  # fmt: skip
    if h >= 2 * HK:
        head = h - 2 * HK
        s = tl.arange(0, PIECE)
        is_own = s < length
        logit = logits_ptr + (begin + s) * logits_stride + head
        r = tl.load(logit, mask=is_own, other=0.0).to(tl.float32) + tl.load(gate_bias_ptr + head)
        d = tl.load(logit + HV, mask=is_own, other=0.0).to(tl.float32)
        d += tl.load(gate_bias_ptr + HV + head)
        r = tl.log(1.0 + tl.exp(-tl.abs(r))) + tl.maximum(r, 0.0)
        d = tl.log(1.0 + tl.exp(-tl.abs(d))) + tl.maximum(d, 0.0)
        rate = tl.exp(r * tl.load(gate_factor_ptr + head))
        decay = tl.cumsum(d * tl.load(gate_factor_ptr + HV + head), 0)
        gate = gates_ptr + head * gates_stride + begin + s
        tl.store(gate, rate, mask=is_own)
        tl.store(gate + HV * gates_stride, decay, mask=is_own)


@triton.jit
def prefill_window_kernel(
    inputs_ptr,
    window_ptr,
    windows_ptr,
    inputs_stride,
    window_stride,
    F: tl.constexpr,
    TAPS: tl.constexpr,
    ENTRIES_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The inputs before a point of a row to a block; the old window may lie in that block."""
    entry = windows_ptr + tl.program_id(0) * 4
    first = tl.load(entry).to(tl.int64)
    source = tl.load(entry + 1).to(tl.int64)
    done = tl.load(entry + 2)
    target = tl.load(entry + 3).to(tl.int64)
    e = tl.arange(0, ENTRIES_PADDED)[:, None]
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_entry = (e < TAPS - 1) & (channel < F)
    at = done - (TAPS - 1) + e
    own = inputs_ptr + (first + at) * inputs_stride + channel
    x = tl.load(own, mask=is_entry & (at >= 0), other=0.0)
    old = window_ptr + source * window_stride + (at + (TAPS - 1)) * F + channel
    # A block of conditions: the interpreter makes a number of a single one.
    has_old = (source + tl.zeros_like(at)) > 0
    kept = tl.load(old, mask=is_entry & (at < 0) & has_old, other=0.0)
    x = tl.where(at >= 0, x.to(kept.dtype), kept)
    # Every load of it by any lane lies before a barrier.
    tl.debug_barrier()
    tl.store(window_ptr + target * window_stride + e * F + channel, x, mask=is_entry)


@triton.jit
def prefill_norm_kernel(
    out_ptr,
    gate_ptr,
    norm_ptr,
    pieces_ptr,
    out_stride,
    gate_stride,
    eps,
    V: tl.constexpr,
    PIECE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Norm and gate of the outputs of one head of a piece, in place."""
    piece = pieces_ptr + tl.program_id(0) * 4
    begin = tl.load(piece).to(tl.int64)
    length = tl.load(piece + 1)
    channel = tl.program_id(1) * V + tl.arange(0, V)
    norm = tl.load(norm_ptr + tl.arange(0, V)).to(tl.float32)
    for part in tl.static_range(PIECE // TOKENS):
        t = part * TOKENS + tl.arange(0, TOKENS)
        is_token = (t < length)[:, None]
        out = out_ptr + (begin + t)[:, None] * out_stride + channel[None, :]
        gate = gate_ptr + (begin + t)[:, None] * gate_stride + channel[None, :]
        x = tl.load(out, mask=is_token, other=0.0).to(tl.float32)
        z = tl.load(gate, mask=is_token, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None] * norm[None, :]
        x = x * (z / (1.0 + tl.exp(-z)))
        tl.store(out, x.to(out_ptr.dtype.element_ty), mask=is_token)
