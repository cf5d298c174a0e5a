"""Ways in which block-aligned caching of recurrent state went wrong elsewhere.

Each test is named after its entry in the project's list of scenarios (B02, B03, ...). What is right
is always the same: bits of a solo run, published states that are what they are labelled, and pools
that balance.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conformance import (
    BLOCK,
    GREEDY,
    GRID,
    MAX_LEN,
    VOCAB,
    Job,
    assert_balanced,
    assert_checkpoints,
    assert_same_bits,
    drive,
    make_engine,
    small_model,
    solve,
)

from headrace.engine.prefix_cache import chain_keys, root_key

pytestmark = pytest.mark.scenarios

SCHEMES = pytest.mark.parametrize("scheme", ["columns", "replay"])


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


def ask(engine: Any, job: Job) -> Any:  # noqa: ANN401
    output = drive(engine, [job])[0]
    assert_same_bits(job, output)
    return output


def poison(engine: Any, value: float) -> None:  # noqa: ANN401
    """Fill every block that nobody owns and no lookup finds, the null blocks excepted."""
    runtime, scheduler = engine.parts.runtime, engine.scheduler
    for pool, buffers in (
        (scheduler.kv_pool, (engine.worker.pools.k, engine.worker.pools.v)),
        *(
            (pool, tuple(engine.worker.pools.states[group].values()))
            for group, pool in enumerate(scheduler.state_pools)
        ),
    ):
        free = [b for b in range(1, pool.num_blocks) if not pool.refs(b)]
        free = [block for block in free if not pool.is_published(block)]
        for buffer in buffers:
            content = runtime.read(buffer).clone()
            content[:, free] = value
            runtime.write(buffer, content)
    for rings in engine.worker.pools.rings:
        for buffer in rings.values():
            content = runtime.read(buffer).clone()
            taken = [seq.slot + 1 for seq in scheduler.running]
            idle = [r for r in range(1, content.shape[1]) if r not in taken]
            content[:, idle] = value
            runtime.write(buffer, content)


def null_blocks(engine: Any) -> list[torch.Tensor]:  # noqa: ANN401
    runtime, pools = engine.parts.runtime, engine.worker.pools
    buffers = [pools.k, pools.v, *(b for group in pools.states for b in group.values())]
    return [runtime.read(buffer)[:, 0].clone() for buffer in buffers]


@pytest.mark.thinned
@SCHEMES
@pytest.mark.parametrize("first", [1, 5, 13, 15, 16])
def test_b02_a_block_left_half_written_by_a_chunk_is_not_published(
    model: Any, rng: random.Random, scheme: str, first: int  # noqa: ANN401
) -> None:
    engine = make_engine(
        model, state_scheme=scheme, max_num_batched_tokens=GRID + first, checkpoint_retention="all"
    )
    job = solve(model, Job(tokens(rng, 24)), states=True)
    # A neighbour takes part of the budget, so that chunks would end anywhere.
    other = solve(model, Job(tokens(rng, first), replace(GREEDY, max_tokens=3)), states=True)
    for result, wanted in zip(drive(engine, [other, job]), (other, job), strict=True):
        assert_same_bits(wanted, result)
    second = solve(model, Job(job.prompt[:16] + tokens(rng, 7)), states=True)
    ask(engine, second)
    assert_checkpoints(engine, [job, other, second])


@SCHEMES
def test_b03_a_resumed_request_is_aligned_like_a_new_one(
    model: Any, rng: random.Random, scheme: str  # noqa: ANN401
) -> None:
    engine = make_engine(
        model, state_scheme=scheme, max_num_batched_tokens=20, checkpoint_retention="all",
        deterministic=False,
    )
    job = solve(model, Job(tokens(rng, 24), replace(GREEDY, max_tokens=24)), states=True)
    engine.add_request("job", job.prompt, job.params)
    seq = engine._requests["job"].sequences[0]
    outputs = []
    while engine.has_work():
        outputs.extend(engine.step())
        if seq.num_output_tokens >= 15 and not seq.num_preemptions:
            engine.scheduler.preempt(seq)
    assert seq.num_preemptions == 1
    assert_same_bits(job, outputs[-1])
    assert_checkpoints(engine, [job])


@pytest.mark.thinned
@SCHEMES
@pytest.mark.parametrize(("start", "keep"), [(13, 3), (14, 3), (15, 3), (12, 3), (15, 0)])
def test_b05_b14_runs_that_step_over_or_onto_a_boundary_publish_honest_states(
    model: Any, rng: random.Random, scheme: str, start: int, keep: int  # noqa: ANN401
) -> None:
    engine = make_engine(
        model, state_scheme=scheme, speculative="scripted:3", checkpoint_retention="all",
        deterministic=False,
    )
    job = solve(model, Job(tokens(rng, start), replace(GREEDY, max_tokens=40)), states=True)
    assert job.run is not None
    full = np.array(job.prompt + job.run.tokens)
    job.script = (full, np.full(len(full) + 8, keep))
    ask(engine, job)
    # The column scheme has every boundary; a replay base is written when the step after it starts.
    assert assert_checkpoints(engine, [job]) >= 2
    conversation = full.tolist()
    for cut in range(GRID, len(conversation), GRID):
        again = Job([*conversation[:cut], 5], replace(GREEDY, max_tokens=2))
        hit = drive(engine, [again])[0].num_cached_tokens
        assert hit >= (cut // GRID - 1) * GRID


@SCHEMES
def test_b06_the_workers_tables_are_the_schedulers_and_no_scratch_is_taken_for_a_state(
    model: Any, rng: random.Random, scheme: str  # noqa: ANN401
) -> None:
    """Every step's tables, entry by entry, absent ones included; then what was published."""
    engine = make_engine(
        model, speculative="scripted:2", state_scheme=scheme, checkpoint_retention="all",
        max_num_batched_tokens=64,
    )
    engine.scheduler.policy = None
    execute, compared = engine.worker.execute, []

    def watched(output: Any) -> Any:  # noqa: ANN401
        owners = {seq.seq_id: seq for seq in engine.scheduler.running}
        plan = output.verify
        for row, seq_id in enumerate(plan.seq_ids if plan is not None else ()):
            seq = owners[seq_id]
            kv = [block for block in plan.kv_table[row].tolist() if block]
            assert kv == seq.kv_blocks[: len(kv)]
            assert len(kv) * BLOCK >= seq.num_computed_tokens
            base = int(plan.state_base[row])
            for table, given in zip(plan.state_tables, seq.state_tables, strict=True):
                width = table.shape[1]
                known = (given + [0] * (base + width))[base : base + width]
                assert table[row].tolist() == known
                compared.append(known)
        for known_row in output.known:
            seq = owners[known_row.seq_id]
            kv = [block for block in known_row.kv_table.tolist() if block]
            assert kv == seq.kv_blocks[: len(kv)]
            for state, given in zip(known_row.states, seq.state_tables, strict=True):
                assert state.target_block in given
                # States for the cache lie apart from everything that a sequence works in.
                assert {block for _, block in state.exports}.isdisjoint(given)
        return execute(output)

    engine.worker.execute = watched  # type: ignore[method-assign]
    params = replace(GREEDY, max_tokens=20)
    prompt = tokens(rng, 45)
    job = solve(model, Job(prompt, params), states=True)
    assert job.run is not None
    full = np.array(job.prompt + job.run.tokens)
    job.script = (full, np.array([rng.randint(0, 2) for _ in range(len(full) + 8)]))
    ask(engine, job)
    assert compared
    assert assert_checkpoints(engine, [job])
    job.script = None
    again = solve(model, Job([*prompt[:32], *tokens(rng, 9)], params), states=True)
    assert ask(engine, again).num_cached_tokens == 32
    assert assert_checkpoints(engine, [job, again])
    assert_balanced(engine)


def test_b07_states_evicted_while_attention_survives_give_no_hit(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model, num_kv_blocks=60, num_state_blocks=8, checkpoint_retention="all")
    job = solve(model, Job(tokens(rng, 64)))
    ask(engine, job)
    state_pool, kv_pool = engine.scheduler.state_pools[0], engine.scheduler.kv_pool
    blocks = state_pool.allocate(state_pool.num_available)
    state_pool.free(blocks)
    poison(engine, float("nan"))
    keys = chain_keys(root_key(None), job.prompt, BLOCK)
    assert kv_pool.lookup(keys[0]) is not None
    assert state_pool.lookup(keys[0]) is None
    again = solve(model, Job([*job.prompt, 9, 8]))
    output = ask(engine, again)
    assert output.num_cached_tokens == 0
    assert output.missed_tokens["evicted"] == 64


@pytest.mark.parametrize("drafts", ["none", "mtp:2"])
def test_b09_the_stored_boundary_is_the_one_that_lookups_ask_for(
    model: Any, rng: random.Random, drafts: str  # noqa: ANN401
) -> None:
    engine = make_engine(model, speculative=drafts)
    for length in (4 * GRID, 4 * GRID + 1, 5 * GRID, 5 * GRID + 1):
        job = solve(model, Job(tokens(rng, length), replace(GREEDY, max_tokens=3)))
        assert ask(engine, job).num_cached_tokens == 0
        assert ask(engine, job).num_cached_tokens >= (length - 1) // GRID * GRID - GRID * (
            drafts != "none"
        )


@SCHEMES
def test_b11_a_tail_shorter_than_the_window_leaves_the_shared_block_alone(
    model: Any, rng: random.Random, scheme: str  # noqa: ANN401
) -> None:
    engine = make_engine(model, state_scheme=scheme, checkpoint_retention="all")
    base = tokens(rng, 33)
    ask(engine, solve(model, Job(base)))
    pool = engine.scheduler.state_pools[0]
    entry = pool.lookup(chain_keys(root_key(None), base, BLOCK)[1])
    assert entry is not None
    buffers = engine.worker.pools.states[0].values()
    before = [engine.parts.runtime.read(b)[:, entry.block].clone() for b in buffers]
    jobs = [solve(model, Job(base[:32] + tokens(rng, tail))) for tail in (1, 2, 3, 4)]
    poison(engine, float("nan"))
    for job, output in zip(jobs, drive(engine, jobs, rng), strict=True):
        assert_same_bits(job, output)
        assert output.num_cached_tokens == 32
    after = [engine.parts.runtime.read(b)[:, entry.block] for b in buffers]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)
    ask(engine, solve(model, Job(base)))


def test_b15_a_cache_unit_wider_than_the_grid_labels_states_by_what_they_are(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model, state_block_size=2 * GRID, checkpoint_retention="all")
    jobs = []
    for length in (40, 48, 56):
        job = solve(model, Job(tokens(rng, length)), states=True)
        jobs.append(job)
        ask(engine, job)
        assert ask(engine, job).num_cached_tokens == 32
        jobs.append(solve(model, Job(job.prompt + tokens(rng, 9)), states=True))
        assert ask(engine, jobs[-1]).num_cached_tokens == 32
    assert_checkpoints(engine, jobs)


@SCHEMES
def test_b16_prompts_of_one_batch_each_have_a_grid_of_their_own(
    model: Any, rng: random.Random, scheme: str  # noqa: ANN401
) -> None:
    for lengths in ((50, 70, 90), (48, 64, 80), (50,)):
        engine = make_engine(
            model, state_scheme=scheme, checkpoint_retention="all", max_num_batched_tokens=256
        )
        jobs = [solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=4)), states=True)
                for n in lengths]
        for job, output in zip(jobs, drive(engine, jobs), strict=True):
            assert_same_bits(job, output)
        assert assert_checkpoints(engine, jobs) == sum(n // GRID for n in lengths)


def test_b17_a_checkpoint_is_published_after_the_step_that_writes_it(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model, max_num_batched_tokens=GRID, checkpoint_retention="all")
    job = solve(model, Job(tokens(rng, 6 * GRID - 2), replace(GREEDY, max_tokens=1)), states=True)
    pool = engine.scheduler.state_pools[0]
    published: list[int] = []
    publish, execute = pool.publish, engine.worker.execute
    done = 0

    def counted(output: Any) -> Any:  # noqa: ANN401
        nonlocal done
        handle = execute(output)
        done = max([done, *(row.end for row in output.known)])
        return handle

    def noted(block: int, key: bytes, *, is_generated: bool) -> None:
        keys = chain_keys(root_key(None), job.prompt, BLOCK)
        published.append((keys.index(key) + 1) * BLOCK)
        assert published[-1] <= done, "published before its step was enqueued"
        publish(block, key, is_generated=is_generated)

    pool.publish, engine.worker.execute = noted, counted
    engine.add_request("job-0", job.prompt, job.params)
    while engine.has_work():
        engine.step()
        assert_checkpoints(engine, [job])
    assert published == [GRID, 2 * GRID, 3 * GRID, 4 * GRID, 5 * GRID]


@pytest.mark.parametrize("is_busy", [False, True])
def test_b19_a_long_shared_prefix_hits_for_the_third_request(
    model: Any, rng: random.Random, is_busy: bool  # noqa: ANN401, FBT001
) -> None:
    engine = make_engine(model, max_num_batched_tokens=8 * GRID, max_num_seqs=12)
    shared = tokens(rng, 4 * GRID)
    if is_busy:
        for index in range(8):
            engine.add_request(f"busy-{index}", tokens(rng, 3), replace(GREEDY, max_tokens=90))
    hits = []
    for _ in range(3):
        job = solve(
            model, Job(shared + tokens(rng, GRID + 3), replace(GREEDY, max_tokens=3))
        )
        engine.add_request("one", job.prompt, job.params)
        final = None
        while final is None:
            final = next((o for o in engine.step() if o.request_id == "one" and o.finished), None)
        assert_same_bits(job, final)
        hits.append(final.num_cached_tokens)
    assert hits[2] >= 3 * GRID, hits
    while engine.has_work():
        engine.step()
    assert_balanced(engine)


def test_b19_requests_that_arrive_together_share_the_prefix_that_the_first_computes(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model, max_num_batched_tokens=8 * GRID)
    shared = tokens(rng, 4 * GRID)
    jobs = [
        solve(model, Job(shared + tokens(rng, 5), replace(GREEDY, max_tokens=3)))
        for _ in range(4)
    ]
    outputs = drive(engine, jobs)
    for job, output in zip(jobs, outputs, strict=True):
        assert_same_bits(job, output)
    assert [o.num_cached_tokens for o in outputs] == [0, 64, 64, 64]


def test_b23_after_a_change_of_weights_nothing_old_is_hit(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    """The engine's own call for it is the cache reset; running requests start over."""
    engine = make_engine(model)
    job = solve(model, Job(tokens(rng, 50)))
    ask(engine, job)
    engine.reset_prefix_cache()
    assert ask(engine, job).num_cached_tokens == 0
    engine.add_request("running", job.prompt, job.params)
    for _ in range(5):
        engine.step()
    engine.reset_prefix_cache()
    outputs = []
    while engine.has_work():
        outputs.extend(engine.step())
    assert_same_bits(job, outputs[-1])
    assert_balanced(engine)


@SCHEMES
def test_b25_a_recurrent_state_is_never_trimmed(
    model: Any, rng: random.Random, scheme: str  # noqa: ANN401
) -> None:
    engine = make_engine(model, state_scheme=scheme, checkpoint_retention="all")
    first = solve(model, Job(tokens(rng, 50)), states=True)
    answer = ask(engine, first).outputs[0].token_ids
    jobs = [first]
    for prompt in (
        first.prompt[:40] + tokens(rng, 6), first.prompt, first.prompt[:16],
        first.prompt + answer, first.prompt[:33],
    ):
        job = solve(model, Job(prompt), states=True)
        assert ask(engine, job).num_cached_tokens % GRID == 0
        jobs.append(job)
    assert_checkpoints(engine, jobs)
    assert_balanced(engine)


@pytest.mark.thinned
@SCHEMES
@pytest.mark.parametrize("value", [float("nan"), 1e4])
def test_b71_b72_poisoned_free_memory_changes_no_bit(
    model: Any, rng: random.Random, scheme: str, value: float  # noqa: ANN401
) -> None:
    """Recycled state blocks, KV blocks and rings are read only where they were written."""
    engine = make_engine(
        model, state_scheme=scheme, speculative="scripted:3", checkpoint_retention="all"
    )
    for lengths in ((1, 3, GRID), (5, 40, 17), (33, 2, 4)):
        poison(engine, value)
        jobs = [solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=12))) for n in lengths]
        for job in jobs:
            assert job.run is not None
            full = np.array(job.prompt + job.run.tokens)
            job.script = (full, np.array([rng.randint(-1, 3) for _ in range(len(full) + 8)]))
        for job, output in zip(jobs, drive(engine, jobs, rng), strict=True):
            assert_same_bits(job, output)


@pytest.mark.thinned
@SCHEMES
@pytest.mark.parametrize("layout", ["slots", "compact"])
def test_b55_b64_null_blocks_keep_their_bytes(
    model: Any, rng: random.Random, scheme: str, layout: str  # noqa: ANN401
) -> None:
    engine = make_engine(
        model, state_scheme=scheme, batch_layout=layout, speculative="scripted:3",
        num_state_blocks=14, num_kv_blocks=16,
    )
    before = null_blocks(engine)
    jobs = [solve(model, Job(tokens(rng, n))) for n in (1, 30, 17, 5, 60)]
    for job, output in zip(jobs, drive(engine, jobs, rng, preempt=0.2), strict=True):
        assert_same_bits(job, output)
    for old, new in zip(before, null_blocks(engine), strict=True):
        assert torch.equal(old, new)


def test_b86_a_prompt_that_fits_the_context_fits_the_pool(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    """At the smallest pools that the engine accepts, the longest prompt is still served."""
    blocks = -(-MAX_LEN // BLOCK) + 1
    engine = make_engine(model, num_kv_blocks=blocks + 1, num_state_blocks=6)
    jobs = [
        solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=MAX_LEN)))
        for n in (MAX_LEN - 1, 3, MAX_LEN - 2, 1)
    ]
    for job, output in zip(jobs, drive(engine, jobs), strict=True):
        assert_same_bits(job, output)
    assert_balanced(engine)


def test_b83_a_budget_below_the_state_block_still_makes_progress(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(
        model, state_block_size=4 * GRID, max_num_batched_tokens=GRID + 3, max_num_seqs=10
    )
    jobs = [solve(model, Job(tokens(rng, 2))) for _ in range(8)]
    jobs.append(solve(model, Job(tokens(rng, 90), replace(GREEDY, max_tokens=2))))
    for job, output in zip(jobs, drive(engine, jobs), strict=True):
        assert_same_bits(job, output)
