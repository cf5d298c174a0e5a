"""Collectives between threads, and what the checker sees of them."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace import rt


def on_each(groups: tuple[rt.LocalGroup, ...], work: Callable[[rt.LocalGroup], None]) -> None:
    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def attached(size: int) -> tuple[rt.LocalGroup, ...]:
    groups = rt.local_groups(size)
    for group in groups:
        group.attach(rt.Runtime.create("cpu"))
    return groups


def test_all_ranks_get_the_parts_in_the_order_of_ranks() -> None:
    found: dict[int, Tensor] = {}

    def work(group: rt.LocalGroup) -> None:
        found[group.rank] = group.all_gather(torch.full((2, 3), float(group.rank)))

    on_each(attached(3), work)
    for gathered in found.values():
        assert gathered.shape == (3, 2, 3)
        assert gathered[:, 0, 0].tolist() == [0.0, 1.0, 2.0]


def test_a_sum_is_made_in_the_order_of_ranks() -> None:
    # In any other order the small number survives, or the large one does not go.
    parts = [1e8, -1e8, 1.0]
    found: dict[int, float] = {}

    def work(group: rt.LocalGroup) -> None:
        for _ in range(3):  # A rank's next part does not overtake the others' last one.
            found[group.rank] = float(group.all_reduce(torch.tensor([parts[group.rank]])))

    on_each(attached(3), work)
    assert found == {0: 1.0, 1: 1.0, 2: 1.0}


def test_who_waits_for_a_rank_that_does_not_come_hears_of_it() -> None:
    group, _ = rt.local_groups(2, timeout_s=0.05)
    group.attach(rt.Runtime.create("cpu"))
    with pytest.raises(rt.RtError, match="rank 0 waited in a collective and others did not come"):
        group.all_gather(torch.zeros(1))


def test_a_group_is_of_one_runtime() -> None:
    group = rt.local_groups(1)[0]
    with pytest.raises(rt.RtError, match="before its group was attached"):
        group.all_gather(torch.zeros(1))
    group.attach(rt.Runtime.create("cpu"))
    with pytest.raises(rt.RtError, match="attached before"):
        group.attach(rt.Runtime.create("cpu"))


@rt.op(value=rt.ReadWrite, exchange=rt.ReadWrite)
def add_parts(*, value: Tensor, exchange: Tensor, group: rt.Group) -> None:
    del exchange
    value.copy_(group.all_reduce(value.clone()))


@rt.op(value=rt.ReadWrite)
def add_parts_in_secret(*, value: Tensor, group: rt.Group) -> None:
    value.copy_(group.all_reduce(value.clone()))


def simulated() -> tuple[rt.Runtime, rt.LocalGroup, rt.Buffer, rt.Buffer, rt.Buffer]:
    """A device that meets nobody, its group's memory, and two values."""
    runtime = rt.Runtime.create("sim", seed=1, policy="random")
    group = rt.local_groups(1)[0]
    exchange = group.attach(runtime)
    one, two = (runtime.alloc(name, (4,), torch.float32) for name in ("one", "two"))
    return runtime, group, exchange, one, two


@pytest.mark.sim
def test_collectives_on_one_stream_are_clean() -> None:
    runtime, group, exchange, one, two = simulated()
    for value in (one, two, one):
        runtime.launch(
            add_parts, runtime.stream("compute"), value=value, exchange=exchange, group=group
        )
    assert runtime.finish() == ()


@pytest.mark.sim
def test_collectives_that_nothing_orders_are_a_race() -> None:
    runtime, group, exchange, one, two = simulated()
    for name, value in (("a", one), ("b", two)):
        runtime.launch(
            add_parts, runtime.stream(name), value=value, exchange=exchange, group=group
        )
    reports = runtime.finish()
    assert {report.buffer for report in reports} == {"exchange"}


@pytest.mark.sim
def test_a_collective_that_its_op_does_not_declare_is_reported() -> None:
    runtime, group, _, one, _ = simulated()
    runtime.launch(add_parts_in_secret, runtime.stream("compute"), value=one, group=group)
    kinds = {(report.kind, report.buffer) for report in runtime.finish()}
    assert ("UNDECLARED-WRITE", "exchange") in kinds


@pytest.mark.sim
def test_a_captured_collective_is_checked_at_every_replay() -> None:
    runtime, group, exchange, one, two = simulated()
    graph = runtime.graph(
        "sum",
        lambda stream: runtime.launch(
            add_parts, stream, value=one, exchange=exchange, group=group
        ),
    )
    graph.replay(runtime.stream("a"))
    assert runtime.reports == ()
    runtime.launch(add_parts, runtime.stream("b"), value=two, exchange=exchange, group=group)
    assert {report.buffer for report in runtime.finish()} == {"exchange"}
