"""The same mixer token by token and head by head: the specification of the kernels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace.ops.mixer_rows import answer_rows

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
    answers = answer_rows(
        inputs, weights.conv.shape[0] - 1, partial(_step, dt, weights, state), _applied,
        window, state, token_index, query_lens, rows, ring,
    )  # fmt: skip
    for tokens, answer in answers:
        out[tokens] = _gated(answer, gate[tokens].float(), weights).to(out.dtype)


def _step(
    dt: Tensor, weights: MixerWeights, pool: Tensor, token: int, taps: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """State after a token, its answer, and its update."""
    one = _Token(taps, dt[token].float(), weights, pool)
    state = _applied(state, one.update)
    return state, one.answer(state), one.update


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
