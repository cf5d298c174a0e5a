"""The same mixer token by token and head by head: the specification of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

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
    for n in range(token_index.shape[0]):
        tokens = token_index[n, : int(query_lens[n])]
        if len(tokens) == 0:
            continue
        x, z, g = inputs[tokens].float(), gate[tokens].float(), logits[tokens].float()
        row_out = None
        if ring is not None:
            row_out = _replay_row(n, x, z, g, weights, window, state, rows, ring)  # type: ignore[arg-type]
        else:
            row_out = _columns_row(n, x, z, g, weights, window, state, rows)  # type: ignore[arg-type]
        if row_out is not None:
            out[tokens] = row_out.to(out.dtype)


def _columns_row(
    n: int,
    x: Tensor,
    z: Tensor,
    g: Tensor,
    weights: MixerWeights,
    window: Tensor,
    state: Tensor,
    rows: ColumnsRows,
) -> Tensor | None:
    blocks, accepted = rows.window_blocks[n], int(rows.accepted[n])
    if accepted == 0 or int(blocks[0]) == 0 or int(blocks[accepted - 1]) == 0:
        return None
    carried = weights.conv.shape[0] - 1
    own = window[int(blocks[0])]
    history = torch.cat((own[accepted - 1 : accepted - 1 + carried].float(), x))
    current = state[int(blocks[accepted - 1])].float()
    outputs = []
    for t in range(len(x)):
        q, k, v = convolve(history[t : t + carried + 1], weights, state)
        rate, decay = gates(g[t], weights)
        current, _ = update(current, k, v, rate, decay)
        outputs.append(normed(current, q, z[t], weights))
        # What a later step would load is what this one goes on with.
        current = current.to(state.dtype).float()
        if int(blocks[t]) > 0:
            state[int(blocks[t])] = current.to(state.dtype)
    moved = history[1:]
    own[: len(moved)] = moved.to(window.dtype)
    return torch.stack(outputs)


def _replay_row(
    n: int,
    x: Tensor,
    z: Tensor,
    g: Tensor,
    weights: MixerWeights,
    window: Tensor,
    state: Tensor,
    rows: ReplayRows,
    ring: Ring,
) -> Tensor | None:
    base, block = int(rows.base_block[n]), int(rows.ring_block[n])
    if base == 0 or block == 0:
        return None
    base_len, computed = int(rows.base_len[n]), int(rows.computed[n])
    write_block, write_len = int(rows.write_block[n]), int(rows.write_len[n])
    carried = weights.conv.shape[0] - 1
    hv, v_dim, k_dim = state.shape[1:]
    hk = weights.unit_scale.numel() // 2
    sizes = (hk * k_dim, hv * v_dim, hv, hv)
    length = ring.inputs.shape[1]
    # Inputs of positions base_len - carried .. computed - 1, then the new ones.
    at = torch.arange(base_len, computed) % length
    history = torch.cat((window[base, :carried].float(), ring.inputs[block, at].float(), x))

    def keep_grid(current: Tensor, tokens: int) -> Tensor:
        return current.to(state.dtype).float() if tokens % ring.interval == 0 else current

    current = state[base].float()
    for position in range(base_len, computed):
        key, change, _, decay = ring.updates[block, position % length].split(sizes)
        current = current * decay[:, None, None]
        current = current + change.view(hv, v_dim, 1) * _per_value_head(key.view(hk, -1), hv)
        current = keep_grid(current, position + 1)
        if position + 1 == write_len and write_block > 0:
            state[write_block] = current.to(state.dtype)
    outputs = []
    for t in range(len(x)):
        first = computed - base_len + t
        q, k, v = convolve(history[first : first + carried + 1], weights, state)
        rate, decay = gates(g[t], weights)
        current, change = update(current, k, v, rate, decay)
        outputs.append(normed(current, q, z[t], weights))
        current = keep_grid(current, computed + t + 1)
        slot = (computed + t) % length
        ring.inputs[block, slot] = x[t].to(ring.inputs.dtype)
        ring.updates[block, slot] = torch.cat((k.flatten(), change.flatten(), rate, decay))
    if computed >= write_len and write_block > 0:
        before = history[write_len - base_len : write_len - base_len + carried]
        window[write_block, :carried] = before.to(window.dtype)
    return torch.stack(outputs)


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
