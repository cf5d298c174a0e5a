"""The same mixer token by token and head by head: the specification of the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.gated_delta_decode import ColumnsRows, ReplayRows, Ring
    from headrace.ops.mamba2_decode import MixerWeights


def mamba2_decode(
    inputs: Tensor,
    gate: Tensor,
    dt: Tensor,
    weights: MixerWeights,
    window: Tensor,
    state: Tensor,
    token_index: Tensor,
    query_lens: Tensor,
    rows: ColumnsRows | ReplayRows,
    out: Tensor,
    *,
    ring: Ring | None = None,
) -> None:
    """Decode or verify; see the package."""
    for n in range(token_index.shape[0]):
        tokens = token_index[n, : int(query_lens[n])]
        if len(tokens) == 0:
            continue
        x, steps = inputs[tokens].float(), dt[tokens].float()
        if ring is not None:
            answers = _replay_row(n, x, steps, weights, window, state, rows, ring)  # type: ignore[arg-type]
        else:
            answers = _columns_row(n, x, steps, weights, window, state, rows)  # type: ignore[arg-type]
        if answers is not None:
            out[tokens] = _gated(answers, gate[tokens].float(), weights).to(out.dtype)


def _columns_row(
    n: int,
    x: Tensor,
    steps: Tensor,
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
    answers = []
    for t in range(len(x)):
        token = _Token(history[t : t + carried + 1], steps[t], weights, state)
        current = token.applied_to(current)
        answers.append(token.answer(current))
        # What a later step would load is what this one goes on with.
        current = current.to(state.dtype).float()
        if int(blocks[t]) > 0:
            state[int(blocks[t])] = current.to(state.dtype)
    moved = history[1:]
    own[: len(moved)] = moved.to(window.dtype)
    return torch.stack(answers)


def _replay_row(
    n: int,
    x: Tensor,
    steps: Tensor,
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
    carried, length = weights.conv.shape[0] - 1, ring.inputs.shape[1]
    # Inputs of positions base_len - carried .. computed - 1, then the new ones.
    at = torch.arange(base_len, computed) % length
    history = torch.cat((window[base, :carried].float(), ring.inputs[block, at].float(), x))

    def keep_grid(current: Tensor, tokens: int) -> Tensor:
        return current.to(state.dtype).float() if tokens % ring.interval == 0 else current

    current = state[base].float()
    for position in range(base_len, computed):
        current = _applied(current, ring.updates[block, position % length])
        current = keep_grid(current, position + 1)
        if position + 1 == write_len and write_block > 0:
            state[write_block] = current.to(state.dtype)
    answers = []
    for t in range(len(x)):
        first = computed - base_len + t
        token = _Token(history[first : first + carried + 1], steps[t], weights, state)
        current = token.applied_to(current)
        answers.append(token.answer(current))
        current = keep_grid(current, computed + t + 1)
        slot = (computed + t) % length
        ring.inputs[block, slot] = x[t].to(ring.inputs.dtype)
        ring.updates[block, slot] = token.update
    if computed >= write_len and write_block > 0:
        before = history[write_len - base_len : write_len - base_len + carried]
        window[write_block, :carried] = before.to(window.dtype)
    return torch.stack(answers)


class _Token:
    """One token after its convolution.

    Args:
        taps: Its inputs and those before, [W, F].
        step: Its time steps before bias and softplus, [H].
        weights: The layer's.
        state: The pool, [S, H, P, D].
    """

    def __init__(self, taps: Tensor, step: Tensor, weights: MixerWeights, state: Tensor) -> None:
        heads, p_dim, d_dim = state.shape[1:]
        mixed = (taps * weights.conv.float()).sum(0)
        if weights.conv_bias is not None:
            mixed = mixed + weights.conv_bias.float()
        inner = heads * p_dim
        shared = (mixed.shape[0] - inner) // 2
        x, b, c = functional.silu(mixed).split((inner, shared, shared))
        self._x = x.view(heads, p_dim)
        self._c = _per_head(c, heads, d_dim)
        self._skip = weights.skip
        dt = functional.softplus(step + weights.dt_bias)
        value = (self._x * dt[:, None]).flatten()
        self.update = torch.cat((b, value, dt * weights.decay_rate))
        """B, dt * x and log decay, as the ring keeps them."""

    def applied_to(self, state: Tensor) -> Tensor:
        """State [H, P, D] after the token."""
        return _applied(state, self.update)

    def answer(self, state: Tensor) -> Tensor:
        """What the state [H, P, D] after the token gives, with the skip, [H * P]."""
        return ((state * self._c).sum(-1) + self._skip[:, None] * self._x).flatten()


def _applied(state: Tensor, update: Tensor) -> Tensor:
    """State [H, P, D] after a token's update."""
    heads, p_dim, d_dim = state.shape
    inner = heads * p_dim
    b, value, log_decay = update.split((update.shape[0] - inner - heads, inner, heads))
    change = value.view(heads, p_dim, 1) * _per_head(b, heads, d_dim)
    return state * log_decay.exp()[:, None, None] + change


def _per_head(shared: Tensor, heads: int, d_dim: int) -> Tensor:
    """Each head's B or C of its group's, [H, 1, D]."""
    groups = shared.view(-1, d_dim)
    return groups.repeat_interleave(heads // groups.shape[0], 0)[:, None]


def _gated(answers: Tensor, gate: Tensor, weights: MixerWeights) -> Tensor:
    """Answers [t, H*P] after gate and norm."""
    opened = functional.silu(gate)
    if weights.norm is None:
        return answers * opened
    if not weights.gates_after_norm:
        answers = answers * opened
    parts = answers.view(len(answers), *weights.norm.shape)
    inverse = torch.rsqrt((parts * parts).mean(-1, keepdim=True) + weights.norm_eps)
    normed = (parts * inverse * weights.norm).view(answers.shape)
    return normed * opened if weights.gates_after_norm else normed
