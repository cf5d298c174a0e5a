"""Choices by kernel against their specification: ties, NaN, parts of rows, noise."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import pytest
import torch

from headrace.ops.aot import compile_kernels, spec_of
from headrace.ops.token_choice import MAX_ENTRIES, choose_tokens, reference
from headrace.rt import Effect
from headrace.rt.detector import RowBound, assert_effects

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from headrace.rt.detector import Detector

pytestmark = pytest.mark.usefixtures("seeded")


DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    temperature: Tensor
    seed: Tensor
    position: Tensor


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The launch, with small sizes until the test ends."""
    pytest.importorskip("triton")
    from headrace.ops.token_choice import fused  # noqa: PLC0415  after the plugin's settings

    # Several blocks in each of several parts, and fewer parts where there are more rows.
    monkeypatch.setattr(fused, "BLOCK", 16)
    monkeypatch.setattr(fused, "SAMPLED_BLOCK", 8)
    monkeypatch.setattr(fused, "MAX_PARTS", 4)
    monkeypatch.setattr(fused, "PROGRAMS", 8)
    return fused


def rows_of(values: Tensor) -> Tensor:
    """The same rows with a gap behind each, whose entries would win."""
    wide = torch.full((values.shape[0], values.shape[1] + 3), torch.inf, dtype=values.dtype)
    wide[:, :-3] = values
    return wide[:, :-3]


def sampled_rows(count: int, temperature: float) -> Sampled:
    return Sampled(
        temperature=torch.full((count,), temperature),
        seed=torch.randint(-(2**62), 2**62, (count,)),
        position=torch.arange(count) * 1000,
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("entries", [1, 16, 63, 200])
def test_the_first_of_the_largest_entries_is_chosen(
    entries: int, dtype: torch.dtype, fused: ModuleType
) -> None:
    # Few values, so that the largest occurs many times, and all are negative in some rows.
    values = torch.randint(-3, 2, (6, entries)).to(dtype)
    values[1] = -values[1].abs() - 1
    values[2] = -torch.inf
    values[3] = torch.where(torch.rand(entries) < 0.5, 0.0, -0.0)
    values[4] = torch.randn(entries)
    values[5, entries // 2 :: 5] = torch.nan
    got = fused.choose_tokens(rows_of(values), None)
    assert got.dtype == torch.int64
    assert torch.equal(got, reference.choose_tokens(values, None))
    assert torch.equal(got[5:], torch.tensor([entries // 2]))
    assert torch.equal(fused.choose_tokens(values[4:5], None), got[4:5])


@pytest.mark.interpreter
def test_nothing_is_larger_than_the_first_nan(fused: ModuleType) -> None:
    values = torch.randn(1, 200)
    values[0, 77] = torch.inf
    values[0, [90, 150]] = torch.tensor([-torch.nan, torch.nan])
    assert fused.choose_tokens(values, None).tolist() == [90]


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_samples_are_those_of_the_specification(
    temperature: float, dtype: torch.dtype, fused: ModuleType
) -> None:
    values, sampled = torch.randn(12, 90).to(dtype), sampled_rows(12, temperature)
    sampled.temperature[::4] = 0.0
    got = fused.choose_tokens(rows_of(values), sampled)
    want = reference.choose_tokens(values, sampled)
    noise = reference.gumbel_noise(sampled.seed, sampled.position, 90)
    noise[::4] = 0.0
    hot = torch.where(sampled.temperature == 0.0, 1.0, sampled.temperature)
    scores = values.float() / hot[:, None] + noise
    # The interpreter's logarithm may differ from PyTorch's in its last bit: where that decides,
    # two entries are as good as equal.
    best = scores.gather(1, torch.stack((got, want), 1))
    torch.testing.assert_close(best[:, 0], best[:, 1], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[::4], values[::4].float().argmax(-1))
    # Noise that ignored its seed or its position would choose the likeliest ones.
    assert len(set((scores - values.float()).argmax(1).tolist())) > 1


@pytest.mark.interpreter
def test_a_row_is_chosen_from_alone_as_among_others(fused: ModuleType) -> None:
    values, sampled = torch.randn(9, 130), sampled_rows(9, 1.0)
    whole = fused.choose_tokens(values, sampled)
    for row in range(9):
        part = slice(row, row + 1)
        own = Sampled(**{f.name: getattr(sampled, f.name)[part] for f in fields(sampled)})
        assert torch.equal(fused.choose_tokens(values[part], own), whole[part])


@pytest.mark.interpreter
def test_only_the_rows_are_read(race_detector: Detector, fused: ModuleType) -> None:
    whole, sampled = torch.randn(5, 70), sampled_rows(3, 1.0)
    values = whole[:3, :61]
    fused.choose_tokens(values, sampled)
    names = [field.name for field in fields(sampled)]
    assert_effects(
        race_detector.launches,
        dict.fromkeys(("values", *names), Effect.READ),
        {"values": whole[:, :61], **{name: getattr(sampled, name) for name in names}},
        rows={"values": RowBound(reads={0, 1, 2}, writes=set())},
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_compile_for_hopper_and_read_16_bytes_at_a_time(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from headrace.ops.token_choice import fused, kernel  # noqa: PLC0415  after the plugin's settings

    def numbers(kind: torch.dtype) -> Tensor:
        return torch.empty(1024, dtype=kind, device="meta")

    i64, stride, options = torch.int64, 248320, {"V": 248320, "num_warps": fused.NUM_WARPS}
    keys = numbers(torch.float32), numbers(i64), numbers(i64)
    specs = [
        spec_of(
            kernel.best_of_parts_kernel,
            (numbers(dtype), *given, numbers(i64), stride, 31),
            {**options, "BLOCK": block},
        )
        for given, block in (((None,) * 3, fused.BLOCK), (keys, fused.SAMPLED_BLOCK))
    ]
    last, options = (numbers(i64), numbers(i64), 4), {"PARTS": fused.MAX_PARTS, "num_warps": 1}
    specs.append(spec_of(kernel.best_of_row_kernel, last, options))
    compiled = compile_kernels(specs)
    assert [each.spill_bytes for each in compiled] == [0, 0, 0]
    # At least half of the threads that a multiprocessor can have.
    assert max(each.registers for each in compiled) <= 64
    for each in compiled[:2]:
        assert not each.instructions or "LDG.E.128" in each.instructions


@pytest.mark.parametrize(
    ("shape", "stride", "count", "message"),
    [
        ((2, 8), 2, 2, r"entries must be adjacent, strides are \(16, 2\)"),
        ((2, 8), 1, 3, r"temperature has shape \(3,\) where logits have 2 rows"),
    ],
)
def test_what_does_not_fit_is_refused(
    shape: tuple[int, int], stride: int, count: int, message: str
) -> None:
    logits = torch.zeros(shape[0], shape[1] * stride)[:, ::stride]
    with pytest.raises(ValueError, match=message):
        choose_tokens(logits, sampled_rows(count, 1.0))


def test_more_entries_than_a_kernel_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2147483648 entries.*counts 2147483647; use kernels"):
        choose_tokens(torch.empty(1, MAX_ENTRIES + 1, device="meta"))
