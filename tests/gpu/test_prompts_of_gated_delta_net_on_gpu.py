"""Prompts of Gated DeltaNet in kernels at the sizes of Qwen3.5-4B, on a real device."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest
import torch

from headrace.ops.gated_delta_prefill import (
    MixerWeights,
    PrefillRows,
    PromptRow,
    gated_delta_prefill,
    number_rows,
    reference,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
HK, HV, K, V, TAPS, GRID = 16, 32, 128, 128, 4, 64
F = 2 * HK * K + HV * V
ROW = PromptRow(first=0, start=37, length=200, source=1, target=2, exports=((128, 3),))
"""Its first piece and its last one are no whole ones."""


def rows_of(*prompts: PromptRow) -> PrefillRows:
    layout, numbers = number_rows(prompts, GRID)
    return layout.on_device(torch.tensor(numbers, dtype=torch.int32, device="cuda"))


class Layer:
    """Weights, and inputs of 8 rows of 256 tokens."""

    def __init__(self, dtype: torch.dtype) -> None:
        seed = secrets.randbits(32)
        print(f"{seed=}")
        self.random = torch.Generator("cuda").manual_seed(seed)
        self.weights = MixerWeights(
            conv=self.normal(TAPS, F) * 0.5,
            gate_bias=torch.cat((torch.zeros(HV, device="cuda"), self.normal(HV) - 2)),
            gate_factor=torch.cat((-torch.ones(HV, device="cuda"), -self.normal(HV).exp() / 20)),
            unit_scale=torch.tensor([K**-0.5] * HK + [1.0] * HK, device="cuda"),
            norm=1 + 0.1 * self.normal(V),
            norm_eps=1e-6,
        )
        self.parts = self.normal(2048, F + HV * V + 2 * HV).to(dtype).split((F, HV * V, 2 * HV), -1)
        self.window = self.normal(24, TAPS - 1, F).to(dtype)
        self.state = self.normal(24, HV, V, K) / 8

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, device="cuda")

    def run(
        self, *prompts: PromptRow, by_reference: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs, windows and states after these prompts; the pools stay as they are."""
        op = reference.gated_delta_prefill if by_reference else gated_delta_prefill
        window, state = self.window.clone(), self.state.clone()
        out = torch.zeros(2048, HV * V, dtype=self.window.dtype, device="cuda")
        op(*self.parts, self.weights, window, state, rows_of(*prompts), out)
        return out, window, state


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_it_does_what_the_specification_says(dtype: torch.dtype, limit: float) -> None:
    layer = Layer(dtype)
    got, want = layer.run(ROW), layer.run(ROW, by_reference=True)
    assert torch.equal(got[1], want[1])
    assert not torch.equal(got[2], layer.state)
    for mine, exact in ((got[0], want[0]), *((got[2][i], want[2][i]) for i in (2, 3))):
        error = float((mine.float() - exact.float()).norm() / exact.float().norm())
        assert error <= limit
    assert torch.equal(got[2][4:], layer.state[4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_and_beside_others(dtype: torch.dtype) -> None:
    """Alone its programs have a processor each, and more of their loads run ahead."""
    layer = Layer(dtype)
    alone = layer.run(ROW)
    others = [
        replace(ROW, first=256 * i, start=3 * i, target=4 + 2 * i, exports=()) for i in range(1, 8)
    ]
    beside = layer.run(ROW, *others)
    assert torch.equal(beside[0][:200], alone[0][:200])
    assert beside[0][256 : 256 + 200].any()
    for block in (2, 3):
        assert torch.equal(beside[1][block], alone[1][block])
        assert torch.equal(beside[2][block], alone[2][block])


def test_it_waits_for_nothing() -> None:
    layer, rows = Layer(torch.bfloat16), rows_of(ROW)
    out = torch.empty(2048, HV * V, dtype=torch.bfloat16, device="cuda")
    given = (*layer.parts, layer.weights, layer.window, layer.state, rows, out)
    gated_delta_prefill(*given)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gated_delta_prefill(*given)
    finally:
        torch.cuda.set_sync_debug_mode(before)
