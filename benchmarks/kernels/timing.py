"""Times of what is launched, as a step graph replays it."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def time_us(run: Callable[[], None], *, repeats: int = 12) -> float:
    """Median time of a captured graph of what `run` launches."""
    # What the inputs are made by must be done before another stream reads them.
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes read and written per second by a large copy."""
    a = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    b = torch.empty_like(a)
    # A kernel and not a copy: graphs hand copies to an engine that reaches 2.8 TB/s only.
    return 2 * a.numel() * 4 / (time_us(lambda: torch.neg(a, out=b)) * 1e-6)


def matmul_rate() -> float:
    """Operations per second of a large product in bfloat16."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / (time_us(lambda: torch.mm(a, b, out=out)) * 1e-6)
