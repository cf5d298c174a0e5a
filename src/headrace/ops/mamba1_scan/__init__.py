"""The Mamba-1 recurrence over pieces of a prompt, all pieces side by side.

The recurrence is linear in its state, so a piece that starts from S ends in

    S * exp(A * sum of its time steps) + (where it ends from a state of zeros)

First all pieces run from zeros, token by token but at once; then the states are carried from piece
to piece; then all pieces run again from the states they really start with, and give their outputs.
A prompt of any length takes 2 g rounds of pointwise work and not one per token.

Pieces are cut at the absolute grid by the caller and padded to g tokens, and all arithmetic is
pointwise but for one sum over the last axis, so a prompt gives the same bits whole or split on the
grid, alone or with others.

This is the path on every device; there is no kernel of its own for a GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.mamba1_step import mamba1_step

if TYPE_CHECKING:
    from torch import Tensor


def mamba1_scan(
    state: Tensor,
    dt: Tensor,
    value: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    rate: Tensor,
    rows_per_round: tuple[int, ...],
    snapshots: tuple[tuple[int, int], ...] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Run several sequences piece by piece.

    Round j holds the j-th piece of every sequence that has one; sequences are sorted by their
    number of pieces, most first, so a round's sequences are a prefix. Padded tokens have dt, value,
    B and C 0.

    Args:
        state: States before the first pieces, [R, I, D] f32, contiguous. Overwritten with the
            states after the last pieces.
        dt: Time steps, rounds one after another, [X, g, I] f32, at least 0.
        value: dt * x, [X, g, I] f32.
        b: [X, g, D] f32.
        c: [X, g, D] f32.
        rate: A, [I, D] f32, below 0.
        rows_per_round: Sequences in each round, non-increasing, sum X.
        snapshots: (round, sequence) pairs after which a copy of the state is wanted, ascending.

    Returns:
        Outputs without the skip connection, [X, g, I] f32, and the wanted states, each [I, D] f32.

    Source: Mamba, arXiv:2312.00752.
    """
    pieces, g, channels = dt.shape
    ends = state.new_zeros(pieces, *state.shape[1:])
    total = dt.new_zeros(pieces, channels)
    for t in range(g):
        mamba1_step(ends, dt[:, t], value[:, t], b[:, t], rate=rate, c=None)
        total.add_(dt[:, t])
    passed = (total[..., None] * rate).exp_()

    starts = torch.empty_like(ends)
    taken: list[Tensor] = []
    first = 0
    for j, rows in enumerate(rows_per_round):
        part = slice(first, first + rows)
        first += rows
        carried = state[:rows]
        starts[part] = carried
        carried.mul_(passed[part]).add_(ends[part])
        taken.extend(state[row].clone() for at, row in snapshots if at == j)

    out = torch.empty_like(dt)
    for t in range(g):
        mixed = mamba1_step(starts, dt[:, t], value[:, t], b[:, t], rate=rate, c=c[:, t])
        assert mixed is not None
        out[:, t] = mixed
    return out, taken
