"""The delta rule with a decay for each channel, one token at a time, for many rows at once.

Per head, with state S [V, K], decays d [K] and learning rate b:

    S := S * d;   S := S + b * (v - S k) k^T;   o := S q

Every product is a multiply and a sum over the last axis, so a row's bits depend neither on its
mates nor on how many tokens it brings. This is the arithmetic of every generated token: in decode,
in verification of drafts, in both state schemes and when tokens are recomputed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def kimi_delta_step(
    state: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    *,
    query: Tensor | None,
) -> Tensor | None:
    """Apply one token to the state of each row, in place.

    A token with key 0, value 0 and decay 1 leaves the state as it is.

    Args:
        state: [N, H, V, K] f32, contiguous.
        key: [N, H, K] f32, of unit length.
        value: [N, H, V] f32.
        decay: [N, H, K] f32, in (0, 1].
        rate: [N, H] f32, in [0, 1].
        query: [N, H, K] f32, scaled; None if the output is not wanted.

    Returns:
        Outputs, [N, H, V] f32, or None.

    Source: Kimi Linear, arXiv:2510.26692.
    """
    k = key[:, :, None]
    state.mul_(decay[:, :, None])
    change = (value - (state * k).sum(-1)).mul_(rate[..., None])
    state.addcmul_(change[..., None], k)
    if query is None:
        return None
    return (state * query[:, :, None]).sum(-1)
