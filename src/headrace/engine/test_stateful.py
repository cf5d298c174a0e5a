"""Pools, prefix cache and scheduler as hypothesis drives them; a failure shrinks to few rules.

`test_scheduler.py` has the device that checks every read and write and long random lives; here
hypothesis chooses what clients do and when results come, and finds the shortest story that breaks
conservation, single ownership or progress.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.engine.block_pool import NULL_BLOCK, BlockPool, RetireQueue
from headrace.engine.sequence import Status
from headrace.worker.state_scheme import Columns, Replay


def _simulation() -> Any:  # noqa: ANN401 - a test module, which has no stubs
    """The scheduler's simulated device, from the test beside this one."""
    name = "headrace_scheduler_simulation"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, Path(__file__).with_name("test_scheduler.py")
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


KEYS = st.sampled_from([b"%d" % number for number in range(6)])


class PoolMachine(RuleBasedStateMachine):
    """A pool and its retire queue against a list of references."""

    owned: Bundle[int] = Bundle("owned")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool("kv", 7)
        self.queue = RetireQueue()
        self.refs: list[int] = []
        self.retired = 0
        self.content: dict[int, bytes] = {}
        self.protected: list[bytes] = []

    @rule(target=owned, count=st.integers(1, 4), key=KEYS)
    def allocate(self, count: int, key: bytes) -> Any:  # noqa: ANN401
        available = self.pool.num_available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > available)
        for block in blocks or []:
            assert block != NULL_BLOCK
            assert block not in self.refs, "a block is handed out while it has an owner"
            self.content[block] = key
        self.refs += blocks or []
        return multiple(*blocks or [])

    @rule(block=owned, is_generated=st.booleans())
    def publish(self, block: int, is_generated: bool) -> None:  # noqa: FBT001
        if block in self.refs:
            self.pool.publish(block, self.content[block], is_generated=is_generated)

    @rule(block=owned)
    def publish_rung(self, block: int) -> None:
        if block in self.refs:
            self.pool.publish_rung(block, self.content[block])

    @rule(target=owned, count=st.integers(1, 3), key=KEYS)
    def allocate_for_rungs(self, count: int, key: bytes) -> Any:  # noqa: ANN401
        others = dict(self.pool._evictable)
        blocks = self.pool.allocate_for_rungs(min(count, self.pool.room_for_rungs(0)))
        assert self.pool._evictable == others, "so small a pool has no share for rungs"
        self.content.update(dict.fromkeys(blocks, key))
        self.refs += blocks
        return multiple(*blocks)

    @rule(key=KEYS)
    def promote(self, key: bytes) -> None:
        self.pool.promote(key)

    @rule(target=owned, key=KEYS)
    def hit(self, key: bytes) -> Any:  # noqa: ANN401
        entry = self.pool.lookup(key)
        if entry is None:
            return multiple()
        assert self.content[entry.block] == key, "a lookup finds other tokens"
        self.pool.fork(entry.block)
        self.refs.append(entry.block)
        return entry.block

    @rule(block=consumes(owned), steps=st.integers(0, 2))
    def release(self, block: int, steps: int) -> None:
        if block in self.refs:
            # The queue holds the reference until the step has retired.
            last_step = self.retired + steps
            self.queue.release(self.pool, [block], last_step=last_step, retired=self.retired)
            self.refs.remove(block)

    @rule()
    def retire(self) -> None:
        self.retired += 1
        self.queue.retire(self.retired)

    @rule(key=KEYS)
    def protect(self, key: bytes) -> None:
        self.pool.protect(key)
        self.protected.append(key)

    @precondition(lambda self: self.protected)
    @rule(data=st.data())
    def unprotect(self, data: Any) -> None:  # noqa: ANN401
        key = data.draw(st.sampled_from(self.protected))
        self.protected.remove(key)
        self.pool.unprotect(key)

    @precondition(lambda self: self.protected)
    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        kept = {key: self.pool.lookup(key) for key in self.protected}
        blocks = self.pool.allocate(count)
        for key, entry in kept.items():
            assert self.pool.lookup(key) == entry, "a protected block was evicted"
        self.pool.free(blocks or [])

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()

    @invariant()
    def nothing_is_lost(self) -> None:
        owners: dict[int, int] = {}
        self.queue.owned(self.pool, owners)
        for block in self.refs:
            owners[block] = owners.get(block, 0) + 1
        self.pool.check(owners)
        assert self.pool.num_protected == len(set(self.protected))

    def teardown(self) -> None:
        self.pool.free(self.refs)
        self.queue.retire(self.retired + 3)
        for key in self.protected:
            self.pool.unprotect(key)
        self.pool.clear_cache()
        assert self.pool.num_free == self.pool.num_usable


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler before the simulated device: clients, operators and results in any order."""

    @initialize(data=st.data())
    def build(self, data: Any) -> None:  # noqa: ANN401
        draw, simulation = data.draw, _simulation()
        drafts = draw(st.sampled_from((0, 1, 3)), label="drafts")
        unit, block = draw(st.sampled_from(((4, 2), (4, 4), (8, 2))), label="unit, block")
        scheme: Columns | Replay = Replay(unit=unit, max_drafts=drafts, interval=unit)
        if unit > drafts and draw(st.booleans(), label="columns"):
            scheme = Columns(unit=unit, max_drafts=drafts)
        if isinstance(scheme, Replay) and unit <= drafts:
            raise AssertionError(f"{unit=} {drafts=}")
        self.bench = simulation.Bench(
            draw(st.integers(0, 2**16), label="contents"),
            simulation.Setup(
                scheme=scheme, grid=4, block_size=block, max_model_len=20,
                max_num_seqs=draw(st.integers(1, 4), label="rows"),
                budget=draw(st.sampled_from((4, 6, 16)), label="budget"),
                depth=draw(st.integers(1, 3), label="depth"),
                num_groups=draw(st.integers(1, 2), label="groups"),
                has_kv=True, is_enabled=draw(st.booleans(), label="cache"),
                is_bitwise=draw(st.booleans(), label="bitwise"),
                retention=draw(st.sampled_from(("latest", "all")), label="retention"),
                spare_kv=draw(st.sampled_from((0, 3, 30)), label="KV"),
                spare_states=draw(st.sampled_from((0, 2, 20)), label="states"),
            ),
        )

    @rule()
    def arrive(self) -> None:
        """One prompt, perhaps with marks, a pin, a salt and several completions."""
        if len(self.bench.scheduler.waiting) < 12:
            self.bench.arrive()

    @rule(index=st.integers(0, 20))
    def abort(self, index: int) -> None:
        live = self.bench.live()
        if live:
            seq = live[index % len(live)]
            seq.is_aborted = True
            self.bench.scheduler.finish(seq, "abort")

    @rule(index=st.integers(0, 20))
    def preempt(self, index: int) -> None:
        running = self.bench.scheduler.running
        if running:
            self.bench.scheduler.preempt(running[index % len(running)])

    @rule()
    def fork(self) -> None:
        self.bench.fork()

    @rule(name=st.sampled_from("abc"))
    def release_pin(self, name: str) -> None:
        self.bench.cache.release(name)

    @rule()
    def reset(self) -> None:
        self.bench.scheduler.reset_prefix_cache()

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.bench.step():
                assert not self.bench.scheduler.has_work(), f"stuck: {self.bench.describe()}"

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check()

    @invariant()
    def forks_have_one_leader(self) -> None:
        if hasattr(self, "bench"):
            for family in self.bench.scheduler._families:
                leader = family.leader
                assert leader is not None
                assert leader.status is Status.RUNNING
                assert leader.high < leader.num_prompt_tokens

    def teardown(self) -> None:
        """Everything ends and everything comes back."""
        if hasattr(self, "bench"):
            self.bench.drain()
            self.bench.check_empty()


QUICK = settings(
    max_examples=20, stateful_step_count=25, deadline=None, database=None, print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
THOROUGH = settings(QUICK, max_examples=400, stateful_step_count=60)


@pytest.mark.parametrize("machine", [PoolMachine, SchedulerMachine])
def test_no_story_breaks_the_books(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.full
@pytest.mark.parametrize("machine", [PoolMachine, SchedulerMachine])
def test_no_long_story_breaks_the_books(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=THOROUGH)


@pytest.mark.parametrize(
    ("machine", "owner", "name", "broken"),
    [
        (PoolMachine, RetireQueue, "release", lambda *_, **__: None),
        (PoolMachine, BlockPool, "protect", lambda self, key: self._protected.update({key: 1})),
        (SchedulerMachine, BlockPool, "fork", lambda *_: None),
    ],
)
def test_a_broken_rule_is_found(
    machine: type[RuleBasedStateMachine], owner: type, name: str, broken: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, broken)
    # Found is enough: nobody reads the shortest story.
    found = settings(QUICK, max_examples=200, phases=[Phase.generate])
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine, settings=found)
