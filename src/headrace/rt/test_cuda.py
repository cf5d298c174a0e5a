"""The same steps on a device; by name only."""

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace import rt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@rt.op(tokens=rt.Read, out=rt.Write, role="forward")
def double(*, tokens: Tensor, out: Tensor) -> None:
    out.copy_(tokens * 2)


@pytest.mark.parametrize("backend", ["cuda", "cuda_checked"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight_keep_their_values(backend: str, depth: int) -> None:
    runtime = rt.Runtime.create(backend, device="cuda", seed=depth)
    h2d, compute, d2h = (runtime.stream(name) for name in ("h2d", "compute", "d2h"))
    ring = runtime.frames(
        "step",
        depth=depth,
        inputs={"t": rt.Field((1 << 16,), torch.int64)},
        outputs={"x": rt.Field((1 << 16,), torch.int64)},
    )
    tickets = []
    for step in range(20):
        frame = ring.next()
        with frame.stage() as w:
            w["t"][:] = step
            w.commit(h2d)
        compute.wait(h2d.record())
        runtime.launch(double, compute, tokens=frame.inputs["t"], out=frame.outputs["x"])
        event = compute.record()
        tickets.append(runtime.fetch({"x": frame.outputs["x"]}, on=d2h, after=event, rows=(step,)))
        if len(tickets) > depth:
            result = tickets.pop(0).result()
            assert isinstance(result.rows, tuple)
            np.testing.assert_array_equal(result["x"], 2 * result.rows[0])
    for ticket in tickets:
        ticket.drop()
    assert runtime.finish() == ()


@pytest.mark.parametrize("backend", ["cuda", "cuda_checked"])
def test_graph_replays(backend: str) -> None:
    runtime = rt.Runtime.create(backend, device="cuda")
    compute = runtime.stream("compute")
    x = runtime.alloc("x", (4,), torch.int64, fill=3)
    y = runtime.alloc("y", (4,), torch.int64)
    runtime.launch(double, compute, tokens=x, out=y)
    graph = runtime.graph("g", lambda stream: runtime.launch(double, stream, tokens=x, out=y))
    runtime.write(x, torch.tensor([1, 2, 3, 4]))
    graph.replay(compute)
    assert runtime.read(y).tolist() == [2, 4, 6, 8]
    assert runtime.finish() == ()


def test_missing_wait_is_reported_on_the_device() -> None:
    runtime = rt.Runtime.create("cuda_checked", device="cuda")
    x = runtime.alloc("x", (4,), torch.int64)
    y = runtime.alloc("y", (4,), torch.int64)
    runtime.launch(double, runtime.stream("a"), tokens=x, out=y)
    runtime.launch(double, runtime.stream("b"), tokens=x, out=y)
    assert {report.kind for report in runtime.finish()} == {"UNORDERED-WRITE-WRITE"}
