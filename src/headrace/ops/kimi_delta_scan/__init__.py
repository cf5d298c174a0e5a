"""The delta rule with a decay for each channel over pieces of a prompt, in chunked form.

Within a piece of g tokens the recurrence becomes a triangular system and a few matrix products;
between pieces the state is carried. Pieces are cut at the absolute grid by the caller and padded
to g tokens, so every product has one fixed shape per piece and head, and a prompt gives the same
bits whole or split on the grid, alone or with others (K and V multiples of 4: for odd sizes a BLAS
picks its code by alignment too).

With c the running sum of log decays inside a piece, [g, K], and S the state before it:

    A_ij = sum_d k_i k_j e^(c_i - c_j),  B_ij = sum_d q_i k_j e^(c_i - c_j)
    (I + b tril(A, -1)) [u | w] = [b v | b k e^c]
    r  = u - w S^T
    o  = (q e^c) S^T + tril(B) r
    S := S e^(c_g) + r^T (k e^(c_g - c))

A and B are not products of factors e^c and e^-c: the latter overflow where decays are strong. They
are made in blocks of BLOCK tokens. Left of the diagonal both factors are taken relative to the sum
at the row block's beginning, so no exponent is positive; on it the pairs are multiplied out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 16
"""Tokens whose pairs are multiplied out, channel by channel."""


def kimi_delta_scan(
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor,
    rate: Tensor,
    rows_per_round: tuple[int, ...],
    snapshots: tuple[tuple[int, int], ...] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Run several sequences piece by piece.

    Round j holds the j-th piece of every sequence that has one; sequences are sorted by their
    number of pieces, most first, so a round's sequences are a prefix. Padded tokens have key,
    value, rate and log decay 0.

    Args:
        state: States before the first pieces, [R, H, V, K] f32, contiguous. Overwritten with the
            states after the last pieces.
        query: Scaled queries, rounds one after another, [X, g, H, K] f32.
        key: Keys of unit length, [X, g, H, K] f32.
        value: [X, g, H, V] f32.
        log_decay: [X, g, H, K] f32, at most 0.
        rate: [X, g, H] f32, in [0, 1].
        rows_per_round: Sequences in each round, non-increasing, sum X.
        snapshots: (round, sequence) pairs after which a copy of the state is wanted, ascending.

    Returns:
        Outputs, [X, g, H, V] f32, and the wanted states, each [H, V, K] f32.

    Source: Kimi Linear, arXiv:2510.26692, section 3.
    """
    pieces, g, num_heads, key_dim = key.shape
    value_dim = value.shape[3]
    # [X, g, H, ...] to one matrix per piece and head.
    q, k, v, c, b = (
        x.transpose(1, 2).reshape(pieces * num_heads, g, -1)
        for x in (query, key, value, log_decay, rate)
    )
    c = c.cumsum(1)
    exp_c = c.exp()
    attention, system = _pairs(q, k, c)
    right = torch.cat((v * b, k * exp_c * b), dim=-1)
    solved = torch.linalg.solve_triangular(system * b, right, upper=False, unitriangular=True)
    u, w = solved.split_with_sizes((value_dim, key_dim), -1)
    # Two readers of S in one product: [w; q e^c] S^T.
    readers = torch.cat((w, q * exp_c), dim=1)
    k_rest = k * (c[:, -1:] - c).exp()
    last_decay = exp_c[:, -1:]

    out = value.new_empty(pieces * num_heads, g, value_dim)
    taken: list[Tensor] = []
    start = 0
    for j, rows in enumerate(rows_per_round):
        part = slice(start, start + rows * num_heads)
        start += rows * num_heads
        s = state[:rows].view(-1, value_dim, key_dim)
        read = torch.bmm(readers[part], s.transpose(1, 2))
        r = u[part] - read[:, :g]
        torch.add(read[:, g:], torch.bmm(attention[part], r), out=out[part])
        s.mul_(last_decay[part]).add_(torch.bmm(r.transpose(1, 2), k_rest[part]))
        taken.extend(state[row].clone() for at, row in snapshots if at == j)
    return out.view(pieces, num_heads, g, value_dim).transpose(1, 2), taken


def _pairs(q: Tensor, k: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply all pairs of tokens, with what has decayed between them.

    Args:
        q: [Z, g, K].
        k: [Z, g, K].
        c: Running sums of log decays, [Z, g, K].

    Returns:
        tril(B), and A of which only what is below the diagonal counts, both [Z, g, g].
    """
    num, g, _ = k.shape
    both = k.new_zeros(2, num, g, g)
    for low in range(0, g, BLOCK):
        high = min(low + BLOCK, g)
        q_rows, k_rows, c_rows = (x[:, low:high] for x in (q, k, c))
        if low:
            base = c[:, low - 1 : low]
            faded = (c_rows - base).exp()
            rows = torch.cat((q_rows * faded, k_rows * faded), 1)
            columns = k[:, :low] * (base - c[:, :low]).exp()
            product = torch.bmm(rows, columns.transpose(1, 2))
            both[:, :, low:high, :low] = product.unflatten(1, (2, -1)).transpose(0, 1)
        size = high - low
        is_behind = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
        between = c_rows[:, :, None] - c_rows[:, None]
        # Mask before exp: above the diagonal the difference is positive and may overflow.
        faded = between.masked_fill_(is_behind[..., None], float("-inf")).exp_()
        faded.mul_(k_rows[:, None])
        for i, rows in enumerate((q_rows, k_rows)):
            both[i, :, low:high, low:high] = (faded * rows[:, :, None]).sum(-1)
    return both[0], both[1]
