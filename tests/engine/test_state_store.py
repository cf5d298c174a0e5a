"""Prefixes that outlive the process: the same bits, or a miss with its reason."""

from __future__ import annotations

import itertools
import random
import secrets
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conformance import (
    GREEDY,
    VOCAB,
    Job,
    assert_balanced,
    assert_same_bits,
    drive,
    make_engine,
    small_model,
    solve,
)

from headrace.engine.prefix_cache import chain_keys, root_key
from headrace.engine.state_store import store as store_module
from headrace.engine.state_store.wire import MAGIC
from headrace.errors import ConfigError, RequestError
from headrace.testing import random_weights, tiny_family

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.engine.engine import Engine
    from headrace.outputs import RequestOutput

SHORT = replace(GREEDY, max_tokens=4)
_TWO = {"num_hidden_layers": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"], **_TWO},
    "granite": {"layer_types": ["mamba", "attention"], **_TWO},
    "lfm2": {"full_attn_idxs": [1], **_TWO},
    "falcon_mamba": _TWO,
    "falcon_h1": _TWO,
    "nemotron_h": {"num_hidden_layers": 3, "hybrid_override_pattern": "M*E"},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], **_TWO},
    "kimi_linear": {
        "linear_attn_config": None, "linear_head_dim": 12, "linear_num_heads": 2,
        "layer_types": ["linear_attention", "full_attention"], **_TWO,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:  # noqa: ANN401
    seed = secrets.randbits(32)
    print(f"model of seed {seed}")
    return small_model(seed)


@pytest.fixture
def prompt() -> list[int]:
    seed = secrets.randbits(32)
    print(f"prompt of seed {seed}")
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(75)]


@pytest.fixture(autouse=True)
def engines() -> Iterator[list[Engine]]:
    """Close what a test has opened."""
    opened: list[Engine] = []
    yield opened
    for engine in opened:
        engine.close()


@pytest.fixture
def start(engines: list[Engine], tmp_path: Path) -> Any:  # noqa: ANN401
    def start(model: Any, **options: Any) -> Engine:  # noqa: ANN401
        settings = {"state_store": str(tmp_path), "block_size": 8}
        engine = make_engine(model, **(settings | options))
        engines.append(engine)
        return engine

    return start


def ask(engine: Engine, prompt: list[int], **changes: Any) -> RequestOutput:  # noqa: ANN401
    """Serve one request, compare it with the oracle bit for bit, let the store take it in."""
    job = solve(engine.parts.model, Job(prompt, replace(SHORT, **changes)))
    (output,) = drive(engine, [job])
    assert_same_bits(job, output)
    stored(engine).flush()
    return output


def stored(engine: Engine) -> Any:  # noqa: ANN401
    assert engine.scheduler.stored is not None
    return engine.scheduler.stored.store


def files(folder: Path, kind: str = "*") -> list[Path]:
    return sorted(folder.glob(f"*/*.{kind}"))


@pytest.mark.parametrize("scheme", ["columns", "replay"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_prompt_after_a_restart_hits_with_the_same_bits(
    family: str, scheme: str, prompt: list[int], start: Any  # noqa: ANN401
) -> None:
    model = tiny_family(family, 7, vocab_size=VOCAB, **FAMILIES[family])
    first = start(model, state_scheme=scheme)
    assert ask(first, prompt).num_cached_tokens == 0
    first.close()
    second = start(model, state_scheme=scheme)
    assert ask(second, prompt).num_cached_tokens == 64
    assert second.stats()["state_store"]["hits"] == 1
    assert second.stats()["state_store"]["hit_tokens"] == 64
    # Whoever comes next finds it on the device.
    assert ask(second, [*prompt[:70], 1, 1]).num_cached_tokens == 64
    assert second.stats()["state_store"]["hits"] == 1
    assert_balanced(second)


@pytest.mark.parametrize(
    ("written", "read"),
    list(
        itertools.permutations(
            [
                {"state_scheme": "columns", "speculative": "mtp:2"},
                {"state_scheme": "replay", "batch_layout": "compact", "async_scheduling": False},
                {"state_scheme": "replay", "speculative": "ngram:3", "replay_interval": 4},
            ],
            2,
        )
    ),
)
def test_layout_scheme_and_drafts_do_not_matter(
    model: Any, prompt: list[int], start: Any, written: Any, read: Any  # noqa: ANN401
) -> None:
    first = start(model, **written)
    ask(first, prompt)
    first.close()
    assert ask(start(model, **read), prompt).num_cached_tokens == 64


def test_a_draft_model_has_its_part(prompt: list[int], start: Any) -> None:  # noqa: ANN401
    model, draft = small_model(1), small_model(2)
    options = {"draft_model": draft, "speculative": "draft:x:2", "num_state_blocks": 40}
    first = start(model, **options)
    ask(first, prompt)
    first.close()
    assert ask(start(model, **options), prompt).num_cached_tokens == 64


def test_a_salt_keeps_prefixes_apart_on_disk_too(
    model: Any, prompt: list[int], start: Any  # noqa: ANN401
) -> None:
    first = start(model)
    ask(first, prompt, cache_salt="a")
    first.close()
    second = start(model)
    assert ask(second, prompt, cache_salt="b").num_cached_tokens == 0
    assert ask(second, prompt, cache_salt="a").num_cached_tokens == 64


def test_what_the_device_has_is_not_loaded_again(
    model: Any, prompt: list[int], start: Any  # noqa: ANN401
) -> None:
    engine = start(model)
    ask(engine, prompt)
    (pool,) = engine.scheduler.state_pools
    for boundary in (16, 64):
        entry = pool.lookup(chain_keys(root_key(None), prompt[:boundary], 8)[-1])
        assert entry is not None
        pool.unpublish(entry.block)
    loads: list[Any] = []
    execute = engine.worker.execute
    engine.worker.execute = lambda output: (loads.extend(output.loads), execute(output))[1]
    assert ask(engine, prompt).num_cached_tokens == 64
    assert [load.kind for load in loads] == ["state"]
    assert_balanced(engine)


def test_a_rung_is_saved_once_it_was_hit(
    model: Any, prompt: list[int], start: Any, tmp_path: Path  # noqa: ANN401
) -> None:
    engine = start(model)
    ask(engine, prompt)
    assert len(files(tmp_path, "state")) == 1
    assert ask(engine, [*prompt[:20], *prompt[:4]]).num_cached_tokens == 16
    assert len(files(tmp_path, "state")) == 2


def test_blocks_are_pinned_until_their_step_has_retired(
    model: Any, prompt: list[int], start: Any  # noqa: ANN401
) -> None:
    engine = start(model, state_store_step_bytes=1, async_scheduling=True)
    engine.add_request("job", prompt, replace(SHORT, max_tokens=1, logprobs=None))
    saved: list[Any] = []
    execute = engine.worker.execute
    engine.worker.execute = lambda output: (saved.extend(output.saves), execute(output))[1]
    pools = {"kv": [engine.scheduler.kv_pool], "state": engine.scheduler.state_pools}
    while engine.has_work():
        engine.step()
        waiting = list(engine.scheduler.stored._queue)
        newest = saved[-1:] if engine._in_flight else []
        for save in (*waiting, *newest):
            (pool,) = pools[save.kind]
            assert all(pool.refs(block) for block in save.blocks), save
    assert [save.kind for save in saved] == ["kv"] * 4 + ["state"]
    assert_balanced(engine)


def regions(path: Path) -> list[int]:
    """A place in each part of a piece: magic, version, digest, length, header, padding, data."""
    raw = path.read_bytes()
    begin = 48 + int.from_bytes(raw[40:48], "little")
    return [0, len(MAGIC) - 1, 8, 39, 40, 47, 48, begin - 1, begin, (begin + len(raw)) // 2, -1]


@pytest.mark.parametrize("kind", ["kv", "state"])
def test_damage_anywhere_is_a_miss_with_its_reason_and_is_mended(
    model: Any, prompt: list[int], start: Any, tmp_path: Path, kind: str  # noqa: ANN401
) -> None:
    first = start(model)
    ask(first, prompt)
    first.close()
    victim = random.choice(files(tmp_path, kind))
    good = victim.read_bytes()
    broken = {"empty": b"", "short": good[:-1], "long": good + b"\0", "head": good[:44]}
    for at in regions(victim):
        bad = bytearray(good)
        bad[at] ^= 1 << random.randrange(8)
        broken[f"byte {at}"] = bytes(bad)
    for what, raw in broken.items():
        victim.write_bytes(raw)
        engine = start(model, state_store_memory=0)
        output = ask(engine, prompt)
        assert output.num_cached_tokens == 0, what
        assert output.missed_tokens["damaged"] == 64, what
        misses = engine.stats()["state_store"]["misses"]
        assert misses.keys() & {"damaged", "truncated", "version"}, (what, misses)
        assert_balanced(engine)
        engine.close()
        assert victim.read_bytes() == good, f"{what} is mended by what was computed"


def test_pieces_under_each_others_names_are_foreign(
    model: Any, prompt: list[int], start: Any, tmp_path: Path  # noqa: ANN401
) -> None:
    first = start(model)
    ask(first, prompt)
    first.close()
    one, two, *_ = files(tmp_path, "kv")
    whole = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(whole)
    engine = start(model, state_store_memory=0)
    assert ask(engine, prompt).num_cached_tokens == 0
    assert engine.stats()["state_store"]["misses"]["foreign"] >= 1


def test_pieces_of_other_tokens_are_never_used(
    model: Any, prompt: list[int], start: Any  # noqa: ANN401
) -> None:
    """Even if two prompts had the same keys."""
    first = start(model)
    ask(first, prompt)
    for (kind, key), data in list(stored(first).memory._pieces.items()):
        if kind == "kv":
            other = data.copy()
            other[0] ^= 1  # The first token.
            stored(first).memory.discard((kind, key))
            stored(first).memory.put((kind, key), other)
    first.reset_prefix_cache()
    output = ask(first, prompt)
    assert output.num_cached_tokens == 0
    assert output.missed_tokens["damaged"] == 64
    assert first.stats()["state_store"]["misses"]["foreign"] >= 1


@pytest.mark.parametrize(
    "changes", [{"weights": "others"}, {"state_dtype": "bfloat16"}, {"deterministic": False}]
)
def test_other_weights_and_dtypes_are_a_foreign_miss(
    model: Any, prompt: list[int], start: Any, changes: dict[str, Any]  # noqa: ANN401
) -> None:
    first = start(model)
    ask(first, prompt)
    first.close()
    if "state_dtype" in changes:
        weights = random_weights(model.config, 1)
        model = type(model).from_weights(model.config, weights, torch.float32, "bfloat16")
    second = start(model, **changes)
    request = second.add_request("x", prompt, replace(SHORT, logprobs=None))
    while second.has_work():
        second.step()
    assert request.sequences[0].num_cached_tokens == 0
    assert second.stats()["state_store"]["misses"] == {"foreign": 1}


def test_memory_and_disk_stay_within_their_bounds_and_keep_what_is_used(
    model: Any, start: Any, tmp_path: Path  # noqa: ANN401
) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(40)] for _ in range(12)]
    engine = start(model, state_store_disk=120_000, state_store_memory=60_000)
    for prompt in prompts:
        ask(engine, prompts[0])
        ask(engine, prompt)
        engine.reset_prefix_cache()
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 120_000 + 120_000 // 16
        assert stored(engine).memory.num_bytes <= 60_000
    stats = engine.stats()["state_store"]
    assert stats["memory_evictions"] > 0
    assert stats["disk_evictions"] > 0
    engine.close()
    again = start(model)
    assert ask(again, prompts[0]).num_cached_tokens == 32
    assert ask(again, prompts[-1]).num_cached_tokens == 32
    assert ask(again, prompts[1]).num_cached_tokens == 0


def test_memory_alone_serves_what_the_device_gave_up(
    model: Any, prompt: list[int], start: Any  # noqa: ANN401
) -> None:
    engine = start(model, state_store=None, state_store_memory=2**20)
    ask(engine, prompt)
    engine.reset_prefix_cache()
    assert ask(engine, prompt).num_cached_tokens == 64


def test_two_replicas_share_a_folder(
    model: Any, prompt: list[int], start: Any  # noqa: ANN401
) -> None:
    one, two = start(model), start(model)
    ask(one, prompt)
    assert ask(two, prompt).num_cached_tokens == 64


def step_until_loading(engine: Engine) -> None:
    for _ in range(2000):
        engine.step()
        if any(seq.loads for seq in engine.scheduler.running):
            return
    raise AssertionError("nothing was loaded")


@pytest.mark.parametrize("layout", ["slots", "compact"])
@pytest.mark.parametrize("what", ["abort", "preempt", "reset"])
def test_a_sequence_that_leaves_while_it_is_loaded_leaks_no_block(
    model: Any, prompt: list[int], start: Any, what: str, layout: str  # noqa: ANN401
) -> None:
    first = start(model)
    ask(first, prompt)
    first.close()
    engine = start(model, state_store_step_bytes=1, batch_layout=layout)
    job = solve(model, Job(prompt, SHORT))
    engine.add_request("job", prompt, SHORT)
    step_until_loading(engine)
    if what == "abort":
        engine.abort("job")
    elif what == "preempt":
        engine.scheduler.preempt(engine.scheduler.running[0])
    else:
        engine.reset_prefix_cache()
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    if what != "abort":
        assert_same_bits(job, outputs[-1])
    assert_balanced(engine)
    assert ask(engine, prompt).num_cached_tokens == 64


def test_others_generate_in_every_step_while_a_prefix_is_read_and_loaded(
    model: Any, prompt: list[int], start: Any  # noqa: ANN401
) -> None:
    first = start(model)
    ask(first, prompt)
    first.close()
    engine = start(model, state_store_step_bytes=1)
    engine.add_request("other", prompt[:5], replace(SHORT, max_tokens=60, logprobs=None))
    for _ in range(4):
        engine.step()
    engine.add_request("job", prompt, replace(SHORT, logprobs=None))
    steps, told = 0, 0
    while not any(seq.num_cached_tokens for seq in engine.scheduler.running):
        told += any(output.request_id == "other" for output in engine.step())
        steps += 1
    while any(seq.loads for seq in engine.scheduler.running):
        told += any(output.request_id == "other" for output in engine.step())
        steps += 1
    assert told == steps > 3
    assert engine.num_early_enqueues == engine.num_steady_steps


def test_a_prefix_moves_to_another_engine_as_bytes(
    model: Any, prompt: list[int], start: Any  # noqa: ANN401
) -> None:
    prefill = start(model, state_store=None, state_store_memory=2**20, state_scheme="columns")
    decode = start(model, state_store=None, state_store_memory=2**20, state_scheme="replay")
    ask(prefill, prompt, max_tokens=1)
    archive = prefill.export_prefix(prompt)
    assert archive is not None
    assert decode.import_prefix(archive) == (5, {})
    assert ask(decode, prompt).num_cached_tokens == 64
    assert prefill.export_prefix(prompt[:10]) is None


def test_an_archive_that_was_cut_damaged_or_is_foreign_is_refused_by_reason(
    model: Any, prompt: list[int], start: Any  # noqa: ANN401
) -> None:
    engine = start(model)
    ask(engine, prompt)
    archive = engine.export_prefix(prompt)
    assert archive is not None
    fresh = {"state_store": None, "state_store_memory": 2**20}
    other = start(model, weights="others", **fresh)
    assert other.import_prefix(archive) == (0, {"foreign": 5})
    again = start(model, **fresh)
    assert again.import_prefix(archive[:-1]) == (4, {"damaged": 1})
    bad = bytearray(archive)
    bad[200] ^= 1
    assert again.import_prefix(bytes(bad)) == (4, {"damaged": 1})
    assert again.import_prefix(b"nothing of ours") == (0, {"damaged": 1})
    assert again.import_prefix(archive[:20])[0] == 0


def test_a_disk_that_fails_costs_hits_and_nothing_else(
    model: Any, prompt: list[int], start: Any, monkeypatch: pytest.MonkeyPatch  # noqa: ANN401
) -> None:
    engine = start(model, state_store_memory=0)
    told: list[str] = []
    monkeypatch.setattr(
        store_module._LOG, "warning", lambda text, *values: told.append(text % values)
    )

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    stored(engine).folder.write = full
    ask(engine, prompt)
    assert engine.stats()["state_store"]["failed_writes"] == 5
    assert told == [
        "the state store cannot write to its folder: [Errno 28] No space left on device"
    ]
    engine.reset_prefix_cache()
    assert ask(engine, prompt).num_cached_tokens == 0


def test_a_folder_that_is_taken_away_costs_hits_and_nothing_else(
    model: Any, prompt: list[int], start: Any, tmp_path: Path  # noqa: ANN401
) -> None:
    first = start(model)
    ask(first, prompt)
    first.close()
    engine = start(model, state_store_memory=0)
    read = stored(engine).folder.read

    def cleared(*name: Any) -> bytes | None:  # noqa: ANN401
        shutil.rmtree(tmp_path, ignore_errors=True)
        return read(*name)

    stored(engine).folder.read = cleared
    output = ask(engine, prompt)
    assert output.num_cached_tokens == 0
    assert "damaged" not in output.missed_tokens
    assert engine.stats()["state_store"]["misses"]["evicted"] > 0
    assert len(files(tmp_path)) == 5, "it is written anew"


def test_pieces_beyond_the_queue_are_dropped_and_counted(
    model: Any, prompt: list[int], start: Any, monkeypatch: pytest.MonkeyPatch  # noqa: ANN401
) -> None:
    monkeypatch.setattr(store_module, "_MAX_WRITE_BYTES", 1)
    engine = start(model)
    ask(engine, prompt)
    assert engine.stats()["state_store"]["dropped_pieces"] == 5
    assert engine.stats()["state_store"]["disk_bytes"] == 0


def test_what_a_store_needs_is_said_at_start(model: Any, start: Any, tmp_path: Path) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="which is off; use prefix_cache align"):
        start(model, prefix_cache="none")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written to .*name a folder that this user"):
        start(model, state_store=str(file))
    engine = start(model, state_store=None)
    with pytest.raises(RequestError, match="there is no state store"):
        engine.export_prefix([1, 2])
