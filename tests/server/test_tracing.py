"""OpenTelemetry traces and the end of a server: collectors that answer, and those that do not."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from headrace.outputs import RequestMetrics, RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.server.settings import ServerSettings
from headrace.server.tracing import SpanTracing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.conftest import Start

CLOSE_S = 0.3
#: The library's own limit is 10 s for an answer and 30 s for the end of its thread.
SOON_S = 5.0


@contextlib.contextmanager
def silent_collector() -> Iterator[str]:
    """Accepts connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"


@contextlib.contextmanager
def collector(bodies: list[bytes]) -> Iterator[str]:
    """Takes what it is sent."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()
        thread.join()


def tracing_to(endpoint: str, *, close_timeout_s: float) -> SpanTracing:
    http_exporter = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    processor = export.BatchSpanProcessor(http_exporter.OTLPSpanExporter(endpoint=endpoint))
    return SpanTracing(processor, close_timeout_s=close_timeout_s)


def tell(tracing: SpanTracing) -> None:
    output = RequestOutput(
        request_id="told", prompt=None, prompt_token_ids=[1], outputs=[], finished=True,
        metrics=RequestMetrics(arrival_time_s=time.monotonic()),
    )
    tracing.finished(output, 1, SamplingParams(), "model")


def test_a_collector_that_never_answers_holds_nothing_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def close(tracing: SpanTracing) -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(CLOSE_S / 20)

        ticking = asyncio.create_task(tick())
        await tracing.close()
        ticking.cancel()
        return ticks

    with silent_collector() as endpoint, caplog.at_level(logging.WARNING, "headrace"):
        tracing = tracing_to(endpoint, close_timeout_s=CLOSE_S)
        tell(tracing)
        begin = time.monotonic()
        ticks = asyncio.run(close(tracing))
        assert time.monotonic() - begin < SOON_S
    assert ticks > 2, "the event loop stood still"
    assert "did not take the last ones within 0.3 s" in caplog.text


def test_what_is_left_is_sent_at_the_end() -> None:
    bodies: list[bytes] = []
    with collector(bodies) as endpoint:
        tracing = tracing_to(endpoint, close_timeout_s=SOON_S)
        tell(tracing)
        asyncio.run(tracing.close())
    assert len(bodies) == 1
    assert b"llm_request" in bodies[0]
    assert b"told" in bodies[0]


def test_a_server_ends_although_its_collector_does_not_answer(serve: Start) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    with silent_collector() as endpoint:
        chosen = ServerSettings(log_level="warning", otlp_traces_endpoint=endpoint)
        with serve(settings=chosen) as server:
            reply = server.post("/v1/completions", {"prompt": "the lamp", "max_tokens": 3})
            assert reply.status_code == 200
            begin = time.monotonic()
        assert time.monotonic() - begin < SOON_S
