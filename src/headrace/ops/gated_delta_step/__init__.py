"""The gated delta rule one token at a time, for many rows at once.

Per value head, with state S [V, K], decay d and learning rate b:

    S := d * S;   S := S + b * (v - S k) k^T;   o := S q

Every product is a multiply and a sum over the last axis, so a row's bits depend neither on its
mates nor on how many tokens it brings. This is the arithmetic of every generated token: in decode,
in verification of drafts, in both state schemes and when tokens are recomputed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def gated_delta_step(
    state: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    *,
    query: Tensor | None,
) -> Tensor | None:
    """Apply one token to the state of each row, in place.

    A token with key 0, value 0, decay 1 and rate 0 leaves the state as it is.

    Args:
        state: [N, HK, HV/HK, V, K] f32, contiguous.
        key: [N, HK, K] f32, of unit length.
        value: [N, HK, HV/HK, V] f32.
        decay: [N, HK, HV/HK] f32, in (0, 1].
        rate: [N, HK, HV/HK] f32, in [0, 2]; above 1 the state has negative eigenvalues.
        query: [N, HK, K] f32, scaled; None if the output is not wanted.

    Returns:
        Outputs, [N, HK, HV/HK, V] f32, or None.

    Source: Gated Delta Networks, arXiv:2412.06464.
    """
    k = key[:, :, None, None]
    state.mul_(decay[..., None, None])
    change = (value - (state * k).sum(-1)).mul_(rate[..., None])
    state.addcmul_(change[..., None], k)
    if query is None:
        return None
    return (state * query[:, :, None, None]).sum(-1)


def store_states(pool: Tensor, blocks: Tensor, states: Tensor, is_valid: Tensor) -> None:
    """Write whole states into their blocks, except for rows that are not valid.

    There is no device-side way to leave a row out of a scatter of fixed shape. Rows that are not
    valid put the null block's own bytes into the null block, which so never changes.

    Args:
        pool: [S, ...].
        blocks: [N] i64, distinct where valid.
        states: [N, ...].
        is_valid: [N] bool.
    """
    mask = is_valid.view(-1, *([1] * (states.dim() - 1)))
    kept = torch.where(mask, states.to(pool.dtype), pool[:1])
    pool.index_copy_(0, blocks.where(is_valid, blocks.new_zeros(())), kept)
