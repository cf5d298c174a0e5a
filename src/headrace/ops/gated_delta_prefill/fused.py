"""The launches: inputs, windows, within pieces, along rows, norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.ops.gated_delta_prefill.kernel import (
    prefill_inputs_kernel,
    prefill_norm_kernel,
    prefill_window_kernel,
)
from headrace.ops.gated_delta_prefill.kernel_scan import prefill_along_kernel, prefill_within_kernel
from headrace.ops.gated_delta_prefill.rows import LEAST_TOKENS
from headrace.rt.kernels import is_interpreted, launch_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.gated_delta_decode.rows import MixerWeights
    from headrace.ops.gated_delta_prefill.rows import PrefillRows

RUNS, INPUT_WARPS = 8, 8
"""Runs of a piece's tokens that a program of the first launch convolves side by side."""

TOKENS, NUM_WARPS = 32, 4
"""Tokens that a program of the last launch holds at a time; warps of the other launches."""

HEADS, WITHIN_WARPS = 1, 4
"""Value heads of a program that computes what is within a piece, and its warps."""

WINDOW_BLOCK = 1024
"""Channels of a program that writes a window."""

VALUES, ALONG_WARPS = 32, 4
"""Values of a head in one program along a row, and its warps. However many rows a step has: a row's
bits never depend on its company."""

FLOAT_VALUES = 16
"""The same for float32 inputs, whose products take three times the registers."""

STAGES, STAGES_ALONE, ALONE = 2, 3, 132
"""Pieces in memory at a time along a row, the one in work included; more where no more programs
than ALONE run, so that each has a processor and its memory for itself. When loads are made does not
change the order of a sum, so neither a bit."""


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
    """Run prompts; see the package."""
    Launches.of(
        inputs, gate, logits, weights, window, state, rows, out, is_fixed=is_fixed
    ).run()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launches:
    """The launches of one layer, in order, with what they hand to each other.

    Attributes:
        mixed: Queries, keys and values after convolution, [T, F].
        gates: Rates, then sums of log decays from a piece's first token on, [2*HV, T] f32.
        inverse, attention: Of the tokens of a piece with each other, [T, HV, piece].
        is_fixed: Whether the same code runs for any number of rows.
    """

    given: tuple[Tensor, Tensor, Tensor]
    weights: MixerWeights
    window: Tensor
    state: Tensor
    rows: PrefillRows
    out: Tensor
    mixed: Tensor
    gates: Tensor
    inverse: Tensor
    attention: Tensor
    is_fixed: bool

    @classmethod
    def of(
        cls,
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
    ) -> Launches:
        """Allocate what the launches hand to each other; see the package for the rest."""
        tokens, hv = inputs.shape[0], state.shape[1]
        pair = inputs.new_empty(2, tokens, hv, _padded(rows))
        return cls(
            given=(inputs, gate, logits),
            weights=weights,
            window=window,
            state=state,
            rows=rows,
            out=out,
            mixed=torch.empty_like(inputs, memory_format=torch.contiguous_format),
            gates=inputs.new_empty(2 * hv, tokens, dtype=torch.float32),
            inverse=pair[0],
            attention=pair[1],
            is_fixed=is_fixed,
        )

    def run(self) -> None:
        """Launch all."""
        self.inputs()
        self.windows()
        self.within()
        self.along()
        self.norm()

    def inputs(self) -> None:
        """Convolve, normalise, gate."""
        inputs, _, logits = self.given
        weights, sizes = self.weights, self._sizes()
        heads = sizes["HK"] * (2 + sizes["GROUP"])
        launch_kernel(
            prefill_inputs_kernel,
            (self.rows.pieces.shape[0], heads),
            inputs,
            logits,
            weights.conv,
            weights.gate_bias,
            weights.gate_factor,
            weights.unit_scale,
            self.window,
            self.rows.pieces,
            self.rows.rows,
            self.mixed,
            self.gates,
            inputs.stride(0),
            logits.stride(0),
            self.window.stride(0),
            self.gates.stride(0),
            **sizes,
            TAPS=weights.conv.shape[0],
            PIECE=_padded(self.rows),
            RUNS=min(RUNS, _padded(self.rows)),
            num_warps=INPUT_WARPS,
        )

    def windows(self) -> None:
        """Write new windows: of exports first, since rows may overwrite what those are made of."""
        inputs = self.given[0]
        taps, channels = self.weights.conv.shape
        split = self.rows.num_exports
        for windows in (self.rows.windows[:split], self.rows.windows[split:]):
            launch_kernel(
                prefill_window_kernel,
                (windows.shape[0], -(-channels // WINDOW_BLOCK)),
                inputs,
                self.window,
                windows,
                inputs.stride(0),
                self.window.stride(0),
                F=channels,
                TAPS=taps,
                ENTRIES_PADDED=1 << max(taps - 2, 1).bit_length(),
                BLOCK=WINDOW_BLOCK,
                num_warps=NUM_WARPS,
            )

    def within(self) -> None:
        """Inverse and attention of every piece."""
        sizes = self._sizes()
        heads = math.gcd(HEADS, sizes["GROUP"])
        launch_kernel(
            prefill_within_kernel,
            (self.rows.pieces.shape[0], sizes["HK"] * sizes["GROUP"] // heads),
            self.mixed,
            self.gates,
            self.rows.pieces,
            self.inverse,
            self.attention,
            self.gates.stride(0),
            **sizes,
            HEADS=heads,
            PIECE=_padded(self.rows),
            PRECISION=self._precision(),
            IS_INTERPRETED=is_interpreted(),
            num_warps=WITHIN_WARPS,
        )

    def along(self) -> None:
        """Outputs and states of every row."""
        hv, v_dim = self.state.shape[1:3]
        num_rows = self.rows.rows.shape[0]
        is_half = self.mixed.dtype == torch.bfloat16
        values = min(VALUES if is_half else FLOAT_VALUES, v_dim)
        is_alone = not self.is_fixed and num_rows * hv * (v_dim // values) <= ALONE
        launch_kernel(
            prefill_along_kernel,
            (num_rows, hv, v_dim // values),
            self.mixed,
            self.gates,
            self.inverse,
            self.attention,
            self.rows.pieces,
            self.rows.rows,
            self.state,
            self.out,
            self.gates.stride(0),
            self.state.stride(0),
            self.out.stride(0),
            **self._sizes(),
            VALUES=values,
            MOST=self.rows.piece_tokens,
            PIECE=_padded(self.rows),
            PRECISION=self._precision(),
            IS_INTERPRETED=is_interpreted(),
            # A piece in float32 takes twice the shared memory.
            STAGES=(STAGES_ALONE if is_alone else STAGES) if is_half else 1,
            num_warps=ALONG_WARPS,
        )

    def norm(self) -> None:
        """Norm and gate of the outputs."""
        gate = self.given[1]
        hv, v_dim = self.state.shape[1:3]
        launch_kernel(
            prefill_norm_kernel,
            (self.rows.pieces.shape[0], hv),
            self.out,
            gate,
            self.weights.norm,
            self.rows.pieces,
            self.out.stride(0),
            gate.stride(0),
            self.weights.norm_eps,
            V=v_dim,
            PIECE=_padded(self.rows),
            TOKENS=min(TOKENS, _padded(self.rows)),
            num_warps=NUM_WARPS,
        )

    def _sizes(self) -> dict[str, int]:
        hv, v_dim, k_dim = self.state.shape[1:]
        hk = self.weights.unit_scale.numel() // 2
        return {"HK": hk, "GROUP": hv // hk, "K": k_dim, "V": v_dim}

    def _precision(self) -> str:
        """Of products of float32: of bfloat16's accuracy, or three products for float32's."""
        return "tf32" if self.mixed.dtype == torch.bfloat16 else "tf32x3"


def _padded(rows: PrefillRows) -> int:
    """Tokens that a piece is computed as."""
    return max(LEAST_TOKENS, 1 << (rows.piece_tokens - 1).bit_length())
