"""The load generator against a server that answers by script."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from headrace.bench.options import ServeOptions
from headrace.bench.serve import Answer, measure_server
from headrace.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Scripted:
    """A server of two routes over plain sockets.

    Attributes:
        bodies: Completion requests as they came.
        most: Most requests that were open at once.
        fails: Answer completions with status 500.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most = self._open = 0
        self.fails = False
        self.url = ""
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,))
        self._thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._answer, "127.0.0.1", 0)
        )
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def close(self) -> None:
        """Stop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("get"):
            self._send(writer, 200, json.dumps({"data": [{"id": "scripted"}]}))
        else:
            length = int(head.partition("content-length:")[2].partition("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.bodies.append(body)
            self._open += 1
            self.most = max(self.most, self._open)
            for _ in range(10):
                await asyncio.sleep(0)
            events = [{"choices": [{"text": "x"}]} for _ in range(body["max_tokens"])]
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(events),
                     "prompt_tokens_details": {"cached_tokens": 2}}  # fmt: skip
            lines = [*events, {"choices": [], "usage": usage}]
            text = "".join(f"data: {json.dumps(line)}\n\n" for line in lines)
            self._open -= 1
            if self.fails:
                self._send(writer, 500, '{"error": {"message": "broken"}}')
            else:
                self._send(writer, 200, text + "data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    def _send(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        writer.write(
            f"HTTP/1.1 {status} X\r\nconnection: close\r\n"
            f"content-length: {len(text.encode())}\r\n\r\n{text}".encode()
        )


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()


def test_requests_have_the_lengths_asked_for_and_share_the_prefix(server: Scripted) -> None:
    options = ServeOptions(
        url=server.url, requests=5, prompt_tokens=6, shared_prefix=4, output_tokens=3,
        arrival_rate=500.0,
    )  # fmt: skip
    run = measure_server(options)

    (row,) = run["rows"]
    assert row["completion_tokens"] == 15
    assert row["cached_tokens"] == 10
    assert row["prompt_tokens"] == 50
    assert row["time_to_first_token"]["p50"] > 0
    assert set(row["inter_token_s"]) == {"p50", "p90", "p99"}
    prompts = [body["prompt"] for body in server.bodies]
    assert {len(prompt) for prompt in prompts} == {10}
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert len({tuple(prompt[4:]) for prompt in prompts}) == len(prompts)
    assert run["model"] == "scripted"


def test_concurrency_is_kept(server: Scripted) -> None:
    measure_server(ServeOptions(url=server.url, requests=6, output_tokens=2, concurrency=2))

    assert server.most <= 2


def test_failing_requests_are_an_error(server: Scripted) -> None:
    server.fails = True
    with pytest.raises(HeadraceError, match=r"all 2 requests failed.*status 500.*broken"):
        measure_server(ServeOptions(url=server.url, requests=2))


def test_a_server_that_is_not_there_is_wrong_use() -> None:
    with pytest.raises(ConfigError, match="no OpenAI server answers"):
        measure_server(ServeOptions(url="http://127.0.0.1:9", requests=1))


def test_tokens_that_come_together_share_the_time() -> None:
    answer = Answer(event_s=[1.0, 3.0], completion_tokens=5)

    assert answer.inter_token_s() == [0.5, 0.5, 0.5, 0.5]
