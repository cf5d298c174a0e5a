"""The same mixer token by token and head by head: the specification of the kernel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace.ops.mixer_rows import answer_rows

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.gated_delta_decode.rows import ColumnsRows, MixerWeights, ReplayRows, Ring


def gated_delta_decode(
    inputs: Tensor,
    gate: Tensor,
    logits: Tensor,
    weights: MixerWeights,
    window: Tensor,
    state: Tensor,
    token_index: Tensor,
    query_lens: Tensor,
    rows: ColumnsRows | ReplayRows,
    out: Tensor,
    *,
    ring: Ring | None = None,
    is_fixed: bool = False,  # noqa: ARG001  tokens go one by one
) -> None:
    """Decode or verify; see the package."""
    answers = answer_rows(
        inputs, weights.conv.shape[0] - 1, partial(_step, gate, logits, weights, state), _again,
        window, state, token_index, query_lens, rows, ring,
    )  # fmt: skip
    for tokens, answer in answers:
        out[tokens] = answer.to(out.dtype)


def _step(
    gate: Tensor,
    logits: Tensor,
    weights: MixerWeights,
    pool: Tensor,
    token: int,
    taps: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """State after a token, its output, and its key, change of the state, rates and decays."""
    q, k, v = convolve(taps, weights, pool)
    rate, decay = gates(logits[token].float(), weights)
    state, change = update(state, k, v, rate, decay)
    kept = torch.cat((k.flatten(), change.flatten(), rate, decay))
    return state, normed(state, q, gate[token].float(), weights), kept


def _again(state: Tensor, kept: Tensor) -> Tensor:
    """State [HV, V, K] after a token of the ring."""
    hv, v_dim, k_dim = state.shape
    keys = kept.shape[0] - hv * v_dim - 2 * hv
    key, change, _, decay = kept.split((keys, hv * v_dim, hv, hv))
    state = state * decay[:, None, None]
    return state + change.view(hv, v_dim, 1) * _per_value_head(key.view(-1, k_dim), hv)


def convolve(taps: Tensor, weights: MixerWeights, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [HK, K], keys [HK, K] and values [HV, V] of one token from its taps [W, F]."""
    hv, v_dim, k_dim = state.shape[1:]
    hk = weights.unit_scale.numel() // 2
    mixed = functional.silu((taps * weights.conv.float()).sum(0))
    q, k, v = mixed.split((hk * k_dim, hk * k_dim, hv * v_dim))
    unit = torch.cat((q, k)).view(2 * hk, k_dim)
    unit = unit * torch.rsqrt((unit * unit).sum(-1, keepdim=True) + 1e-6)
    unit = unit * weights.unit_scale.view(-1, 1)
    return unit[:hk], unit[hk:], v.view(hv, v_dim)


def gates(logits: Tensor, weights: MixerWeights) -> tuple[Tensor, Tensor]:
    """Rates and decays of one token, [HV] each."""
    rate, decay = torch.exp(
        functional.softplus(logits + weights.gate_bias) * weights.gate_factor
    ).chunk(2)
    return rate, decay


def update(
    state: Tensor, key: Tensor, value: Tensor, rate: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """State [HV, V, K] after one token, and its change [HV, V]."""
    k = _per_value_head(key, state.shape[0])
    state = state * decay[:, None, None]
    change = (value - (state * k).sum(-1)) * rate[:, None]
    return state + change[..., None] * k, change


def _per_value_head(x: Tensor, hv: int) -> Tensor:
    """Each value head's key or query, [HV, 1, K]."""
    return x.repeat_interleave(hv // x.shape[0], 0)[:, None]


def normed(state: Tensor, query: Tensor, z: Tensor, weights: MixerWeights) -> Tensor:
    """Output of one token after the gated norm, [HV * V]."""
    o = (state * _per_value_head(query, state.shape[0])).sum(-1)
    o = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + weights.norm_eps) * weights.norm
    return o.flatten() * functional.silu(z)
