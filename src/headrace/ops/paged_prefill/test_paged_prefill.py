"""Attention of known rows against its specification, and how rows are cut into tiles."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from headrace.ops.aot import MAX_SHARED_BYTES, KernelSpec, compile_kernels, spec_of
from headrace.ops.paged_prefill import PrefillTiles, Span, Tiling, paged_prefill, reference, tiles
from headrace.ops.paged_prefill.tiles import FIELDS, TileSizes, tiling
from headrace.rt import Effect
from headrace.rt.detector import RowBound, assert_effects

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from headrace.rt.detector import Detector

HEADS, KV_HEADS = 6, 2
SMALL = TileSizes(rows=16, keys=8, num_warps=4, num_stages=1)
"""Five tokens a tile, and a row that is no token's."""


@pytest.fixture
def fused() -> ModuleType:
    """The launches."""
    pytest.importorskip("triton")
    from headrace.ops.paged_prefill import fused  # noqa: PLC0415  after the plugin's settings

    return fused


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split rows of more than 16 keys, and few parts a round."""
    monkeypatch.setattr(tiles, "_SPLIT_KEYS", 16)
    monkeypatch.setattr(tiles, "_PART_BYTES", 0)
    monkeypatch.setattr(tiles, "_PROGRAMS", 8)


def small_tiling(head_dim: int = 16) -> Tiling:
    return Tiling(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=head_dim, sizes=SMALL)


def case_of(
    seed: int,
    rows: Sequence[tuple[int, int]],
    *,
    page: int = 4,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 16,
) -> dict[str, Any]:
    """Rows of (start, length) in shuffled blocks; what is no row's is NaN, block 0 included."""
    g = torch.Generator().manual_seed(seed)
    widths = [-(-(start + length) // page) for start, length in rows]
    blocks = 1 + sum(widths)
    shape = (blocks, page, KV_HEADS, head_dim)
    k, v = (torch.randn(shape, generator=g).to(dtype) for _ in range(2))
    k[0] = v[0] = float("nan")
    order = 1 + torch.randperm(blocks - 1, generator=g).to(torch.int32)
    spans, parts = [], []
    token = table = taken = 0
    for (start, length), width in zip(rows, widths, strict=True):
        spans.append(Span(token=token, start=start, length=length, table=table))
        own = order[taken : taken + width]
        # Tables have null blocks behind their end.
        parts += [own, torch.zeros(2, dtype=torch.int32)]
        behind = (start + length) % page
        if behind:
            k[own[-1].long(), behind:] = v[own[-1].long(), behind:] = float("nan")
        token, table, taken = token + length, table + width + 2, taken + width
    layout, records = small_tiling(head_dim).list_tiles(spans)
    wide = torch.randn(token, (HEADS + 1) * head_dim, generator=g).to(dtype)
    return {
        "query": wide[:, : HEADS * head_dim].view(-1, HEADS, head_dim),
        "k_pool": k,
        "v_pool": v,
        "tiles": PrefillTiles(
            records=torch.from_numpy(records), tables=torch.cat(parts), layout=layout
        ),
        "out": torch.full((token, HEADS, head_dim), float("nan"), dtype=dtype),
    }


@pytest.mark.interpreter
@pytest.mark.parametrize("page", [4, 8, 3], ids=lambda page: f"blocks of {page}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_does_what_the_specification_says(
    dtype: torch.dtype, page: int, fused: ModuleType
) -> None:
    seed = random.randrange(1 << 30)
    print(f"{seed=}")
    rows = [(0, 1), (0, 13), (16, 5), (11, 6)]
    want, got = (case_of(seed, rows, page=page, dtype=dtype) for _ in range(2))
    assert not got["tiles"].layout.rounds
    reference.paged_prefill(**want)
    fused.paged_prefill(**got)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got["out"], want["out"], rtol=limit, atol=limit)


@pytest.mark.interpreter
@pytest.mark.usefixtures("splits")
def test_rows_that_are_split_over_their_keys_have_the_same_results(fused: ModuleType) -> None:
    seed = random.randrange(1 << 30)
    print(f"{seed=}")
    # The last tokens of the second row's first tile see keys that its first ones do not: a part.
    rows = [(40, 3), (61, 7), (0, 5)]
    want, got = (case_of(seed, rows) for _ in range(2))
    assert got["tiles"].layout.num_whole == 1
    assert len(got["tiles"].layout.rounds) > 1
    reference.paged_prefill(**want)
    fused.paged_prefill(**got)
    torch.testing.assert_close(got["out"], want["out"], rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("row", [(3, 7), (37, 4)], ids=["whole", "split"])
def test_a_row_has_the_same_bits_alone_and_beside_others(
    row: tuple[int, int], fused: ModuleType
) -> None:
    both = case_of(1, [row, (20, 9)])
    fused.paged_prefill(**both)
    span = Span(token=0, start=row[0], length=row[1], table=0)
    layout, records = small_tiling().list_tiles([span])
    alone = both | {
        "tiles": PrefillTiles(
            records=torch.from_numpy(records), tables=both["tiles"].tables, layout=layout
        ),
        "out": torch.zeros_like(both["out"]),
    }
    fused.paged_prefill(**alone)
    assert torch.equal(alone["out"][: row[1]], both["out"][: row[1]])
    assert not alone["out"][row[1] :].any()


@pytest.mark.interpreter
def test_a_prompt_has_the_same_bits_in_chunks(fused: ModuleType) -> None:
    """As long as no chunk is split: a run of keys that a row does not see changes nothing."""
    whole = case_of(2, [(0, 23)])
    fused.paged_prefill(**whole)
    out = torch.zeros_like(whole["out"])
    for start, end in ((0, 3), (3, 16), (16, 23)):
        span = Span(token=start, start=start, length=end - start, table=0)
        layout, records = small_tiling().list_tiles([span])
        chunk = PrefillTiles(
            records=torch.from_numpy(records), tables=whole["tiles"].tables, layout=layout
        )
        fused.paged_prefill(**(whole | {"tiles": chunk, "out": out}))
    assert torch.equal(out, whole["out"])


@pytest.mark.interpreter
@pytest.mark.usefixtures("splits")
def test_only_the_rows_own_blocks_are_read_and_only_their_tokens_written(
    race_detector: Detector, fused: ModuleType
) -> None:
    case = case_of(3, [(2, 7), (37, 2)])
    fused.paged_prefill(**case)
    assert {launch.kernel for launch in race_detector.launches} == {
        "paged_prefill_kernel", "add_parts_kernel",
    }
    given = {name: case[name] for name in ("query", "k_pool", "v_pool", "out")}
    given |= {"tables": case["tiles"].tables, "records": case["tiles"].records}
    reads = ("query", "k_pool", "v_pool", "tables", "records")
    blocks = {int(block) for block in case["tiles"].tables if block}
    assert_effects(
        race_detector.launches,
        dict.fromkeys(reads, Effect.READ) | {"out": Effect.WRITE},
        given,
        rows={
            "k_pool": RowBound(reads=blocks),
            "v_pool": RowBound(reads=blocks),
            "out": RowBound(writes=set(range(9))),
        },
    )


# Tiles ------------------------------------------------------------------------------------------


def random_spans(rng: random.Random) -> list[Span]:
    spans, token = [], 0
    for row in range(rng.randrange(1, 9)):
        length = rng.choice((1, 5, 127, 128, 129, rng.randrange(1, 5000)))
        start = rng.choice((0, 16, rng.randrange(70_000)))
        spans.append(Span(token=token, start=start, length=length, table=row * 1000))
        token += length
    return spans


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_every_token_sees_each_of_its_keys_once(kv_heads: int, head_dim: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"{seed=}")
    rng = random.Random(seed)
    cut = tiling(16, kv_heads, head_dim, 2)
    for _ in range(20):
        spans = random_spans(rng)
        layout, records = cut.list_tiles(spans)
        assert len(records) == layout.num_records
        total = sum(span.length for span in spans)
        assert len(records) <= cut.max_records(total, len(spans))
        pieces = [list(records[: layout.num_whole])]
        place = layout.num_whole
        for num_parts, num_tiles in layout.rounds:
            assert num_parts <= cut.most_parts
            parts = records[place : place + num_parts]
            assert np.array_equal(parts[:, 6], np.arange(num_parts))
            for tile in records[place + num_parts : place + num_parts + num_tiles]:
                own = parts[tile[2] : tile[2] + tile[3]]
                assert len(own) > 1
                assert (own[:, :2] == tile[:2]).all()
                assert own[0, 4] == 0
                assert np.array_equal(own[1:, 4], own[:-1, 5])
                assert not (own[:, 4] % layout.sizes.keys).any()
                pieces.append([np.concatenate((own[0, :5], own[-1:, 5]))])
            place += num_parts + num_tiles
        for span in spans:
            mine = sorted(
                tuple(tile[:6]) for piece in pieces for tile in piece if tile[3] == span.table
            )
            done = np.array(mine)
            assert np.array_equal(done[:, 0], span.token + np.cumsum(done[:, 1]) - done[:, 1])
            assert done[:, 1].sum() == span.length
            assert np.array_equal(done[:, 2], span.start + done[:, 0] - span.token)
            assert not done[:, 4].any()
            assert np.array_equal(done[:, 5], done[:, 2] + done[:, 1])


@pytest.mark.parametrize(
    ("start", "length", "splits"),
    [(0, 4096, 1), (0, 8192, 1), (0, 256, 1), (16384, 128, 4), (65536, 128, 8), (65536, 1, 16)],
)
def test_rows_of_few_tiles_behind_many_keys_are_split(
    start: int, length: int, splits: int
) -> None:
    """As the 4B model has its heads."""
    span = Span(token=0, start=start, length=length, table=0)
    layout, records = tiling(16, 4, 256, 2).list_tiles([span])
    if splits == 1:
        assert not layout.rounds
    else:
        assert layout.num_whole == 0
        assert records[layout.rounds[0][0] :][0, 3] == splits


def test_parts_of_many_rows_are_made_in_rounds_of_bounded_memory() -> None:
    cut = tiling(16, 4, 256, 2)
    spans = [Span(token=32 * n, start=65536, length=32, table=n) for n in range(256)]
    layout, _ = cut.list_tiles(spans)
    assert cut.most_parts * 4 * 128 * 256 * 4 <= 128 << 20
    assert len(layout.rounds) == 256 * 16 // cut.most_parts
    assert layout.rounds[0] == (cut.most_parts, cut.most_parts // 16)


def test_a_step_without_known_rows_has_no_tiles() -> None:
    layout, records = tiling(16, 4, 256, 2).list_tiles([])
    assert (layout.num_records, records.shape) == (0, (0, FIELDS))


# What does not fit -------------------------------------------------------------------------------


def test_heads_that_fill_more_than_a_tile_are_refused() -> None:
    with pytest.raises(ValueError, match="200 query heads for each KV head exceed the 128 rows"):
        tiling(200, 1, 64, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(5, 5, 16)}, "do not fit keys"),
        ({"v_pool": torch.zeros(9, 4, 2, 16)}, "differ in layout"),
        ({"query": torch.zeros(5, 6, 32)[..., ::2]}, "adjacent in memory"),
        ({"out": torch.zeros(6, 5, 16).transpose(0, 1)}, "must be contiguous"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_prefill(**(case_of(4, [(0, 5)]) | changes))


@pytest.mark.parametrize("size", [24, 512])
def test_head_sizes_without_a_kernel_are_refused(size: int) -> None:
    case = case_of(5, [(0, 5)], head_dim=size)
    with pytest.raises(ValueError, match=f"power of 2 up to 256, not {size}"):
        paged_prefill(**case)


# Compiling --------------------------------------------------------------------------------------


def launches_of(
    heads: tuple[int, int, int], page: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> list[KernelSpec]:
    """What a step with whole and with split rows launches, for heads (H, G, D)."""
    pytest.importorskip("triton")
    from headrace.ops.paged_prefill import fused  # noqa: PLC0415  after the plugin's settings

    specs: list[KernelSpec] = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:  # noqa: ANN401
        assert 0 not in grid
        specs.append(spec_of(kernel, args, options))

    monkeypatch.setattr(fused, "launch_kernel", launch)
    num_heads, kv_heads, head_dim = heads
    cut = tiling(*heads, dtype.itemsize)
    spans = [
        Span(token=0, start=0, length=4096, table=0),
        Span(token=4096, start=65536, length=32, table=256),
    ]
    layout, records = cut.list_tiles(spans)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pool, query = empty(9, page, kv_heads, head_dim), empty(4128, num_heads, head_dim)
    on_meta = PrefillTiles(
        records=torch.from_numpy(records).to("meta"),
        tables=torch.empty(9, dtype=torch.int32, device="meta"),
        layout=layout,
    )
    fused.paged_prefill(query, pool, pool, on_meta, query)
    # Rounds after the first repeat it.
    return specs[:3]


@pytest.mark.full
@pytest.mark.parametrize(
    ("heads", "page", "dtype"),
    [
        ((16, 4, 256), 16, torch.bfloat16),
        ((16, 4, 256), 64, torch.bfloat16),
        ((16, 2, 256), 32, torch.bfloat16),
        ((24, 4, 256), 16, torch.bfloat16),
        ((32, 8, 128), 16, torch.bfloat16),
        ((32, 8, 64), 16, torch.bfloat16),
        ((16, 4, 256), 16, torch.float32),
    ],
)
def test_the_kernels_compile_for_hopper_with_tensor_cores(
    heads: tuple[int, int, int],
    page: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = launches_of(heads, page, dtype, monkeypatch)
    assert [spec.kernel.partition(":")[2] for spec in specs] == [
        "paged_prefill_kernel", "paged_prefill_kernel", "add_parts_kernel"
    ]
    for spec, compiled in zip(specs, compile_kernels(specs), strict=True):
        print(spec.kernel, compiled)
        # Heads of 256 leave no register: what is needed before and after the loops alone, some
        # words of addresses, waits in memory meanwhile.
        assert compiled.spill_bytes <= (96 if heads[2] == 256 else 0), spec
        assert compiled.shared_bytes <= MAX_SHARED_BYTES, spec
        is_product = dtype == torch.bfloat16 and "add_parts" not in spec.kernel
        assert bool(compiled.tensor_core) == is_product, spec
