"""Limits, keys, log lines and traces: what keeps a server in operation."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from headrace.cli.main import run_command
from headrace.errors import ConfigError
from headrace.server.logs import JsonFormatter, log_config
from headrace.server.progress import log_progress, progress_line
from headrace.server.settings import ServerSettings, keys_of_file
from headrace.server.tracing import SPAN, SpanTracing

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.conftest import FakeEngine, Running, Start

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
DEPLOY = Path(__file__).parents[2] / "deploy"
DEADLINE_S = 10.0


def wait_until(condition: Callable[[], object]) -> None:
    poll = threading.Event()
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        poll.wait(0.002)


def test_more_requests_than_the_limit_get_429_and_others_go_on(serve: Start) -> None:
    chosen = ServerSettings(max_concurrent_requests=2, log_level="warning")
    with serve(settings=chosen) as server:
        server.engine.pause = threading.Event()
        answers: list[httpx.Response] = []
        asking = [
            threading.Thread(target=lambda: answers.append(server.post("/v1/completions",
                                                                       {"prompt": "a"})))
            for _ in range(2)
        ]
        for one in asking:
            one.start()
        wait_until(lambda: len(server.engine.active) == 2)

        refused = server.post("/v1/chat/completions", CHAT)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "raise max_concurrent_requests" in refused.json()["error"]["message"]
        assert server.client.get("/health").status_code == 200
        metrics = server.client.get("/metrics").text
        assert 'reason="max_concurrent_requests"} 1.0' in metrics

        server.engine.pause.set()
        for one in asking:
            one.join(DEADLINE_S)
        assert [answer.status_code for answer in answers] == [200, 200]
        # A client has its answer a moment before the server counts it as done.
        wait_until(lambda: not server.server._app.state.gate.num_in_flight)
        assert server.post("/v1/chat/completions", CHAT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_ends_with_what_there_is(
    serve: Start, *, stream: bool
) -> None:
    chosen = ServerSettings(request_timeout_s=0.05, log_level="warning")
    with serve(settings=chosen) as server:
        server.engine.pause = threading.Event()
        reply = server.post("/v1/chat/completions", {**CHAT, "stream": stream})
        assert reply.status_code == 200
        assert '"finish_reason":"abort"' in reply.text
        wait_until(lambda: not server.engine.active)


def test_a_body_that_never_comes_is_given_up(serve: Start) -> None:
    with serve(settings=ServerSettings(body_timeout_s=0.05, log_level="warning")) as server:
        url = httpx.URL(server.url)
        with socket.create_connection((url.host, url.port or 80), timeout=DEADLINE_S) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{"
            )
            answer = client.recv(65536).decode()
        assert answer.startswith("HTTP/1.1 408 ")
        assert "raise body_timeout_s" in answer


def test_keys_come_from_a_file_too(tmp_path: Path, serve: Start) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\nalpha\n  beta \n")
    keys = keys_of_file(file)
    assert keys == ("alpha", "beta")
    with serve(settings=ServerSettings(api_keys=keys, log_level="warning")) as server:
        for key, status in (("alpha", 200), ("beta", 200), ("gamma", 401)):
            reply = server.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert reply.status_code == status
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        keys_of_file(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        keys_of_file(tmp_path / "missing")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_concurrent_requests": 0}, "at least 1"),
        ({"request_timeout_s": 0}, "positive"),
        ({"body_timeout_s": float("nan")}, "positive"),
        ({"send_timeout_s": 0}, "positive"),
        ({"log_format": "xml"}, "choose one of text, json"),
        ({"log_stats_interval_s": -1}, "negative"),
    ],
)
def test_wrong_limits_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**wrong)


def test_a_served_configuration_comes_from_file_environment_and_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ServerSettings]] = []
    monkeypatch.setattr(
        "headrace.server.app.serve", lambda config, *, settings: seen.append((config, settings))
    )
    keys = tmp_path / "keys"
    keys.write_text("from-file\n")
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: nano\nport: 1234\nlog-format: json\napi-key-file: {keys}\n"
                    "max-num-seqs: 7\n")
    code = run_command(
        ["serve", "--config", str(file), "--port", "4321", "--request-timeout", "9"],
        environ={"HEADRACE_API_KEY": "one,two", "HEADRACE_LOG_FORMAT": "text"},
    )
    assert code == 0
    (config, settings), = seen
    assert (config.model, config.max_num_seqs) == ("nano", 7)
    assert (settings.port, settings.log_format, settings.request_timeout_s) == (4321, "text", 9.0)
    assert settings.api_keys == ("one", "two", "from-file")


def test_the_example_configuration_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServerSettings] = []
    monkeypatch.setattr(
        "headrace.server.app.serve", lambda _, *, settings: seen.append(settings)
    )
    assert run_command(["serve", "--config", str(DEPLOY / "serve.yaml")], environ={}) == 0
    assert seen[0].log_format == "json"
    assert seen[0].max_concurrent_requests == 2048


def test_the_unit_gives_the_server_longer_than_it_takes_to_drain() -> None:
    unit = (DEPLOY / "headrace.service").read_text()
    stop = re.search(r"TimeoutStopSec=(\d+)", unit)
    shutdown = yaml.safe_load((DEPLOY / "serve.yaml").read_text())["shutdown-timeout"]
    assert stop is not None
    assert int(stop[1]) > shutdown
    assert "Restart=on-failure" in unit


def test_the_access_log_names_request_status_and_time(
    serve: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "headrace.access"),
        serve(settings=ServerSettings(access_log=True, log_level="info")) as server,
    ):
        reply = server.client.post(
            "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine"}
        )
        server.client.get("/health")
        server.client.post("/v1/completions", json={"prompt": 3})
    assert reply.headers["x-request-id"] == "mine"
    lines = [
        json.loads(JsonFormatter().format(record))
        for record in caplog.records if record.name == "headrace.access"
    ]
    # A client may have its answer, and the next one's refusal, before the first line is written.
    lines.sort(key=lambda line: line["status"])
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/v1/completions", 200), ("/v1/completions", 400)
    ]
    assert lines[0]["request_id"] == "mine"
    assert lines[0]["duration_s"] > 0
    assert lines[0]["level"] == "info"


def test_a_path_cannot_write_a_line_of_its_own_into_the_log(
    serve: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "headrace.access"),
        serve(settings=ServerSettings(access_log=True, log_level="info")) as server,
    ):
        server.client.get("/x%0AINFO:%20forged%1b[2K")
    (message,) = [r.getMessage() for r in caplog.records if r.name == "headrace.access"]
    assert message.isprintable()
    assert message.startswith("GET /x%0AINFO%3A%20forged%1B%5B2K 404 in")


def test_a_json_line_holds_the_exception_too() -> None:
    try:
        int("a\nb")
    except ValueError as error:
        record = logging.LogRecord(
            "headrace.x", logging.ERROR, __file__, 1, "it %s", ("failed",),
            (type(error), error, error.__traceback__),
        )
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == "it failed"
    assert "ValueError: invalid literal" in line["exception"]
    assert log_config(level="info", log_format="json")["formatters"]["chosen"]["()"] is (
        JsonFormatter
    )


def test_the_progress_line_has_rates_of_the_interval() -> None:
    def stats(scale: int) -> dict[str, Any]:
        return {
            "steps": scale, "running": 3, "waiting": 1, "computed_prompt_tokens": 100 * scale,
            "generated_tokens": 50 * scale, "draft_tokens": 10 * scale,
            "accepted_tokens": 7 * scale,
            "kv_blocks": {"used": 1, "total": 4}, "state_blocks": [{"used": 1, "total": 2}],
            "prefix_cache": {"hit_tokens": 30 * scale, "query_tokens": 40 * scale},
        }

    assert progress_line(stats(1), stats(3), 4.0) == (
        "Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 25.0 tokens/s, "
        "Running: 3 reqs, Waiting: 1 reqs, KV cache usage: 25.0%, State usage: 50.0%, "
        "Prefix cache hit rate: 75.0%, Draft acceptance: 70.0%"
    )


def test_progress_is_logged_while_steps_are_taken_and_not_when_idle(
    fake_engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [1, 2, 2, 2, 5, 5]
    asked = 0

    def stats() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {"steps": taken[min(asked, len(taken)) - 1]}

    monkeypatch.setattr(fake_engine, "stats", stats)

    async def watch() -> None:
        watching = asyncio.create_task(log_progress(fake_engine, interval_s=0.001))
        while asked < len(taken):
            await asyncio.sleep(0.001)
        watching.cancel()
        await asyncio.wait([watching])

    with caplog.at_level(logging.INFO, "headrace.server.progress"):
        asyncio.run(watch())
    assert len(caplog.records) == 2
    asyncio.run(log_progress(fake_engine, interval_s=0))


def test_a_finished_request_is_a_span_below_the_clients(
    serving: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    tracing = SpanTracing(export.SimpleSpanProcessor(exporter))
    service = serving.server._app.state.service
    monkeypatch.setattr(service, "tracing", tracing)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    serving.client.post(
        "/v1/completions", json={"prompt": "the lamp", "max_tokens": 3, "temperature": 0.5},
        headers={"traceparent": f"00-{trace}-{parent}-01"},
    )
    serving.post("/v1/completions", {"prompt": "the lamp", "max_tokens": 3})
    wait_until(lambda: len(exporter.get_finished_spans()) == 2)
    child, root = exporter.get_finished_spans()
    asyncio.run(tracing.close())
    assert child.name == root.name == SPAN
    assert f"{child.context.trace_id:032x}" == trace
    assert f"{child.parent.span_id:016x}" == parent
    assert root.parent is None
    assert child.attributes["gen_ai.usage.completion_tokens"] == 3
    assert child.attributes["gen_ai.request.temperature"] == 0.5
    assert child.attributes["gen_ai.latency.time_to_first_token"] == 1.0
    assert child.end_time - child.start_time == 2_000_000_000


def test_every_metric_of_the_dashboard_exists(serving: Running) -> None:
    serving.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
    serving.post("/v1/completions", {"prompt": 3})
    there = set(re.findall(r"^([a-z0-9_:]+)", serving.client.get("/metrics").text, re.MULTILINE))
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    named = set(re.findall(r"(?:vllm|headrace):\w+", " ".join(expressions)))
    assert len(named) > 30
    assert named - there == set()
    assert dashboard["templating"]["list"][1]["query"].split("(")[1].split(",")[0] in there


def test_a_client_that_does_not_read_keeps_nobody_waiting(serve: Start) -> None:
    with serve() as server:
        server.engine.max_model_len = 1 << 20
        server.engine.reply = "the lamp post " * 4000
        body = json.dumps({"prompt": "a", "max_tokens": 1 << 19, "stream": True}).encode()
        url = httpx.URL(server.url)
        with socket.socket() as slow:
            # Little room, so that the server soon has to wait for this client.
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((url.host, url.port or 80))
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            wait_until(lambda: server.engine.active)
            server.engine.reply = "hello there"
            for _ in range(20):
                reply = server.post("/v1/completions", {"prompt": "b", "max_tokens": 9})
                assert reply.json()["choices"][0]["text"] == "hello there"
            assert len(server.engine.active) == 1, "the slow one is not done: it had to wait"
        wait_until(lambda: not server.engine.active)
        assert len(server.engine.aborted) == 1
