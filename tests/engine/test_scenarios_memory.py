"""Rows, padding and memory: ways in which other engines wrote where they should not."""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from conformance import (
    GREEDY,
    GRID,
    VOCAB,
    Job,
    assert_balanced,
    assert_same_bits,
    drive,
    make_engine,
    script_for,
    small_model,
    solve,
)

from headrace.worker.rows import CompactRows, ProducerMap

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

pytestmark = pytest.mark.scenarios

SCHEMES = pytest.mark.parametrize("scheme", ["columns", "replay"])
DRAFTS = pytest.mark.parametrize("drafts", ["none", "scripted:3", "mtp:2"])


@pytest.fixture(scope="module")
def model() -> Any:  # noqa: ANN401
    seed = secrets.randbits(32)
    print(f"model of seed {seed}")
    return small_model(seed)


@pytest.fixture
def rng() -> random.Random:
    seed = secrets.randbits(32)
    print(f"events of seed {seed}")
    return random.Random(seed)


def job_of(model: Any, rng: random.Random, length: int, count: int) -> Job:  # noqa: ANN401
    prompt = [rng.randrange(2, VOCAB) for _ in range(length)]
    return solve(model, Job(prompt, replace(GREEDY, max_tokens=count)))


def scripted(jobs: list[Job], drafts: str, rng: random.Random) -> None:
    if drafts.startswith("scripted"):
        for job in jobs:
            job.script = script_for(job, int(drafts[-1]), rng)


@pytest.mark.thinned
@SCHEMES
@pytest.mark.parametrize("budget", [16, 17, 23, 64])
def test_b36_recomputed_tokens_give_the_same_bits_in_any_split(
    model: Any, rng: random.Random, scheme: Any, budget: int  # noqa: ANN401
) -> None:
    # 24 generated tokens are computed again in pieces that the budget decides, on a warm state.
    job = job_of(model, rng, 19, 40)
    engine = make_engine(
        model, state_scheme=scheme, max_num_batched_tokens=budget, async_scheduling=False
    )
    engine.add_request("job-0", job.prompt, job.params)
    while engine.scheduler.waiting or engine.scheduler.running[0].num_output_tokens < 24:
        engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    outputs = []
    while engine.has_work():
        outputs = engine.step() or outputs
    assert_same_bits(job, outputs[-1])
    assert_balanced(engine)


def test_b61_counts_that_arrive_several_steps_late_reach_their_own_sequences(
    rng: random.Random,
) -> None:
    for _ in range(200):
        rows = CompactRows(8, GRID, GRID)
        alive = list(range(1, rng.randrange(4, 8)))
        rows.begin_step((), tuple(alive))
        computed = {seq: rng.randrange(1, 40) for seq in alive}
        for seq, value in computed.items():
            rows.counts["computed"][rows.row(seq)] = value
        order = rng.sample(alive, len(alive))
        produced = ProducerMap(
            seq_ids=tuple(order), num_verify=len(order), known_ends=(),
            num_scheduled=(4,) * len(order),
        )
        counts = {seq: rng.randrange(1, 5) for seq in order}
        next_id = 100
        for _late in range(rng.randrange(1, 4)):
            leaving = tuple(rng.sample(alive, rng.randrange(0, len(alive))))
            alive = [seq for seq in alive if seq not in leaving]
            entering = (next_id,) if len(alive) < 7 else ()
            alive.extend(entering)
            next_id += 1
            rows.begin_step(leaving, entering)
        landed = np.array([counts[seq] for seq in order])
        rows.apply(produced, landed, landed)
        for seq in alive:
            row = rows.row(seq)
            if seq in counts:
                assert rows.counts["computed"][row] == computed[seq] + counts[seq]
                assert rows.counts["accepted"][row] == counts[seq]
            else:
                assert rows.counts["computed"][row] == 0, "a newcomer took another's count"
                assert rows.counts["accepted"][row] == 1


def poison(engine: Engine) -> None:
    """Fill everything that holds nothing: free blocks, scratch buffers, the null block aside."""
    worker, runtime = engine.worker, engine.parts.runtime
    pools = [(worker.pools.k, engine.scheduler.kv_pool), (worker.pools.v, engine.scheduler.kv_pool)]
    for group, pool in enumerate(engine.scheduler.state_pools):
        pools += [(buffer, pool) for buffer in worker.pools.states[group].values()]
    for buffer, pool in pools:
        assert pool is not None
        tensor = runtime.read(buffer).clone()
        for block in pool._free:
            tensor[:, block] = float("nan")
        runtime.write(buffer, tensor)
    for buffer in (worker._hidden, worker._logits):
        runtime.write(buffer, torch.full(tuple(buffer.shape), float("nan"), dtype=buffer.dtype))


@pytest.mark.thinned
@SCHEMES
@DRAFTS
def test_b65_b71_poison_in_free_memory_changes_nothing(
    model: Any, rng: random.Random, scheme: Any, drafts: str  # noqa: ANN401
) -> None:
    jobs = [job_of(model, rng, length, 12) for length in (1, 3, 17, 33)]
    scripted(jobs, drafts, rng)
    engine = make_engine(
        model, state_scheme=scheme, speculative=drafts, num_kv_blocks=30, num_state_blocks=30
    )
    engine.scheduler.policy = None
    step = engine.worker.execute

    def poisoned(output: Any) -> Any:  # noqa: ANN401
        poison(engine)
        return step(output)

    engine.worker.execute = poisoned  # type: ignore[method-assign]
    for job, output in zip(jobs, drive(engine, jobs), strict=True):
        assert_same_bits(job, output)


@pytest.mark.thinned
@SCHEMES
@DRAFTS
def test_b64_b68_a_step_writes_nowhere_but_into_its_own_rows_blocks(
    model: Any, rng: random.Random, scheme: Any, drafts: str  # noqa: ANN401
) -> None:
    # Every draft of some proposals is -1: used as an index it would name the last slot of all.
    jobs = [job_of(model, rng, length, 10) for length in (2, 20, 33)]
    for job in jobs:
        scripted([job], drafts, rng)
        if job.script is not None:
            job.script[1][:] = rng.choice((-1, 0))
    engine = make_engine(
        model, state_scheme=scheme, speculative=drafts, num_kv_blocks=24, num_state_blocks=24,
        async_scheduling=False,
    )
    engine.scheduler.policy = None
    worker, runtime = engine.worker, engine.parts.runtime
    execute = worker.execute

    def watched(output: Any) -> Any:  # noqa: ANN401
        allowed_kv: set[int] = set()
        allowed_state: set[int] = set()
        if output.verify is not None:
            allowed_kv.update(output.verify.kv_table.reshape(-1).tolist())
            allowed_state.update(output.verify.state_tables[0].reshape(-1).tolist())
        for row in output.known:
            allowed_kv.update(row.kv_table.tolist())
            allowed_state.add(row.states[0].target_block)
            allowed_state.update(block for _, block in row.states[0].exports)
        buffers = [(worker.pools.k, allowed_kv), (worker.pools.v, allowed_kv)]
        buffers += [(buffer, allowed_state) for buffer in worker.pools.states[0].values()]
        before = [runtime.read(buffer).clone() for buffer, _ in buffers]
        handle = execute(output)
        for (buffer, allowed), old in zip(buffers, before, strict=True):
            new = runtime.read(buffer)
            changed = (new != old).flatten(2).any(-1).any(0).nonzero()[:, 0].tolist()
            assert set(changed) <= allowed - {0}, f"{buffer.name}: {changed} of {sorted(allowed)}"
        return handle

    worker.execute = watched  # type: ignore[method-assign]
    for job, output in zip(jobs, drive(engine, jobs), strict=True):
        assert_same_bits(job, output)


@DRAFTS
def test_b67_every_buffer_keeps_its_address(
    model: Any, rng: random.Random, drafts: str  # noqa: ANN401
) -> None:
    jobs = [job_of(model, rng, length, 8) for length in (1, 18, 40)]
    scripted(jobs, drafts, rng)
    engine = make_engine(model, speculative=drafts)
    engine.scheduler.policy = None

    def addresses() -> dict[str, int]:
        buffers = engine.parts.runtime._buffers
        return {name: buffer.device_tensor.data_ptr() for name, buffer in buffers.items()}

    before = addresses()
    drive(engine, jobs)
    assert addresses() == before
