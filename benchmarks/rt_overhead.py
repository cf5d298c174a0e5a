"""What the runtime costs: microseconds beyond bare torch in release, per access in the simulation.

Usage: OMP_NUM_THREADS=1 python benchmarks/rt_overhead.py [FILE]    (JSON to FILE or stdout)

"Bare" is the same work by hand: the torch call of a launch, the same numpy writes, `copy_` of the
same slices, `.numpy().copy()` of the same slices. It has no frames, events, tickets or row maps, so
the difference is all that the runtime adds, less what it saves by making slices once. Runtime and
bare rounds alternate, in CPU time of the process, and the least of each counts: other work on the
machine only ever adds. "cuda" is the release backend for the GPU with its driver calls left out, on
CPU memory: its bookkeeping, beside the same bare calls.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace import rt
from headrace.check import TARGETS
from headrace.check.toy.engine import ToyEngine
from headrace.check.toy.workload import generate
from headrace.rt.cuda import CudaRuntime
from headrace.rt.host import PlainHostMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from headrace.rt.frames import HostMemory

REPEATS = 12
CALLS = 200
SEEDS = range(3)
FIELDS = 9


class Undriven(CudaRuntime):
    """The `cuda` backend without a driver."""

    def use(self, stream: rt.Stream) -> None:
        """Count the work, as the backend does; there is no current stream to set."""
        stream.sequence += 1

    def device_memory(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: float | None
    ) -> Tensor:
        """Memory of the CPU."""
        return torch.full(shape, fill or 0, dtype=dtype)

    def host_memory(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str
    ) -> HostMemory:
        """Memory that is not pinned."""
        del kind
        return PlainHostMemory(name, torch.zeros(shape, dtype=dtype))

    def stream_created(self, stream: rt.Stream) -> None:
        """No native stream."""

    def record_native(self, stream: rt.Stream, event: rt.Event) -> None:
        """No native event."""

    def wait_native(self, stream: rt.Stream, event: rt.Event) -> None:
        """No native wait."""

    def block_on(self, event: rt.Event) -> None:
        """Nothing runs."""


@rt.op(x=rt.Read, y=rt.Read, out=rt.Write)
def add(*, x: Tensor, y: Tensor, out: Tensor) -> None:
    """One torch call."""
    torch.add(x, y, out=out)


@rt.op(pools=rt.ReadWrite)
def nothing(*, pools: dict[str, Tensor]) -> None:
    """No torch call: what is left is the launch."""


def timed(work: Callable[[], object]) -> float:
    """Microseconds a call takes, in one round."""
    start = time.process_time()
    for _ in range(CALLS):
        work()
    return (time.process_time() - start) / CALLS * 1e6


def beside(work: Callable[[], object], bare: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of a call and of the bare one, the least of many alternating rounds."""
    rounds = [(timed(work), timed(bare)) for _ in range(REPEATS)]
    return min(one for one, _ in rounds), min(other for _, other in rounds)


def release(  # noqa: C901  a closure for each operation
    runtime: rt.Runtime,
) -> dict[str, tuple[float, float]]:
    """The release path beside the torch and numpy calls it stands for."""
    stream, d2h = runtime.stream("compute"), runtime.stream("d2h")
    x, y, out = (runtime.alloc(name, (64,), torch.float32) for name in ("x", "y", "out"))
    tx, ty, tout = torch.zeros(64), torch.zeros(64), torch.zeros(64)
    pools = rt.Bundle(
        {f"p{i}": runtime.alloc(f"p{i}", (64,), torch.float32) for i in range(20)}
    )
    bare_pools = {name: torch.zeros(64) for name in pools}
    names = [f"f{i}" for i in range(FIELDS)]
    field = rt.Field((64,), torch.int64)
    ring = runtime.frames("step", depth=2, inputs=dict.fromkeys(names, field), outputs={"o": field})
    targets = {name: torch.zeros(64, dtype=torch.int64) for name in names}
    sources = {name: torch.zeros(64, dtype=torch.int64) for name in names}
    arrays = {name: source.numpy() for name, source in sources.items()}
    values = np.arange(48)

    def stage(fields: list[str]) -> Callable[[], None]:
        rows = dict.fromkeys(fields, 48)

        def work() -> None:
            with ring.next().stage() as w:
                for name in fields:
                    w[name][:48] = values
                w.commit(stream, rows=rows)

        return work

    def bare_stage(fields: list[str]) -> Callable[[], None]:
        def work() -> None:
            for name in fields:
                arrays[name][:48] = values
            for name in fields:
                targets[name][:48].copy_(sources[name][:48])

        return work

    def fetch(buffers: dict[str, rt.Buffer]) -> Callable[[], None]:
        def work() -> None:
            views = {name: buffer[:48] for name, buffer in buffers.items()}
            result = runtime.fetch(views, on=stream, rows=7).result()
            for name in views:
                result[name]

        return work

    def bare_fetch(tensors: dict[str, Tensor]) -> Callable[[], None]:
        landing = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

        def at_once() -> None:
            for tensor in tensors.values():
                tensor[:48].numpy().copy()

        def landed() -> None:
            for name, tensor in tensors.items():
                landing[name][:48].copy_(tensor[:48])
            for name in tensors:
                landing[name][:48].numpy().copy()

        return landed if runtime.backend == "cuda" else at_once

    three = {name: runtime.alloc(f"r.{name}", (64,), torch.int64) for name in names[:3]}
    one = {"f0": three["f0"]}
    bare_three = {name: targets[name] for name in three}
    empty: Callable[[], None] = lambda: None  # noqa: E731
    return {
        "launch": beside(
            lambda: runtime.launch(add, stream, x=x, y=y, out=out),
            lambda: add.fn(x=tx, y=ty, out=tout),
        ),
        "launch of a bundle of 20 buffers": beside(
            lambda: runtime.launch(nothing, stream, pools=pools),
            lambda: nothing.fn(pools=bare_pools),
        ),
        "view": beside(lambda: x[:32], lambda: tx[:32]),
        "record": beside(stream.record, empty),
        "record and wait": beside(lambda: d2h.wait(stream.record()), empty),
        "frame": beside(ring.next, empty),
        "frame, stage, commit of 1 field": beside(stage(names[:1]), bare_stage(names[:1])),
        f"frame, stage, commit of {FIELDS} fields": beside(stage(names), bare_stage(names)),
        "fetch and result of 1 view": beside(fetch(one), bare_fetch({"f0": targets["f0"]})),
        "fetch and result of 3 views": beside(fetch(three), bare_fetch(bare_three)),
    }


def figures(runtime: rt.Runtime) -> dict[str, dict[str, float]]:
    """Release costs as they are printed."""
    costs = release(runtime)
    report = {
        name: {
            "rt_us": round(cost, 2),
            "bare_us": round(bare, 2),
            "beyond_us": round(cost - bare, 2),
        }
        for name, (cost, bare) in costs.items()
    }
    one, many = (report[f"frame, stage, commit of {n}"] for n in ("1 field", f"{FIELDS} fields"))
    report["each further field"] = {
        key: round((many[key] - one[key]) / (FIELDS - 1), 2) for key in one
    }
    one, many = (report[f"fetch and result of {n}"] for n in ("1 view", "3 views"))
    report["each further view"] = {key: round((many[key] - one[key]) / 2, 2) for key in one}
    return report


def toy(seed: int, *, checks: bool) -> tuple[float, int]:
    """Seconds and accesses of the toy engine on the simulated device."""
    start = time.process_time()
    runtime = rt.Runtime.create("sim", seed=seed, policy="lazy", checks=checks)
    ToyEngine(runtime, generate(seed)).run()
    return time.process_time() - start, runtime.stats.accesses


def real(seed: int, *, checks: bool) -> tuple[float, int]:
    """The same of the real engine."""
    target = next(target for target in TARGETS if target.name == "engine")
    start = time.process_time()
    runtime = rt.Runtime.create("sim", seed=seed, policy="lazy", checks=checks)
    target.run(runtime, seed)
    return time.process_time() - start, runtime.stats.accesses


def simulated(engine: Callable[..., tuple[float, int]], repeats: int) -> dict[str, float]:
    """Cost of the checks on one engine: over all seeds, the least of alternating runs of each."""
    checked = unchecked = 0.0
    accesses = 0
    for seed in SEEDS:
        accesses += engine(seed, checks=True)[1]
        rounds = [
            (engine(seed, checks=True)[0], engine(seed, checks=False)[0]) for _ in range(repeats)
        ]
        checked += min(seconds for seconds, _ in rounds)
        unchecked += min(seconds for _, seconds in rounds)
    return {
        "us_per_access": round((checked - unchecked) / accesses * 1e6, 1),
        "accesses": accesses,
        "checked_s": round(checked, 3),
        "unchecked_s": round(unchecked, 3),
    }


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    report = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/rt_overhead.py",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cpu": figures(rt.Runtime.create("cpu")),
        "cuda without driver calls": figures(Undriven(torch.device("cpu"))),
        "sim": {"toy engine": simulated(toy, 5), "engine": simulated(real, 3)},
    }
    text = json.dumps(report, indent=2) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
