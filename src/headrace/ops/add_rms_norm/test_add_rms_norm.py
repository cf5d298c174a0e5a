"""The fused norm against its specification, and its error against that of PyTorch's norm."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from headrace.ops.add_rms_norm import MAX_WIDTH, add_rms_norm
from headrace.rt import Effect
from headrace.rt.detector import RowBound, assert_effects

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.rt.detector import Detector

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def seeded() -> None:
    pytest.importorskip("triton")
    seed = random.SystemRandom().randrange(2**31)
    print(f"{seed=}")
    torch.manual_seed(seed)


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows with a gap behind each of them, which no one may touch."""
    return torch.randn(count, width + 3).to(dtype)[:, :width]


def exact(residual: Tensor, scale: Tensor) -> Tensor:
    wide = residual.double()
    return wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * scale.double()


def error_of(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_errs_at_most_twice_as_much_as_pytorch(dtype: torch.dtype) -> None:
    made = []
    for width in (1, 63, 257):
        residual, x = rows(5, width, dtype), rows(5, width, dtype)
        scale, total = 1 + torch.randn(width) / 8, residual + x
        out = torch.full((5, width + 5), float("nan"), dtype=dtype)[:, :width]
        got = add_rms_norm(residual, x, scale, 1e-6, out=out)
        assert got is out
        # The interpreter cuts off what bfloat16 does not hold, where a GPU rounds.
        limit = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(residual, total, rtol=limit, atol=0.0)
        own = functional.rms_norm(residual.float(), (width,), scale, 1e-6).to(dtype)
        made.append((got, own, exact(residual, scale)))
        # Without an addition the same norm, and nothing is written.
        kept = residual.clone()
        plain = add_rms_norm(residual, None, scale, 1e-6)
        assert plain.dtype == dtype
        assert torch.equal(plain, got)
        assert torch.equal(residual, kept)
    # Of a few numbers the errors would be chance.
    got, own, want = (
        torch.cat([each.flatten() for each in part]) for part in zip(*made, strict=True)
    )
    assert error_of(got, want) <= 2 * max(error_of(own, want), torch.finfo(dtype).eps / 2)


@pytest.mark.interpreter
def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    residual, x, scale = (torch.randn(5, 40) for _ in range(3))
    alone = residual[3:4].clone()
    want = add_rms_norm(residual, x, scale[0], 1e-6)
    assert torch.equal(add_rms_norm(alone, x[3:4], scale[0], 1e-6), want[3:4])
    assert torch.equal(alone, residual[3:4])


@pytest.mark.interpreter
def test_only_the_rows_are_read_and_written(race_detector: Detector) -> None:
    whole = [torch.randn(4, 24) for _ in range(3)]
    # The gap belongs to someone else.
    residual, x, out = (each[:2, :17] for each in whole)
    scale = torch.randn(17)
    add_rms_norm(residual, x, scale, 1e-6, out=out)
    names = ("residual", "x", "out")
    assert_effects(
        race_detector.launches,
        {
            "residual": Effect.READ_WRITE,
            "x": Effect.READ,
            "out": Effect.WRITE,
            "scale": Effect.READ,
        },
        {**{name: each[:, :17] for name, each in zip(names, whole, strict=True)}, "scale": scale},
        rows={name: RowBound(reads={0, 1}, writes={0, 1}) for name in names},
    )


@pytest.mark.parametrize(
    ("residual", "x", "scale", "message"),
    [
        ((2, 8), (2, 7), 8, r"x has shape \(2, 7\).*residual \(2, 8\)"),
        ((2, 8), None, 7, r"scale has shape \(7,\) where rows have 8"),
        ((1, MAX_WIDTH + 1), None, MAX_WIDTH + 1, r"32769 columns.*can hold 32768; use kernels"),
    ],
)
def test_what_does_not_fit_is_refused(
    residual: tuple[int, ...], x: tuple[int, ...] | None, scale: int, message: str
) -> None:
    added = None if x is None else torch.zeros(x)
    with pytest.raises(ValueError, match=message):
        add_rms_norm(torch.zeros(residual), added, torch.zeros(scale), 1e-6)
