"""The gated delta rule over pieces of a prompt, in chunked form.

Within a piece of g tokens the recurrence becomes a triangular system and a few matrix products;
between pieces the state is carried. Pieces are cut at the absolute grid by the caller and padded
to g tokens, so every product has one fixed shape per piece and head, and a prompt gives the same
bits whole or split on the grid, alone or with others.

With c the running sum of log decays inside a piece, and S the state before it:

    (I + tril(b_i k_i.k_j e^(c_i - c_j), -1)) [u | w] = [b v | b k e^c]
    r  = u - w S^T
    o  = (q e^c) S^T + tril(q_i.k_j e^(c_i - c_j)) r
    S := S e^(c_g) + r^T (k e^(c_g - c))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def gated_delta_scan(
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
        state: States before the first pieces, [R, HV, V, K] f32, contiguous. Overwritten with the
            states after the last pieces.
        query: Scaled queries, rounds one after another, [X, g, HK, K] f32.
        key: Keys of unit length, [X, g, HK, K] f32.
        value: [X, g, HV, V] f32.
        log_decay: [X, g, HV] f32, at most 0.
        rate: [X, g, HV] f32, in [0, 2]; above 1 the state has negative eigenvalues.
        rows_per_round: Sequences in each round, non-increasing, sum X.
        snapshots: (round, sequence) pairs after which a copy of the state is wanted, ascending.

    Returns:
        Outputs, [X, g, HV, V] f32, and the wanted states, each [HV, V, K] f32.

    Source: Gated Delta Networks, arXiv:2412.06464; DeltaNet's chunked form, arXiv:2406.06484.
    """
    pieces, g, num_key_heads, key_dim = key.shape
    num_value_heads, value_dim = value.shape[2:]
    group = num_value_heads // num_key_heads
    heads = pieces * num_value_heads

    # [X, g, ...] to one matrix per piece and head.
    q = query.transpose(1, 2)  # [X, HK, g, K]
    k = key.transpose(1, 2).contiguous()
    v = value.transpose(1, 2)  # [X, HV, g, V]
    b = rate.transpose(1, 2)  # [X, HV, g]
    c = log_decay.transpose(1, 2).cumsum(-1)
    # Mask before exp: above the diagonal the difference is positive and may overflow.
    upper = torch.ones(g, g, dtype=torch.bool, device=key.device).triu(1)
    pair_decay = (c[..., :, None] - c[..., None, :]).masked_fill_(upper, float("-inf")).exp_()

    k_flat = k.view(-1, g, key_dim)
    k_transposed = k_flat.transpose(1, 2)
    products = torch.bmm(k_flat, k_transposed).view(pieces, num_key_heads, 1, g, g)
    grouped_decay = pair_decay.view(pieces, num_key_heads, group, g, g)
    system = (products * grouped_decay).view(pieces, num_value_heads, g, g).mul_(b[..., None])
    attention = torch.bmm(q.reshape(-1, g, key_dim), k_transposed)
    attention = attention.view(pieces, num_key_heads, 1, g, g) * grouped_decay
    attention = attention.view(heads, g, g)

    exp_c = c.exp()
    k_heads = k[:, :, None].expand(-1, -1, group, -1, -1)
    k_heads = k_heads.reshape(pieces, num_value_heads, g, key_dim)
    right = torch.cat(
        (v * b[..., None], k_heads * (b * exp_c)[..., None]), dim=-1
    )  # [X, HV, g, V + K]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.view(heads, g, -1).split_with_sizes((value_dim, key_dim), -1)
    q_decayed = q[:, :, None] * exp_c.view(pieces, num_key_heads, group, g, 1)
    q_decayed = q_decayed.reshape(heads, g, key_dim)
    # Two readers of S in one product: [w; q e^c] S^T.
    readers = torch.cat((w, q_decayed), dim=1)  # [X*HV, 2g, K]
    k_rest = (k_heads * (c[..., -1:] - c).exp()[..., None]).view(heads, g, key_dim)
    last_decay = exp_c[..., -1].reshape(heads, 1, 1)

    out = value.new_empty(heads, g, value_dim)
    taken: list[Tensor] = []
    start = 0
    for j, rows in enumerate(rows_per_round):
        n = rows * num_value_heads
        part = slice(start, start + n)
        start += n
        s = state[:rows].view(n, value_dim, key_dim)
        read = torch.bmm(readers[part], s.transpose(1, 2))
        r = u[part] - read[:, :g]
        torch.add(read[:, g:], torch.bmm(attention[part], r), out=out[part])
        s.mul_(last_decay[part]).add_(torch.bmm(r.transpose(1, 2), k_rest[part]))
        taken.extend(state[row].clone() for at, row in snapshots if at == j)
    out = out.view(pieces, num_value_heads, g, value_dim).transpose(1, 2)
    return out, taken
