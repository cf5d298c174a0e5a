"""The Mamba-2 recurrence one token at a time, for many rows at once.

Per head, with state S [P, N], decay a and step-scaled input u = dt * x:

    S := a * S + u B^T;   y := S C

Every product is a multiply and a sum over the last axis, so a row's bits depend neither on its
mates nor on how many tokens it brings. This is the arithmetic of every generated token: in decode,
in verification of drafts, in both state schemes and when tokens are recomputed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def mamba2_step(
    state: Tensor, b: Tensor, value: Tensor, decay: Tensor, *, c: Tensor | None
) -> Tensor | None:
    """Apply one token to the state of each row, in place.

    A token with B 0, value 0 and decay 1 leaves the state as it is.

    Args:
        state: [N, G, H/G, P, D] f32, contiguous; G groups share B and C, D is the state size.
        b: What the token writes along, [N, G, D] f32.
        value: dt * x, [N, G, H/G, P] f32.
        decay: exp(dt * A), [N, G, H/G] f32, in (0, 1].
        c: What it reads along, [N, G, D] f32; None if the output is not wanted.

    Returns:
        Outputs without the skip connection, [N, G, H/G, P] f32, or None.

    Source: Mamba-2, arXiv:2405.21060.
    """
    state.mul_(decay[..., None, None])
    state.addcmul_(value[..., None], b[:, :, None, None])
    if c is None:
        return None
    return (state * c[:, :, None, None]).sum(-1)
