"""What the kernel race detector costs over Triton's interpreter alone.

Run ``TRITON_INTERPRET=1 OMP_NUM_THREADS=1 python benchmarks/kernels/detector.py``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING

import torch

from headrace.ops.paged_decode import fused as attention
from headrace.ops.state_columns import StatePool
from headrace.ops.state_columns import fused as columns
from headrace.rt.detector import Detector

if TYPE_CHECKING:
    from collections.abc import Callable


def _move() -> None:
    places = 4
    pools = (
        StatePool(tensor=torch.zeros(2, 1 + places * 4, 5, 64), kind="window"),
        StatePool(tensor=torch.zeros(2, 1 + places * 4, 4, 32, 32), kind="recurrent"),
    )
    columns.premove(
        pools,
        torch.arange(1, 1 + places * 4, dtype=torch.int32).view(places, 4),
        computed=torch.full((places,), 8),
        scheduled=torch.ones(places, dtype=torch.int64),
        accepted=torch.ones(places, dtype=torch.int64),
        state_column=torch.ones(places, dtype=torch.int64),
        accepted_out=torch.ones(places, dtype=torch.int64),
        state_column_out=torch.ones(places, dtype=torch.int64),
        block_size=4,
        max_accepted=2,
    )


def _attend() -> None:
    pool = torch.randn(17, 16, 2, 64)
    attention.paged_decode(
        torch.randn(4, 4, 64),
        pool,
        pool.clone(),
        torch.arange(1, 17, dtype=torch.int32).view(4, 4),
        torch.arange(4).view(4, 1),
        torch.ones(4, dtype=torch.int64),
        torch.full((4,), 60),
        64,
        torch.empty(4, 4, 64),
    )


def _best_s(run: Callable[[], None], *, watched: bool) -> float:
    times = []
    for _ in range(7):
        with Detector() if watched else contextlib.nullcontext():
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print one line of JSON for each kernel."""
    for name, run in (("state_columns", _move), ("paged_decode", _attend)):
        run()
        alone, watched = _best_s(run, watched=False), _best_s(run, watched=True)
        row = {
            "kernel": name,
            "interpreter_ms": round(alone * 1e3, 1),
            "watched_ms": round(watched * 1e3, 1),
            "ratio": round(watched / alone, 2),
        }
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
