"""E1: the same request gives the same bits whatever happens around it (fresh seeds)."""

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
    MAX_LEN,
    VOCAB,
    Job,
    assert_balanced,
    assert_same_bits,
    assert_same_outputs,
    drive,
    log_probabilities,
    make_engine,
    small_model,
    solve,
)

if TYPE_CHECKING:
    from headrace.engine.engine import Engine


@pytest.fixture(scope="module")
def seed() -> int:
    value = secrets.randbits(32)
    print(f"seed {value}")
    return value


@pytest.fixture(scope="module")
def model(seed: int) -> Any:  # noqa: ANN401
    return small_model(seed)


@pytest.fixture
def rng(seed: int) -> random.Random:
    own = secrets.randbits(16)
    print(f"seed {seed}, events {own}")
    return random.Random(own)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, VOCAB) for _ in range(count)]


def alone(engine: Engine, job: Job) -> Any:  # noqa: ANN401
    return drive(engine, [job])[0]


SAMPLED = replace(GREEDY, temperature=0.9, top_k=20, top_p=0.95, seed=77)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_batch_mates_change_no_bit(model: Any, rng: random.Random, params: Any) -> None:  # noqa: ANN401
    jobs = [solve(model, Job(tokens(rng, n), params)) for n in (1, 16, 21, 40)]
    engine = make_engine(model)
    for job, output in zip(jobs, drive(engine, jobs, rng, stagger=0.5), strict=True):
        assert_same_bits(job, output)
    engine.reset_prefix_cache()
    for job in jobs:
        assert_same_bits(job, alone(engine, job))
    assert_balanced(engine)


def test_chunks_of_every_budget_change_no_bit(model: Any, rng: random.Random) -> None:  # noqa: ANN401
    job = solve(model, Job(tokens(rng, 75)))
    for budget in (GRID, GRID + 1, 37, 2 * GRID, 63, 75, 76, 200):
        engine = make_engine(model, max_num_batched_tokens=budget)
        assert_same_bits(job, alone(engine, job))


def test_a_chunk_that_begins_inside_a_column_changes_no_bit(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    """Columns of four scan pieces: exports go to the block that the chunk reads."""
    job = solve(model, Job(tokens(rng, 90)))
    for scheme in ("columns", "replay"):
        engine = make_engine(
            model, max_num_batched_tokens=GRID, state_block_size=4 * GRID,
            checkpoint_retention="all", state_scheme=scheme,
        )
        assert_same_bits(job, alone(engine, job))
        again = alone(engine, job)
        assert again.num_cached_tokens == 4 * GRID
        assert_same_bits(job, again)


@pytest.mark.parametrize("retention", ["latest", "all", "every:32"])
def test_a_hit_gives_the_bits_of_a_miss_and_saves_exactly_its_tokens(
    model: Any, rng: random.Random, retention: str  # noqa: ANN401
) -> None:
    engine = make_engine(model, checkpoint_retention=retention)
    job = solve(model, Job(tokens(rng, 70)))
    before = engine.worker.num_forward_tokens
    first = alone(engine, job)
    cold = engine.worker.num_forward_tokens - before
    second = alone(engine, job)
    warm = engine.worker.num_forward_tokens - before - cold
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (70 - 1) // GRID * GRID
    assert cold - warm == second.num_cached_tokens
    for output in (first, second):
        assert_same_bits(job, output)
        assert output.num_cached_tokens + sum(output.missed_tokens.values()) == 70


def test_a_hit_on_a_part_of_another_prompt_changes_no_bit(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model, checkpoint_retention="all")
    base = tokens(rng, 80)
    alone(engine, solve(model, Job(base)))
    for shared in (1, 15, 16, 17, 31, 32, 48, 63, 64, 65, 79):
        other = 2 + (base[shared] - 1) % (VOCAB - 2)  # Not the base's: no longer prefix by chance.
        job = solve(model, Job([*base[:shared], other, *tokens(rng, 7)]))
        output = alone(engine, job)
        assert output.num_cached_tokens <= shared
        assert output.num_cached_tokens >= min(shared, 79) // GRID * GRID - GRID
        assert_same_bits(job, output)


def test_preemption_at_any_moment_changes_no_bit(model: Any, rng: random.Random) -> None:  # noqa: ANN401
    jobs = [solve(model, Job(tokens(rng, n), SAMPLED)) for n in (5, 33, 48)]
    for depth in (True, False):
        engine = make_engine(model, async_scheduling=depth)
        outputs = drive(engine, jobs, rng, preempt=0.3)
        assert engine.stats()["preemptions"]
        for job, output in zip(jobs, outputs, strict=True):
            assert_same_bits(job, output)
        assert_balanced(engine)


def test_neighbours_that_are_aborted_change_no_bit(model: Any, rng: random.Random) -> None:  # noqa: ANN401
    jobs = [solve(model, Job(tokens(rng, n))) for n in (9, 30)]
    engine = make_engine(model)
    for index, job in enumerate(jobs):
        engine.add_request(f"job-{index}", job.prompt, job.params)
    pending: list[str] = []
    done: dict[str, Any] = {}
    turn = 0
    while len(done) < len(jobs):
        turn += 1
        if rng.random() < 0.5:
            pending.append(f"victim-{turn}")
            engine.add_request(pending[-1], tokens(rng, rng.randint(1, 60)), GREEDY)
        if pending and rng.random() < 0.4:
            engine.abort(pending.pop(rng.randrange(len(pending))))
        ended = [output for output in engine.step() if output.finished]
        done.update((o.request_id, o) for o in ended if o.request_id.startswith("job"))
    for name in pending:
        engine.abort(name)
    while engine.has_work():
        engine.step()
    for index, job in enumerate(jobs):
        assert_same_bits(job, done[f"job-{index}"])
    assert_balanced(engine)


def test_a_seeded_request_samples_the_same_tokens_whatever_its_mates_ask_for(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    job = solve(model, Job(tokens(rng, 20), SAMPLED))
    mates = [
        Job(tokens(rng, 12), replace(GREEDY, temperature=1.7, min_p=0.2, seed=5)),
        Job(tokens(rng, 30), replace(GREEDY, temperature=0.0)),
        Job(tokens(rng, 7), replace(GREEDY, temperature=0.5, top_k=3, seed=77, logprobs=4)),
    ]
    engine = make_engine(model)
    for count in range(len(mates) + 1):
        outputs = drive(engine, [*mates[:count], job], rng)
        assert_same_bits(job, outputs[-1])


def test_drafts_change_no_token_of_a_seeded_request(model: Any, rng: random.Random) -> None:  # noqa: ANN401
    job = solve(model, Job(tokens(rng, 20), SAMPLED))
    for drafts in ("mtp:3", "ngram:2", "draft:same:4"):
        engine = make_engine(model, draft_model=model, speculative=drafts)
        engine.scheduler.policy = None
        assert_same_bits(job, alone(engine, job))


def test_kv_of_generated_tokens_never_serves_a_prompt(model: Any, rng: random.Random) -> None:  # noqa: ANN401
    """A generates after X; B's prompt is all of it; C comes after B. All equal a cold run."""
    engine = make_engine(model, checkpoint_retention="all")
    first = solve(model, Job(tokens(rng, 20), replace(GREEDY, max_tokens=28)))
    output = alone(engine, first)
    assert_same_bits(first, output)
    conversation = first.prompt + output.outputs[0].token_ids
    assert len(conversation) == 48
    second = solve(model, Job([*conversation, 5, 6], replace(GREEDY, max_tokens=20)))
    answer = alone(engine, second)
    assert answer.num_cached_tokens == GRID, "only the first prompt's own block may serve"
    assert answer.missed_tokens["generated_checkpoint"] == 2 * GRID
    assert_same_bits(second, answer)
    third = solve(model, Job([*second.prompt, *answer.outputs[0].token_ids, 7]))
    reply = alone(engine, third)
    assert reply.num_cached_tokens == 48, "the second request computed these as a prompt"
    assert_same_bits(third, reply)


def test_generated_checkpoints_serve_later_prompts_within_tolerance(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    """Outside bitwise mode a conversation's second turn reuses the first answer (E2)."""
    engine = make_engine(model, deterministic=False, speculative="scripted:3",
                         checkpoint_retention="all")
    first = solve(model, Job(tokens(rng, 20), replace(GREEDY, max_tokens=40)))
    assert first.run is not None
    full = np.array(first.prompt + first.run.tokens)
    first.script = (full, np.full(len(full) + 8, 3))
    output = alone(engine, first)
    assert_same_bits(first, output)
    second = solve(model, Job([*first.prompt, *output.outputs[0].token_ids, 5]))
    answer = alone(engine, second)
    assert answer.num_cached_tokens == 48
    assert second.run is not None
    logits = second.run.logits[0].numpy()
    entry = answer.outputs[0].logprobs[0]
    wanted = log_probabilities(logits)
    error = max(abs(entry[t].logprob - wanted[t]) for t in range(VOCAB))
    print(f"largest difference {error:.2e}, {logits.std():.2e} is the logits' deviation")
    assert error <= 2e-4 * logits.std() + 1e-6


def test_erasing_the_state_changes_the_logits(model: Any, rng: random.Random) -> None:  # noqa: ANN401
    """The tests above would notice a wrong state: here every state block is wiped once."""
    job = solve(model, Job(tokens(rng, 40)))
    for wipe in ("states", "nothing"):
        engine = make_engine(model, async_scheduling=False)
        engine.add_request("job-0", job.prompt, job.params)
        outputs = []
        while engine.has_work():
            outputs.extend(engine.step())
            if wipe == "states" and engine.worker.num_steps == 3:
                for buffer in engine.worker.pools.states[0].values():
                    engine.parts.runtime.write(buffer, torch.zeros(buffer.shape))
        if wipe == "nothing":
            assert_same_bits(job, outputs[-1])
        else:
            with pytest.raises(AssertionError):
                assert_same_bits(job, outputs[-1])


def test_the_same_engine_gives_the_same_bits_twice_after_a_cache_reset(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model)
    job = Job(tokens(rng, 50), replace(SAMPLED, max_tokens=MAX_LEN - 50))
    first = alone(engine, job)
    engine.reset_prefix_cache()
    second = alone(engine, job)
    assert second.num_cached_tokens == 0
    assert_same_outputs(first, second)


def test_several_completions_of_one_prompt_equal_requests_with_their_own_seeds(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model)
    prompt = tokens(rng, 33)
    request = replace(SAMPLED, n=3)
    output = drive(engine, [Job(prompt, request)])[0]
    assert sorted(c.index for c in output.outputs) == [0, 1, 2]
    texts = [tuple(c.token_ids) for c in output.outputs]
    assert len(set(texts)) == 3
    assert tuple(drive(engine, [Job(prompt, SAMPLED)])[0].outputs[0].token_ids) == texts[0]
