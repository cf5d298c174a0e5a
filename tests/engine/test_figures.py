"""The engine's figures: what is counted as prompts are computed, and by step."""

from __future__ import annotations

import secrets

import pytest
from conformance import make_engine, small_model

from headrace.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model() -> object:
    seed = secrets.randbits(20)
    print(f"{seed=}")
    return small_model(seed)


def params(max_tokens: int = 4, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def test_prompt_tokens_count_as_they_are_computed_not_when_requests_end(model: object) -> None:
    engine = make_engine(model, max_num_batched_tokens=16, async_scheduling=False)
    engine.add_request("a", list(range(40)), params())
    seen = []
    while engine.has_work():
        engine.step()
        seen.append(engine.stats()["computed_prompt_tokens"])
    assert seen[:4] == [16, 32, 40, 40]
    assert engine.stats()["prompt_tokens"] == 40


def test_cached_prompt_tokens_count_when_they_are_found(model: object) -> None:
    engine = make_engine(model)
    for name, tail in (("a", []), ("b", [1, 2, 3])):
        engine.add_request(name, [*range(40), *tail], params())
        while engine.has_work():
            engine.step()
    stats = engine.stats()
    assert stats["cached_prompt_tokens"] == stats["prefix_cache"]["hit_tokens"] == 32
    assert stats["computed_prompt_tokens"] == 40 + 43 - 32
    assert stats["prompt_tokens"] == 40 + 43


def test_a_prompt_counts_once_however_often_it_is_computed(model: object) -> None:
    engine = make_engine(model, num_kv_blocks=6, max_model_len=64, prefix_cache="none")
    engine.add_request("a", list(range(20)), params(20))
    engine.add_request("b", list(range(30)), params(20))
    while engine.has_work():
        engine.step()
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert stats["computed_prompt_tokens"] == stats["prompt_tokens"] == 50
    assert stats["forward_tokens"] > 50 + stats["generated_tokens"]


def test_completions_that_share_a_prompt_count_it_once(model: object) -> None:
    engine = make_engine(model)
    engine.add_request("a", list(range(20)), params(3, n=3))
    while engine.has_work():
        engine.step()
    assert engine.stats()["prompt_tokens"] == 20


def test_each_step_counts_its_prompt_and_new_tokens(model: object) -> None:
    engine = make_engine(model, speculative="ngram:3")
    engine.add_request("a", [5, 6] * 20, params(16))
    engine.add_request("b", list(range(9)), params(8))
    num_steps = 0
    while engine.has_work():
        engine.step()
        num_steps += 1
    stats = engine.stats()
    tally = stats["step_tokens"]
    assert stats["draft_tokens"] > stats["accepted_tokens"]
    assert tally["sum"] == 40 + 9 + stats["generated_tokens"]
    assert sum(tally["counts"]) == stats["steps"]
    assert tally["limits"][:3] == (1, 8, 16)
    # The first step has both prompts.
    assert tally["counts"][tally["limits"].index(64)] == 1


def test_who_waits_for_anothers_prompt_is_told_apart(model: object) -> None:
    engine = make_engine(model, max_num_seqs=2, max_num_batched_tokens=128, async_scheduling=False)
    for name in ("a", "twin", "c", "d"):
        prompt = [9, 8, 7] if name in "cd" else list(range(60))
        engine.add_request(name, prompt, params())
    engine.step()
    stats = engine.stats()
    assert stats["running"] == 2
    assert (stats["waiting"], stats["deferred"]) == (2, 1)
    engine.step()
    assert engine.stats()["deferred"] == 0, "the prompt has been computed"


def test_who_left_is_not_among_those_who_wait(model: object) -> None:
    engine = make_engine(model, max_num_batched_tokens=128, async_scheduling=False)
    for name in ("a", "twin"):
        engine.add_request(name, list(range(60)), params())
    engine.step()
    assert engine.stats()["deferred"] == 1
    engine.abort("twin")
    assert engine.stats()["deferred"] == 0


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 1024),
        ({"max_num_seqs": 256, "speculative": "ngram:3"}, 2 * 256 * 4),
        ({"max_num_batched_tokens": 48}, 48),
    ],
)
def test_a_step_of_a_cpu_has_few_tokens_and_room_for_prompts(
    model: object, options: dict[str, object], most: int
) -> None:
    engine = make_engine(model, **({"max_num_batched_tokens": None} | options))
    assert engine.parts.sizes.max_tokens == engine.scheduler.limits.max_num_batched_tokens == most
