"""The gated products against exact ones, and their error against that of PyTorch's operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from headrace.ops.gated_product import sigmoid_product_, silu_product
from headrace.rt import Effect
from headrace.rt.detector import RowBound, assert_effects

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from headrace.rt.detector import Detector

pytestmark = pytest.mark.usefixtures("seeded")


DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    from headrace.ops.gated_product import fused  # noqa: PLC0415  after the plugin's settings

    # Several programs for each row.
    monkeypatch.setattr(fused, "BLOCK", 32)
    return fused


def error_of(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_err_at_most_twice_as_much_as_pytorch(dtype: torch.dtype) -> None:
    made: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {"silu": [], "sigmoid": []}
    for width in (1, 63, 96):
        wide = (3 * torch.randn(4, 2 * width + 5)).to(dtype)
        gate, value = wide[:, :width], wide[:, width : 2 * width]
        got, own = silu_product(wide[:, : 2 * width]), functional.silu(gate) * value
        made["silu"].append((got, own, functional.silu(gate.double()) * value.double()))
        own, want = torch.sigmoid(gate) * value, torch.sigmoid(gate.double()) * value.double()
        got = sigmoid_product_(value, gate)
        assert got is value
        made["sigmoid"].append((got, own, want))
    for name, results in made.items():
        # Of a few numbers the errors would be chance.
        got, own, want = (
            torch.cat([each.flatten() for each in part]) for part in zip(*results, strict=True)
        )
        limit = 2 * max(error_of(own, want), torch.finfo(dtype).eps / 2)
        assert error_of(got, want) <= limit, name


@pytest.mark.interpreter
def test_gates_far_from_zero_give_the_limits() -> None:
    gate = torch.tensor([[-1e4, -200.0, -0.0, 0.0, 200.0, 1e4]])
    value = torch.full_like(gate, 3.0)
    got = silu_product(torch.cat((gate, value), 1))
    assert torch.equal(got, torch.tensor([[0.0, 0.0, 0.0, 0.0, 600.0, 3e4]]))
    assert torch.equal(sigmoid_product_(value, gate), torch.tensor([[0, 0, 1.5, 1.5, 3.0, 3.0]]))


@pytest.mark.interpreter
def test_an_element_has_the_same_bits_at_any_place() -> None:
    gate_up = torch.randn(6, 2 * 70)
    whole = silu_product(gate_up)
    assert torch.equal(silu_product(gate_up[4:5]), whole[4:5])
    part = torch.cat((gate_up[:, 5:50], gate_up[:, 75:120]), 1)
    assert torch.equal(silu_product(part), whole[:, 5:50])


@pytest.mark.interpreter
def test_only_the_rows_are_read_and_written(race_detector: Detector) -> None:
    x, gate = torch.randn(4, 50), torch.randn(4, 90)
    sigmoid_product_(x[1:3, :40], gate[1:3, 45:85])
    assert_effects(
        race_detector.launches,
        {"x": Effect.READ_WRITE, "gate": Effect.READ},
        {"x": x[:, :40], "gate": gate[:, 45:85]},
        rows={name: RowBound(reads={1, 2}, writes={1, 2}) for name in ("x", "gate")},
    )


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="7 columns are no gate and values"):
        silu_product(torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"gate \(2, 7\) and values \(2, 8\) differ"):
        sigmoid_product_(torch.zeros(2, 8), torch.zeros(2, 7))
    with pytest.raises(ValueError, match="columns must be adjacent"):
        sigmoid_product_(torch.zeros(8, 2).t(), torch.zeros(2, 8))
