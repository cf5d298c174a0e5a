"""What both copies promise beyond the formulas, for the reference and for the kernels."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.ops.aot import KernelSpec, compile_kernel
from headrace.ops.state_columns import StatePool, reference
from headrace.rt import Effect
from headrace.rt.detector import Detector, RowBound, assert_effects, explore

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from headrace.rt.detector import Order

BLOCK_SIZE, MAX_DRAFTS, ENTRIES, CHANNELS = 4, 3, 5, 6
LAYERS, COLUMNS, PLACES = 2, 8, 9


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The launch, with small sizes until the test ends."""
    pytest.importorskip("triton")
    from headrace.ops.state_columns import fused  # noqa: PLC0415  after the plugin's settings

    # Several small tiles, of which the last is not full.
    monkeypatch.setattr(fused, "TILES", 2)
    monkeypatch.setattr(fused, "CHANNEL_TILE", 2)
    monkeypatch.setattr(fused, "BLOCK", 8)
    return fused


@pytest.fixture(params=["reference", pytest.param("fused", marks=pytest.mark.interpreter)])
def columns(request: pytest.FixtureRequest) -> ModuleType:
    """Both implementations."""
    return reference if request.param == "reference" else request.getfixturevalue("fused")


def _pools(seed: int) -> tuple[StatePool, StatePool, StatePool]:
    """Random pools: a window in each layout and a recurrent state."""
    generator = torch.Generator().manual_seed(seed)
    blocks = 1 + PLACES * COLUMNS
    first = torch.randn(LAYERS, blocks, ENTRIES, CHANNELS, generator=generator)
    last = first.transpose(2, 3).contiguous()
    state = torch.randn(LAYERS, blocks, 2, 3, 4, generator=generator)
    return (
        StatePool(tensor=first, kind="window"),
        StatePool(tensor=last, kind="window", entries="last"),
        StatePool(tensor=state.to(torch.bfloat16), kind="recurrent"),
    )


def _table() -> Tensor:
    return torch.arange(1, 1 + PLACES * COLUMNS, dtype=torch.int32).view(PLACES, COLUMNS)


def _bytes(pools: tuple[StatePool, ...]) -> list[Tensor]:
    return [pool.tensor.clone() for pool in pools]


def test_a_mapped_batch_moves_the_places_it_names_and_no_others(columns: ModuleType) -> None:
    pools, table = _pools(1), _table()
    before = _bytes(pools)
    rows = torch.tensor([5, 2, 7])
    computed = torch.full((PLACES,), 9)
    computed[2] = 6
    accepted = torch.tensor([4, 4, 1, 4, 4, 3, 4, 2, 4])
    column = torch.full((PLACES,), 2)
    column[2] = 1
    accepted_out, column_out = accepted.clone(), column.clone()
    columns.premove(
        pools,
        table,
        computed=computed,
        scheduled=torch.tensor([4, 4, 1]),
        accepted=accepted,
        state_column=column,
        accepted_out=accepted_out,
        state_column_out=column_out,
        block_size=BLOCK_SIZE,
        max_accepted=MAX_DRAFTS + 1,
        rows=rows,
    )
    # Place 5: column 2 -> 3 with offset 2; place 2: column 1 -> 2; place 7 stays in column 2.
    assert accepted_out.tolist() == [4, 4, 1, 4, 4, 1, 4, 2, 4]
    assert column_out.tolist() == [2, 2, 2, 2, 2, 3, 2, 2, 2]
    window, channels_first, state = (tensor.clone() for tensor in before)
    for place, source, target, offset in ((5, 2, 3, 2), (2, 1, 2, 0)):
        old, new = int(table[place, source]), int(table[place, target])
        keep = ENTRIES - offset
        window[:, new, :keep] = before[0][:, old, offset:]
        channels_first[:, new, :, :keep] = before[1][:, old, :, offset:]
        state[:, new] = before[2][:, int(table[place, source + offset])]
    for pool, expected in zip(pools, (window, channels_first, state), strict=True):
        assert torch.equal(pool.tensor, expected)


def _save(
    columns: ModuleType, pools: tuple[StatePool, ...], table: Tensor, *, derived: bool, rows: Tensor
) -> Tensor:
    computed = torch.full((PLACES,), 9)
    scheduled = torch.tensor([4, 4, 4])
    accepted = torch.tensor([1, 1, 4, 1, 1, 3, 1, 2, 1])
    out = accepted.clone()
    ends = computed + 4 - 3 + accepted - 1
    given = (
        {"computed": computed, "drafts": torch.tensor([3, 3, 3])}
        if derived
        else {"new_computed": ends}
    )
    columns.save(
        pools,
        table,
        scheduled=scheduled,
        accepted=accepted,
        state_column=torch.full((PLACES,), 3),
        accepted_out=out,
        block_size=BLOCK_SIZE,
        max_accepted=MAX_DRAFTS + 1,
        rows=rows,
        **given,
    )
    return out


def test_derived_and_precomputed_lengths_save_the_same_states(columns: ModuleType) -> None:
    table, rows = _table(), torch.tensor([5, 2, 7])
    derived, given = _pools(2), _pools(2)
    before = _bytes(derived)
    first = _save(columns, derived, table, derived=True, rows=rows)
    second = _save(columns, given, table, derived=False, rows=rows)
    assert torch.equal(first, second)
    for a, b, old in zip(derived, given, before, strict=True):
        assert torch.equal(a.tensor, b.tensor)
        assert not torch.equal(a.tensor, old)


@pytest.mark.parametrize("why", ["padded", "accepted 0", "null blocks"])
def test_a_row_that_takes_no_part_changes_nothing(columns: ModuleType, why: str) -> None:
    pools, table = _pools(3), _table()
    before = _bytes(pools)
    scheduled = torch.tensor([0, 0]) if why == "padded" else torch.tensor([4, 4])
    accepted = (
        torch.zeros(PLACES, dtype=torch.int64) if why == "accepted 0" else torch.full((PLACES,), 3)
    )
    if why == "null blocks":
        table.zero_()
    # Padded rows may name a place that is in use.
    rows = torch.tensor([4, 4]) if why == "padded" else torch.tensor([4, 6])
    column = torch.full((PLACES,), 2)
    accepted_out, column_out = accepted.clone(), column.clone()
    columns.premove(
        pools,
        table,
        computed=torch.full((PLACES,), 9),
        scheduled=scheduled,
        accepted=accepted,
        state_column=column,
        accepted_out=accepted_out,
        state_column_out=column_out,
        block_size=BLOCK_SIZE,
        max_accepted=MAX_DRAFTS + 1,
        rows=rows,
    )
    columns.save(
        pools,
        table,
        scheduled=scheduled,
        accepted=accepted,
        state_column=column,
        accepted_out=accepted_out,
        block_size=BLOCK_SIZE,
        max_accepted=MAX_DRAFTS + 1,
        new_computed=torch.full((PLACES,), 12),
        rows=rows,
    )
    assert torch.equal(accepted, accepted_out)
    assert torch.equal(column, column_out)
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool.tensor, old)


def test_a_padded_row_beside_a_live_row_of_the_same_place_does_not_undo_it(
    columns: ModuleType,
) -> None:
    pools, table = _pools(4), _table()
    accepted, column = torch.full((PLACES,), 3), torch.full((PLACES,), 2)
    accepted_out, column_out = accepted.clone(), column.clone()
    columns.premove(
        pools,
        table,
        computed=torch.full((PLACES,), 9),
        scheduled=torch.tensor([0, 4, 0]),
        accepted=accepted,
        state_column=column,
        accepted_out=accepted_out,
        state_column_out=column_out,
        block_size=BLOCK_SIZE,
        max_accepted=MAX_DRAFTS + 1,
        rows=torch.tensor([0, 0, 0]),
    )
    assert (int(accepted_out[0]), int(column_out[0])) == (1, 3)


@pytest.mark.parametrize("name", ["reference", "fused"])
@pytest.mark.interpreter(detector=False)
def test_an_empty_batch_is_no_work(name: str, request: pytest.FixtureRequest) -> None:
    columns = reference if name == "reference" else request.getfixturevalue("fused")
    pools, table = _pools(5), _table()
    before = _bytes(pools)
    accepted, column = torch.ones(PLACES, dtype=torch.int64), torch.full((PLACES,), 2)
    nothing = torch.zeros(0, dtype=torch.int64)
    columns.premove(
        pools,
        table,
        computed=torch.full((PLACES,), 9),
        scheduled=nothing,
        accepted=accepted,
        state_column=column,
        accepted_out=accepted.clone(),
        state_column_out=column.clone(),
        block_size=BLOCK_SIZE,
        max_accepted=MAX_DRAFTS + 1,
        rows=nothing,
    )
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool.tensor, old)


@pytest.mark.parametrize("name", ["reference", "fused"])
@pytest.mark.interpreter(detector=False)
def test_counts_that_are_written_while_they_decide_are_refused(
    name: str, request: pytest.FixtureRequest
) -> None:
    columns = reference if name == "reference" else request.getfixturevalue("fused")
    accepted = torch.full((PLACES,), 3)
    with pytest.raises(ValueError, match=r"accepted_out share memory; pass a snapshot"):
        columns.save(
            _pools(6),
            _table(),
            scheduled=torch.tensor([4]),
            accepted=accepted,
            state_column=torch.full((PLACES,), 2),
            accepted_out=accepted,
            block_size=BLOCK_SIZE,
            max_accepted=MAX_DRAFTS + 1,
            new_computed=torch.full((PLACES,), 12),
        )


def test_a_count_above_what_a_step_can_keep_fails() -> None:
    accepted = torch.full((PLACES,), MAX_DRAFTS + 2)
    with pytest.raises(RuntimeError, match="single nonzero value"):
        _save_above(reference, _pools(7), accepted, accepted.clone())


@pytest.mark.interpreter
def test_a_count_above_what_a_step_can_keep_moves_nothing_in_the_kernel(fused: ModuleType) -> None:
    # On a GPU the kernel asserts; the interpreter skips assertions.
    pools, accepted = _pools(7), torch.full((PLACES,), MAX_DRAFTS + 2)
    before, out = _bytes(pools), accepted.clone()
    _save_above(fused, pools, accepted, out)
    assert torch.equal(accepted, out)
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool.tensor, old)


def _save_above(
    columns: ModuleType, pools: tuple[StatePool, ...], accepted: Tensor, out: Tensor
) -> None:
    columns.save(
        pools,
        _table(),
        scheduled=torch.tensor([4]),
        accepted=accepted,
        state_column=torch.full((PLACES,), 2),
        accepted_out=out,
        block_size=BLOCK_SIZE,
        max_accepted=MAX_DRAFTS + 1,
        new_computed=torch.full((PLACES,), 12),
    )


def _random_case(seed: int) -> dict[str, Any]:
    """A step over rows in every situation: fresh, moved, kept, padded, without blocks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    rows = torch.randperm(PLACES, generator=generator)[:7]
    table = _table()
    table[rows[6]] = 0
    computed = draw(0, 20, PLACES)
    drafts = draw(0, MAX_DRAFTS + 1, 7)
    scheduled = torch.where(draw(0, 5, 7) == 0, 0, drafts + 1)
    return {
        "table": table,
        "rows": rows,
        "computed": computed,
        "drafts": drafts,
        "scheduled": scheduled,
        "accepted": draw(0, MAX_DRAFTS + 2, PLACES),
        "kept": torch.minimum(draw(0, MAX_DRAFTS + 2, PLACES), computed + 1),
        "state_column": torch.where(computed == 0, -1, draw(0, 5, PLACES)),
    }


def _step(columns: ModuleType, case: dict[str, Any], pools: tuple[StatePool, ...]) -> list[Tensor]:
    """Both copies of one step; returns all counts."""
    accepted_out, column_out = case["accepted"].clone(), case["state_column"].clone()
    common = {"block_size": BLOCK_SIZE, "max_accepted": MAX_DRAFTS + 1, "rows": case["rows"]}
    columns.premove(
        pools,
        case["table"],
        computed=case["computed"],
        scheduled=case["scheduled"],
        accepted=case["accepted"],
        state_column=case["state_column"],
        accepted_out=accepted_out,
        state_column_out=column_out,
        **common,
    )
    saved = [case["kept"].clone() for _ in range(2)]
    given: tuple[dict[str, Tensor], ...] = (
        {"computed": case["computed"], "drafts": case["drafts"]},
        {"new_computed": case["computed"] + case["kept"]},
    )
    for out, ends in zip(saved, given, strict=True):
        columns.save(
            pools,
            case["table"],
            scheduled=case["scheduled"],
            accepted=case["kept"],
            state_column=column_out,
            accepted_out=out,
            **ends,
            **common,
        )
    return [accepted_out, column_out, *saved]


@pytest.mark.interpreter
def test_the_fused_kernels_do_what_the_reference_does_bit_for_bit(
    race_detector: Detector,
    fused: ModuleType,
) -> None:
    seed = random.randrange(1 << 30)
    print(f"{seed=}")
    for trial in range(2):
        case = _random_case(seed + trial)
        expected, got = _pools(seed), _pools(seed)
        counts = zip(_step(reference, case, expected), _step(fused, case, got), strict=True)
        assert all(torch.equal(a, b) for a, b in counts)
        for a, b in zip(expected, got, strict=True):
            assert torch.equal(a.tensor, b.tensor)
            assert torch.equal(a.tensor[:, 0], _pools(seed)[expected.index(a)].tensor[:, 0])
    assert len(race_detector.launches) == 6


@pytest.mark.interpreter(detector=False)
def test_no_order_of_the_programs_gives_another_result(fused: ModuleType) -> None:
    seed = random.randrange(1 << 30)
    print(f"{seed=}")
    case, pools = _random_case(seed), _pools(seed)
    explore(lambda: _step(fused, case, pools)).assert_clean()


@pytest.mark.interpreter
def test_the_kernels_touch_what_they_declare_and_only_the_rows_of_their_tables(
    race_detector: Detector,
    fused: ModuleType,
) -> None:
    pools, table = _pools(8), _table()
    before = {
        "computed": torch.full((PLACES,), 9),
        "scheduled": torch.tensor([4, 4]),
        "accepted": torch.full((PLACES,), 3),
        "state_column": torch.full((PLACES,), 2),
        "rows": torch.tensor([5, 2]),
    }
    after = {
        "accepted_out": before["accepted"].clone(),
        "state_column_out": before["state_column"].clone(),
    }
    fused.premove(
        pools, table, **before, **after, block_size=BLOCK_SIZE, max_accepted=MAX_DRAFTS + 1
    )
    tensors = [pool.tensor for pool in pools]
    assert_effects(
        race_detector.launches,
        dict.fromkeys(before, Effect.READ)
        | dict.fromkeys(after, Effect.WRITE)
        | {"table": Effect.READ, "windows": Effect.READ_WRITE, "states": Effect.READ_WRITE},
        {**before, **after, "table": table, "windows": tensors[:2], "states": tensors[2]},
        rows={
            "windows": RowBound(
                axis=1,
                reads=[int(table[place, 2]) for place in (5, 2)],
                writes=[int(table[place, 3]) for place in (5, 2)],
            ),
            "states": RowBound(
                axis=1,
                reads=[int(table[place, 4]) for place in (5, 2)],
                writes=[int(table[place, 3]) for place in (5, 2)],
            ),
            "accepted_out": RowBound(writes=[5, 2]),
            "state_column_out": RowBound(writes=[5, 2]),
            "accepted": RowBound(reads=[5, 2]),
        },
    )


@pytest.mark.interpreter(detector=False)
@pytest.mark.parametrize("order", ["forward", "reverse", 1, 2, 3])
def test_the_founding_fault_put_back_is_reported_in_every_order(
    monkeypatch: pytest.MonkeyPatch, order: Order, fused: ModuleType
) -> None:
    monkeypatch.setattr(fused, "refuse_shared", lambda *_: None)
    accepted, column = torch.full((PLACES,), 3), torch.full((PLACES,), 2)
    with Detector(orders=(order,)) as detector:
        fused.premove(
            _pools(9),
            _table(),
            computed=torch.full((PLACES,), 9),
            scheduled=torch.tensor([4]),
            accepted=accepted,
            state_column=column.clone(),
            accepted_out=accepted,
            state_column_out=column,
            block_size=BLOCK_SIZE,
            max_accepted=MAX_DRAFTS + 1,
        )
    assert {(report.kind, report.tensor, report.index) for report in detector.races} == {
        ("READ-WRITE", "accepted_ptr", "[0]")
    }


@pytest.mark.parametrize(("state", "is_save"), [("*fp32", True), ("*bf16", False)])
def test_the_kernel_compiles_for_hopper_without_spills_and_with_wide_accesses(
    state: str,
    is_save: bool,  # noqa: FBT001
) -> None:
    pytest.importorskip("triton")
    constants = {
        "drafts_ptr": None,
        "COLUMNS": 20,
        "BLOCK_SIZE": 64,
        "MAX_ACCEPTED": 4,
        "IS_SAVE": is_save,
        "IS_DERIVED": False,
        "IS_MAPPED": True,
        "IS_WINDOW": [True, False],
        "ENTRIES": [6, 1],
        "ENTRIES_PADDED": [8, 1],
        "CHANNELS": [8192, 32 * 128 * 128],
        "ENTRIES_FIRST": [True, True],
        "CHANNEL_TILE": 256,
        "BLOCK": 2048,
        "TILES": 8,
    }
    if is_save:
        constants["state_column_out_ptr"] = None
    signature = {
        "pools": ["*bf16", state],
        "layer_strides": ["i64", "i64"],
        "block_strides": ["i64", "i64"],
        "table_ptr": "*i32",
        "scheduled_ptr": "*i64",
        "computed_ptr": "*i64",
        "accepted_ptr": "*i32",
        "state_column_ptr": "*i32",
        "rows_ptr": "*i64",
        "accepted_out_ptr": "*i32",
        "state_column_out_ptr": "*i32",
        "table_stride": "i32",
    } | dict.fromkeys(constants, "constexpr")
    compiled = compile_kernel(
        KernelSpec(
            kernel="headrace.ops.state_columns.kernel:columns_kernel",
            signature=signature,
            constants=constants,
            aligned=("pools", "layer_strides", "block_strides"),
            options={"num_warps": 4, "debug": True},
        )
    )
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 64
    assert compiled.instructions.get("LDG.E.128", 0) > 0
    assert compiled.instructions.get("STG.E.128", 0) > 0
