"""Attention of prompts: the kernel against float32 and PyTorch's own, and its share of the limits.

Qwen3.5-4B heads: 16 query and 4 KV heads of 256, in blocks of 16 tokens. Checked are the errors
against float32 of rows with and without a prefix, split over their keys and not; the kernel's may
be twice that of PyTorch's `scaled_dot_product_attention` on keys laid out one after another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from fusions import report
from timing import matmul_rate, time_us
from torch.nn import functional

from headrace.ops.paged_prefill import PrefillTiles, Span, Tiling, fused, tiling
from headrace.ops.paged_prefill.tiles import TileSizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

HEADS, KV_HEADS, HEAD, PAGE = 16, 4, 256, 16
CHECKED = ((0, 200), (1000, 77), (9000, 128), (20_000, 5))
"""Start and length of the checked rows; the last two are split."""

CASES = {
    "2 x 4096": ([(0, 4096)] * 2, False),
    "1 x 8192": ([(0, 8192)], False),
    "32 x 256": ([(0, 256)] * 32, False),
    "32 x 128 behind the same 16k": ([(16_384, 128)] * 32, True),
    "32 x 128 behind 16k each": ([(16_384, 128)] * 32, False),
    "1 x 128 behind 64k": ([(65_536, 128)], False),
}
"""Start and length of each row, and whether what is before the start lies in the same blocks."""

SWEEP = (
    TileSizes(rows=128, keys=64, num_warps=8, num_stages=3),
    TileSizes(rows=128, keys=32, num_warps=8, num_stages=5),
    TileSizes(rows=64, keys=64, num_warps=4, num_stages=2),
    TileSizes(rows=64, keys=32, num_warps=4, num_stages=2),
)
"""Beside what the kernel takes; each is compiled once more, in some seconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Random queries, pools and tables.

    Attributes:
        query: [T, H, D].
        k, v: [B, P, G, D].
        table: Blocks of the rows one after another, [W] i32.
        spans: The rows.
    """

    query: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    spans: tuple[Span, ...]

    def tiles(self, cut: Tiling) -> PrefillTiles:
        """Cut the rows."""
        layout, records = cut.list_tiles(self.spans)
        on_device = torch.from_numpy(records).to(self.query.device)
        return PrefillTiles(records=on_device, tables=self.table, layout=layout)

    def keys_of(self, span: Span) -> list[Tensor]:
        """Keys and values of a row, each [1, G, L, D]."""
        length = span.start + span.length
        page = self.k.shape[1]
        blocks = self.table[span.table : span.table + -(-length // page)].long()
        return [
            pool[blocks].flatten(0, 1)[:length].transpose(0, 1)[None] for pool in (self.k, self.v)
        ]


def case_of(
    rows: Sequence[tuple[int, int]],
    *,
    is_shared: bool = False,
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, HEAD),
    page: int = PAGE,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Make rows of (start, length) in shuffled blocks."""
    num_heads, kv_heads, head = heads
    widths = [-(-(start + length) // page) for start, length in rows]
    common = rows[0][0] // page if is_shared else 0
    order = torch.randperm(common + sum(width - common for width in widths)).to(torch.int32) + 1
    parts, spans = [], []
    token = table = 0
    taken = common
    for (start, length), width in zip(rows, widths, strict=True):
        parts += [order[:common], order[taken : taken + width - common]]
        spans.append(Span(token=token, start=start, length=length, table=table))
        token, table, taken = token + length, table + width, taken + width - common
    shape = (1 + len(order), page, kv_heads, head)
    k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    query = torch.randn(token, num_heads, head, device="cuda", dtype=dtype)
    return Case(query=query, k=k, v=v, table=torch.cat(parts).cuda(), spans=tuple(spans))


def run_once(case: Case, tiles: PrefillTiles) -> Tensor:
    """Attend by the kernel."""
    out = torch.full_like(case.query, float("nan"))
    fused.paged_prefill(case.query, case.k, case.v, tiles, out)
    return out


def by_pytorch(case: Case, dtype: torch.dtype) -> Tensor:
    """Attend by PyTorch in a dtype, row by row."""
    outputs = []
    group = case.query.shape[1] // case.k.shape[2]
    for span in case.spans:
        q = case.query[span.token : span.token + span.length].transpose(0, 1)[None]
        keys = (part.repeat_interleave(group, 1).to(dtype) for part in case.keys_of(span))
        rows = torch.arange(span.start, span.start + span.length, device="cuda")[:, None]
        is_seen = torch.arange(span.start + span.length, device="cuda") <= rows
        out = functional.scaled_dot_product_attention(q.to(dtype), *keys, attn_mask=is_seen)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def check_prefill() -> list[dict[str, Any]]:
    """Errors against float64, and a row alone against the same row among others, bit for bit."""
    rows = []
    for heads, page, dtype, count in (
        ((HEADS, KV_HEADS, HEAD), PAGE, torch.bfloat16, 4),
        ((32, 8, 128), 64, torch.bfloat16, 2),
        ((8, 2, 64), PAGE, torch.float32, 4),
    ):
        case = case_of(CHECKED[:count], heads=heads, page=page, dtype=dtype)
        cut = tiling(*heads, dtype.itemsize)
        got = run_once(case, case.tiles(cut))
        name = f"paged_prefill, heads {heads}, blocks of {page}"
        own, want = by_pytorch(case, dtype), by_pytorch(case, torch.float64)
        rows.append(report(name, dtype, got, own, want))
        are_equal = []
        for span in case.spans:
            alone = run_once(case, replace(case, spans=(span,)).tiles(cut))
            part = slice(span.token, span.token + span.length)
            are_equal.append(torch.equal(alone[part], got[part]))
        rows.append({"case": f"{name}: each row alone", "passed": all(are_equal)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def num_operations(case: Case) -> float:
    """Multiplications and additions of the two products, of the keys that are seen alone."""
    seen = sum(
        span.length * span.start + span.length * (span.length + 1) // 2 for span in case.spans
    )
    return 4 * seen * case.query.shape[1] * case.query.shape[2]


def time_case(
    name: str, case: Case, cut: Tiling, rates: tuple[float, float], **more: object
) -> dict[str, Any]:
    """Time one case, beside what its products and its bytes need at the measured rates."""
    tiles = case.tiles(cut)
    out = torch.empty_like(case.query)
    us = time_us(lambda: fused.paged_prefill(case.query, case.k, case.v, tiles, out), repeats=5)
    operations = num_operations(case)
    size = 2 * case.k.nbytes + 2 * case.query.nbytes
    copied, multiplied = rates
    floor = max(size / copied, operations / multiplied) * 1e6
    row = {
        "case": f"paged_prefill {name}",
        **more,
        "us_per_layer": round(us, 1),
        "tflop_per_s": round(operations / us / 1e6, 1),
        "floor_us": round(floor, 1),
        "share_of_floor": round(floor / us, 3),
        "parts": sum(parts for parts, _ in tiles.layout.rounds),
    }
    print(json.dumps(row), flush=True)
    return row


def time_pytorch(case: Case) -> dict[str, Any]:
    """Time PyTorch's causal attention of equal rows without a prefix, keys one after another."""
    count, length = len(case.spans), case.spans[0].length
    shape = (count, length, HEADS, HEAD)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    us = time_us(
        lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True), repeats=5
    )
    row = {
        "case": f"PyTorch's attention {count} x {length}",
        "us_per_layer": round(us, 1),
        "tflop_per_s": round(num_operations(case) / us / 1e6, 1),
    }
    print(json.dumps(row), flush=True)
    return row


def bench_prefill(rate: float) -> list[dict[str, Any]]:
    """Times of all cases, then of one by other sizes of a program and of blocks."""
    rates = (rate, matmul_rate())
    print(json.dumps({"matmul_tflop_per_s": round(rates[1] / 1e12, 1)}), flush=True)
    own = tiling(HEADS, KV_HEADS, HEAD, 2)
    cases = {
        name: case_of(rows, is_shared=is_shared) for name, (rows, is_shared) in CASES.items()
    }
    rows = [time_case(name, case, own, rates) for name, case in cases.items()]
    rows.append(time_pytorch(cases["2 x 4096"]))
    for sizes in SWEEP:
        cut = replace(own, sizes=sizes)
        told = {"rows": sizes.rows, "keys": sizes.keys}
        told |= {"warps": sizes.num_warps, "stages": sizes.num_stages}
        rows.append(time_case("2 x 4096", cases["2 x 4096"], cut, rates, **told))
    wide = case_of(CASES["2 x 4096"][0], page=64)
    rows.append(time_case("2 x 4096", wide, own, rates, block_size=64))
    return rows
