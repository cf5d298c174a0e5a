"""The checker's rules, each broken once and kept once, in every policy."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace import rt

pytestmark = pytest.mark.sim

POLICIES: tuple[rt.Policy, ...] = ("eager", "lazy", "random")


@rt.op(x=rt.ReadWrite, role="forward")
def bump(*, x: Tensor) -> None:
    x.add_(1)


@rt.op(x=rt.Read, y=rt.Write, role="forward")
def copy_op(*, x: Tensor, y: Tensor) -> None:
    y.copy_(x.clone())


@rt.op(pool=rt.ReadWrite, role="forward")
def write_row(*, pool: Tensor, row: int) -> None:
    pool[row] = 5


@rt.op(pool=rt.ReadWrite, out=rt.Write)
def read_row(*, pool: Tensor, out: Tensor, row: int) -> None:
    out.copy_(pool[row])


Body = Callable[[rt.Runtime], None]


def kinds(body: Body, policy: rt.Policy = "lazy", seed: int = 0) -> set[str]:
    runtime = rt.Runtime.create("sim", seed=seed, policy=policy)
    body(runtime)
    return {report.kind for report in runtime.finish()}


@pytest.mark.parametrize("policy", POLICIES)
def test_unordered_streams_are_reported_with_both_stacks(policy: rt.Policy) -> None:
    runtime = rt.Runtime.create("sim", seed=1, policy=policy)
    x = runtime.alloc("x", (4,), torch.int64)
    runtime.launch(bump, runtime.stream("a"), x=x)
    runtime.launch(bump, runtime.stream("b"), x=x)
    reports = runtime.finish()
    assert {report.kind for report in reports} == {
        "UNORDERED-WRITE-READ",
        "UNORDERED-WRITE-WRITE",
        "UNORDERED-READ-WRITE",
    }
    report = reports[0]
    assert report.buffer == "x"
    assert "test_sim.py" in report.site_a
    assert "test_sim.py" in report.site_b
    assert report.site_a != report.site_b
    assert report.first is not None
    assert (report.first.actor, report.second.actor) == ("stream a", "stream b")


@pytest.mark.parametrize("policy", POLICIES)
def test_an_event_orders_streams(policy: rt.Policy) -> None:
    def body(runtime: rt.Runtime) -> None:
        x = runtime.alloc("x", (4,), torch.int64)
        a, b = runtime.stream("a"), runtime.stream("b")
        runtime.launch(bump, a, x=x)
        b.wait(a.record())
        runtime.launch(bump, b, x=x)
        assert runtime.read(x).tolist() == [2, 2, 2, 2]

    assert kinds(body, policy) == set()


def test_an_event_recorded_too_early_does_not_order() -> None:
    def body(runtime: rt.Runtime) -> None:
        x = runtime.alloc("x", (4,), torch.int64)
        a, b = runtime.stream("a"), runtime.stream("b")
        event = a.record()
        runtime.launch(bump, a, x=x)
        b.wait(event)
        runtime.launch(bump, b, x=x)

    assert "UNORDERED-WRITE-WRITE" in kinds(body)


def test_distinct_rows_do_not_conflict() -> None:
    def body(runtime: rt.Runtime, rows: tuple[int, int]) -> None:
        pool = runtime.alloc("pool", (4, 2), torch.int64)
        for name, row in zip("ab", rows, strict=True):
            runtime.launch(write_row, runtime.stream(name), pool=pool.rows(write=[row]), row=row)

    assert kinds(lambda runtime: body(runtime, (1, 2))) == set()
    assert kinds(lambda runtime: body(runtime, (1, 1))) == {"UNORDERED-WRITE-WRITE"}


def test_landing_read_before_its_event_is_reported() -> None:
    def body(runtime: rt.Runtime) -> None:
        x = runtime.alloc("x", (4,), torch.int64, fill=7)
        landing = runtime.raw.host_array("counts", (4,), torch.int64)
        runtime.raw.copy_to_host(landing, x, runtime.stream("d2h"))
        landing.array[:2].sum()

    assert kinds(body) == {"UNORDERED-WRITE-READ"}


def test_unread_landing_is_reported_even_when_ordered() -> None:
    def body(runtime: rt.Runtime) -> None:
        x = runtime.alloc("x", (4,), torch.int64, fill=7)
        landing = runtime.raw.host_array("counts", (4,), torch.int64)
        for _ in range(2):
            runtime.raw.copy_to_host(landing, x, runtime.stream("d2h"))
            runtime.stream("d2h").record().wait_host()

    assert kinds(body) == {"OVERWRITES-UNREAD"}


def test_source_written_after_the_copy_was_enqueued_is_seen_by_clock_and_canary() -> None:
    def body(runtime: rt.Runtime) -> None:
        x = runtime.alloc("x", (4,), torch.int64)
        table = runtime.raw.host_array("table", (4,), torch.int64, kind="staging_slot")
        table.array[:] = 1
        runtime.raw.copy_to_device(x, table, runtime.stream("h2d"))
        table.array[2] = 9

    assert kinds(body) == {"UNORDERED-READ-WRITE", "CANARY-SOURCE"}


def test_poll_is_a_timing_branch() -> None:
    def body(runtime: rt.Runtime) -> None:
        runtime.raw.poll(runtime.stream("a").record())

    assert kinds(body) == {"TIMING-BRANCH"}


def test_wait_without_record_is_reported() -> None:
    def body(runtime: rt.Runtime) -> None:
        runtime.stream("a").wait(runtime.event())

    assert kinds(body) == {"NEVER-RECORDED"}


def test_duplicate_rows_are_reported_but_padding_is_not() -> None:
    def body(runtime: rt.Runtime, null_row: int | None) -> None:
        pool = runtime.alloc("pool", (4, 2), torch.int64, null_row=null_row)
        stream = runtime.stream("a")
        runtime.launch(write_row, stream, pool=pool.rows(write=[0, 0, 1]), row=1)

    assert kinds(lambda runtime: body(runtime, None)) == {"DUPLICATE-ROWS"}
    assert kinds(lambda runtime: body(runtime, 0)) == set()


def test_one_memory_in_two_arguments_is_reported() -> None:
    def body(runtime: rt.Runtime) -> None:
        x = runtime.alloc("x", (8,), torch.int64)
        runtime.launch(copy_op, runtime.stream("a"), x=x[0:4], y=x[3:7])

    assert "ALIASED-ARGUMENTS" in kinds(body)


def test_halves_of_one_memory_may_be_two_arguments() -> None:
    def body(runtime: rt.Runtime) -> None:
        x = runtime.alloc("x", (8,), torch.int64)
        runtime.launch(copy_op, runtime.stream("a"), x=x[0:4], y=x[4:8])

    assert kinds(body) == set()


def test_write_to_an_argument_declared_as_read_is_reported() -> None:
    @rt.op(x=rt.Read)
    def sneak(*, x: Tensor) -> None:
        x.add_(1)

    def body(runtime: rt.Runtime) -> None:
        runtime.launch(sneak, runtime.stream("a"), x=runtime.alloc("x", (4,), torch.int64))

    assert kinds(body) == {"UNDECLARED-WRITE"}


def test_write_in_inference_mode_is_seen_too() -> None:
    @rt.op(x=rt.Read)
    def sneak(*, x: Tensor) -> None:
        with torch.inference_mode():
            x.add_(1)

    def body(runtime: rt.Runtime) -> None:
        with torch.inference_mode():
            x = runtime.alloc("x", (4,), torch.int64)
        runtime.launch(sneak, runtime.stream("a"), x=x)

    assert kinds(body) == {"UNDECLARED-WRITE"}


def test_write_outside_the_declared_rows_is_reported() -> None:
    def body(runtime: rt.Runtime) -> None:
        pool = runtime.alloc("pool", (4, 2), torch.int64)
        runtime.launch(write_row, runtime.stream("a"), pool=pool.rows(write=[1]), row=2)

    # Run a second time with other values in row 2, the launch overwrites them just the same.
    assert kinds(body) == {"UNDECLARED-WRITE"}


def test_read_outside_the_declared_rows_is_reported() -> None:
    def body(runtime: rt.Runtime, row: int) -> None:
        pool = runtime.alloc("pool", (4, 2), torch.float32, fill=3)
        out = runtime.alloc("out", (2,), torch.float32)
        runtime.launch(read_row, runtime.stream("a"), pool=pool.rows(read=[1]), out=out, row=row)
        assert runtime.read(out).tolist() == [3, 3]

    assert kinds(lambda runtime: body(runtime, 1)) == set()
    assert kinds(lambda runtime: body(runtime, 2)) == {"UNDECLARED-ROW-READ"}


def test_memory_reached_through_a_closure_is_reported() -> None:
    leaked: list[Tensor] = []

    @rt.op(x=rt.Read)
    def leak(*, x: Tensor) -> None:
        leaked.append(x)

    @rt.op(y=rt.Write)
    def use(*, y: Tensor) -> None:
        y.copy_(leaked[0])

    def body(runtime: rt.Runtime) -> None:
        x = runtime.alloc("x", (4,), torch.int64)
        y = runtime.alloc("y", (4,), torch.int64)
        runtime.launch(leak, runtime.stream("a"), x=x)
        runtime.launch(use, runtime.stream("a"), y=y)

    assert kinds(body) == {"UNDECLARED-READ"}


def test_a_buffer_without_memory_is_not_taken_for_other_empty_tensors() -> None:
    @rt.op(x=rt.ReadWrite)
    def use(*, x: Tensor) -> None:
        x.add_(torch.cat((x[:0], torch.zeros(0, dtype=x.dtype))).sum())

    def body(runtime: rt.Runtime) -> None:
        runtime.alloc("nothing", (0, 4), torch.int64)
        x = runtime.alloc("x", (4,), torch.int64)
        runtime.launch(use, runtime.stream("a"), x=x)

    assert kinds(body) == set()


def test_torch_write_outside_a_launch_is_reported() -> None:
    leaked: list[Tensor] = []

    @rt.op(x=rt.Read)
    def leak(*, x: Tensor) -> None:
        leaked.append(x)

    def body(runtime: rt.Runtime) -> None:
        runtime.launch(leak, runtime.stream("a"), x=runtime.alloc("x", (4,), torch.int64))
        runtime.synchronize()
        leaked[0].add_(1)

    assert kinds(body) == {"OUTSIDE-LAUNCH"}


def test_mutable_values_are_refused() -> None:
    @rt.op(x=rt.Read)
    def step(*, x: Tensor, lengths: object) -> None:
        del x, lengths

    runtime = rt.Runtime.create("sim")
    x = runtime.alloc("x", (4,), torch.int64)
    for value in ([1], np.zeros(2), {"a": 1}, (1, [2])):
        with pytest.raises(rt.EffectError, match="the host may change"):
            runtime.launch(step, runtime.stream("a"), x=x, lengths=value)
    with pytest.raises(rt.EffectError, match="no declared effect"):
        runtime.launch(step, runtime.stream("a"), x=x, lengths=x)
    runtime.launch(step, runtime.stream("a"), x=x, lengths=(1, 2))


def test_plain_tensor_changed_while_queued_is_reported() -> None:
    @rt.op(x=rt.Write)
    def step(*, x: Tensor, weights: Tensor) -> None:
        x.copy_(weights)

    def body(runtime: rt.Runtime) -> None:
        weights = torch.zeros(4)
        x = runtime.alloc("x", (4,), torch.float32)
        runtime.launch(step, runtime.stream("a"), x=x, weights=weights)
        weights.add_(1)

    assert kinds(body) == {"MUTATED-ARGUMENT"}


def test_stage_used_after_commit_is_reported_and_raises() -> None:
    runtime = rt.Runtime.create("sim")
    frame = runtime.frames(
        "step", depth=2, inputs={"t": rt.Field((4,), torch.int64)}, outputs={}
    ).next()
    with frame.stage() as w:
        w["t"][:] = 1
        w.commit(runtime.stream("a"))
        with pytest.raises(rt.StageClosedError):
            w["t"][:] = 0
    (report,) = runtime.finish()
    assert report.kind == "USE-AFTER-COMMIT"
    assert report.first is not None


def test_array_kept_from_a_stage_is_still_watched() -> None:
    def body(runtime: rt.Runtime) -> None:
        frame = runtime.frames(
            "step", depth=2, inputs={"t": rt.Field((4,), torch.int64)}, outputs={}
        ).next()
        with frame.stage() as w:
            kept = w["t"]
            kept[:] = 1
            w.commit(runtime.stream("a"))
        kept[:] = 0

    assert kinds(body) == {"UNORDERED-READ-WRITE", "CANARY-SOURCE"}


def test_replay_on_replaced_memory_is_reported() -> None:
    def body(runtime: rt.Runtime) -> None:
        x = runtime.alloc("x", (4,), torch.int64)
        graph = runtime.graph("g", lambda stream: runtime.launch(bump, stream, x=x))
        graph.replay(runtime.stream("a"))
        runtime.resize(x, (8,))
        graph.replay(runtime.stream("a"))

    assert kinds(body) == {"STALE-GENERATION"}


def test_rotating_memory_in_a_graph_is_reported() -> None:
    def body(runtime: rt.Runtime) -> None:
        ring = runtime.frames("s", depth=2, inputs={"t": rt.Field((4,), torch.int64)}, outputs={})
        x = ring.next().inputs["t"]
        runtime.graph("g", lambda stream: runtime.launch(bump, stream, x=x)).replay(
            runtime.stream("a")
        )

    assert kinds(body) == {"ROTATING-IN-GRAPH"}


def test_replay_takes_the_rows_of_this_replay() -> None:
    def body(runtime: rt.Runtime) -> None:
        pool = runtime.alloc("pool", (4, 2), torch.int64)
        graph = runtime.graph(
            "g",
            lambda stream: runtime.launch(write_row, stream, pool=pool.rows(write=[1]), row=1),
        )
        runtime.launch(write_row, runtime.stream("b"), pool=pool.rows(write=[2]), row=2)
        graph.replay(runtime.stream("a"), rows={"pool": (None, [1])})

    assert kinds(body) == set()


def test_freed_memory_keeps_its_clocks() -> None:
    def body(runtime: rt.Runtime) -> None:
        x = runtime.alloc("x", (4,), torch.int64)
        runtime.launch(bump, runtime.stream("a"), x=x)
        runtime.raw.free(x)
        y = runtime.alloc("y", (4,), torch.int64, fill=None)
        runtime.launch(bump, runtime.stream("b"), x=y)

    assert "UNORDERED-WRITE-WRITE" in kinds(body)


def test_kernel_that_reads_host_memory_races_with_the_host() -> None:
    def body(runtime: rt.Runtime) -> None:
        table = runtime.raw.host_array("table", (4,), torch.int64, kind="staging_slot")
        out = runtime.alloc("out", (4,), torch.int64)
        runtime.launch(copy_op, runtime.stream("a"), x=runtime.raw.mapped(table), y=out)
        table.array[0] = 1

    assert kinds(body) == {"UNORDERED-READ-WRITE"}


def test_lost_ticket_is_reported() -> None:
    def body(runtime: rt.Runtime) -> None:
        runtime.fetch({"x": runtime.alloc("x", (4,), torch.int64)}, on=runtime.stream("a"))

    assert kinds(body) == {"LOST-TICKET"}


def test_row_map_that_can_change_is_refused() -> None:
    runtime = rt.Runtime.create("sim")
    x = runtime.alloc("x", (4,), torch.int64)
    with pytest.raises(rt.RtError, match="pass a tuple"):
        runtime.fetch({"x": x}, on=runtime.stream("a"), rows=[1])  # type: ignore[arg-type]


def test_threads_are_ordered_by_queues_alone() -> None:
    def body(runtime: rt.Runtime, *, through_queue: bool) -> None:
        memory = runtime.raw.host_array("shared", (2,), torch.int64)
        handed = runtime.queue()

        def reader() -> None:
            handed.get()
            memory.array[0].item() if through_queue else memory.array[1:].sum()

        thread = runtime.thread(reader, "reader")
        thread.start()
        if through_queue:
            memory.array[0] = 1
            handed.put(0)
        else:
            handed.put(0)
            memory.array[1] = 1
        thread.join()

    assert kinds(lambda runtime: body(runtime, through_queue=True)) == set()
    assert kinds(lambda runtime: body(runtime, through_queue=False)) != set()


def test_thread_that_nobody_announced_is_ordered_after_nothing() -> None:
    def body(runtime: rt.Runtime) -> None:
        memory = runtime.raw.host_array("shared", (2,), torch.int64)
        memory.array[0] = 1
        thread = threading.Thread(target=memory.array.tolist)
        thread.start()
        thread.join()

    assert kinds(body) == {"UNORDERED-WRITE-READ"}


def test_object_of_two_threads_is_watched_by_field() -> None:
    class Request:
        length = 0
        state = 0

    def body(runtime: rt.Runtime, field: str) -> None:
        request = runtime.watch("request", Request())
        thread = runtime.thread(lambda: setattr(request, field, 1), "other")
        thread.start()
        request.length = 2
        thread.join()

    assert kinds(lambda runtime: body(runtime, "state")) == set()
    assert kinds(lambda runtime: body(runtime, "length")) == {"UNORDERED-WRITE-WRITE"}


def test_deadlock_is_a_report() -> None:
    runtime = rt.Runtime.create("sim")
    with pytest.raises(rt.DeadlockError):
        runtime.queue().get()
    assert {report.kind for report in runtime.finish()} == {"DEADLOCK"}


def test_one_seed_is_one_run() -> None:
    def run() -> tuple[str, list[tuple[int, int]]]:
        runtime = rt.Runtime.create("sim", seed=11, policy="random")
        x = runtime.alloc("x", (64,), torch.int64)
        for index in range(20):
            runtime.launch(bump, runtime.stream("ab"[index % 2]), x=x)
        reports = runtime.finish()
        times = [(one.begun, one.ended) for one in runtime.operations]  # type: ignore[attr-defined]
        return "\n".join(map(str, reports)), times

    assert run() == run()


def test_copy_lands_in_pieces_and_late() -> None:
    runtime = rt.Runtime.create("sim", seed=2, policy="lazy", checks=False)
    x = runtime.alloc("x", (4,), torch.int64, fill=7)
    landing = runtime.raw.host_array("counts", (4,), torch.int64)
    runtime.raw.copy_to_host(landing, x, runtime.stream("d2h"))
    assert landing.array.tolist() == [0, 0, 0, 0]
    runtime.synchronize()
    assert landing.array.tolist() == [7, 7, 7, 7]


def test_overlaps_are_counted_by_state_kind() -> None:
    runtime = rt.Runtime.create("sim")
    x = runtime.alloc("x", (4,), torch.int64, kind="recurrent_state")
    runtime.launch(bump, runtime.stream("a"), x=x)
    runtime.launch(bump, runtime.stream("a"), x=x)
    assert runtime.pairs == {("recurrent_state", "forward with forward")}  # type: ignore[attr-defined]
