"""The product of few rows against its specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from headrace.ops.aot import compile_kernels, spec_of
from headrace.ops.few_rows_linear import MAX_ROWS, few_rows_linear
from headrace.rt import Effect
from headrace.rt.detector import RowBound, assert_effects

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from headrace.rt.detector import Detector

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The launch, with small sizes until the test ends."""
    pytest.importorskip("triton")
    from headrace.ops.few_rows_linear import fused  # noqa: PLC0415  after the plugin's settings

    # Several tiles of outputs, and of columns in several parts.
    for name, value in (("TILE_OUT", 16), ("TILE_IN", 16), ("PROGRAMS", 8), ("LEAST_TILES", 1)):
        monkeypatch.setattr(fused, name, value)
    return fused


def matrix(rows: int, columns: int) -> Tensor:
    """Rows with a gap of NaN behind each of them."""
    wide = torch.full((rows, columns + 3), torch.nan)
    wide[:, :columns] = torch.randn(rows, columns)
    return wide.to(torch.bfloat16)[:, :columns]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 48, 16), (3, 63, 33), (16, 16, 7), (33, 80, 160), (5, 7, 1)]
)
def test_it_errs_at_most_twice_as_much_as_pytorch(
    rows: int, inputs: int, outputs: int, fused: ModuleType
) -> None:
    x, weight = matrix(rows, inputs), matrix(outputs, inputs)
    exact = x.double() @ weight.double().t()
    got = fused.few_rows_linear(x, weight)
    assert got.shape == (rows, outputs)
    assert got.dtype == torch.bfloat16
    own = float(((x.contiguous() @ weight.contiguous().t()).double() - exact).norm())
    # The interpreter cuts off what bfloat16 does not hold, where a GPU rounds.
    assert float((got.double() - exact).norm()) <= max(2 * own, float(exact.norm()) / 128)


@pytest.mark.interpreter
def test_a_row_has_the_same_bits_among_others_of_a_tile(fused: ModuleType) -> None:
    x, weight = matrix(16, 64), matrix(40, 64)
    whole = fused.few_rows_linear(x, weight)
    for row in (0, 5, 15):
        assert torch.equal(fused.few_rows_linear(x[row : row + 1], weight), whole[row : row + 1])


@pytest.mark.interpreter
def test_only_rows_are_read(race_detector: Detector, fused: ModuleType) -> None:
    x, weight = torch.randn(6, 40).to(torch.bfloat16), torch.randn(24, 40).to(torch.bfloat16)
    fused.few_rows_linear(x[:3, :33], weight[:20, :33])
    assert_effects(
        race_detector.launches,
        {"x": Effect.READ, "weight": Effect.READ},
        {"x": x[:, :33], "weight": weight[:, :33]},
        rows={
            "x": RowBound(reads={0, 1, 2}, writes=set()),
            "weight": RowBound(reads=set(range(20)), writes=set()),
        },
    )


def test_no_rows_are_no_launch(fused: ModuleType) -> None:
    assert fused.few_rows_linear(matrix(0, 16), matrix(5, 16)).shape == (0, 5)


@pytest.mark.parametrize("rows", [16, 32])
def test_the_kernel_compiles_for_hopper_with_tensor_cores_and_copies_past_registers(
    rows: int,
) -> None:
    pytest.importorskip("triton")
    from headrace.ops.few_rows_linear import fused, kernel  # noqa: PLC0415  after the settings

    def numbers(dtype: torch.dtype) -> Tensor:
        return torch.empty(1024, dtype=dtype, device="meta")

    bf16 = numbers(torch.bfloat16)
    options = {
        "ROWS": rows, "TILE_OUT": fused.TILE_OUT, "TILE_IN": fused.TILE_IN, "HAS_TAIL": False,
        "WIDE": False, "num_warps": fused.NUM_WARPS, "num_stages": fused.NUM_STAGES,
    }  # fmt: skip
    specs = [
        spec_of(
            kernel.few_rows_linear_kernel,
            (bf16, bf16, numbers(made), rows, 2560, 18432, 2560, 2560, 2560),
            options,
        )
        for made in (torch.bfloat16, torch.float32)
    ]
    for compiled in compile_kernels(specs):
        assert compiled.spill_bytes == 0
        assert compiled.tensor_core > 0
        # Two programs share a multiprocessor at least.
        assert compiled.registers <= 255
        assert compiled.shared_bytes <= 113 * 1024
        copies = [name for name in compiled.instructions if name.startswith("LDGSTS")]
        assert not compiled.instructions or any(".128" in name for name in copies)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "message"),
    [
        (MAX_ROWS + 1, 8, torch.bfloat16, r"65 rows.*holds 64; use headrace.ops.linear"),
        (2, 7, torch.bfloat16, r"rows have 7 columns and the weight 8"),
        (2, 8, torch.float32, r"x is torch.float32 and must be bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(
    rows: int, columns: int, dtype: torch.dtype, message: str
) -> None:
    weight = torch.zeros(3, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        few_rows_linear(torch.zeros(rows, columns, dtype=dtype), weight)


def test_columns_that_are_not_adjacent_are_refused() -> None:
    x = torch.zeros(8, 2, dtype=torch.bfloat16).t()
    with pytest.raises(ValueError, match=r"x: columns must be adjacent, strides are \(1, 2\)"):
        few_rows_linear(x, torch.zeros(3, 8, dtype=torch.bfloat16))
