"""The server in front of the real engine, on a model with random weights."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.sampling_params import SamplingParams, completion_seed
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.server.conftest import Running, Start

DEADLINE_S = 20.0


def config(folder: Path, **changes: object) -> EngineConfig:
    return EngineConfig(
        model=str(folder), served_model_name="tiny", max_num_seqs=16, num_kv_blocks=200,
        num_state_blocks=64, check_invariants=True, **changes,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def real(random_model: Path, start_server: Start) -> Iterator[Running]:
    with start_server(
        AsyncLLM(config(random_model)), ServerSettings(log_level="warning")
    ) as server:
        yield server


def wait_until(condition: Callable[[], object]) -> None:
    poll = threading.Event()
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        poll.wait(0.005)


def is_idle(server: Running) -> bool:
    stats = server.client.get("/stats").json()
    in_use = [stats["kv_blocks"], *stats["state_blocks"]]
    return not stats["running"] and not stats["waiting"] and all(
        pool["free"] + pool["cached"] == pool["total"] for pool in in_use
    )


def test_streams_equal_whole_answers_greedy_and_seeded(real: Running) -> None:
    for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 5}):
        body = {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, **sampling}
        whole = real.post("/v1/completions", body).json()
        events = real.stream("/v1/completions", body)
        text = whole["choices"][0]["text"]
        assert "".join(event["choices"][0]["text"] for event in events) == text
        assert whole["usage"]["completion_tokens"] == 24


def test_many_clients_at_once_get_what_each_gets_alone(real: Running) -> None:
    async def ask(client: openai.AsyncOpenAI, place: int) -> str:
        answer = await client.completions.create(
            model="tiny", prompt=f"about lamps, {place * 7}", max_tokens=12, seed=place,
            temperature=place % 2, extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="x") as client:
            together = await asyncio.gather(*(ask(client, place) for place in range(12)))
            alone = [await ask(client, place) for place in range(12)]
            assert together == alone
            return alone

    assert len(set(asyncio.run(all_of_them()))) > 1


def test_a_chat_is_answered_by_the_real_engine(real: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    whole = real.post("/v1/chat/completions", body).json()
    events = real.stream("/v1/chat/completions", body)
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text == whole["choices"][0]["message"]["content"]


def test_a_prompt_sent_again_comes_from_the_cache(real: Running) -> None:
    body = {"prompt": "the quick brown fox " * 8, "max_tokens": 4, "temperature": 0}
    first = real.post("/v1/completions", body).json()
    second = real.post("/v1/completions", body).json()
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    details = second["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= 64
    total = details["cached_tokens"] + sum(details["missed_tokens"].values())
    assert total == second["usage"]["prompt_tokens"]


def test_a_second_prompt_that_shares_a_hundred_tokens_says_what_was_cached(real: Running) -> None:
    rng = random.Random(seed := secrets.randbits(32))
    print(f"seed {seed}")
    common, tails = [rng.randrange(256) for _ in range(100)], (130, 30)
    answers = [
        real.post("/v1/completions", {"prompt": [*common, place, *[7] * tail], "max_tokens": 2})
        for place, tail in enumerate(tails)
    ]
    cached = [a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached == [0, 64]


def test_choices_and_prompts_keep_their_places(real: Running) -> None:
    body = {"prompt": ["ab", [5, 6, 7]], "n": 2, "max_tokens": 6, "seed": 3, "ignore_eos": True}
    whole = real.post("/v1/completions", body).json()
    texts = ["", "", "", ""]
    for event in real.stream("/v1/completions", body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


@pytest.mark.parametrize("logprobs", [None, 0])
def test_the_best_of_several_have_the_likeliest_tokens(real: Running, logprobs: int | None) -> None:
    body = {
        "prompt": ["ab", [5, 6, 7]], "max_tokens": 6, "seed": secrets.randbits(31),
        "ignore_eos": True,
    }
    drawn = real.post("/v1/completions", {**body, "n": 5, "logprobs": 0}).json()["choices"]
    wanted = []
    for own in (drawn[:5], drawn[5:]):
        own.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
        wanted += own[:2]
    asked = {**body, "n": 2, "best_of": 5, "logprobs": logprobs}
    answer = real.post("/v1/completions", asked).json()
    assert [choice["text"] for choice in answer["choices"]] == [each["text"] for each in wanted]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 2 * 5 * 6
    for choice, each in zip(answer["choices"], wanted, strict=True):
        assert choice["logprobs"] == (None if logprobs is None else each["logprobs"])


def test_logprobs_hold_the_chosen_token_to_the_bit(real: Running) -> None:
    body = {"prompt": "abc", "max_tokens": 5, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    logprobs = real.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 5
    for value, top in zip(
        logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert value == max(top.values())


@pytest.mark.scenarios("B99")
def test_scores_of_a_cached_prompt_are_those_of_its_beginnings(real: Running) -> None:
    """`echo`, `logprobs` and no new token, as evaluation harnesses send it, after a prefix hit.

    Each score is held against the answer to the part of the prompt before it: the same bits.
    """
    rng = random.Random(seed := secrets.randbits(32))
    print(f"seed {seed}")
    ids = [rng.randrange(256) for _ in range(150)]
    plain = {"max_tokens": 1, "temperature": 0, "seed": 1234}
    warm = real.post("/v1/completions", {"prompt": ids, **plain}).json()
    hit = real.post("/v1/completions", {"prompt": ids, **plain}).json()
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
    assert hit["choices"][0]["text"] == warm["choices"][0]["text"]
    scored = [
        real.post(
            "/v1/completions",
            {"prompt": ids, **plain, "max_tokens": most, "echo": True, "logprobs": 5},
        ).json()
        for most in (0, 1, 0)
    ]
    first, longer, again = (answer["choices"][0]["logprobs"] for answer in scored)
    assert first == again, "the second scoring gave stale values"
    assert [answer["usage"]["completion_tokens"] for answer in scored] == [0, 1, 0]
    assert first["token_logprobs"][0] is first["top_logprobs"][0] is None
    assert len(first["token_logprobs"]) == len(ids)
    assert longer["token_logprobs"][:-1] == first["token_logprobs"]
    compared = 0
    for place in (1, 2, 63, 64, 65, 100, 127, 128, 129, 149):
        part = {"prompt": ids[:place], **plain, "logprobs": 20}
        entry = real.post("/v1/completions", part).json()["choices"][0]["logprobs"]
        best = entry["top_logprobs"][0]
        told = first["top_logprobs"][place]
        # Parts of characters, and ids without a token, have texts that do not tell them apart.
        for text in (told.keys() & best.keys()) - {"\ufffd", ""}:
            assert told[text] == best[text]
            compared += 1
    assert compared >= 10, "too few to tell"
    wait_until(lambda: is_idle(real))


def test_a_stop_string_ends_text_and_usage(real: Running) -> None:
    body = {"prompt": "xyz", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    text = real.post("/v1/completions", body).json()["choices"][0]["text"]
    stop = text[3:5]
    stopped = real.post("/v1/completions", {**body, "stop": stop}).json()
    choice = stopped["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert stopped["usage"]["completion_tokens"] < 30


@pytest.mark.scenarios("B117")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks(real: Running, *, stream: bool) -> None:
    wait_until(lambda: is_idle(real))
    body = {"prompt": ["abc", "def"], "max_tokens": 200, "ignore_eos": True, "stream": stream}

    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(base_url=real.url, timeout=DEADLINE_S) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            while True:
                stats = (await client.get("/stats")).json()
                if stats["running"] or asking.done():
                    break
            asking.cancel()

    asyncio.run(ask_and_leave())
    wait_until(lambda: is_idle(real))


def test_bad_requests_leave_nothing_behind(real: Running) -> None:
    for change in (
        {"prompt": []}, {"prompt": [10**6]}, {"prompt": "a" * 5000}, {"temperature": -1},
        {"max_tokens": -1}, {"n": 0}, {"presence_penalty": 9},
    ):
        reply = real.post("/v1/completions", {"prompt": "abc", "max_tokens": 3, **change})
        assert reply.status_code == 400, change
        assert reply.json()["error"]["type"] == "invalid_request_error"
    assert real.post("/v1/completions", {"prompt": "abc", "max_tokens": 3}).status_code == 200
    wait_until(lambda: is_idle(real))


def test_metrics_follow_the_engine(real: Running) -> None:
    real.post("/v1/completions", {"prompt": "abc", "max_tokens": 3})
    text = real.client.get("/metrics").text
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"}' in text
    assert "headrace:prefix_cache_missed_tokens_total{" in text


@pytest.mark.scenarios("B118")
def test_bad_words_are_tokenised_away_from_the_engine(
    real: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, threads = real.engine._engine, []
    inner = engine.bad_word_tokens

    def seen(params: SamplingParams) -> object:
        threads.append(threading.current_thread())
        return inner(params)

    monkeypatch.setattr(engine, "bad_word_tokens", seen)
    body = {"prompt": "abc", "max_tokens": 3, "bad_words": ["ab"]}
    assert real.post("/v1/completions", body).status_code == 200
    assert len(threads) == 1
    assert threads[0] not in {real.engine._thread, real.thread}


def test_a_full_queue_is_answered_with_429(random_model: Path, start_server: Start) -> None:
    small = EngineConfig(
        model=str(random_model), max_num_seqs=1, max_waiting=1, num_kv_blocks=60,
        num_state_blocks=24,
    )
    body = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True}

    async def all_of_them(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
            return await asyncio.gather(
                *(client.post("/v1/completions", json=body) for _ in range(8))
            )

    with start_server(AsyncLLM(small), ServerSettings(log_level="warning")) as server:
        replies = asyncio.run(all_of_them(server.url))
        statuses = {reply.status_code for reply in replies}
        assert statuses == {200, 429}
        assert all(reply.headers["retry-after"] for reply in replies if reply.status_code == 429)
        wait_until(lambda: is_idle(server))


@pytest.mark.scenarios("B119")
def test_the_death_of_the_engine_reaches_every_client(
    random_model: Path, start_server: Start
) -> None:
    engine = AsyncLLM(config(random_model))
    with start_server(engine, ServerSettings(log_level="warning")) as server:
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200

        def fail() -> None:
            raise MemoryError("a test took the memory away")

        engine._engine.step = fail  # type: ignore[method-assign, assignment]
        for stream in (False, True):
            reply = server.post("/v1/completions", {"prompt": "a", "stream": stream})
            assert reply.status_code == 503
            assert "restart the server" in reply.json()["error"]["message"]
        assert server.client.get("/health").status_code == 503
        server.thread.join(DEADLINE_S)
        assert not server.thread.is_alive()
        assert server.server.death is not None


@pytest.mark.scenarios("B119")
def test_an_engine_that_hangs_in_a_step_is_dead(
    random_model: Path, start_server: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = AsyncLLM(config(random_model), step_timeout_s=0.2)
    hanging = threading.Event()
    inner = engine._engine.step
    num_steps = 0

    def step() -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 4:
            hanging.wait()
        return inner()

    engine._engine.step = step  # type: ignore[method-assign, assignment]
    try:
        with start_server(engine, ServerSettings(log_level="warning")) as server:
            body = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "stream": True}
            with server.client.stream("POST", "/v1/completions", json=body) as reply:
                events = [line for line in reply.iter_lines() if line]
            assert '"choices"' in events[0]
            assert "a step took longer than 0.2 s" in events[-1]
            assert server.client.get("/health").status_code == 503
            server.thread.join(DEADLINE_S)
            assert not server.thread.is_alive()
            assert server.server.death is not None
        # Where it hangs stands in the log.
        assert "in step\n    hanging.wait()" in caplog.text
    finally:
        hanging.set()


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_several_choices_are_those_of_single_requests_and_share_one_prompt(
    real: Running, kind: str
) -> None:
    text = "a story of three lamps " * 5
    body: dict[str, object] = (
        {"prompt": text} if kind == "completions"
        else {"messages": [{"role": "user", "content": text}]}
    )
    body |= {"max_tokens": 9, "temperature": 1.0, "ignore_eos": True}

    def texts(**changes: object) -> list[str]:
        answer = real.post(f"/v1/{kind}", body | changes).json()
        assert [choice["index"] for choice in answer["choices"]] == list(
            range(len(answer["choices"]))
        )
        return [
            choice["text"] if kind == "completions" else choice["message"]["content"]
            for choice in answer["choices"]
        ]

    before = real.client.get("/stats").json()["forks"]
    together = texts(n=3, seed=11)
    assert real.client.get("/stats").json()["forks"] == before + 2
    assert together == [texts(seed=completion_seed(11, index))[0] for index in range(3)]
    streamed = ["", "", ""]
    for event in real.stream(f"/v1/{kind}", body | {"n": 3, "seed": 11}):
        for choice in event["choices"]:
            delta = choice["text"] if kind == "completions" else choice["delta"].get("content")
            streamed[choice["index"]] += delta or ""
    assert streamed == together


def test_a_pinned_prompt_is_listed_until_its_name_is_released(real: Running) -> None:
    body = {"prompt": list(range(5, 80)), "max_tokens": 1, "cache_pin": "system/prompt"}
    assert real.post("/v1/completions", body).status_code == 200
    assert real.client.get("/cache/pins").json()["system/prompt"]["checkpoints"] == 1
    assert real.client.delete("/cache/pins/system/prompt").status_code == 200
    assert real.client.get("/cache/pins").json() == {}
