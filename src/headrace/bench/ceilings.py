"""How fast this device copies memory and multiplies matrices: the ceilings of every floor."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace import rt
from headrace.bench.random_weights import release_memory

if TYPE_CHECKING:
    from torch import Tensor

_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Speeds of a device.

    Attributes:
        copy_bytes_per_s: Bytes read and written by a large copy.
        matmul_flops_per_s: Operations of a large product in `matmul_dtype`.
        matmul_dtype: Of the product.
        is_measured: False if both were given.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    matmul_dtype: str
    is_measured: bool = True


@rt.op(source=rt.Read, target=rt.Write)
def copy(*, source: Tensor, target: Tensor) -> None:
    """Copy all of a buffer."""
    target.copy_(source)


@rt.op(a=rt.Read, b=rt.Read, out=rt.Write)
def multiply(*, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Multiply two square matrices."""
    torch.mm(a, b, out=out)


@rt.op(out=rt.Write)
def fill_random(*, out: Tensor) -> None:
    """Fill with noise: products of constants draw less power, and would run at a higher clock."""
    out.normal_()


def measure_ceilings(
    device: str,
    dtype: str,
    *,
    copy_bytes: int | None = None,
    matmul_size: int | None = None,
) -> Ceilings:
    """Measure a device; takes about a second. Not while an engine lives on this thread.

    Args:
        device: cpu or cuda.
        dtype: Of the product.
        copy_bytes: Size of the copied buffer, larger than any cache; None picks by device.
        matmul_size: Rows and columns of the matrices; None picks by device.
    """
    on_gpu = torch.device(device).type == "cuda"
    size = copy_bytes or (2**30 if on_gpu else 2**26)
    rows = matmul_size or (8192 if on_gpu else 768)
    wide: torch.dtype = getattr(torch, dtype)
    runtime = rt.Runtime.create("cuda" if on_gpu else "cpu", device=device)
    source = runtime.alloc("source", (size // 4,), torch.float32)
    target = runtime.alloc("target", (size // 4,), torch.float32)
    seconds = _fastest(runtime, copy, 20 if on_gpu else 2, source=source, target=target)
    runtime.free(source)
    runtime.free(target)
    a, b, out = (runtime.alloc(name, (rows, rows), wide) for name in ("a", "b", "out"))
    for buffer in (a, b):
        runtime.launch(fill_random, runtime.stream("measure"), out=buffer)
    product_s = _fastest(runtime, multiply, 20 if on_gpu else 1, a=a, b=b, out=out)
    for buffer in (a, b, out):
        runtime.free(buffer)
    del source, target, a, b, out, runtime
    release_memory()
    return Ceilings(
        copy_bytes_per_s=2 * size / seconds,
        matmul_flops_per_s=2 * rows**3 / product_s,
        matmul_dtype=dtype,
    )


def _fastest(runtime: rt.Runtime, op: rt.Op[...], count: int, **buffers: rt.Buffer) -> float:
    """Seconds of one launch, the best of several runs of many."""
    stream = runtime.stream("measure")
    best = float("inf")
    for _ in range(1 + _TRIES):
        runtime.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            runtime.launch(op, stream, **buffers)
        runtime.synchronize()
        best = min(best, (time.perf_counter() - begin) / count)
    return best
