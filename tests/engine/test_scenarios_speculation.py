"""Ways in which speculation over recurrent state went wrong elsewhere (B28 to B48)."""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.scenarios

SCHEMES = pytest.mark.parametrize("scheme", ["columns", "replay"])
LAYOUTS = pytest.mark.parametrize("layout", ["slots", "compact"])
MODES = pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])


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


def scripted(job: Job, keep: Any) -> Job:  # noqa: ANN401
    """Give a solved job a script; keep is one number or one per position."""
    assert job.run is not None
    full = np.array(job.prompt + job.run.tokens)
    job.script = (full, np.resize(np.array(keep), min(len(full) + 8, MAX_LEN)))
    return job


def check(engine: Any, jobs: list[Job], rng: random.Random | None = None, **events: float) -> Any:  # noqa: ANN401
    outputs = drive(engine, jobs, rng, **events)
    for job, output in zip(jobs, outputs, strict=True):
        assert_same_bits(job, output)
    assert_balanced(engine)
    return outputs


@pytest.mark.thinned
@SCHEMES
@LAYOUTS
@MODES
def test_b28_a_step_without_drafts_after_a_step_with_accepted_ones(
    model: Any, rng: random.Random, scheme: str, layout: str, is_async: bool  # noqa: ANN401, FBT001
) -> None:
    """Drafts come and go: accept 2, none, accept 3, none, none, propose 0; caching off."""
    engine = make_engine(
        model, state_scheme=scheme, batch_layout=layout, async_scheduling=is_async,
        speculative="scripted:3", prefix_cache="none",
    )
    pattern = (3, 0, 3, 0, 0, 2)
    engine.scheduler.draft_policy = lambda seq: pattern[(seq.num_steps + seq.seq_id) % 6]
    params = replace(GREEDY, max_tokens=60)
    jobs = [
        scripted(solve(model, Job(tokens(rng, n), params)), [rng.randint(1, 3) for _ in range(70)])
        for n in (3, 8, 13)
    ]
    check(engine, jobs)


@pytest.mark.thinned
@pytest.mark.parametrize("drafts", ["scripted:3", "ngram:3", "mtp:3", "draft:same:3"])
@SCHEMES
def test_b29_every_drafter_commits_the_verified_state(
    model: Any, rng: random.Random, drafts: str, scheme: str  # noqa: ANN401
) -> None:
    engine = make_engine(model, draft_model=model, speculative=drafts, state_scheme=scheme)
    engine.scheduler.policy = None
    # A text that repeats itself, so that prompt lookup has something to find.
    phrase = tokens(rng, 6)
    jobs = [
        scripted(solve(model, Job(phrase * 4 + tokens(rng, n), replace(GREEDY, max_tokens=40))), 2)
        for n in (0, 1, 5)
    ]
    if not drafts.startswith("scripted"):
        for job in jobs:
            job.script = None
    check(engine, jobs)
    assert engine.stats()["draft_tokens"]


@SCHEMES
def test_b32_prompts_as_long_as_a_verify_row_are_prompts(
    model: Any, rng: random.Random, scheme: str  # noqa: ANN401
) -> None:
    drafts = 3
    for lengths in (*((n,) for n in range(1, 2 * drafts + 4)), (4, 4), (4, 1, 4, 2)):
        engine = make_engine(model, speculative=f"scripted:{drafts}", state_scheme=scheme)
        params = replace(GREEDY, max_tokens=8)
        jobs = [scripted(solve(model, Job(tokens(rng, n), params)), 3) for n in lengths]
        check(engine, jobs, rng, stagger=0.5)


@pytest.mark.thinned
@LAYOUTS
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_b33_a_last_chunk_of_one_token_beside_verify_rows(
    model: Any, rng: random.Random, layout: str, order: tuple[int, ...]  # noqa: ANN401
) -> None:
    engine = make_engine(
        model, batch_layout=layout, speculative="scripted:2", max_num_batched_tokens=2 * GRID
    )
    jobs = [
        scripted(solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=24))), 2)
        for n in (2 * GRID + 1, 3, 5)
    ]
    check(engine, [jobs[i] for i in order])


@pytest.mark.thinned
@SCHEMES
@LAYOUTS
def test_b35_a_long_prompt_in_chunks_while_others_verify(
    model: Any, rng: random.Random, scheme: str, layout: str  # noqa: ANN401
) -> None:
    engine = make_engine(
        model, state_scheme=scheme, batch_layout=layout, speculative="scripted:3",
        max_num_batched_tokens=GRID + 14,
    )
    jobs = [
        scripted(
            solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=14))),
            [rng.randint(-1, 3) for _ in range(40)],
        )
        for n in (4, 6, 9, 5 * GRID)
    ]
    check(engine, jobs)


@pytest.mark.thinned
@SCHEMES
@MODES
def test_b37_near_the_context_limit_drafts_stop_in_time(
    model: Any, rng: random.Random, scheme: str, is_async: bool  # noqa: ANN401, FBT001
) -> None:
    """The limit is also a multiple of the KV block, whose last place is used (B38)."""
    assert MAX_LEN % BLOCK == 0
    for drafts in ("scripted:3", "mtp:3"):
        engine = make_engine(
            model, speculative=drafts, state_scheme=scheme, async_scheduling=is_async
        )
        engine.scheduler.policy = None
        params = replace(GREEDY, max_tokens=None)
        jobs = []
        for length in range(MAX_LEN - 7, MAX_LEN):
            job = solve(model, Job(tokens(rng, length), replace(GREEDY, max_tokens=MAX_LEN)))
            job = scripted(job, rng.randint(0, 3))
            job.params = params
            if drafts != "scripted:3":
                job.script = None
            jobs.append(job)
        for job, output in zip(jobs, check(engine, jobs), strict=True):
            assert output.outputs[0].finish_reason == "length"
            assert len(output.outputs[0].token_ids) == MAX_LEN - len(job.prompt)


def test_b38_a_drafter_with_a_shorter_context_is_harmless(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(
        model, draft_model=small_model(5, max_position_embeddings=40), speculative="draft:small:3"
    )
    engine.scheduler.policy = None
    check(engine, [solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=90)))
                   for n in (6, 39, 50)])


@pytest.mark.parametrize("drafts", ["mtp:3", "scripted:7", "draft:same:2"])
def test_b41_a_step_at_the_full_budget_while_drafting(
    model: Any, rng: random.Random, drafts: str  # noqa: ANN401
) -> None:
    engine = make_engine(
        model, draft_model=model, speculative=drafts, max_num_seqs=8, max_num_batched_tokens=64
    )
    engine.scheduler.policy = None
    jobs = [solve(model, Job(tokens(rng, 8), replace(GREEDY, max_tokens=12))) for _ in range(8)]
    jobs.append(solve(model, Job(tokens(rng, 64), replace(GREEDY, max_tokens=4))))
    if drafts.startswith("scripted"):
        jobs = [scripted(job, 7) for job in jobs]
    check(engine, jobs)


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 5, 6, 9])
def test_b46_a_stop_inside_the_budget_wins_over_the_length(
    model: Any, rng: random.Random, max_tokens: int  # noqa: ANN401
) -> None:
    job = solve(model, Job(tokens(rng, 5), replace(GREEDY, max_tokens=12)))
    assert job.run is not None
    stop = job.run.tokens[3]
    place = job.run.tokens.index(stop) + 1
    scripted(job, 7)
    job.params = replace(job.params, max_tokens=max_tokens, stop_token_ids=[stop])
    engine = make_engine(model, speculative="scripted:7")
    completion = drive(engine, [job])[0].outputs[0]
    assert completion.token_ids == job.run.tokens[: min(place, max_tokens)]
    assert completion.finish_reason == ("stop" if place <= max_tokens else "length")
    assert_balanced(engine)


@MODES
def test_b47_what_is_counted_is_what_was_delivered(
    model: Any, rng: random.Random, is_async: bool  # noqa: ANN401, FBT001
) -> None:
    engine = make_engine(model, speculative="scripted:4", async_scheduling=is_async)
    job = scripted(solve(model, Job(tokens(rng, 5), replace(GREEDY, max_tokens=12))), 4)
    assert job.run is not None
    generated = 0
    for max_tokens in range(1, 10):
        job.params = replace(job.params, max_tokens=max_tokens)
        completion = drive(engine, [job])[0].outputs[0]
        assert completion.token_ids == job.run.tokens[:max_tokens]
        assert completion.logprobs is not None
        assert len(completion.logprobs) == max_tokens
        generated += max_tokens
        assert engine.stats()["generated_tokens"] == generated
    stats = engine.stats()
    assert 0 < stats["accepted_tokens"] <= stats["draft_tokens"]


@pytest.mark.thinned
@SCHEMES
@MODES
def test_b48_rows_that_move_keep_their_own_counts(
    model: Any, rng: random.Random, scheme: str, is_async: bool  # noqa: ANN401, FBT001
) -> None:
    """Accepted 1, 4, 2, 3 in four rows; row 0 ends at that step, later another enters."""
    for end in range(2, 7):
        engine = make_engine(
            model, batch_layout="compact", speculative="scripted:3", state_scheme=scheme,
            async_scheduling=is_async,
        )
        jobs = []
        for index, keep in enumerate((0, 3, 1, 2, 3)):
            count = end if index == 0 else 22
            job = solve(model, Job(tokens(rng, 4 + index), replace(GREEDY, max_tokens=count)))
            jobs.append(scripted(job, keep))
        check(engine, jobs)


@SCHEMES
def test_b50_a_column_is_given_up_only_when_the_confirmed_length_has_passed_it(
    model: Any, rng: random.Random, scheme: str  # noqa: ANN401
) -> None:
    """Length 14, four tokens scheduled across the boundary, all drafts rejected; a waiting
    request takes every block that is freed.
    """
    engine = make_engine(
        model, speculative="scripted:3", state_scheme=scheme, num_state_blocks=15, num_kv_blocks=20
    )
    jobs = [
        scripted(solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=30))), 0)
        for n in (13, 14, 15, 12, 29, 30)
    ]
    check(engine, jobs)


@pytest.mark.thinned
@SCHEMES
@LAYOUTS
def test_b70_runs_of_every_length_over_every_offset_keep_states_exact(
    model: Any, rng: random.Random, scheme: str, layout: str  # noqa: ANN401
) -> None:
    """Every (start, kept) pair around a boundary; each published state is compared."""
    engine = make_engine(
        model, state_scheme=scheme, batch_layout=layout, speculative="scripted:3",
        deterministic=False, checkpoint_retention="all", max_num_seqs=8,
    )
    jobs = []
    for start in range(GRID - 5, GRID + 1):
        for keep in (0, 1, 2, 3):
            params = replace(GREEDY, max_tokens=14)
            jobs.append(scripted(solve(model, Job(tokens(rng, start), params), states=True), keep))
    outputs = drive(engine, jobs)
    for job, output in zip(jobs, outputs, strict=True):
        assert_same_bits(job, output)
    assert assert_checkpoints(engine, jobs)


@pytest.mark.parametrize("include", [False, True])
def test_b105_a_stop_string_inside_an_accepted_run_ends_everything_at_one_place(
    random_model: Path, rng: random.Random, *, include: bool
) -> None:
    """Runs of 8 tokens, a stop string ending at any of them or spanning two runs."""
    spoken = small_model(rng.randrange(2**31), vocab_size=272)
    prompt = [rng.randrange(2, 250) for _ in range(5)]
    job = solve(spoken, Job(prompt, replace(GREEDY, max_tokens=20)))
    assert job.run is not None
    scripted(job, 7)
    engines = [
        make_engine(spoken, tokenizer=str(random_model), speculative=speculative)
        for speculative in ("none", "scripted:7")
    ]
    engines[1].scheduler.policy = None
    tokenizer = engines[0].tokenizer
    assert tokenizer is not None
    for end in range(1, 17):
        for length in (1, 2) if end % 3 else (3,):
            # A stop string is text: these bytes, where they happen to be whole characters.
            part = job.run.tokens[max(0, end - length) : end]
            piece = b"".join(map(tokenizer.token_bytes, part))
            is_text = piece.isascii() and tokenizer.special_ids.isdisjoint(part)
            if not piece or not is_text:
                continue
            job.params = replace(
                GREEDY, max_tokens=20, stop=[piece.decode()], logprobs=2,
                include_stop_str_in_output=include,
            )
            script = job.script
            job.script = None
            plain = drive(engines[0], [job])[0].outputs[0]
            job.script = script
            drafted = drive(engines[1], [job])[0].outputs[0]
            assert drafted.text == plain.text
            assert not include or drafted.text.endswith(piece.decode())
            assert drafted.token_ids == plain.token_ids == job.run.tokens[: len(plain.token_ids)]
            assert drafted.finish_reason == plain.finish_reason == "stop"
            assert drafted.logprobs == plain.logprobs
            assert drafted.logprobs is not None
            assert len(drafted.logprobs) == len(drafted.token_ids) <= end
    assert engines[1].stats()["accepted_tokens"]
    for engine in engines:
        assert_balanced(engine)


def test_b30_padded_rows_and_rows_of_no_tokens_change_no_state() -> None:
    """The save and the move on rows with accepted 0, null blocks or zero length."""
    from headrace.ops.state_columns import StatePool, premove, save  # noqa: PLC0415

    state = torch.arange(12.0).view(1, 6, 2)
    window = torch.arange(36.0).view(1, 6, 6, 1)
    pools = (
        StatePool(tensor=state, kind="recurrent"), StatePool(tensor=window, kind="window")
    )
    before = state.clone(), window.clone()
    table = torch.tensor([[1, 2, 3], [0, 0, 0], [4, 5, 0]], dtype=torch.int32)
    scheduled = torch.tensor([0, 4, 4])
    accepted = torch.tensor([2, 1, 0])
    column = torch.tensor([0, 0, 0])
    premove(
        pools, table, computed=torch.tensor([3, 3, 3]), scheduled=scheduled, accepted=accepted,
        state_column=column, accepted_out=accepted.clone(), state_column_out=column.clone(),
        block_size=4, max_accepted=4,
    )
    save(
        pools, table, scheduled=scheduled, accepted=accepted, state_column=column,
        accepted_out=accepted.clone(), block_size=4, max_accepted=4,
        new_computed=torch.tensor([4, 4, 4]),
    )
    assert torch.equal(state, before[0])
    assert torch.equal(window, before[1])
    with pytest.raises(RuntimeError):
        save(
            pools, table, scheduled=torch.tensor([4, 0, 0]), accepted=torch.tensor([5, 1, 1]),
            state_column=column, accepted_out=accepted.clone(), block_size=4, max_accepted=4,
            new_computed=torch.tensor([9, 4, 4]),
        )
