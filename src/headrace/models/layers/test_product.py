"""Who multiplies what."""

from __future__ import annotations

import pytest
import torch

from headrace.models.layers import product as module
from headrace.models.layers.product import product
from headrace.ops import few_rows_linear as few_rows


@pytest.mark.parametrize(
    ("rows", "kernels", "dtype", "by_kernel"),
    [
        (32, "triton", torch.bfloat16, True),
        (48, "triton", torch.bfloat16, False),
        (32, "torch", torch.bfloat16, False),
        (32, "triton", torch.float32, False),
    ],
)
def test_few_rows_of_bfloat16_go_through_the_kernel(
    rows: int,
    kernels: str,
    dtype: torch.dtype,
    by_kernel: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def few_rows_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return few_rows.reference.few_rows_linear(x, weight)

    monkeypatch.setattr(module, "FEW_ROWS", 32)
    monkeypatch.setattr(module, "few_rows_linear", few_rows_linear)
    x, weight = torch.randn(rows, 24).to(dtype), torch.randn(40, 24).to(dtype)
    got = product(x, weight, kernels)  # type: ignore[arg-type]
    assert asked == ([rows] if by_kernel else [])
    torch.testing.assert_close(got.float(), x.float() @ weight.float().t(), rtol=2e-2, atol=2e-2)
