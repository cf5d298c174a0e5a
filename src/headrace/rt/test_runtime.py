import numpy as np
import pytest
import torch
from torch import Tensor

from headrace import rt


@rt.op(tokens=rt.Read, out=rt.Write, role="forward")
def double(*, tokens: Tensor, out: Tensor, factor: int = 2) -> None:
    out.copy_(tokens * factor)


@rt.op(state=rt.ReadWrite, role="zero")
def clear(*, state: Tensor, row: int) -> None:
    state[row] = 0


@rt.op(pools=rt.ReadWrite)
def clear_all(*, pools: dict[str, tuple[Tensor, ...]]) -> None:
    for pool in pools["a"]:
        pool.zero_()


@pytest.fixture(params=["cpu", "sim"])
def runtime(request: pytest.FixtureRequest) -> rt.Runtime:
    return rt.Runtime.create(request.param, seed=3, policy="lazy")


def test_step_runs_from_stage_to_ticket(runtime: rt.Runtime) -> None:
    compute, d2h = runtime.stream("compute"), runtime.stream("d2h")
    ring = runtime.frames(
        "step",
        depth=2,
        inputs={"token_ids": rt.Field((8,), torch.int64)},
        outputs={"x": rt.Field((8,), torch.int64)},
    )
    tickets = []
    for step in range(4):
        frame = ring.next()
        with frame.stage() as w:
            w["token_ids"][:5] = np.arange(5) + step
            w.commit(compute, rows={"token_ids": 5})
        runtime.launch(
            double, compute, tokens=frame.inputs["token_ids"][:5], out=frame.outputs["x"][:5]
        )
        event = compute.record()
        tickets.append(
            runtime.fetch({"x": frame.outputs["x"][:5]}, on=d2h, after=event, rows=(step,))
        )
    for step, ticket in enumerate(tickets):
        result = ticket.result()
        assert result is ticket.result()
        assert result.rows == (step,)
        np.testing.assert_array_equal(result["x"], 2 * (np.arange(5) + step))
        with pytest.raises(ValueError, match="read-only"):
            result["x"][0] = 1
    assert runtime.stats.launches == 4
    assert runtime.finish() == ()


def test_what_numpy_has_no_dtype_for_lands_as_the_same_values(runtime: rt.Runtime) -> None:
    compute = runtime.stream("compute")
    buffer = runtime.alloc("b", (5, 3), torch.bfloat16)
    values = torch.randn(5, 3).to(torch.bfloat16)
    runtime.write(buffer, values)
    landed = runtime.fetch({"b": buffer}, on=compute).result()["b"]
    assert landed.dtype == np.float32
    assert torch.equal(torch.from_numpy(landed.copy()), values.float())
    assert runtime.finish() == ()


def test_steady_step_waits_only_for_its_ticket(runtime: rt.Runtime) -> None:
    compute = runtime.stream("compute")
    ring = runtime.frames(
        "step",
        depth=2,
        inputs={"t": rt.Field((4,), torch.int64)},
        outputs={"x": rt.Field((4,), torch.int64)},
    )
    before = runtime.stats.syncs
    for _ in range(6):
        frame = ring.next()
        with frame.stage() as w:
            w["t"][:] = 1
            w.commit(compute)
        runtime.launch(double, compute, tokens=frame.inputs["t"], out=frame.outputs["x"])
        runtime.fetch({"x": frame.outputs["x"]}, on=compute).result()
    assert runtime.stats.syncs - before == 6


def test_stage_is_dead_after_commit() -> None:
    runtime = rt.Runtime.create("cpu")
    frame = runtime.frames(
        "step", depth=1, inputs={"t": rt.Field((4,), torch.int64)}, outputs={}
    ).next()
    with frame.stage() as w:
        w["t"][:] = 1
        w.commit(runtime.stream("compute"))
        with pytest.raises(rt.StageClosedError, match="field 't' was used after commit"):
            w["t"][:] = 2


def test_event_never_recorded_is_an_error() -> None:
    runtime = rt.Runtime.create("cpu")
    with pytest.raises(rt.RtError, match="never recorded"):
        runtime.stream("a").wait(runtime.event())
    with pytest.raises(rt.RtError, match="never recorded"):
        runtime.event().wait_host()


def test_nested_arguments_reach_the_op_as_tensors(runtime: rt.Runtime) -> None:
    compute = runtime.stream("compute")
    a = runtime.alloc("a", (2, 3), torch.float32, fill=7)
    b = runtime.alloc("b", (2, 3), torch.float32, fill=7)
    runtime.launch(clear_all, compute, pools={"a": (a, b)})
    assert runtime.read(a).sum() == 0
    assert runtime.read(b).sum() == 0


def test_plain_tensor_in_a_declared_argument_is_refused(runtime: rt.Runtime) -> None:
    with pytest.raises(rt.EffectError, match="'state' has a declared effect but holds a Tensor"):
        runtime.launch(clear, runtime.stream("compute"), state=torch.zeros(2), row=0)


def test_rows_limit_the_effect(runtime: rt.Runtime) -> None:
    compute = runtime.stream("compute")
    pool = runtime.alloc("pool", (4, 2), torch.float32, fill=1)
    runtime.launch(clear, compute, state=pool.rows(write=[2]), row=2)
    np.testing.assert_array_equal(runtime.read(pool)[:, 0], [1, 1, 0, 1])
    assert runtime.finish() == ()


def test_op_declaration_is_checked() -> None:
    with pytest.raises(rt.EffectError, match="'missing', which is not one of its parameters"):

        @rt.op(missing=rt.Read)
        def nothing(*, x: Tensor) -> None:
            del x

    with pytest.raises(rt.EffectError, match="make every parameter keyword-only"):

        @rt.op(x=rt.Read)
        def positional(x: Tensor) -> None:
            del x


def test_slice_past_the_end_is_refused(runtime: rt.Runtime) -> None:
    buffer = runtime.alloc("b", (4,), torch.int64)
    with pytest.raises(rt.RtError, match="reaches past the 4 rows"):
        buffer[:5]
    with pytest.raises(rt.RtError, match="slices of dimension 0"):
        buffer[0]  # type: ignore[index]


def test_slot_pool_is_first_in_first_out(runtime: rt.Runtime) -> None:
    compute = runtime.stream("compute")
    slots = runtime.slot_pool(2)
    a, b = slots.take(), slots.take()
    with pytest.raises(rt.RtError, match="all 2 slots are taken"):
        slots.take()
    slots.give(b, after=compute.record())
    slots.give(a, after=None)
    assert slots.take(on=compute) == b
    assert slots.take() == a
    with pytest.raises(rt.RtError, match="slot 7 was given back"):
        slots.give(7, after=None)


def test_graph_replays_its_launches(runtime: rt.Runtime) -> None:
    compute = runtime.stream("compute")
    x = runtime.alloc("x", (2,), torch.int64, fill=3)
    y = runtime.alloc("y", (2,), torch.int64)

    def capture(stream: rt.Stream) -> None:
        runtime.launch(double, stream, tokens=x, out=y)
        runtime.launch(double, stream, tokens=y, out=x)

    graph = runtime.graph(("decode", 2), capture, inputs={"x": x}, outputs={"y": y})
    assert runtime.read(y).tolist() == [0, 0]
    graph.replay(compute)
    graph.replay(compute)
    assert runtime.read(x).tolist() == [48, 48]
    assert runtime.graph(("decode", 2), capture) is graph
    assert runtime.finish() == ()


def test_queue_carries_items_between_threads(runtime: rt.Runtime) -> None:
    requests, answers = runtime.queue(1), runtime.queue()

    def serve() -> None:
        while (item := requests.get()) is not None:
            answers.put(item + 1)

    thread = runtime.thread(serve, "server")
    thread.start()
    for item in range(3):
        requests.put(item)
    requests.put(None)
    thread.join()
    assert answers.drain() == [1, 2, 3]
    assert not thread.is_alive


def test_ticket_can_be_dropped_once(runtime: rt.Runtime) -> None:
    compute = runtime.stream("compute")
    ticket = runtime.fetch({"b": runtime.alloc("b", (4,), torch.int64)}, on=compute)
    ticket.drop()
    with pytest.raises(rt.RtError, match="read or dropped before"):
        ticket.result()
    assert runtime.finish() == ()


def test_buffer_name_is_unique(runtime: rt.Runtime) -> None:
    runtime.alloc("b", (4,), torch.int64)
    with pytest.raises(rt.RtError, match="'b' exists already"):
        runtime.alloc("b", (4,), torch.int64)


def test_unknown_backend_is_an_error() -> None:
    with pytest.raises(rt.RtError, match="choose one of cpu, cuda, sim, cuda_checked"):
        rt.Runtime.create("tpu")


def test_a_bundle_is_handed_over_as_its_buffers_and_follows_a_resize(runtime: rt.Runtime) -> None:
    compute = runtime.stream("compute")
    pools = rt.Bundle({name: runtime.alloc(name, (2,), torch.int64, fill=1) for name in "ab"})

    @rt.op(pools=rt.ReadWrite)
    def count(*, pools: dict[str, Tensor]) -> None:
        for pool in pools.values():
            pool.add_(len(pool))

    runtime.launch(count, compute, pools=pools)
    runtime.fetch(pools, on=compute).result()
    runtime.resize(pools["a"], (3,), fill=0)
    runtime.launch(count, compute, pools=pools)
    results = runtime.fetch(pools, on=compute).result()
    assert results["a"].tolist() == [3, 3, 3]
    assert results["b"].tolist() == [5, 5]
    assert runtime.finish() == ()


def test_a_bundle_never_changes_and_belongs_to_one_frame(runtime: rt.Runtime) -> None:
    fields = {"x": rt.Field((4,), torch.int64)}
    ring = runtime.frames("step", depth=2, inputs=fields, outputs={})
    one, other = ring.next(), ring.next()
    with pytest.raises(rt.RtError, match="does not change"):
        one.inputs["x"] = other.inputs["x"]
    with pytest.raises(rt.RtError, match="frames step"):
        rt.Bundle({"one": one.inputs["x"], "other": other.inputs["x"]})
