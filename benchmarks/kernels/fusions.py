"""Norms, gated products and inputs of attention: kernels against PyTorch's operations.

Checked are the errors of both against float64, in bfloat16 and float32; a kernel's may be twice
that of PyTorch. Timed are both, over buffers of 16 layers in turn, with the sizes of Qwen3.5-4B.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from timing import time_us
from torch.nn import functional

from headrace.ops.activations import sigmoid, silu_mul
from headrace.ops.add_rms_norm import add_rms_norm
from headrace.ops.attention_inputs import attention_inputs
from headrace.ops.gated_product import sigmoid_product_, silu_product
from headrace.ops.paged_attention import write_kv
from headrace.ops.rms_norm import rms_norm
from headrace.ops.rotary import inverse_frequencies, rotary_tables, rotate_

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

WIDTH, INNER, HEADS, KV_HEADS, HEAD, ROTARY, PAGE = 2560, 9216, 16, 4, 256, 64, 64
EPS = 1e-6
LAYERS = 16
TOKENS = (1, 32, 128, 256, 1024)
MOST_ERROR = 2.0
"""A kernel's error over PyTorch's."""


def error_of(got: Tensor, want: Tensor) -> float:
    """Relative error in the square mean."""
    return float((got.double() - want).norm() / want.norm())


def report(case: str, dtype: torch.dtype, got: Tensor, own: Tensor, want: Tensor) -> dict[str, Any]:
    """Compare a kernel's result and PyTorch's with the exact one."""
    mine, theirs = error_of(got, want), error_of(own, want)
    limit = MOST_ERROR * max(theirs, torch.finfo(dtype).eps / 4)
    row = {
        "case": case,
        "dtype": str(dtype).removeprefix("torch."),
        "relative_error": f"{mine:.2e}",
        "relative_error_of_pytorch": f"{theirs:.2e}",
        "passed": mine <= limit,
    }
    print(json.dumps(row), flush=True)
    return row


def check_norms(device: str, dtype: torch.dtype, tokens: int, width: int) -> list[dict[str, Any]]:
    """The addition bit for bit, the norm by its error, a row alone and among others."""
    x, residual = (torch.randn(tokens, width, device=device).to(dtype) for _ in range(2))
    scale = 1 + torch.randn(width, device=device) / 8
    total = residual + x
    kept = residual.clone()
    got = add_rms_norm(residual, x, scale, EPS)
    wide = total.double()
    want = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPS) * scale.double()
    own = functional.rms_norm(total.float(), (width,), scale, EPS).to(dtype)
    rows = [report(f"add_rms_norm {width}", dtype, got, own, want)]
    alone = add_rms_norm(kept[-1:], x[-1:], scale, EPS)
    rows[0]["equal_bits"] = [
        torch.equal(residual, total),
        torch.equal(add_rms_norm(total, None, scale, EPS), got),
        torch.equal(alone, got[-1:]),
    ]
    rows[0]["passed"] &= all(rows[0]["equal_bits"])
    return rows


def check_products(
    device: str, dtype: torch.dtype, tokens: int, inner: int
) -> list[dict[str, Any]]:
    """Both gates."""
    wide = (3 * torch.randn(tokens, 2 * inner, device=device)).to(dtype)
    gate, value = wide.chunk(2, -1)
    want = functional.silu(gate.double()) * value.double()
    own = functional.silu(gate) * value
    rows = [report("silu_product", dtype, silu_product(wide), own, want)]
    want = torch.sigmoid(gate.double()) * value.double()
    own = torch.sigmoid(gate) * value
    rows.append(report("sigmoid_product_", dtype, sigmoid_product_(value.clone(), gate), own, want))
    return rows


def by_operations(
    projected: Tensor,
    scale: Tensor,
    tables: tuple[Tensor, Tensor],
    slots: Tensor,
    pools: Any,  # noqa: ANN401
) -> Tensor:
    """What the layers do with `kernels` torch."""
    kv_heads, dim = pools[0].shape[2:]
    count = scale.shape[0]
    heads, value, _ = projected.tensor_split((count * dim, (count + kv_heads) * dim), -1)
    rotated = rotate_(rms_norm(heads.view(-1, count, dim), scale, EPS), *tables)
    query, key = rotated.split((count - kv_heads, kv_heads), 1)
    write_kv(*pools, key, value.view(-1, kv_heads, dim), slots)
    return query


def inputs_case(
    device: str, dtype: torch.dtype, tokens: int, head: int, blocks: int = 0
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor, tuple[Tensor, Tensor]]:
    """Tokens at positions up to 256k, each with a slot but for the first one of many."""
    columns = (2 * HEADS + 2 * KV_HEADS) * head
    projected = torch.randn(tokens, columns, device=device).to(dtype)
    scale = 1 + torch.randn(HEADS + KV_HEADS, head, device=device) / 8
    positions = torch.randint(0, 1 << 18, (tokens,), device=device)
    tables = rotary_tables(positions, inverse_frequencies(ROTARY, 1e7, positions.device))
    blocks = blocks or 2 + tokens // PAGE
    # The last slots of the pool.
    slots = blocks * PAGE - 1 - torch.randperm(tokens, device=device)
    if tokens > 1:
        slots[0] = 0
    pools = tuple(
        torch.zeros(blocks, PAGE, KV_HEADS, head, dtype=dtype, device=device) for _ in "kv"
    )
    return projected, scale, tables, slots, pools  # type: ignore[return-value]


def made(query: Tensor, slots: Tensor, pools: tuple[Tensor, Tensor]) -> Tensor:
    """Everything that was made for the tokens that have slots."""
    parts = [query[slots > 0], *(pool.flatten(0, 1)[slots[slots > 0]] for pool in pools)]
    return torch.cat([part.flatten(1) for part in parts], 1)


def check_inputs(
    device: str, dtype: torch.dtype, tokens: int, head: int, blocks: int = 0
) -> list[dict[str, Any]]:
    """Queries, keys and values, and that no other slot is written."""
    projected, scale, tables, slots, pools = inputs_case(device, dtype, tokens, head, blocks)
    query = attention_inputs(projected, scale, *tables, slots, *pools, EPS)
    got = made(query, slots, pools)
    written = sum(int(pool.flatten(0, 1)[:, 0, 0].count_nonzero()) for pool in pools)
    is_finite = bool(query.isfinite().all())
    for pool in pools:
        pool.flatten(0, 1)[slots] = 0
    own = made(by_operations(projected, scale, tables, slots, pools), slots, pools)
    wide = projected.double()
    heads = wide[:, : (HEADS + KV_HEADS) * head].view(tokens, -1, head)
    normed = heads * torch.rsqrt((heads * heads).mean(-1, keepdim=True) + EPS) * scale.double()
    half = ROTARY // 2
    a, b, rest = normed.split((half, half, head - ROTARY), -1)
    c, s = tables[0][..., :half].double(), tables[1][..., half:].double()
    rotated = torch.cat((a * c - b * s, b * c + a * s, rest), -1)
    value = wide[:, heads[0].numel() :][:, : KV_HEADS * head]
    want = torch.cat((rotated.flatten(1), value), 1)[slots > 0]
    case = f"attention_inputs, heads of {head}" + (", large pool" if blocks else "")
    rows = [report(case, dtype, got, own, want)]
    # A first element may be zero by chance in one of many thousand.
    rows[0]["slots_written"] = [written, 2 * int((slots > 0).sum())]
    rows[0]["passed"] &= is_finite and 0 <= rows[0]["slots_written"][1] - written <= 1
    return rows


def check_fusions(device: str = "cuda", tokens: int = 97) -> list[dict[str, Any]]:
    """Errors of the kernels in both dtypes."""
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for width in (1024, WIDTH, 5120):
            rows += check_norms(device, dtype, tokens, width)
        rows += check_products(device, dtype, tokens, INNER)
        for head in (64, 128, 256):
            rows += check_inputs(device, dtype, tokens, head)
    if device != "cpu":
        # Beyond 2^31 elements.
        blocks = (1 << 31) // (PAGE * KV_HEADS * HEAD) + 8
        rows += check_inputs(device, torch.bfloat16, tokens, HEAD, blocks)
    return rows


def bench_fusions(rate: float) -> list[dict[str, Any]]:
    """Times a layer in bfloat16."""
    results = []
    for tokens in TOKENS:
        for case, (fused, operations, size) in cases_of(tokens).items():
            us, own = (time_us(run) / LAYERS for run in (fused, operations))
            floor = size / rate * 1e6
            results.append(
                {
                    "case": case,
                    "tokens": tokens,
                    "us": round(us, 2),
                    "us_of_pytorch": round(own, 2),
                    "floor_us": round(floor, 2),
                }
            )
            print(json.dumps(results[-1]), flush=True)
    return results


def cases_of(
    tokens: int, device: str = "cuda"
) -> dict[str, tuple[Callable[[], None], Callable[[], None], int]]:
    """What runs the kernel and PyTorch's operations in all layers, and a layer's bytes."""

    def some(*shape: int) -> Tensor:
        return torch.randn(LAYERS, tokens, *shape, device=device).to(torch.bfloat16)

    residual, x, gate_up = some(WIDTH), some(WIDTH), some(2 * INNER)
    scale = 1 + torch.randn(WIDTH, device=device) / 8
    out = some(HEADS * HEAD)
    layers = [inputs_case(device, torch.bfloat16, tokens, HEAD) for _ in range(LAYERS)]
    gates = [projected[:, -HEADS * HEAD :] for projected, *_ in layers]
    each = range(LAYERS)

    def repeat(run: Callable[[int], object]) -> Callable[[], None]:
        def all_layers() -> None:
            for i in each:
                run(i)

        return all_layers

    def inputs(i: int) -> Tensor:
        projected, scales, tables, slots, pools = layers[i]
        return attention_inputs(projected, scales, *tables, slots, *pools, EPS)

    return {
        "add_rms_norm": (
            repeat(lambda i: add_rms_norm(residual[i], x[i], scale, EPS)),
            repeat(lambda i: rms_norm(residual[i].add_(x[i]), scale, EPS)),
            tokens * 2 * 4 * WIDTH,
        ),
        "rms_norm": (
            repeat(lambda i: add_rms_norm(x[i], None, scale, EPS)),
            repeat(lambda i: rms_norm(x[i], scale, EPS)),
            tokens * 2 * 2 * WIDTH,
        ),
        "silu_product": (
            repeat(lambda i: silu_product(gate_up[i])),
            repeat(lambda i: silu_mul(gate_up[i])),
            tokens * 2 * 3 * INNER,
        ),
        "sigmoid_product_": (
            repeat(lambda i: sigmoid_product_(out[i], gates[i])),
            repeat(lambda i: out[i].mul_(sigmoid(gates[i]))),
            tokens * 2 * 3 * HEADS * HEAD,
        ),
        "attention_inputs": (
            repeat(inputs),
            repeat(lambda i: by_operations(*layers[i])),
            tokens * (2 * 2 * (HEADS + 2 * KV_HEADS) * HEAD + 2 * 4 * ROTARY),
        ),
    }
