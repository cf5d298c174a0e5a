"""The Mamba-1 recurrence one token at a time, for many rows at once.

Per channel, with state h [D], time step dt and step-scaled input u = dt * x:

    h := exp(dt * A) * h + u B;   y := h . C

Unlike in Mamba-2 every entry of the state decays at a rate of its own, so there is no form of
matrix products. Every product is a multiply and a sum over the last axis: a row's bits depend
neither on its mates nor on how many tokens it brings. This is the arithmetic of every generated
token: in decode, in verification of drafts, in both state schemes and when tokens are recomputed.

This is the path on every device; there is no kernel of its own for a GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def mamba1_step(
    state: Tensor, dt: Tensor, value: Tensor, b: Tensor, *, rate: Tensor, c: Tensor | None
) -> Tensor | None:
    """Apply one token to the state of each row, in place.

    A token with dt, value and B 0 leaves the state as it is.

    Args:
        state: [N, I, D] f32, contiguous.
        dt: Time steps, [N, I] f32, at least 0.
        value: dt * x, [N, I] f32.
        b: What the token writes along, [N, D] f32.
        rate: A, [I, D] f32, below 0.
        c: What it reads along, [N, D] f32; None if the output is not wanted.

    Returns:
        Outputs without the skip connection, [N, I] f32, or None.

    Source: Mamba, arXiv:2312.00752.
    """
    state.mul_((dt[..., None] * rate).exp_())
    state.addcmul_(value[..., None], b[:, None])
    if c is None:
        return None
    return (state * c[:, None]).sum(-1)
