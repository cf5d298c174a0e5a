"""Clients that ask and do not read: they hold up nobody, and not for ever."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx

from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.server.connections import WatchedConnection
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest

    from tests.server.conftest import Running, Start

DEADLINE_S = 20.0
SEND_TIMEOUT_S = 0.3
SETTINGS = ServerSettings(send_timeout_s=SEND_TIMEOUT_S, log_level="warning")


def wait_until(condition: Callable[[], object]) -> None:
    poll = threading.Event()
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        poll.wait(0.005)


def num_aborted(server: Running) -> float:
    """Sequences that ended because nobody takes their answers."""
    name = r'request_success_total{.*finished_reason="abort".*} (.+)'
    return float(re.search(name, server.client.get("/metrics").text)[1])  # type: ignore[index]


@contextlib.contextmanager
def asking(url: str, **fields: Any) -> Iterator[socket.socket]:  # noqa: ANN401 - JSON
    """A client that has sent a request and reads nothing."""
    body = json.dumps(fields).encode()
    at = httpx.URL(url)
    with socket.socket() as client:
        # Little room, so that the server soon has to wait for this client.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((at.host, at.port or 80))
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        yield client


def give_little_room(server: Running) -> None:
    """Let the kernel take little of what the server sends: accepted sockets inherit that."""
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def num_connections(server: Running) -> int:
    return len(server.server.server_state.connections)


def test_a_stream_that_nobody_reads_ends_and_gives_its_blocks_back(
    random_model: Path, start_server: Start
) -> None:
    config = EngineConfig(
        model=str(random_model), max_num_seqs=16, num_kv_blocks=2000, num_state_blocks=64,
        max_model_len=30_000,
    )
    with start_server(AsyncLLM(config), SETTINGS) as server:
        give_little_room(server)
        with asking(
            server.url, prompt="a", stream=True, n=8, max_tokens=29_000, ignore_eos=True,
            logprobs=20,
        ):
            reply = server.post(
                "/v1/completions", {"prompt": "b", "max_tokens": 8, "ignore_eos": True}
            )
            assert reply.json()["usage"]["completion_tokens"] == 8
            # Not "length": it was ended, long before its last token.
            wait_until(lambda: num_aborted(server) == 8)
            wait_until(lambda: server.client.get("/stats").json()["running"] == 0)
            stats = server.client.get("/stats").json()
        for pool in (stats["kv_blocks"], *stats["state_blocks"]):
            assert pool["free"] + pool["cached"] == pool["total"]


def test_the_rest_of_an_answer_that_nobody_reads_is_dropped(
    serve: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(settings=SETTINGS) as server:
        give_little_room(server)
        server.engine.max_model_len = 1 << 20
        server.engine.reply = "the lamp post " * 300
        with asking(server.url, prompt="a", max_tokens=1 << 19, logprobs=20) as client:
            wait_until(lambda: num_connections(server) == 1)
            wait_until(lambda: num_connections(server) == 0)
            with contextlib.suppress(ConnectionResetError):
                while client.recv(1 << 16):
                    pass
        assert "took nothing of its answer for 0.3 s" in caplog.text
        assert "raise send_timeout" in caplog.text


class FakeTransport:
    """A transport whose buffer the test fills and empties."""

    def __init__(self) -> None:
        self.left = 0
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.left

    def abort(self) -> None:
        self.is_aborted = True


class FakeLoop:
    """Holds what is to be called later until the test calls it."""

    def __init__(self) -> None:
        self.later: list[Callable[[], None]] = []

    def call_later(self, _: float, call: Callable[..., None], *given: int) -> threading.Event:
        self.later.append(lambda: call(*given))
        return threading.Event()


def test_a_client_that_reads_slowly_keeps_its_connection() -> None:
    connection = WatchedConnection.__new__(WatchedConnection)
    connection.send_timeout_s = 60.0
    connection.client = ("127.0.0.1", 1)
    transport, loop = FakeTransport(), FakeLoop()
    connection.transport, connection.loop = transport, loop  # type: ignore[assignment]
    transport.left = 1000
    connection._begin_watch()
    for left, is_aborted in ((999, False), (998, False), (998, True)):
        transport.left = left
        loop.later.pop()()
        assert transport.is_aborted is is_aborted
    assert not loop.later
