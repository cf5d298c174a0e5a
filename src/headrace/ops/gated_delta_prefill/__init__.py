"""Prompts of a Gated DeltaNet mixer: everything between its projections, in chunked form.

Causal convolution over a row's window, SiLU, queries and keys to unit length, gates, the gated
delta rule piece by piece, gated RMS norm. States and windows are read from their pools and written
to them by block, also those that are exported inside of a row.

Pieces are cut at the absolute grid, so that a prompt gives the same bits whole or cut at the grid,
where states are stored in float32; and the same bits alone or beside other rows.

Products are of the inputs' dtype and summed in float32; the state is float32 along a row. Learning
rates are sigmoids: a layer whose `max_rate` is not 1 (OLMo hybrid) cannot use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.gated_delta_decode import check_mixer
from headrace.ops.gated_delta_decode.rows import MixerWeights
from headrace.ops.gated_delta_prefill import reference
from headrace.ops.gated_delta_prefill.rows import (
    PrefillLayout,
    PrefillRows,
    PromptRow,
    max_numbers,
    number_rows,
)
from headrace.rt.kernels import can_launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MixerWeights",
    "PrefillLayout",
    "PrefillRows",
    "PromptRow",
    "gated_delta_prefill",
    "max_numbers",
    "number_rows",
]


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
    is_fixed: bool = False,
) -> None:
    """Run the mixer of one layer over the prompt rows of a step.

    Args:
        inputs: Conv inputs: queries, keys, values, [T, F]; rows may be strided.
        gate: Output gate, [T, HV*V]; rows may be strided.
        logits: Negated rate logits, then decay logits, [T, 2*HV]; rows may be strided.
        weights: The layer's.
        window: [S, W-1+s, F]; overwritten at the rows' targets and exports.
        state: [S, HV, V, K] f32 or bf16; overwritten at the same blocks. K and V are powers of 2,
            on a GPU at least 16.
        rows: The prompt rows.
        out: [T, HV*V]; overwritten at the rows' tokens.
        is_fixed: Launch the same code for any number of rows.

    Raises:
        ValueError: Sizes that do not fit each other.

    Source: Gated Delta Networks, arXiv:2412.06464; DeltaNet's chunked form, arXiv:2406.06484.
    """
    check_mixer(inputs, gate, logits, weights, window, state, ring=None)
    run = reference.gated_delta_prefill
    if can_launch(inputs):
        from headrace.ops.gated_delta_prefill import fused  # noqa: PLC0415  needs Triton

        run = fused.gated_delta_prefill
    run(inputs, gate, logits, weights, window, state, rows, out, is_fixed=is_fixed)
