"""Prompts of the fused mixer against their specification and against PyTorch's operations."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.ops.aot import MAX_SHARED_BYTES, Compiled, KernelSpec, compile_kernels, spec_of
from headrace.ops.gated_delta_prefill import (
    MixerWeights,
    PrefillRows,
    PromptRow,
    gated_delta_prefill,
    max_numbers,
    number_rows,
    reference,
)
from headrace.rt import Effect
from headrace.rt.detector import RowBound, assert_effects

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from torch import Tensor

    from headrace.rt.detector import Detector

HK, HV, K, V, TAPS = 3, 6, 8, 16, 4
F = 2 * HK * K + HV * V
BLOCKS, DRAFTS = 24, 2


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The launches, with small sizes until the test ends."""
    pytest.importorskip("triton")
    from headrace.ops.gated_delta_prefill import fused  # noqa: PLC0415  after the plugin's settings

    # Several tiles for each head, several programs for each window.
    monkeypatch.setattr(fused, "VALUES", 8)
    # A row by itself has fewer than this, two rows have more.
    monkeypatch.setattr(fused, "ALONE", 15)
    monkeypatch.setattr(fused, "WINDOW_BLOCK", 64)
    return fused


@pytest.fixture
def seed() -> int:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"{seed=}")
    return seed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Inputs of a step and the pools that it changes."""

    tokens: tuple[Tensor, Tensor, Tensor]
    weights: MixerWeights
    window: Tensor
    state: Tensor

    def copy(self) -> Case:
        return replace(self, window=self.window.clone(), state=self.state.clone())

    def run(self, op: Any, rows: PrefillRows) -> Tensor:  # noqa: ANN401  either implementation
        out = self.tokens[1].new_full((self.tokens[0].shape[0], HV * V), float("nan"))
        op.gated_delta_prefill(*self.tokens, self.weights, self.window, self.state, rows, out)
        return out


def case_of(
    seed: int, count: int, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32
) -> Case:
    """Inputs, gate and logits are slices of one projection, so their rows are strided."""
    g = torch.Generator().manual_seed(seed)
    projected = torch.randn(count, F + HV * V + 2 * HV, generator=g).to(dtype)
    inputs, gate, logits = projected.split((F, HV * V, 2 * HV), dim=-1)
    decay = -torch.exp(torch.rand(HV, generator=g) * 3 - 4)
    weights = MixerWeights(
        conv=torch.randn(TAPS, F, generator=g) * 0.5,
        gate_bias=torch.cat((torch.zeros(HV), torch.rand(HV, generator=g) * 3 - 3)),
        gate_factor=torch.cat((-torch.ones(HV), decay)),
        unit_scale=torch.cat((torch.full((HK,), K**-0.5), torch.ones(HK))),
        norm=1 + 0.1 * torch.randn(V, generator=g),
        norm_eps=1e-6,
    )
    return Case(
        tokens=(inputs, gate, logits),
        weights=weights,
        window=torch.randn(BLOCKS, TAPS - 1 + DRAFTS, F, generator=g).to(dtype),
        state=torch.randn(BLOCKS, HV, V, K, generator=g).to(state_dtype),
    )


def rows_of(prompts: Sequence[PromptRow], grid: int) -> PrefillRows:
    layout, numbers = number_rows(prompts, grid)
    assert layout.num_numbers == len(numbers)
    assert len(numbers) <= max_numbers(sum(row.length for row in prompts), len(prompts), grid)
    return layout.on_device(torch.tensor(numbers, dtype=torch.int32))


def mixed_rows() -> tuple[list[PromptRow], int]:
    """A fresh row, one that begins off the grid in place, one of one token; gaps between them."""
    return [
        PromptRow(first=2, start=0, length=37, source=None, target=3, exports=((16, 4), (32, 5))),
        # It ends its first piece before it has a window of its own tokens.
        PromptRow(first=40, start=14, length=20, source=6, target=6, exports=((16, 7), (32, 8))),
        PromptRow(first=60, start=5, length=1, source=9, target=10),
    ], 64


def error_of(got: Tensor, want: Tensor) -> float:
    got, want = got.double().nan_to_num(), want.double().nan_to_num()
    return float((got - want).norm() / want.norm())


@pytest.mark.interpreter
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_do_what_the_specification_says(
    dtype: torch.dtype, state_dtype: torch.dtype, seed: int, fused: ModuleType
) -> None:
    prompts, count = mixed_rows()
    rows = rows_of(prompts, 16)
    got = case_of(seed, count, dtype, state_dtype)
    expected = got.copy()
    want, out = expected.run(reference, rows), got.run(fused, rows)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(got.window, expected.window)
    # The interpreter cuts numbers off where a GPU rounds them to bfloat16: twice the error.
    limit = 2e-2 if torch.bfloat16 in (dtype, state_dtype) else 2e-6
    assert error_of(out, want) <= limit
    assert error_of(got.state, expected.state) <= limit


@pytest.mark.interpreter
def test_pieces_of_64_tokens_do_it_too(seed: int, fused: ModuleType) -> None:
    rows = rows_of([PromptRow(first=1, start=60, length=72, source=2, target=3)], 64)
    got = case_of(seed, 73, torch.float32)
    expected = got.copy()
    want, out = expected.run(reference, rows), got.run(fused, rows)
    assert error_of(out, want) <= 2e-6
    assert error_of(got.state[3], expected.state[3]) <= 2e-6


@pytest.mark.interpreter
def test_keys_that_are_all_alike_lose_nothing(seed: int, fused: ModuleType) -> None:
    """A sum of powers of their products would: its terms are binomials of 63."""
    rows = rows_of([PromptRow(first=0, start=0, length=64, source=2, target=3)], 64)
    got = case_of(seed, 64, torch.float32)
    inputs, _, logits = got.tokens
    inputs[:, : 2 * HK * K] = inputs[:1, : 2 * HK * K]
    # Rates of nearly 1 and hardly any decay.
    logits[:, :HV] = -8.0
    logits[:, HV:] = -12.0
    expected = got.copy()
    want, out = expected.run(reference, rows), got.run(fused, rows)
    assert error_of(out, want) <= 1e-5
    assert error_of(got.state[3], expected.state[3]) <= 1e-5


@pytest.mark.interpreter
def test_blocks_of_others_stay_untouched(race_detector: Detector, fused: ModuleType) -> None:
    prompts, count = mixed_rows()
    rows, case = rows_of(prompts, 16), case_of(1, count, torch.float32)
    before = case.copy()
    out = case.run(fused, rows)
    is_row = torch.zeros(count, dtype=torch.bool)
    for row in prompts:
        is_row[row.first : row.first + row.length] = True
    assert torch.equal(out.isnan().all(-1), ~is_row)
    assert torch.equal(out.isnan().any(-1), ~is_row)
    written = {3, 4, 5, 6, 7, 8, 10}
    for new, old in ((case.window, before.window), (case.state, before.state)):
        changed = (new != old).flatten(1).any(1).nonzero().flatten()
        assert set(changed.tolist()) == written
    # Entries behind the first W-1 are for drafts.
    assert torch.equal(case.window[:, TAPS - 1 :], before.window[:, TAPS - 1 :])
    tables = {name: getattr(rows, name) for name in ("pieces", "rows", "windows")}
    assert_effects(
        race_detector.launches,
        dict.fromkeys((*tables, "tokens"), Effect.READ)
        | {"window": Effect.READ_WRITE, "state": Effect.READ_WRITE},
        tables | {"tokens": case.tokens, "window": case.window, "state": case.state},
        rows=dict.fromkeys(("window", "state"), RowBound(reads={6, 9}, writes=written)),
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_gives_the_same_bits_whole_cut_at_the_grid_and_beside_others(
    dtype: torch.dtype, seed: int, fused: ModuleType
) -> None:
    whole = case_of(seed, 50, dtype)
    cut, beside = whole.copy(), whole.copy()
    row = PromptRow(first=4, start=10, length=40, source=2, target=3)
    want = whole.run(fused, rows_of([row], 16))
    head, tail = replace(row, length=22), replace(row, first=26, start=32, length=18, source=3)
    first = cut.run(fused, rows_of([head], 16))
    rest = cut.run(fused, rows_of([tail], 16))
    assert torch.equal(first[4:26], want[4:26])
    assert torch.equal(rest[26:44], want[26:44])
    other = PromptRow(first=44, start=0, length=6, source=None, target=5)
    both = beside.run(fused, rows_of([other, row], 16))
    assert torch.equal(both[4:44], want[4:44])
    for case in (cut, beside):
        assert torch.equal(case.state[3], whole.state[3])
        assert torch.equal(case.window[3], whole.window[3])


@pytest.mark.interpreter(detector=False)
def test_blocks_beyond_two_to_the_31_elements_are_read_and_written(fused: ModuleType) -> None:
    """The memory is reserved, not touched: pages come with what is written."""
    small = case_of(0, 4, torch.bfloat16, torch.bfloat16)
    blocks = (1 << 31) // small.state[0].numel() + 4
    state = torch.empty(blocks, HV, V, K, dtype=torch.bfloat16)
    window = torch.empty(blocks, TAPS - 1, F, dtype=torch.bfloat16)
    assert state.numel() > 1 << 31
    state[-1], window[-1] = small.state[2], small.window[2, : TAPS - 1]
    large = replace(small, state=state, window=window)
    row = PromptRow(first=0, start=0, length=4, source=2, target=3)
    want = small.run(fused, rows_of([row], 16))
    far = replace(row, source=blocks - 1, target=blocks - 2)
    assert torch.equal(large.run(fused, rows_of([far], 16)), want)
    assert torch.equal(state[-2], small.state[3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exports": ((17, 4),)}, r"export at 17 is not inside 0\.\.40 on the grid of 16"),
        ({"exports": ((48, 4),)}, r"export at 48 is not inside 0\.\.40"),
        ({"exports": ((16, 0),)}, "the state after 16 tokens would go to block 0"),
        ({"target": 0}, "the state after 40 tokens would go to block 0"),
    ],
)
def test_rows_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    row = PromptRow(first=0, start=0, length=40, source=None, target=3)
    with pytest.raises(ValueError, match=message):
        number_rows([replace(row, **changes)], 16)


@pytest.mark.parametrize(("grid", "most"), [(1, 1), (6, 6), (64, 64), (128, 64), (96, 32)])
def test_pieces_lie_between_points_of_the_grid(grid: int, most: int) -> None:
    row = PromptRow(first=3, start=70, length=200, source=None, target=1)
    made = rows_of([row], grid)
    assert made.piece_tokens == most
    ends = (made.pieces[:, 0] + made.pieces[:, 1] - 3 + 70).tolist()
    assert ends == [*range(70 // most * most + most, 270, most), 270]
    assert int(made.pieces[:, 1].max()) <= most
    assert made.rows.tolist() == [[3, 200, ends[0] - 70, 0, 1, 0]]


def test_inputs_that_do_not_fit_are_refused() -> None:
    case = case_of(0, 4, torch.float32)
    rows = rows_of([PromptRow(first=0, start=0, length=4, source=None, target=1)], 16)
    inputs, gate, logits = case.tokens
    with pytest.raises(ValueError, match="gate: 95 columns where 3 key heads"):
        gated_delta_prefill(
            inputs, gate[:, 1:], logits, case.weights, case.window, case.state, rows,
            torch.empty(4, HV * V),
        )  # fmt: skip


def compiled(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_rows: int, key: int, value: int
) -> dict[str, Compiled]:
    """What a layer of 16 key and 32 value heads launches, compiled for Hopper."""
    pytest.importorskip("triton")
    from headrace.ops.gated_delta_prefill import fused  # noqa: PLC0415  after the plugin's settings

    specs: dict[str, KernelSpec] = {}

    def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:  # noqa: ANN401
        del grid
        spec = spec_of(kernel, args, options)
        specs[spec.kernel.partition(":")[2].removeprefix("prefill_")] = spec

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    monkeypatch.setattr(fused, "launch_kernel", launch)
    monkeypatch.setattr(fused, "is_interpreted", lambda: False)
    hk, hv, f32 = 16, 32, torch.float32
    channels, tokens = 2 * hk * key + hv * value, 128 * num_rows
    projected = empty(tokens, channels + hv * value + 2 * hv)
    inputs, gate, logits = projected.split((channels, hv * value, 2 * hv), -1)
    weights = MixerWeights(
        conv=empty(TAPS, channels, dtype=f32),
        gate_bias=empty(2 * hv, dtype=f32),
        gate_factor=empty(2 * hv, dtype=f32),
        unit_scale=empty(2 * hk, dtype=f32),
        norm=empty(value, dtype=f32),
        norm_eps=1e-6,
    )
    layout, numbers = number_rows(
        [
            PromptRow(first=128 * i, start=0, length=128, source=None, target=1)
            for i in range(num_rows)
        ],
        64,
    )
    fused.gated_delta_prefill(
        inputs, gate, logits, weights, empty(9, TAPS - 1, channels),
        empty(9, hv, value, key, dtype=f32),
        layout.on_device(empty(len(numbers), dtype=torch.int32)), empty(tokens, hv * value),
    )  # fmt: skip
    return dict(zip(specs, compile_kernels(list(specs.values())), strict=True))


def test_they_compile_for_hopper_with_tensor_cores_and_without_spills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = compiled(monkeypatch, torch.bfloat16, 2, 128, 128)
    assert len(made) == 5
    for name, one in made.items():
        assert one.spill_bytes == 0, name
        assert one.shared_bytes <= MAX_SHARED_BYTES, name
    assert made["within_kernel"].tensor_core > 0
    assert made["along_kernel"].tensor_core > 0
    # Loads run ahead of the products: asynchronous copies of 16 bytes.
    assert made["along_kernel"].instructions.get("LDGSTS.E.BYPASS.128", 0) >= 16
    for name in ("norm_kernel", "window_kernel"):
        assert made[name].instructions.get("LDG.E.128", 0) >= 4, name
    # A thread loads each of its run's 8 tokens once, 8 bytes at a time: taps are in registers.
    # Beside them the 3 inputs before the run, from one of two places; all for each sort of head.
    wide = made["inputs_kernel"].instructions
    assert not wide or wide["LDG.E.64"] == 2 * (8 + 2 * (TAPS - 1))
    # So that several programs of a processor hide each other's waits.
    assert made["within_kernel"].registers <= 128
    assert made["inputs_kernel"].registers <= 64


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "num_rows", "key", "value"),
    [
        (torch.bfloat16, 1, 128, 128),
        (torch.bfloat16, 2, 32, 16),
        (torch.float32, 2, 16, 32),
        (torch.float32, 2, 128, 128),
    ],
)
def test_they_compile_for_hopper_with_other_sizes(
    dtype: torch.dtype, num_rows: int, key: int, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of float32 may spill: they are there to be compared with."""
    for name, one in compiled(monkeypatch, dtype, num_rows, key, value).items():
        assert one.spill_bytes == 0 or dtype == torch.float32, name
        assert one.shared_bytes <= MAX_SHARED_BYTES, name
