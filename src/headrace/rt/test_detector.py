"""The kernel detector on small kernels with known faults and their correct twins."""

# Kernels have no types.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from headrace.rt import Effect
from headrace.rt.detector import (
    Detector,
    Order,
    RowBound,
    active,
    assert_effects,
    explore,
)
from headrace.rt.errors import RefusedError
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.interpreter(detector=False)


@triton.jit
def _double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def _neighbour_kernel(x_ptr, y_ptr, VALUE: tl.constexpr):
    i = tl.program_id(0)
    seen = tl.load(x_ptr + i + 1)
    tl.store(y_ptr + i, seen)
    tl.store(x_ptr + i, VALUE)


@triton.jit
def _same_target_kernel(x_ptr, DIFFERENT: tl.constexpr):
    tl.store(x_ptr + 3, tl.program_id(0) * DIFFERENT)


@triton.jit
def _bytes_kernel(x_ptr, y_ptr):
    i = tl.program_id(0)
    tl.store(x_ptr + i, i.to(tl.int8))
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.int32))


@triton.jit
def _shift_kernel(x_ptr, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i + 1)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + i, x)


@triton.jit
def _turn_kernel(x_ptr, y_ptr, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, i)
    if BARRIER:
        tl.debug_barrier()
    tl.store(y_ptr + i, tl.load(x_ptr + BLOCK - 1 - i))


@triton.jit
def _half_kernel(x_ptr, SAME: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i // 2, i // 2 if SAME else i)


@triton.jit
def _atomic_kernel(x_ptr, sum_ptr, MODE: tl.constexpr):
    i = tl.program_id(0)
    if MODE == "add":
        tl.atomic_add(sum_ptr, tl.load(x_ptr + i))
    elif MODE == "exchange":
        tl.atomic_xchg(sum_ptr, tl.load(x_ptr + i))
    elif MODE == "ticket":
        place = tl.atomic_add(sum_ptr, 1)
        tl.store(x_ptr + place, i)
    elif MODE == "mixed":
        if i % 2 == 0:
            tl.atomic_add(sum_ptr, 1)
        else:
            tl.atomic_max(sum_ptr, 5)
    elif i == 0:
        tl.store(sum_ptr, 0)
    else:
        tl.atomic_add(sum_ptr, 1)


@triton.jit
def _pointer_kernel(addresses_ptr):
    x_ptr = tl.load(addresses_ptr + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(x_ptr, 1.0)


@triton.jit
def _tuple_kernel(pools):
    i = tl.program_id(0)
    for p in tl.static_range(len(pools)):
        tl.store(pools[p] + i, tl.load(pools[p] + i) + 1)


def _found(run: Callable[[], object], *, orders: tuple[Order, ...] = ("forward",)) -> Detector:
    with Detector(orders=orders) as detector:
        run()
    return detector


def _line(kernel: object, text: str) -> str:
    """File and line of the only source line of a kernel with this text."""
    lines, first = inspect.getsourcelines(kernel.fn)  # type: ignore[attr-defined]
    hits = [first + place for place, line in enumerate(lines) if text in line]
    assert len(hits) == 1, f"{text!r} at {hits}"
    return f"test_detector.py:{hits[0]}"


def test_a_clean_launch_is_quiet_and_counted() -> None:
    x, y = torch.randn(1000), torch.empty(1000)
    detector = _found(lambda: launch_kernel(_double_kernel, (8,), x, y, 1000, 128))
    detector.assert_clean()
    assert torch.equal(y, 2 * x)
    assert (len(detector.launches), detector.num_accesses) == (1, 16)
    assert detector.launches[0].grid == (8, 1, 1)


def test_a_read_of_what_a_sibling_writes_names_tensor_programs_and_both_lines() -> None:
    x, y = torch.arange(5), torch.empty(4, dtype=torch.int64)
    (report,) = _found(lambda: launch_kernel(_neighbour_kernel, (4,), x, y, 7)).reports
    read, write = _line(_neighbour_kernel, "seen ="), _line(_neighbour_kernel, "VALUE)\n")
    assert str(report) == (
        f"READ-WRITE value-changing x_ptr[1] and 2 more: program 1 W at {write}, "
        f"program 0 R at {read} (_neighbour_kernel)"
    )


def test_a_store_of_the_value_that_is_there_is_a_silent_race() -> None:
    x, y = torch.full((5,), 7), torch.empty(4, dtype=torch.int64)
    (report,) = _found(lambda: launch_kernel(_neighbour_kernel, (4,), x, y, 7)).reports
    assert (report.kind, report.value_class) == ("READ-WRITE", "silent")


@pytest.mark.parametrize(("different", "value_class"), [(1, "different-value"), (0, "same-value")])
def test_two_writers_of_one_element_are_told_apart_by_their_values(
    different: int, value_class: str
) -> None:
    x = torch.zeros(8, dtype=torch.int32)
    (report,) = _found(lambda: launch_kernel(_same_target_kernel, (4,), x, different)).reports
    assert (report.kind, report.value_class) == ("WRITE-WRITE", value_class)
    assert (report.tensor, report.index, report.num_elements) == ("x_ptr", "[3]", 1)


def test_adjacent_bytes_of_one_word_are_no_race() -> None:
    words = torch.zeros(2, dtype=torch.int32)
    x, y = words.view(torch.int8), torch.empty(8, dtype=torch.int32)
    detector = _found(lambda: launch_kernel(_bytes_kernel, (8,), x, y))
    assert not detector.races


@pytest.mark.parametrize("order", ["forward", "reverse", 1, 2, 3])
def test_a_race_is_reported_in_every_order(order: Order) -> None:
    x, y = torch.arange(5), torch.empty(4, dtype=torch.int64)
    detector = _found(lambda: launch_kernel(_neighbour_kernel, (4,), x, y, 7), orders=(order,))
    assert [report.kind for report in detector.races] == ["READ-WRITE"]


def test_exploring_orders_shows_the_wrong_value_and_keeps_the_forward_result() -> None:
    x, y = torch.arange(5), torch.zeros(4, dtype=torch.int64)
    detector = explore(lambda: launch_kernel(_neighbour_kernel, (4,), x, y, 7))
    assert {difference.tensor for difference in detector.differences} == {"y_ptr"}
    assert y.tolist() == [1, 2, 3, 4]
    assert len(detector.launches) == 5


@pytest.mark.parametrize("barrier", [True, False])
def test_a_shift_in_place_needs_a_barrier(barrier: bool) -> None:  # noqa: FBT001
    x = torch.randn(17)
    detector = _found(lambda: launch_kernel(_shift_kernel, (1,), x, barrier, 16))
    assert [report.kind for report in detector.reports] == ([] if barrier else ["LANE-WAR"])


@pytest.mark.parametrize("barrier", [True, False])
def test_a_read_of_another_lane_s_store_needs_a_barrier(barrier: bool) -> None:  # noqa: FBT001
    x, y = (torch.zeros(16, dtype=torch.int32) for _ in range(2))
    detector = _found(lambda: launch_kernel(_turn_kernel, (1,), x, y, barrier, 16))
    assert [report.kind for report in detector.reports] == ([] if barrier else ["LANE-RAW"])


@pytest.mark.parametrize("same", [True, False])
def test_one_store_with_two_values_for_an_address_is_reported(same: bool) -> None:  # noqa: FBT001
    x = torch.zeros(8, dtype=torch.int32)
    detector = _found(lambda: launch_kernel(_half_kernel, (1,), x, same, 16))
    assert [report.kind for report in detector.reports] == ([] if same else ["LANE-DUP-STORE"])


@pytest.mark.parametrize(
    ("mode", "dtype", "kinds"),
    [
        ("add", torch.int32, []),
        ("add", torch.float32, ["ATOMIC-ORDER"]),
        ("exchange", torch.int32, ["ATOMIC-ORDER"]),
        ("ticket", torch.int32, ["ATOMIC-ORDER"]),
        ("mixed", torch.int32, ["ATOMIC-ORDER"]),
        ("plain", torch.int32, ["ATOMIC-PLAIN"]),
    ],
)
def test_atomics_are_clean_only_where_their_order_cannot_matter(
    mode: str, dtype: torch.dtype, kinds: list[str]
) -> None:
    x, total = torch.ones(8, dtype=dtype), torch.zeros(1, dtype=dtype)
    detector = _found(lambda: launch_kernel(_atomic_kernel, (8,), x, total, mode))
    assert [report.kind for report in detector.reports] == kinds


def test_an_access_outside_every_tensor_is_refused() -> None:
    x, y = torch.randn(1000), torch.empty(900)
    with pytest.raises(RefusedError, match=r"y_ptr .*fix the bounds"):
        _found(lambda: launch_kernel(_double_kernel, (8,), x, y, 1000, 128))
    assert active() is None


def test_a_tensor_behind_an_address_is_refused_until_it_is_named() -> None:
    hidden = torch.zeros(2)
    addresses = torch.tensor([hidden.data_ptr(), hidden.data_ptr()])
    with pytest.raises(RefusedError, match=r"Detector\.track"):
        _found(lambda: launch_kernel(_pointer_kernel, (2,), addresses))
    with Detector(tracked={"hidden": hidden}) as detector:
        launch_kernel(_pointer_kernel, (2,), addresses)
    assert [(report.kind, report.tensor) for report in detector.reports] == [
        ("WRITE-WRITE", "hidden")
    ]


def test_members_of_a_tuple_have_names() -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    shared = _found(lambda: launch_kernel(_tuple_kernel, (4,), (a, b)))
    assert not shared.races
    assert list(shared.launches[0].tensors) == ["pools[0]", "pools[1]"]


def test_a_buffer_passed_twice_is_seen() -> None:
    x = torch.arange(5)
    detector = _found(lambda: launch_kernel(_neighbour_kernel, (4,), x, x, 7))
    assert {report.kind for report in detector.races} == {"READ-WRITE", "WRITE-WRITE"} or {
        report.kind for report in detector.races
    } == {"READ-WRITE"}


def test_recorded_effects_are_compared_with_declared_ones() -> None:
    x, y = torch.randn(1000), torch.empty(1000)
    launches = _found(lambda: launch_kernel(_double_kernel, (8,), x, y, 1000, 128)).launches
    arguments = {"x": x, "y": y}
    assert_effects(launches, {"x": Effect.READ, "y": Effect.WRITE}, arguments)
    with pytest.raises(AssertionError, match=r"writes y\[0\], which is not declared"):
        assert_effects(launches, {"x": Effect.READ}, arguments)
    with pytest.raises(AssertionError, match="no launch reads y, although"):
        assert_effects(launches, {"x": Effect.READ, "y": Effect.READ_WRITE}, arguments)


def test_recorded_rows_are_compared_with_declared_ones() -> None:
    x, y = torch.randn(10, 100), torch.empty(10, 100)
    launches = _found(
        lambda: launch_kernel(_double_kernel, (2,), x[3:5], y[3:5], 200, 128)
    ).launches
    effects = {"x": Effect.READ, "y": Effect.WRITE}
    arguments = {"x": x, "y": y}
    assert_effects(launches, effects, arguments, rows={"y": RowBound(writes=[3, 4])})
    with pytest.raises(AssertionError, match=r"writes y\[4, 0\], which is not declared"):
        assert_effects(launches, effects, arguments, rows={"y": RowBound(writes=[3])})
    assert launches[0].touched(y, "W").any(1).nonzero().flatten().tolist() == [3, 4]


def test_the_same_run_gives_the_same_report_text() -> None:
    texts = []
    for _ in range(2):
        x, y = torch.arange(5), torch.empty(4, dtype=torch.int64)
        detector = _found(
            lambda x=x, y=y: launch_kernel(_neighbour_kernel, (4,), x, y, 7),  # type: ignore[misc]
            orders=(5,),
        )
        texts.append([str(report) for report in detector.reports])
    assert texts[0] == texts[1]
