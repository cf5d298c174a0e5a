"""Probes, metrics, clients that go away, draining, and the engine's death."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.config import EngineConfig
from headrace.errors import ConfigError, EngineDeadError
from headrace.server.app import create_app, serve
from headrace.server.prompts import _LARGE_CHARS, _size_of
from headrace.server.runner import listen, run_server
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.conftest import FakeEngine, Running, Start

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
DEADLINE_S = 10.0


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does; fails loudly instead of hanging."""
    poll = threading.Event()
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        poll.wait(0.002)


def metrics_of(serving: Running) -> dict[str, float]:
    reply = serving.client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    return {
        sample.name + "".join(
            f" {value}" for key, value in sorted(sample.labels.items())
            if key not in ("model_name", "engine")
        ): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def test_probes_follow_the_engine(serve: Start) -> None:
    with serve() as server:
        for path in ("/health", "/ready"):
            assert server.client.get(path).status_code == 200
        server.engine.dead = True
        for path in ("/health", "/ready"):
            reply = server.client.get(path)
            assert reply.status_code == 503
            assert reply.json()["error"]["type"] == "service_unavailable_error"


def test_metrics_have_the_names_dashboards_know_and_ours(serving: Running) -> None:
    before = metrics_of(serving)
    serving.post("/v1/chat/completions", CHAT)
    serving.post("/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 2})
    after = metrics_of(serving)
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0.5
    assert after["vllm:prefix_cache_queries_total"] == 9
    assert after["vllm:prefix_cache_hits_total"] == 4
    assert after["vllm:generation_tokens_total"] == 7
    assert after["headrace:prefix_cache_missed_tokens_total last_token"] == 5
    assert after["headrace:state_blocks_total 0"] == 4
    assert after["headrace:spec_decode_acceptance 0"] == 0.5

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("vllm:request_success_total stop") == 1
    assert grown("vllm:request_success_total length") == 2
    assert grown("vllm:time_to_first_token_seconds_count") == 2
    assert grown("vllm:time_to_first_token_seconds_sum") == 2.0
    assert grown("vllm:e2e_request_latency_seconds_sum") == 4.0
    assert grown("vllm:request_generation_tokens_sum") > 4


def test_stats_are_the_engines_figures(serving: Running) -> None:
    stats = serving.client.get("/stats").json()
    assert stats["prefix_cache"]["missed_tokens"] == {"last_token": 5}
    assert stats["model"] == "fake"


def test_the_openapi_document_names_bodies_and_errors(serving: Running) -> None:
    document = serving.client.get("/openapi.json").json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    schema = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert schema.rsplit("/", 1)[1] in document["components"]["schemas"]
    assert {"400", "404", "413", "429", "503"} <= set(chat["responses"])
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    for name in (ref.split('"')[0] for ref in json.dumps(document).split("schemas/")[1:]):
        assert name in document["components"]["schemas"]


@pytest.mark.scenarios("B117")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["the", ["the", "lamp", "post"]])
def test_a_client_that_goes_away_ends_its_work(
    serving: Running, prompt: str | list[str], *, stream: bool
) -> None:
    serving.engine.pause = threading.Event()
    body = {"prompt": prompt, "stream": stream, "n": 2}
    num_prompts = len(prompt) if isinstance(prompt, list) else 1

    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(base_url=serving.url, timeout=20) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            while len(serving.engine.active) < num_prompts:
                await asyncio.sleep(0.002)
            asking.cancel()

    asyncio.run(ask_and_leave())
    wait_until(lambda: len(serving.engine.aborted) == num_prompts)
    assert not serving.engine.active


@pytest.mark.scenarios("B117")
def test_clients_that_leave_at_random_points_leave_nothing(serving: Running) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    serving.engine.reply = "hello there by the lamp post " * 2

    async def one(client: httpx.AsyncClient, *, stream: bool) -> None:
        body = {**CHAT, "stream": stream, "n": rng.choice([1, 3])}
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        asking.cancel()

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=serving.url, timeout=20) as client:
            await asyncio.gather(*(one(client, stream=rng.random() < 0.5) for _ in range(20)))

    asyncio.run(all_of_them())
    wait_until(lambda: not serving.engine.active)
    assert serving.post("/v1/chat/completions", CHAT).status_code == 200


@pytest.mark.scenarios("B118")
def test_a_long_prompt_does_not_keep_probes_waiting(serving: Running) -> None:
    serving.engine.max_model_len = 1 << 22
    text = "the lamp post " * 60_000
    slow = threading.Thread(target=serving.post, args=("/tokenize", {"prompt": text}))
    slow.start()
    waits = []
    while slow.is_alive():
        begin = time.monotonic()
        assert serving.client.get("/health").status_code == 200
        short = {"prompt": "the lamp", "max_tokens": 1}
        assert serving.post("/v1/completions", short).status_code == 200
        waits.append(time.monotonic() - begin)
    slow.join()
    # The machine may be busy: one slow answer is no verdict, most of them are.
    assert len(waits) > 3
    assert sorted(waits)[len(waits) // 2] < 0.1


@pytest.mark.parametrize(
    ("parts", "is_large"),
    [
        (([{"role": "user", "content": "a" * 50_000}], None), False),
        (([{"role": "user", "content": "a" * 70_000}], None), True),
        (([{"content": [{"type": "text", "text": "a" * 70_000}]}], None), True),
        (([{"role": "user", "content": "a"}], [{"description": "a" * 70_000}]), True),
        (([{"role": "user", "content": ""}] * 10_000, None), True),
        (([{"role": "user", "content": "a" * 40_000}], [{"a" * 40_000: 1}]), True),
    ],
)
def test_whatever_makes_a_conversation_large_counts(
    parts: tuple[object, ...], *, is_large: bool
) -> None:
    assert (_size_of(*parts) > _LARGE_CHARS) is is_large


def test_draining_lets_running_requests_end_and_refuses_new_ones(serve: Start) -> None:
    with serve() as server:
        server.engine.pause = threading.Event()
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(server.post("/v1/chat/completions", CHAT))
        )
        asking.start()
        wait_until(lambda: server.engine.active)
        server.server.handle_exit(signal.SIGTERM, None)
        with httpx.Client(base_url=server.url) as other:
            wait_until(lambda: other.get("/ready").status_code == 503)
            refused = other.post("/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert other.get("/health").status_code == 200
            server.engine.pause.set()
            asking.join(DEADLINE_S)
        assert answers[0].status_code == 200
        server.thread.join(DEADLINE_S)
        assert not server.thread.is_alive()
        assert server.server.death is None


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_outlast_draining_end_with_finish_reason_abort(
    serve: Start, *, stream: bool
) -> None:
    with serve(settings=ServerSettings(shutdown_timeout_s=0.05)) as server:
        server.engine.pause = threading.Event()
        answers: list[httpx.Response] = []
        body = {**CHAT, "stream": stream}
        asking = threading.Thread(
            target=lambda: answers.append(server.post("/v1/chat/completions", body))
        )
        asking.start()
        wait_until(lambda: server.engine.active)
        server.server.handle_exit(signal.SIGTERM, None)
        asking.join(DEADLINE_S)
        assert answers[0].status_code == 200
        assert '"finish_reason":"abort"' in answers[0].text
        server.thread.join(DEADLINE_S)
        assert not server.thread.is_alive()
        assert not server.engine.active


@pytest.mark.scenarios("B119")
def test_the_engines_death_ends_the_process_with_an_error(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.server.runner._HEALTH_INTERVAL_S", 0.01)
    monkeypatch.setattr("headrace.server.runner._MOURNING_S", 0.05)
    fake_engine.dead = True
    chosen = ServerSettings(port=0, log_level="warning")
    with pytest.raises(EngineDeadError, match="restart the server"):
        run_server(create_app(fake_engine, chosen), fake_engine, chosen, listen("127.0.0.1", 0))


def test_an_address_that_is_taken_is_a_config_error() -> None:
    first = listen("127.0.0.1", 0)
    first.listen()
    port = first.getsockname()[1]
    with pytest.raises(ConfigError, match=f"port {port}.*choose another"):
        listen("127.0.0.1", port)
    # Found before the model is looked at: loading it may take minutes.
    with pytest.raises(ConfigError, match=f"port {port}.*choose another"):
        serve(EngineConfig(model="/no/such/folder"), port=port)
    first.close()


def test_of_two_that_bound_an_address_one_may_listen(fake_engine: FakeEngine) -> None:
    first = listen("127.0.0.1", 0)
    port = first.getsockname()[1]
    chosen = ServerSettings(port=port, log_level="warning")
    with listen("127.0.0.1", port) as second:
        first.listen()
        with pytest.raises(ConfigError, match=f"port {port}.*choose another"):
            run_server(create_app(fake_engine, chosen), fake_engine, chosen, second)
    first.close()


def test_a_host_that_no_name_can_be_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="choose another --host or --port"):
        listen("é" * 100, 0)




def test_many_streams_at_once_through_the_official_client(serving: Running) -> None:
    async def one(client: openai.AsyncOpenAI, place: int) -> str:
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": f"hi {place}"}], stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 2
        return text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{serving.url}/v1", api_key="x") as client:
            return await asyncio.gather(*(one(client, place) for place in range(32)))

    assert set(asyncio.run(all_of_them())) == {serving.engine.reply}


def test_a_client_that_leaves_inside_its_own_body_is_no_error_of_the_server(
    serving: Running, caplog: pytest.LogCaptureFixture
) -> None:
    url = httpx.URL(serving.url)
    with socket.create_connection((url.host, url.port or 80)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{"
        )
    # The next answer comes after the loop has seen the end of that connection.
    assert serving.post("/v1/completions", {"prompt": "the"}).status_code == 200
    assert not [r for r in caplog.records if r.exc_info]


def test_an_unknown_log_level_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="log_level is 'loud'; choose one of debug"):
        ServerSettings(log_level="loud")
