"""The same prompts token by token and head by head: the specification of the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.gated_delta_decode.reference import convolve, gates, normed, update

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.gated_delta_decode.rows import MixerWeights
    from headrace.ops.gated_delta_prefill.rows import PrefillRows


def gated_delta_prefill(
    inputs: Tensor,
    gate: Tensor,
    logits: Tensor,
    weights: MixerWeights,
    window: Tensor,
    state: Tensor,
    rows: PrefillRows,
    out: Tensor,
    *,
    is_fixed: bool = False,  # noqa: ARG001  tokens go one by one
) -> None:
    """Run prompts; see the package."""
    carried = weights.conv.shape[0] - 1
    exports = {
        int(begin + length): int(block) for begin, length, _, block in rows.pieces if block > 0
    }
    for row in rows.rows:
        first, length, _, source, target, _ = (int(number) for number in row)
        old = window[source, :carried] if source else torch.zeros_like(window[0, :carried])
        history = torch.cat((old.float(), inputs[first : first + length].float()))
        current = state[source if source else 0].float() * (source > 0)
        for t in range(length):
            q, k, v = convolve(history[t : t + carried + 1], weights, state)
            rate, decay = gates(logits[first + t].float(), weights)
            current, _ = update(current, k, v, rate, decay)
            out[first + t] = normed(current, q, gate[first + t].float(), weights).to(out.dtype)
            block = target if t + 1 == length else exports.get(first + t + 1, 0)
            if block:
                state[block] = current.to(state.dtype)
                window[block, :carried] = history[t + 1 : t + 1 + carried].to(window.dtype)
