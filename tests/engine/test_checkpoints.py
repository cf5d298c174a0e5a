"""Where prompts leave checkpoints, who may use them, and what keeps them."""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from conformance import (
    BLOCK,
    GREEDY,
    GRID,
    MAX_LEN,
    VOCAB,
    Job,
    assert_balanced,
    assert_same_bits,
    assert_same_outputs,
    drive,
    make_engine,
    small_model,
    solve,
)

from headrace.engine.prefix_cache import chain_keys, root_key
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.outputs import RequestOutput

SHORT = replace(GREEDY, max_tokens=3)


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


def ask(engine: Engine, prompt: list[int], **changes: Any) -> RequestOutput:  # noqa: ANN401
    """Serve one request and compare it with the oracle, bit for bit."""
    job = solve(engine.parts.model, Job(prompt, replace(SHORT, **changes)))
    (output,) = drive(engine, [job])
    assert_same_bits(job, output)
    return output


def checkpoints(engine: Engine, prompt: list[int], salt: str | None = None) -> list[int]:
    """Lengths after which a state of this prompt is cached."""
    keys = chain_keys(root_key(salt), prompt, BLOCK)
    (pool,) = engine.scheduler.state_pools
    return [n for n in range(GRID, len(prompt) + 1, GRID) if pool.lookup(keys[n // BLOCK - 1])]


def rungs(engine: Engine, prompt: list[int]) -> list[int]:
    """Those of them that nobody has asked for."""
    keys = chain_keys(root_key(None), prompt, BLOCK)
    (pool,) = engine.scheduler.state_pools
    return [n for n in checkpoints(engine, prompt) if keys[n // BLOCK - 1] in pool._rung_keys]


def hits(engine: Engine, *prompts: list[int], **changes: Any) -> list[int]:  # noqa: ANN401
    """Cached tokens of requests that come one after the other."""
    found = []
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{index}", prompt, replace(SHORT, logprobs=None, **changes))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        found.append(outputs[-1].num_cached_tokens)
    return found


@pytest.mark.parametrize("scheme", ["columns", "replay"])
@pytest.mark.parametrize("drafts", ["none", "mtp:2"])
def test_marks_are_floored_to_a_state_block_and_serve_whoever_shares_that_much(
    model: Any, rng: random.Random, scheme: str, drafts: str  # noqa: ANN401
) -> None:
    engine = make_engine(model, state_scheme=scheme, speculative=drafts)
    prompt = tokens(rng, 75)
    ask(engine, prompt, cache_checkpoint=[7, 16, 47])
    assert checkpoints(engine, prompt) == [16, 32, 64]
    for shared, hit in ((16, 16), (31, 16), (46, 32), (63, 32), (74, 64)):
        other = [*prompt[:shared], 1, *tokens(rng, 3)]
        assert ask(engine, other).num_cached_tokens == hit, f"{shared=}"
    assert_balanced(engine)


def test_a_mark_inside_a_hit_leaves_nothing_new(model: Any, rng: random.Random) -> None:  # noqa: ANN401
    engine = make_engine(model)
    prompt = tokens(rng, 70)
    ask(engine, prompt)
    assert rungs(engine, prompt) == [16]
    output = ask(engine, [*prompt[:66], 1, 1], cache_checkpoint=20)
    assert output.num_cached_tokens == 64
    assert checkpoints(engine, prompt) == [16, 64]
    assert rungs(engine, prompt) == [], "what is marked is a rung no longer"


@pytest.mark.parametrize("scheme", ["columns", "replay"])
def test_a_prompt_that_ends_on_a_boundary_serves_itself_and_its_continuation(
    model: Any, rng: random.Random, scheme: str  # noqa: ANN401
) -> None:
    engine = make_engine(model, state_scheme=scheme, speculative="mtp:2")
    prompt = tokens(rng, 48)
    first = ask(engine, prompt)
    assert checkpoints(engine, prompt) == [16, 32, 48]
    assert rungs(engine, prompt) == [16]
    assert ask(engine, prompt).num_cached_tokens == 32
    longer = prompt + first.outputs[0].token_ids + tokens(rng, 5)
    assert ask(engine, longer).num_cached_tokens == 48
    assert_balanced(engine)


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        ("latest", [80]),
        ("all", [16, 32, 48, 64, 80]),
        ("every:32", [32, 64, 80]),
        ("every:40", [48, 80]),
    ],
)
@pytest.mark.parametrize("budget", [64, GRID])
def test_retention_says_which_boundaries_are_kept_and_what_is_between_are_rungs(
    model: Any, rng: random.Random, retention: str, kept: list[int], budget: int  # noqa: ANN401
) -> None:
    engine = make_engine(model, checkpoint_retention=retention, max_num_batched_tokens=budget)
    prompt = tokens(rng, 83)
    ask(engine, prompt)
    found = rungs(engine, prompt)
    assert [n for n in checkpoints(engine, prompt) if n not in found] == kept
    assert found == [n for n in (16, 64) if n not in kept]


def test_the_junction_of_two_prompts_is_kept_for_the_third(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model)
    common = tokens(rng, 56)
    ask(engine, common + tokens(rng, 30))
    second = ask(engine, [*common, 1, *tokens(rng, 20)])
    assert second.num_cached_tokens == 16, "the longest rung within what they share"
    assert second.missed_tokens["no_checkpoint"] == 48
    assert ask(engine, [*common, 2, 2]).num_cached_tokens == 48
    assert rungs(engine, [*common, 2, 2]) == []


def test_salts_share_with_their_equals_alone(model: Any, rng: random.Random) -> None:  # noqa: ANN401
    engine = make_engine(model)
    prompt = tokens(rng, 40)
    ask(engine, prompt, cache_salt="one")
    assert checkpoints(engine, prompt) == []
    assert checkpoints(engine, prompt, "one") == [16, 32]
    for salt in (None, "two", ""):
        assert ask(engine, prompt, cache_salt=salt).num_cached_tokens == 0
    assert ask(engine, prompt, cache_salt="one").num_cached_tokens == 32
    again = make_engine(model)
    ask(again, prompt)
    assert ask(again, prompt, cache_salt="one").missed_tokens["salt"] == 32


def full_size(model: Any, **options: Any) -> Engine:  # noqa: ANN401
    """An engine with the grid and blocks that users have."""
    settings: dict[str, Any] = {
        "scan_grid": 64, "state_block_size": 64, "max_model_len": 512,
        "max_num_batched_tokens": 512,
    }
    return make_engine(model, **(settings | options))


@pytest.mark.parametrize("lengths", [(101, 130), (700, 1500)])
@pytest.mark.parametrize(
    ("layout", "scheme"),
    [("slots", "replay"), ("slots", "columns"), ("compact", "replay"), ("compact", "columns")],
)
def test_a_request_that_shares_a_hundred_tokens_with_any_other_hits(
    model: Any, rng: random.Random, layout: str, scheme: str, lengths: tuple[int, ...]  # noqa: ANN401
) -> None:
    """However long the first prompt is; a hit changes no bit, and what it saves is not computed."""
    options = {"batch_layout": layout, "state_scheme": scheme, "max_model_len": 1600}
    engine, never = full_size(model, **options), full_size(model, prefix_cache="none", **options)
    assert engine.stats()["prefix_cache"]["min_cacheable_prefix_tokens"] == 64
    for length in lengths:
        common = tokens(rng, 100)
        hits(engine, [*common, 1, *tokens(rng, length - 101)])
        second = [*common, 2, *tokens(rng, 20)]
        rows, outputs = [], []
        for one in (never, engine):
            before = one.stats()["forward_tokens"]
            outputs += drive(one, [Job(second, SHORT)])
            rows.append(one.stats()["forward_tokens"] - before)
        assert_same_outputs(*outputs)
        assert outputs[1].num_cached_tokens == 64
        assert rows[0] - rows[1] == 64
    assert_balanced(engine)


def test_requests_that_come_together_share_what_the_first_one_computes(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    common = tokens(rng, 100)
    long, other = [*common, 1, *tokens(rng, 200)], [*common, 2, *tokens(rng, 30)]
    engine = full_size(model, max_num_batched_tokens=128)
    for name, prompt in (("long", long), ("other", other)):
        engine.add_request(name, prompt, replace(SHORT, logprobs=None))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert max(o.num_cached_tokens for o in outputs if o.request_id == "other") == 64


def test_rungs_give_way_before_all_other_checkpoints(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model, num_state_blocks=11, max_num_seqs=1)
    (pool,) = engine.scheduler.state_pools
    prompts = [tokens(rng, 83) for _ in range(7)]
    left = []
    for prompt in prompts:
        assert hits(engine, prompt) == [0]
        left.append(pool.num_rungs)
    assert left[:3] == [2, 4, 6], "there is room to spare"
    assert left[3:] == [5, 4, 3, 2], "one for each end"
    assert [checkpoints(engine, prompt)[-1:] for prompt in prompts] == [[80]] * len(prompts)


def test_a_preempted_prompt_goes_on_from_its_last_rung(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model, max_num_batched_tokens=GRID, async_scheduling=False)
    job = solve(model, Job(tokens(rng, 90), SHORT))
    engine.add_request("job", job.prompt, job.params)
    for _ in range(4):
        engine.step()
    engine.scheduler.preempt(engine.scheduler.running[0])
    before = engine.stats()["forward_tokens"]
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert_same_bits(job, outputs[-1])
    assert engine.stats()["forward_tokens"] - before == 90 - 64 + 2
    assert_balanced(engine)


def test_pinned_checkpoints_outlive_what_evicts_all_others(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model, num_kv_blocks=16, num_state_blocks=12)
    pinned, other = tokens(rng, 40), tokens(rng, 40)
    ask(engine, pinned, cache_pin="system")
    ask(engine, other)
    assert engine.pins() == {"system": {"kv_blocks": 2, "checkpoints": 1}}
    hits(engine, *(tokens(rng, 60) for _ in range(14)))
    assert engine.scheduler.kv_pool.num_evictions > 20
    assert ask(engine, other).num_cached_tokens == 0
    assert ask(engine, pinned).num_cached_tokens == 32
    assert engine.release_pin("system")
    assert not engine.release_pin("system")
    hits(engine, *(tokens(rng, 60) for _ in range(14)))
    assert ask(engine, pinned).missed_tokens["evicted"] == 32
    assert_balanced(engine)


def test_pins_add_up_under_one_name_and_hold_what_is_marked(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model, num_kv_blocks=60, num_state_blocks=40)
    prompt = tokens(rng, 80)
    ask(engine, prompt, cache_pin="a", cache_checkpoint=[32, 20])
    assert engine.pins() == {"a": {"kv_blocks": 2, "checkpoints": 2}}
    ask(engine, prompt, cache_pin="a")
    # A prompt that ends on a boundary has two ends.
    assert engine.pins() == {"a": {"kv_blocks": 5, "checkpoints": 4}}
    ask(engine, prompt[:10], cache_pin="b")
    assert "b" not in engine.pins(), "ten tokens leave no checkpoint"
    engine.reset_prefix_cache()
    assert ask(engine, prompt).num_cached_tokens == 0
    assert engine.stats()["kv_blocks"]["pinned"] == 5


def test_pins_are_bounded_so_that_the_longest_sequence_still_runs(
    model: Any, rng: random.Random  # noqa: ANN401
) -> None:
    engine = make_engine(model, num_kv_blocks=20, num_state_blocks=16, max_pinned_share=1.0)
    for index in range(3):
        ask(engine, tokens(rng, 70), cache_pin=f"p{index}")
    # Of 19 blocks a sequence of MAX_LEN tokens needs 7, and each pin holds 4.
    with pytest.raises(RequestError, match="would spare 4 more KV blocks but 0 of 12 are left"):
        ask(engine, tokens(rng, 70), cache_pin="p3")
    assert not engine.has_work()
    output = ask(engine, tokens(rng, 50), max_tokens=MAX_LEN - 50)
    assert len(output.outputs[0].token_ids) == MAX_LEN - 50
    assert len(engine.pins()) == 3
    none = make_engine(model, max_pinned_share=0.0)
    with pytest.raises(RequestError, match="0 of 0 are left for that"):
        none.add_request("x", tokens(rng, 40), replace(SHORT, cache_pin="x"))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"cache_checkpoint": 41}, {}, "cache_checkpoint has 41 but the prompt has 40 tokens"),
        ({"cache_checkpoint": 0}, {}, "cache_checkpoint must be at least 1, got 0"),
        ({"cache_checkpoint": [True]}, {}, "cache_checkpoint must be an integer"),
        ({"cache_checkpoint": [16] * 65}, {}, "has 65 positions but at most 64 are allowed"),
        ({"cache_pin": ""}, {}, "cache_pin must be a name of 1..128 characters"),
        ({"cache_pin": "x"}, {"prefix_cache": "none"}, "cache_pin needs the prefix cache"),
        ({"cache_checkpoint": 3}, {"prefix_cache": "none"}, "cache_checkpoint needs the prefix"),
    ],
)
def test_marks_and_pins_that_cannot_be_are_refused_by_name(
    model: Any, changes: dict[str, Any], options: dict[str, Any], message: str  # noqa: ANN401
) -> None:
    engine = make_engine(model, **options)
    with pytest.raises(RequestError, match=message):
        engine.add_request("x", [5] * 40, replace(SHORT, **changes))
    assert not engine.has_work()
