"""Ways in which asynchronous scheduling, preemption, aborts and rows went wrong elsewhere.

Named after their entries, B50 to B76. Those that need copies delayed or reordered (B17, B48, B122)
run on the simulated device in `headrace check`; here the engine's own order is shown to be right.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from conformance import (
    GREEDY,
    GRID,
    MAX_LEN,
    VOCAB,
    Job,
    assert_balanced,
    assert_same_bits,
    drive,
    make_engine,
    small_model,
    solve,
)

from headrace.sampling_params import SamplingParams

pytestmark = pytest.mark.scenarios

SCHEMES = pytest.mark.parametrize("scheme", ["columns", "replay"])
LAYOUTS = pytest.mark.parametrize("layout", ["slots", "compact"])


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


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, VOCAB) for _ in range(count)]


def with_script(job: Job, keep: Any) -> Job:  # noqa: ANN401
    assert job.run is not None
    full = np.array(job.prompt + job.run.tokens)
    job.script = (full, np.resize(np.array(keep), min(len(full) + 8, MAX_LEN)))
    return job


def finish(engine: Any) -> dict[str, Any]:  # noqa: ANN401
    done = {}
    while engine.has_work():
        done.update((o.request_id, o) for o in engine.step() if o.finished)
    return done


@pytest.mark.thinned
@pytest.mark.parametrize(
    "drafts", [0, *(pytest.param(k, marks=pytest.mark.full) for k in (1, 5)), 3]
)
@LAYOUTS
def test_b52_results_of_a_preempted_request_come_late_and_are_neither_lost_nor_repeated(
    model: Any, rng: random.Random, drafts: int, layout: str  # noqa: ANN401
) -> None:
    """Preemption before each of 20 steps in turn, with runs partly accepted; then twice at once."""
    job = solve(model, Job(tokens(rng, 14), replace(GREEDY, max_tokens=18)))
    with_script(job, [rng.randint(-1, drafts) for _ in range(40)])
    other = solve(model, Job(tokens(rng, 5), replace(GREEDY, max_tokens=18)))
    with_script(other, drafts)
    engine = make_engine(
        model, batch_layout=layout, speculative=f"scripted:{drafts}" if drafts else "none"
    )
    for at in range(1, 21):
        names = [f"{at}-{index}" for index in range(2)]
        for name, wanted in zip(names, (job, other), strict=True):
            request = engine.add_request(name, wanted.prompt, wanted.params)
            if drafts:
                engine.worker.scripts[request.sequences[0].seq_id] = wanted.script
        seq = engine._requests[names[0]].sequences[0]
        done, step = {}, 0
        while engine.has_work():
            step += 1
            for _ in range(1 + at % 2):
                if step in (at, at + 1) and seq in engine.scheduler.running:
                    engine.scheduler.preempt(seq)
            done.update((o.request_id, o) for o in engine.step() if o.finished)
            assert seq.num_in_flight >= 0
            assert seq.num_known_in_flight >= 0
        assert_same_bits(job, done[names[0]])
        assert_same_bits(other, done[names[1]])
    assert_balanced(engine)


@pytest.mark.thinned
@SCHEMES
@LAYOUTS
def test_b53_a_cache_reset_while_running_rebuilds_every_field(
    model: Any, rng: random.Random, scheme: str, layout: str  # noqa: ANN401
) -> None:
    engine = make_engine(
        model, state_scheme=scheme, batch_layout=layout, speculative="scripted:3",
        checkpoint_retention="all",
    )
    jobs = [
        with_script(solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=24))), 2)
        for n in (5 * GRID - 20, 3, 2 * GRID)
    ]
    for index, job in enumerate(jobs):
        request = engine.add_request(f"job-{index}", job.prompt, job.params)
        engine.worker.scripts[request.sequences[0].seq_id] = job.script
    done, step = {}, 0
    while engine.has_work():
        step += 1
        if step % 4 == 0 and step < 30:
            engine.reset_prefix_cache()
            assert not engine.scheduler.running
        done.update((o.request_id, o) for o in engine.step() if o.finished)
    for index, job in enumerate(jobs):
        assert_same_bits(job, done[f"job-{index}"])
    assert_balanced(engine)


@pytest.mark.thinned
@SCHEMES
@pytest.mark.parametrize("at", [1, GRID - 1, GRID, GRID + 1])
def test_b54_a_resumed_request_starts_from_no_foreign_state(
    model: Any, rng: random.Random, scheme: str, at: int  # noqa: ANN401
) -> None:
    """Preempted at output `at`; another request takes its slot and blocks meanwhile."""
    engine = make_engine(
        model, state_scheme=scheme, max_num_seqs=1, prefix_cache="none", num_kv_blocks=9
    )
    job = solve(model, Job(tokens(rng, 9), replace(GREEDY, max_tokens=24)))
    usurper = solve(model, Job(tokens(rng, 40), replace(GREEDY, max_tokens=6)))
    engine.add_request("job", job.prompt, job.params)
    seq = engine._requests["job"].sequences[0]
    done = {}
    while seq.num_output_tokens < at:
        engine.step()
    engine.scheduler.preempt(seq)
    engine.add_request("usurper", usurper.prompt, usurper.params)
    second = engine._requests["usurper"].sequences[0]
    engine.scheduler.waiting.remove(second)
    engine.scheduler.waiting.appendleft(second)
    done.update(finish(engine))
    assert_same_bits(job, done["job"])
    assert_same_bits(usurper, done["usurper"])
    assert_balanced(engine)


@pytest.mark.parametrize("is_async", [True, False])
def test_b56_an_abort_in_any_state_is_idempotent_and_hurts_nobody(
    model: Any, rng: random.Random, is_async: bool  # noqa: ANN401, FBT001
) -> None:
    """200 random interleavings of arrivals, steps and aborts, some of them twice or unknown."""
    engine = make_engine(
        model, async_scheduling=is_async, speculative="ngram:2", num_kv_blocks=20,
        num_state_blocks=14,
    )
    job = solve(model, Job(tokens(rng, 20), replace(GREEDY, max_tokens=10)))
    names: list[str] = []
    kept: list[str] = []
    done = {}
    for turn in range(200):
        event = rng.random()
        if event < 0.25:
            names.append(f"victim-{turn}")
            engine.add_request(names[-1], tokens(rng, rng.randint(1, 70)), GREEDY)
        elif event < 0.45 and names:
            name = rng.choice(names)  # Perhaps one that has ended, or was aborted before.
            engine.abort(name)
            engine.abort(name)
        elif event < 0.5:
            assert engine.abort("nobody") is None
        elif event < 0.55:
            kept.append(f"kept-{turn}")
            engine.add_request(kept[-1], job.prompt, job.params)
        done.update((o.request_id, o) for o in engine.step() if o.finished)
    for name in names:
        engine.abort(name)
    done.update(finish(engine))
    for name in kept:
        assert_same_bits(job, done[name])
    assert_balanced(engine)


def test_b57_waiting_requests_own_nothing(model: Any, rng: random.Random) -> None:  # noqa: ANN401
    engine = make_engine(model, max_num_seqs=2)
    shared = tokens(rng, 4 * GRID)
    jobs = [
        solve(model, Job(shared + tokens(rng, 4), replace(GREEDY, max_tokens=4))) for _ in range(4)
    ]
    names = [f"job-{index}" for index in range(24)]
    for index, name in enumerate(names):
        job = jobs[index % 4]
        engine.add_request(name, job.prompt, job.params)
    for _ in range(3):
        engine.step()
    engine.scheduler.check()
    for name in names[4:]:
        engine.abort(name)
    done = finish(engine)
    for index, name in enumerate(names[:4]):
        assert_same_bits(jobs[index], done[name])
    assert_balanced(engine)


@pytest.mark.parametrize("layout", ["slots", "compact"])
def test_b58_b59_no_way_out_leaks_anything(
    model: Any, rng: random.Random, layout: str  # noqa: ANN401
) -> None:
    """Every exit path many times over; all gauges return to where they were."""
    engine = make_engine(
        model, batch_layout=layout, max_num_seqs=8, speculative="ngram:2", check_invariants=False
    )
    worker, scheduler = engine.worker, engine.scheduler
    stop = solve(model, Job([5, 6], replace(GREEDY, max_tokens=1)))
    assert stop.run is not None
    ways = (
        SamplingParams(max_tokens=1, ignore_eos=True),
        SamplingParams(temperature=0.0, stop_token_ids=[stop.run.tokens[0]]),
        SamplingParams(max_tokens=3, n=3, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=40, ignore_eos=True),
        SamplingParams(max_tokens=2, logprobs=3, frequency_penalty=0.5, ignore_eos=True),
    )

    def gauges() -> dict[str, int]:
        found = {
            "requests": len(engine._requests), "owners": len(engine._owner),
            "waiting keys": len(scheduler._waiting_keys),
            "pending keys": len(scheduler._pending_keys),
            "slots": len(scheduler._free_slots), "left": len(scheduler._left),
        }
        for pool in (scheduler.kv_pool, *scheduler.state_pools):
            found[pool.name] = pool.num_available
        found["worker"] = sum(
            len(value) for value in vars(worker).values() if isinstance(value, dict)
        )
        return found

    before: dict[str, int] = {}
    most = 0
    for round_ in range(6):
        for index in range(20):
            way = (round_ + index) % (len(ways) + 1)
            name = f"{round_}-{index}"
            params = ways[min(way, len(ways) - 1)]
            engine.add_request(name, [5, 6] if way == 1 else tokens(rng, 1 + index * 2), params)
            if way == len(ways):
                engine.step()
                engine.abort(name)
        finish(engine)
        after = gauges()
        # What has left is handed over with the next step, so a few names may still wait.
        assert after["left"] <= 8
        after["left"] = 0
        maps = after.pop("worker")
        if before:
            assert after == before
            assert maps <= most, "a map of the worker grows with every request"
        else:
            before, most = after, maps + 8
    assert_balanced(engine)


def test_b60_an_id_may_be_used_again_at_once(model: Any, rng: random.Random) -> None:  # noqa: ANN401
    engine = make_engine(model)
    job = solve(model, Job(tokens(rng, 12), replace(GREEDY, max_tokens=5)))
    for _ in range(50):
        engine.add_request("same", tokens(rng, 30), GREEDY)
        engine.step()
        engine.abort("same")
        engine.add_request("same", job.prompt, job.params)
        done = finish(engine)
        assert_same_bits(job, done["same"])
    assert_balanced(engine)


def test_b122_a_step_sees_the_inputs_that_were_staged_for_it(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    """Frames are as many as the steps in flight, and each is a step's own until it retires."""
    engine = make_engine(model, speculative="scripted:2")
    ring = engine.worker._frames
    assert ring.depth == engine.parts.depth == 2
    seen: list[int] = []
    execute = engine.worker.execute

    def watched(output: Any) -> Any:  # noqa: ANN401
        handle = execute(output)
        seen.append(ring._current)
        return handle

    engine.worker.execute = watched  # type: ignore[method-assign]
    jobs = [with_script(solve(model, Job(tokens(rng, n))), 1) for n in (5, 20, 9)]
    for job, output in zip(jobs, drive(engine, jobs, rng), strict=True):
        assert_same_bits(job, output)
    assert all(a != b for a, b in pairwise(seen)), "a frame was reused at once"


@SCHEMES
def test_b63_a_parked_request_keeps_its_state_to_the_byte(
    model: Any, rng: random.Random, scheme: str  # noqa: ANN401
) -> None:
    """Of four live requests two run per step, by budget; the others' blocks stay untouched."""
    engine = make_engine(
        model, state_scheme=scheme, speculative="scripted:3", async_scheduling=False
    )
    jobs = [
        with_script(solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=16))), 3)
        for n in (6, 9, 12, 15)
    ]
    scheduler, runtime = engine.scheduler, engine.parts.runtime
    policy, turn = [0], [0]
    verify_drafts = scheduler._verify_drafts

    def every_other(seq: Any) -> int:  # noqa: ANN401
        wanted = verify_drafts(seq)
        return wanted if (seq.seq_id + turn[0]) % 2 else -1

    scheduler._verify_drafts = every_other
    scheduler.draft_policy = lambda _: 3
    buffers = list(engine.worker.pools.states[0].values())
    for index, job in enumerate(jobs):
        request = engine.add_request(f"job-{index}", job.prompt, job.params)
        engine.worker.scripts[request.sequences[0].seq_id] = job.script
    done = {}
    while engine.has_work():
        turn[0] += 1
        parked = {
            block for seq in scheduler.running if not (seq.seq_id + turn[0]) % 2
            and seq.num_computed_tokens >= seq.known_end > 0
            for table in seq.state_tables for block in table if block
        }
        before = [runtime.read(b)[:, sorted(parked)].clone() for b in buffers]
        done.update((o.request_id, o) for o in engine.step() if o.finished)
        for old, buffer in zip(before, buffers, strict=True):
            assert torch.equal(old, runtime.read(buffer)[:, sorted(parked)])
        policy[0] += len(parked)
    assert policy[0], "nothing was ever parked"
    for index, job in enumerate(jobs):
        assert_same_bits(job, done[f"job-{index}"])


@LAYOUTS
def test_b76_newcomers_join_running_requests_and_the_first_leaves(
    model: Any, rng: random.Random, layout: str  # noqa: ANN401
) -> None:
    engine = make_engine(model, batch_layout=layout)
    jobs = [
        solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=count)))
        for n, count in ((4, 6), (7, 20), (2, 20), (9, 3))
    ]
    engine.add_request("0", jobs[0].prompt, jobs[0].params)
    for _ in range(4):
        engine.step()
    for index in (1, 2, 3):
        engine.add_request(str(index), jobs[index].prompt, jobs[index].params)
    done = finish(engine)
    for index, job in enumerate(jobs):
        assert_same_bits(job, done[str(index)])


@LAYOUTS
def test_b62_options_of_one_row_never_reach_another(
    model: Any, rng: random.Random, layout: str  # noqa: ANN401
) -> None:
    """One request of each kind among plain ones, while rows move."""
    engine = make_engine(model, batch_layout=layout, max_num_seqs=3)
    plain = [solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=8))) for n in (3, 10)]
    odd = [
        Job(tokens(rng, 4), replace(GREEDY, max_tokens=5, allowed_token_ids=[7, 9])),
        Job(tokens(rng, 5), replace(GREEDY, max_tokens=4, logit_bias={11: 100.0})),
        Job(tokens(rng, 6), replace(GREEDY, max_tokens=6, frequency_penalty=2.0)),
        Job(tokens(rng, 7), replace(GREEDY, max_tokens=3, temperature=5.0, seed=1)),
    ]
    for _ in range(6):
        jobs = [*plain, *odd]
        rng.shuffle(jobs)
        for job, output in zip(jobs, drive(engine, jobs, rng, stagger=0.5), strict=True):
            if job in plain:
                assert_same_bits(job, output)
        engine.reset_prefix_cache()


@pytest.mark.thinned
@pytest.mark.parametrize("drafts", ["none", "ngram:3", "mtp:2", "draft:same:3"])
@LAYOUTS
def test_a_step_that_only_copies_for_a_fork_that_has_left_is_harmless(
    model: Any, rng: random.Random, drafts: str, layout: str  # noqa: ANN401
) -> None:
    """The last fork is aborted before it runs, with nobody beside it."""
    from headrace.engine.sequence import Sequence  # noqa: PLC0415

    engine = make_engine(
        model, batch_layout=layout, speculative=drafts, async_scheduling=False, draft_model=model
    )
    job = solve(model, Job(tokens(rng, 9), replace(GREEDY, max_tokens=12)))
    request = engine.add_request("parent", job.prompt, job.params)
    parent = request.sequences[0]
    while not parent.num_output_tokens:
        engine.step()
    child = Sequence(
        seq_id=1000, prompt=job.prompt, params=job.params, seed=parent.seed, num_groups=1
    )
    assert engine.scheduler.fork(parent, child)
    engine.scheduler.finish(child, "abort")
    engine.abort("parent")
    engine.step()
    check = engine.add_request("after", job.prompt, job.params)
    done = finish(engine)
    assert check.is_finished
    assert_same_bits(job, done["after"])
    assert_balanced(engine)


@pytest.mark.thinned
@SCHEMES
@LAYOUTS
def test_a_forked_sequence_continues_exactly_where_its_parent_was(
    model: Any, rng: random.Random, scheme: str, layout: str  # noqa: ANN401
) -> None:
    """Not from the list: beams and agents fork; the copies hold KV, states, ring and counts."""
    from headrace.engine.sequence import Sequence  # noqa: PLC0415

    engine = make_engine(
        model, state_scheme=scheme, batch_layout=layout, speculative="scripted:3",
        async_scheduling=False, max_num_seqs=6,
    )
    job = with_script(solve(model, Job(tokens(rng, 11), replace(GREEDY, max_tokens=26))), 2)
    assert job.run is not None
    mate = with_script(solve(model, Job(tokens(rng, 21), replace(GREEDY, max_tokens=9))), 3)
    for name, wanted in (("mate", mate), ("parent", job)):
        request = engine.add_request(name, wanted.prompt, wanted.params)
        engine.worker.scripts[request.sequences[0].seq_id] = wanted.script
    parent = engine._requests["parent"].sequences[0]
    children: list[Sequence] = []
    done = {}
    while engine.has_work():
        done.update((o.request_id, o) for o in engine.step() if o.finished)
        is_ready = parent in engine.scheduler.running and parent.num_output_tokens > 0
        if is_ready and parent.num_computed_tokens >= parent.known_end and len(children) < 3:
            child = Sequence(
                seq_id=1000 + len(children), prompt=job.prompt, params=job.params,
                seed=parent.seed, num_groups=1,
            )
            engine.worker.scripts[child.seq_id] = job.script
            if engine.scheduler.fork(parent, child):
                children.append(child)
    assert len(children) == 3
    for child in children:
        assert child.output_token_ids == job.run.tokens
    assert_same_bits(job, done["parent"])
    assert_same_bits(mate, done["mate"])
    assert_balanced(engine)
