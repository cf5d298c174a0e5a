"""The product with fixed tiles: right, and the same bits for a row wherever it stands."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.ops.aot import MAX_SHARED_BYTES, compile_kernels, spec_of
from headrace.ops.fixed_linear import fixed_linear, reference
from headrace.rt import Effect
from headrace.rt.detector import RowBound, assert_effects

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from headrace.ops.aot import KernelSpec
    from headrace.rt.detector import Detector

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**31)
    print(f"{seed=}")
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The launches, with small sizes until the test ends: several tiles, runs and bands."""
    pytest.importorskip("triton")
    from headrace.ops.fixed_linear import fused  # noqa: PLC0415  after the plugin's settings

    small = fused.TileSizes(rows=16, outputs=32, inputs=16, num_warps=4, num_stages=1)
    monkeypatch.setattr(fused, "TILES", dict.fromkeys(DTYPES, small))
    for name, value in (("CHUNK", 32), ("BAND", 2), ("MIN_TILES", 4), ("ADD_BLOCK", 16)):
        monkeypatch.setattr(fused, name, value)
    return fused


def case_of(rows: int, width: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Strided rows and a weight."""
    return torch.randn(rows, width + 3)[:, :width].to(dtype), torch.randn(outputs, width).to(dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "outputs"), [(1, 16, 32), (17, 63, 40), (70, 100, 96), (3, 32, 1)]
)
def test_it_does_what_the_specification_says(
    rng: random.Random, dtype: torch.dtype, rows: int, width: int, outputs: int
) -> None:
    del rng
    x, weight = case_of(rows, width, outputs, dtype)
    want = torch.empty(rows, outputs)
    reference.fixed_linear(x, weight, want)
    got = fixed_linear(x, weight, out=torch.full((rows, outputs), float("nan"), dtype=dtype))
    # In bfloat16 the error is that of the store, which cuts off in the interpreter.
    limit = 1e-5 * width**0.5 if dtype == torch.float32 else 2.0**-7 * float(want.abs().max())
    assert float((got.float() - want).abs().max()) <= limit


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "outputs"), [(40, 48), (100, 70)])
def test_a_row_has_the_same_bits_among_any_others(
    rng: random.Random,
    dtype: torch.dtype,
    width: int,
    outputs: int,
    fused: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone and among many; with runs as programs of their own and without."""
    x, weight = case_of(70, width, outputs, dtype)
    whole = fixed_linear(x, weight)
    for count in (1, 16, 17, 33):
        order = torch.tensor(rng.sample(range(70), count))
        for least in (0, 10**6):
            monkeypatch.setattr(fused, "MIN_TILES", least)
            assert torch.equal(fixed_linear(x[order], weight), whole[order]), f"{count=} {least=}"


@pytest.mark.interpreter
def test_rows_beside_a_row_do_not_reach_it(rng: random.Random) -> None:
    del rng
    x, weight = case_of(20, 40, 48, torch.float32)
    whole = fixed_linear(x, weight)
    x[7] = float("nan")
    again = fixed_linear(x, weight)
    assert again[7].isnan().all()
    others = torch.arange(20) != 7
    assert torch.equal(again[others], whole[others])


@pytest.mark.interpreter
@pytest.mark.parametrize("least", [0, 10**6], ids=["whole", "split"])
def test_only_the_rows_are_read_and_written(
    least: int, race_detector: Detector, fused: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "MIN_TILES", least)
    x, weight, out = torch.randn(22, 80), torch.randn(50, 80), torch.zeros(22, 60)
    fixed_linear(x[2:20, :70], weight[:, 5:75], out=out[2:20, :50])
    kernels = {launch.kernel for launch in race_detector.launches}
    split = {"add_runs_kernel"} if least else set()
    assert kernels == {"fixed_linear_kernel"} | split
    rows = set(range(2, 20))
    assert_effects(
        race_detector.launches,
        {"x": Effect.READ, "weight": Effect.READ, "out": Effect.WRITE},
        {"x": x[:, :70], "weight": weight[:, 5:75], "out": out[:, :50]},
        rows={"x": RowBound(reads=rows), "out": RowBound(writes=rows)},
    )


def test_no_rows_are_no_launch() -> None:
    assert fixed_linear(torch.zeros(0, 8), torch.zeros(5, 8)).shape == (0, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(5, 9)}, "rows have 8 columns and the weight 9"),
        ({"weight": torch.zeros(5, 8, dtype=torch.bfloat16)}, "weight is torch.bfloat16 beside"),
        ({"x": torch.zeros(8, 2).t()}, "x: columns must be adjacent"),
        ({"out": torch.zeros(2, 6)}, r"out has shape \(2, 6\) where the product has \(2, 5\)"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"x": torch.zeros(2, 8), "weight": torch.zeros(5, 8), "out": None} | changes
    with pytest.raises(ValueError, match=message):
        fixed_linear(given["x"], given["weight"], out=given["out"])


def launches_of(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> list[KernelSpec]:
    from headrace.ops.fixed_linear import fused  # noqa: PLC0415  after the plugin's settings

    specs: list[KernelSpec] = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:  # noqa: ANN401
        assert 0 not in grid
        specs.append(spec_of(kernel, args, options))

    monkeypatch.setattr(fused, "launch_kernel", launch)
    x, weight, out = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    fused.fixed_linear(x, weight, out)
    return specs


@pytest.mark.full
def test_it_compiles_for_hopper_with_tensor_cores_and_without_spills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sizes of Qwen3.5-4B: the down projection of few rows, and all columns of many."""
    monkeypatch.undo()
    specs = [
        spec
        for dtype in DTYPES
        for rows, outputs in ((4, 2560), (8192, 19456))
        for spec in launches_of(dtype, rows, 9728, outputs, monkeypatch)
    ]
    assert len(specs) == 6
    for spec, made in zip(specs, compile_kernels(specs), strict=True):
        print(spec.kernel, spec.constants, made.registers, made.shared_bytes, made.tensor_core)
        assert made.spill_bytes == 0
        assert made.shared_bytes <= MAX_SHARED_BYTES
        if spec.signature["x_ptr" if "x_ptr" in spec.signature else "out_ptr"] == "*bf16":
            assert made.tensor_core or "add_runs" in spec.kernel
