"""Several completions of one prompt: it is computed once, and each one is what it is alone."""

from __future__ import annotations

import asyncio
import random
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from conformance import (
    BLOCK,
    GREEDY,
    GRID,
    VOCAB,
    Job,
    assert_balanced,
    assert_same_bits,
    make_engine,
    script_for,
    small_model,
    solve,
)

from headrace import LLM
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.sequence import Status
from headrace.sampling_params import OutputKind, SamplingParams, completion_seed

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.outputs import RequestOutput

WARM = replace(GREEDY, temperature=1.3, max_tokens=11)


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


def alone(model: Any, prompt: list[int], params: SamplingParams) -> list[Job]:  # noqa: ANN401
    """The oracle's answer to each completion as a request of its own."""
    assert params.seed is not None
    jobs = []
    for index in range(params.n):
        seed = completion_seed(params.seed, index)
        signed = seed - 2**64 if seed >= 2**63 else seed
        jobs.append(solve(model, Job(prompt, replace(params, n=1, seed=signed))))
    return jobs


def ask(engine: Engine, name: str, jobs: list[Job], params: SamplingParams,
        rng: random.Random) -> None:
    request = engine.add_request(name, jobs[0].prompt, params)
    if engine.worker.drafter == "scripted":
        for seq, job in zip(request.sequences, jobs, strict=True):
            engine.worker.scripts[seq.seq_id] = script_for(job, engine.parts.sizes.max_drafts, rng)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_work():
        done.update((o.request_id, o) for o in engine.step() if o.finished)
    return done


def assert_each(jobs: list[Job], output: RequestOutput) -> None:
    for job, completion in zip(jobs, output.outputs, strict=True):
        assert_same_bits(job, replace(output, outputs=[completion]))


CASES = pytest.mark.parametrize(
    ("layout", "scheme", "drafter"),
    [
        ("slots", "columns", "mtp:2"),
        ("slots", "replay", "draft:x:2"),
        ("compact", "columns", "scripted:3"),
        ("compact", "replay", "mtp:1"),
        ("slots", "replay", "ngram:3"),
    ],
)


@CASES
def test_each_completion_is_bit_for_bit_what_it_is_alone(
    model: Any, rng: random.Random, layout: str, scheme: str, drafter: str  # noqa: ANN401
) -> None:
    engine = make_engine(
        model, draft_model=small_model(3), batch_layout=layout, state_scheme=scheme,
        speculative=drafter, async_scheduling=rng.random() < 0.7, max_num_seqs=8,
        max_num_batched_tokens=40,
    )
    engine.scheduler.policy = None
    mate = solve(model, Job(tokens(rng, 7)))
    ask(engine, "mate", [mate], mate.params, rng)
    wanted = {}
    for n, length in ((4, rng.choice((16, 32))), (3, rng.randrange(33, 80))):
        params = replace(WARM, n=n, seed=rng.randrange(2**31))
        jobs = wanted[f"{n}"] = alone(model, tokens(rng, length), params)
        ask(engine, f"{n}", jobs, params, rng)
    done = finish(engine)
    assert_same_bits(mate, done["mate"])
    for name, jobs in wanted.items():
        assert_each(jobs, done[name])
        assert len({tuple(c.token_ids) for c in done[name].outputs}) > 1, "noise of their own"
    assert engine.scheduler.num_forks == 3 + 2
    assert engine.num_draft_tokens
    assert engine.num_accepted_drafts or drafter != "scripted:3"
    assert_balanced(engine)


@pytest.mark.parametrize(
    ("layout", "scheme", "drafter"),
    [("slots", "columns", "none"), ("compact", "replay", "scripted:3")],
)
def test_hits_aborts_and_preemptions_of_some_leave_the_others_exact(
    model: Any, rng: random.Random, layout: str, scheme: str, drafter: str  # noqa: ANN401
) -> None:
    engine = make_engine(
        model, batch_layout=layout, state_scheme=scheme, speculative=drafter, max_num_seqs=5,
        max_num_batched_tokens=40,
    )
    params = replace(WARM, n=4, seed=rng.randrange(2**31))
    jobs = alone(model, tokens(rng, 45), params)
    for turn in range(5):
        ask(engine, f"turn {turn}", jobs, params, rng)
        sequences = engine._requests[f"turn {turn}"].sequences
        aborted, preempt_at = rng.randrange(4), rng.sample(range(9), 2)
        abort_at = rng.randrange(9)
        done = None
        for step in range(10_000):
            others = [seq for seq in sequences if seq is not sequences[aborted]]
            # The last one to end brings the request's output; nothing would, were it ended here.
            if step == abort_at and any(seq.status is not Status.FINISHED for seq in others):
                engine._finish(sequences[aborted], "abort")
            if step in preempt_at and engine.scheduler.running:
                count = rng.choice((1, len(engine.scheduler.running)))
                for seq in rng.sample(engine.scheduler.running, count):
                    engine.scheduler.preempt(seq)
            done = next(iter([o for o in engine.step() if o.finished]), done)
            if not engine.has_work():
                break
        assert done is not None
        if aborted:  # Else the one that is asked may never have begun.
            assert done.num_cached_tokens == (2 * GRID if turn else 0)
        for job, completion in zip(jobs, done.outputs, strict=True):
            if completion.finish_reason == "abort":
                assert job.run is not None
                got = completion.token_ids
                assert got == job.run.tokens[: len(got)]
            else:
                assert_same_bits(job, replace(done, outputs=[completion]))
    assert engine.scheduler.num_forks
    assert_balanced(engine)


def test_an_aborted_request_gives_everything_back_at_any_moment(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model, max_num_batched_tokens=16, speculative="mtp:1")
    prompt = tokens(rng, 60)
    for steps in range(9):
        engine.add_request("gone", prompt, replace(WARM, n=3, seed=1))
        for _ in range(steps):
            engine.step()
        output = engine.abort("gone")
        assert output is not None
        assert {c.finish_reason for c in output.outputs} == {"abort"}
        finish(engine)
        engine.reset_prefix_cache()
    assert_balanced(engine)


def test_rules_look_at_each_completions_own_text(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model)
    prompt, seed = tokens(rng, 20), rng.randrange(2**31)
    params = replace(
        WARM, seed=seed, presence_penalty=1.0, repetition_penalty=1.4, logit_bias={3: 5.0},
        min_tokens=4, stop_token_ids=[9], logprobs=3, max_tokens=15,
    )
    engine.add_request("together", prompt, replace(params, n=3))
    together = finish(engine)["together"].outputs
    for index in range(3):
        engine.add_request("alone", prompt, replace(params, seed=completion_seed(seed, index)))
        (one,) = finish(engine)["alone"].outputs
        assert together[index].token_ids == one.token_ids
        assert together[index].logprobs == one.logprobs


def test_prompt_logprobs_come_once_and_do_not_hinder_forks(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model)
    prompt = tokens(rng, 20)
    engine.add_request("one", prompt, replace(WARM, n=3, seed=2, prompt_logprobs=1))
    output = finish(engine)["one"]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert engine.scheduler.num_forks == 2


def test_generate_and_the_async_engine_give_the_same_completions(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    params = replace(WARM, n=3, seed=5, logprobs=None)
    prompt = tokens(rng, 30)
    (offline,) = LLM(engine=make_engine(model)).generate(prompt, params)
    assert [c.index for c in offline.outputs] == [0, 1, 2]

    async def ask_async() -> dict[int, list[int]]:
        llm = AsyncLLM(engine=make_engine(model))
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        try:
            deltas = replace(params, output_kind=OutputKind.DELTA)
            async for output in llm.generate(prompt, deltas):
                for completion in output.outputs:
                    got[completion.index] += completion.token_ids
        finally:
            await llm.shutdown()
        assert llm._engine.scheduler.num_forks == 2
        return got

    assert asyncio.run(ask_async()) == {c.index: c.token_ids for c in offline.outputs}


@pytest.mark.parametrize("scheme", ["columns", "replay"])
def test_sixteen_completions_compute_one_prompt_and_keep_one_prompts_memory(
    model: Any, rng: random.Random, scheme: str  # noqa: ANN401
) -> None:
    prompt, count, steps = tokens(rng, 75), 16, 4
    state_blocks, kv_blocks, running = {}, {}, {}
    for n in (1, count):
        engine = make_engine(
            model, state_scheme=scheme, max_num_seqs=count, max_num_batched_tokens=32,
            async_scheduling=False,
        )
        scheduler = engine.scheduler
        engine.add_request("all", prompt, replace(WARM, n=n, seed=7, max_tokens=12))
        rows = []
        for _ in range(3 + steps):
            before = engine.worker.num_forward_tokens
            engine.step()
            rows.append(engine.worker.num_forward_tokens - before)
        # The prompt in three chunks, then a token for each completion: nothing is recomputed.
        assert rows == [32, 32, 11] + [n] * steps
        (pool,), kv = scheduler.state_pools, scheduler.kv_pool
        state_blocks[n] = pool.num_usable - pool.num_free
        kv_blocks[n] = kv.num_usable - kv.num_free
        running[n] = max(sum(map(bool, seq.state_tables[0])) for seq in scheduler.running)
        finish(engine)
        assert_balanced(engine)
    # Rings come with the rows and are the same for both.
    of_prompt = state_blocks[1] - running[1]
    assert of_prompt >= 1, "the prompt leaves a checkpoint"
    assert state_blocks[count] <= 1.3 * of_prompt + count * running[1]
    assert kv_blocks[count] == len(prompt) // BLOCK + count, "a last block each"


def test_more_completions_than_rows_are_served_in_waves(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model, max_num_seqs=3)
    params = replace(WARM, n=8, seed=rng.randrange(2**31), max_tokens=5)
    jobs = alone(model, tokens(rng, 21), params)
    ask(engine, "many", jobs, params, rng)
    assert_each(jobs, finish(engine)["many"])
    assert engine.scheduler.num_forks >= 4, "each wave computes the prompt once"
    assert_balanced(engine)
