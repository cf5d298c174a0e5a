"""Split attention against its specification."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.ops.aot import KernelSpec, compile_kernel
from headrace.ops.paged_decode import paged_decode, reference
from headrace.rt import Effect
from headrace.rt.detector import RowBound, assert_effects

if TYPE_CHECKING:
    from types import ModuleType

    from headrace.rt.detector import Detector

HEADS, KV_HEADS, PAGE, WIDTH = 6, 2, 4, 3


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The launch, with small sizes until the test ends."""
    pytest.importorskip("triton")
    from headrace.ops.paged_decode import fused  # noqa: PLC0415  after the plugin's settings

    # Several splits of several tiles at small lengths.
    monkeypatch.setattr(fused, "SPLIT", 16)
    monkeypatch.setattr(fused, "KEYS", 8)
    return fused


def _case(
    seed: int, lens: list[int], queries: list[int], dtype: torch.dtype, head_dim: int = 16
) -> dict[str, Any]:
    """Sequences in shuffled blocks; block 0 is no one's and full of NaN."""
    g = torch.Generator().manual_seed(seed)
    rows = len(lens)
    width = max(-(-length // PAGE) for length in lens)
    blocks = 1 + rows * width
    shape = (blocks, PAGE, KV_HEADS, head_dim)
    k, v = (torch.randn(shape, generator=g).to(dtype) for _ in range(2))
    k[0] = v[0] = float("nan")
    table = 1 + torch.randperm(rows * width, generator=g).view(rows, width).to(torch.int32)
    for n, length in enumerate(lens):
        table[n, -(-length // PAGE) :] = 0
        # What lies behind a sequence in its last block must not be read.
        if length % PAGE:
            k[table[n, length // PAGE], length % PAGE :] = float("nan")
            v[table[n, length // PAGE], length % PAGE :] = float("nan")
    index = torch.arange(rows * WIDTH).view(rows, WIDTH)
    wide = torch.randn(rows * WIDTH, (HEADS + 1) * head_dim, generator=g).to(dtype)
    return {
        "query": wide[:, : HEADS * head_dim].view(-1, HEADS, head_dim),
        "k_pool": k,
        "v_pool": v,
        "block_table": table,
        "token_index": index,
        "query_lens": torch.tensor(queries),
        "seq_lens": torch.tensor(lens),
        "max_seq_len": max(lens),
        "out": torch.full((rows * WIDTH, HEADS, head_dim), float("nan"), dtype=dtype),
    }


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_do_what_the_specification_says(dtype: torch.dtype, fused: ModuleType) -> None:
    seed = random.randrange(1 << 30)
    print(f"{seed=}")
    lens, queries = [1, 16, 17, 33, 9], [1, 3, 2, 3, 0]
    want, got = _case(seed, lens, queries, dtype), _case(seed, lens, queries, dtype)
    reference.paged_decode(**want)
    fused.paged_decode(**got)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got["out"], want["out"], rtol=limit, atol=limit, equal_nan=True)


@pytest.mark.interpreter
def test_a_row_has_the_same_bits_alone_and_beside_a_longer_one(fused: ModuleType) -> None:
    both, alone = _case(1, [13, 40], [2, 1], torch.float32), None
    fused.paged_decode(**both)
    alone = {
        key: value[:1] if key in {"block_table", "token_index", "query_lens", "seq_lens"} else value
        for key, value in both.items()
    }
    alone |= {"max_seq_len": 13, "out": torch.zeros_like(both["out"])}
    fused.paged_decode(**alone)
    assert torch.equal(alone["out"][:2], both["out"][:2])


@pytest.mark.interpreter
def test_only_the_rows_own_blocks_are_read_and_only_their_tokens_written(
    race_detector: Detector,
    fused: ModuleType,
) -> None:
    case = _case(2, [9, 20], [1, 2], torch.float32)
    fused.paged_decode(**case)
    blocks = {int(b) for b in case["block_table"].flatten() if b}
    reads = ("query", "k_pool", "v_pool", "block_table", "token_index", "query_lens", "seq_lens")
    assert_effects(
        race_detector.launches,
        dict.fromkeys(reads, Effect.READ) | {"out": Effect.WRITE},
        {name: case[name] for name in (*reads, "out")},
        rows={
            "k_pool": RowBound(reads=blocks),
            "v_pool": RowBound(reads=blocks),
            "out": RowBound(writes={0, 3, 4}),
        },
    )


def test_heads_that_do_not_fit_are_refused() -> None:
    case = _case(3, [5], [1], torch.float32)
    case["query"] = torch.zeros(3, 5, 16)
    with pytest.raises(ValueError, match="do not fit keys"):
        paged_decode(**case)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_kernel_compiles_for_hopper_with_tensor_cores_and_without_spills(
    head_dim: int,
) -> None:
    pytest.importorskip("triton")
    constants: dict[str, object] = {
        "GROUP": 4, "G": 4, "D": head_dim, "P": 64, "QUERY": 4, "ROWS": 16, "SPLIT": 512,
        "KEYS": 64, "WIDE": False,
    }  # fmt: skip
    pointers = dict.fromkeys(("query_ptr", "k_ptr", "v_ptr"), "*bf16")
    pointers |= dict.fromkeys(("token_index_ptr", "query_lens_ptr", "seq_lens_ptr"), "*i64")
    pointers |= {"table_ptr": "*i32", "partial_ptr": "*fp32", "stats_ptr": "*fp32"}
    strides = dict.fromkeys(("query_stride", "block_stride", "slot_stride", "table_stride"), "i32")
    compiled = compile_kernel(
        KernelSpec(
            kernel="headrace.ops.paged_decode.kernel:paged_decode_kernel",
            signature=pointers
            | strides
            | {"scale": "fp32"}
            | dict.fromkeys(constants, "constexpr"),
            constants=constants,
            aligned=(*pointers, "query_stride", "block_stride", "slot_stride"),
            options={"num_warps": 4, "num_stages": 2},
        )
    )
    assert compiled.spill_bytes == 0
    assert any(name.startswith("HMMA") for name in compiled.instructions)
