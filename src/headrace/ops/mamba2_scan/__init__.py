"""The Mamba-2 recurrence over pieces of a prompt, in chunked form.

Within a piece of g tokens the recurrence becomes a few matrix products; between pieces the state is
carried. Pieces are cut at the absolute grid by the caller and padded to g tokens, so every product
has one fixed shape per piece and head, and a prompt gives the same bits whole or split on the grid,
alone or with others. P and D are padded to multiples of 4: for odd sizes a BLAS picks its code by
the alignment of each matrix too.

With l the running sum of log decays inside a piece, u = dt * x, and S the state before it:

    y  = (C e^l) S^T + tril(C_i.B_j e^(l_i - l_j)) u
    S := S e^(l_g) + u^T (B e^(l_g - l))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


_ALIGNED = 4
"""Elements in 16 bytes."""


def mamba2_scan(
    state: Tensor,
    b: Tensor,
    c: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor,
    rows_per_round: tuple[int, ...],
    snapshots: tuple[tuple[int, int], ...] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Run several sequences piece by piece.

    Round j holds the j-th piece of every sequence that has one; sequences are sorted by their
    number of pieces, most first, so a round's sequences are a prefix. Padded tokens have B, C,
    value and log decay 0.

    Args:
        state: States before the first pieces, [R, H, P, D] f32, contiguous. Overwritten with the
            states after the last pieces.
        b: Rounds one after another, [X, g, G, D] f32.
        c: [X, g, G, D] f32.
        value: dt * x, [X, g, H, P] f32.
        log_decay: dt * A, [X, g, H] f32, at most 0.
        rows_per_round: Sequences in each round, non-increasing, sum X.
        snapshots: (round, sequence) pairs after which a copy of the state is wanted, ascending.

    Returns:
        Outputs without the skip connection, [X, g, H, P] f32, and the wanted states, each
        [H, P, D] f32.

    Source: Mamba-2, arXiv:2405.21060, section 6.
    """
    pieces, g, num_groups, state_dim = b.shape
    num_heads, head_dim = value.shape[2:]
    if head_dim % _ALIGNED or state_dim % _ALIGNED:
        more_p, more_d = -head_dim % _ALIGNED, -state_dim % _ALIGNED
        wide = functional.pad(state, (0, more_d, 0, more_p))
        wide_out, wide_states = mamba2_scan(
            wide,
            functional.pad(b, (0, more_d)),
            functional.pad(c, (0, more_d)),
            functional.pad(value, (0, more_p)),
            log_decay=log_decay,
            rows_per_round=rows_per_round,
            snapshots=snapshots,
        )
        state.copy_(wide[..., :head_dim, :state_dim])
        return (
            wide_out[..., :head_dim].contiguous(),
            [each[..., :head_dim, :state_dim].contiguous() for each in wide_states],
        )
    group = num_heads // num_groups
    heads = pieces * num_heads

    # [X, g, ...] to one matrix per piece and group or head.
    b_groups = b.transpose(1, 2).reshape(-1, g, state_dim)
    c_groups = c.transpose(1, 2).reshape(-1, g, state_dim)
    v = value.transpose(1, 2).reshape(heads, g, head_dim)
    total = log_decay.transpose(1, 2).cumsum(-1)  # [X, H, g]
    # Mask before exp: above the diagonal the difference is positive and may overflow.
    upper = torch.ones(g, g, dtype=torch.bool, device=b.device).triu(1)
    pair_decay = (total[..., :, None] - total[..., None, :]).masked_fill_(upper, float("-inf"))
    products = torch.bmm(c_groups, b_groups.transpose(1, 2)).view(pieces, num_groups, 1, g, g)
    mixing = pair_decay.exp_().view(pieces, num_groups, group, g, g).mul_(products)

    def per_head(groups: Tensor, factor: Tensor) -> Tensor:
        """Scale [X*G, g, D] by a factor per head and token, [X, H, g], to [X*H, g, D]."""
        scaled = groups.view(pieces, num_groups, 1, g, state_dim) * factor.view(
            pieces, num_groups, group, g, 1
        )
        return scaled.view(heads, g, state_dim)

    readers = per_head(c_groups, total.exp())
    writers = per_head(b_groups, (total[..., -1:] - total).exp())
    last_decay = total[..., -1].exp().view(heads, 1, 1)

    out = torch.bmm(mixing.view(heads, g, g), v)
    change = torch.bmm(v.transpose(1, 2), writers)  # [X*H, P, D]
    taken: list[Tensor] = []
    start = 0
    for j, rows in enumerate(rows_per_round):
        part = slice(start, start + rows * num_heads)
        start += rows * num_heads
        s = state[:rows].view(-1, head_dim, state_dim)
        out[part] += torch.bmm(readers[part], s.transpose(1, 2))
        s.mul_(last_decay[part]).add_(change[part])
        taken.extend(state[row].clone() for at, row in snapshots if at == j)
    return out.view(pieces, num_heads, g, head_dim).transpose(1, 2), taken
