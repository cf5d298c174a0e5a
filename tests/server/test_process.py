"""`headrace serve` as a process: signals and exit codes."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START_S = 120.0
END_S = 30.0

DYING = """
import sys
from headrace.engine.engine import Engine
from headrace.cli.main import main

def step(self):
    raise MemoryError("a test took the memory away")

Engine.step = step
main()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def served(
    folder: Path, program: str, *more: str
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Start a server, wait until it is healthy, and leave no process behind."""
    port = free_port()
    arguments = [
        "serve", str(folder), "--port", str(port), "--num-kv-blocks", "100",
        "--num-state-blocks", "64", "--max-num-seqs", "4", *more,
    ]
    with (
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True
        ) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as client,
    ):
        try:
            wait_until_healthy(process, client)
            yield process, client
        finally:
            process.kill()


def wait_until_healthy(process: subprocess.Popen[str], client: httpx.Client) -> None:
    end = time.monotonic() + START_S
    poll = threading.Event()
    while True:
        try:
            client.get("/health").raise_for_status()
        except httpx.HTTPError:
            if process.poll() is not None:
                pytest.fail(f"the server ended: {process.communicate()[1]}")
            assert time.monotonic() < end, "the server did not start in time"
            poll.wait(0.05)
        else:
            return


def test_sigterm_ends_the_process_with_code_zero_after_the_last_answer(random_model: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    body = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "stream": True}
    program = "from headrace.cli.main import main; main()"
    with contextlib.ExitStack() as stack:
        # Whoever gets the traces says nothing: the end does not wait for it.
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        traces = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        process, client = stack.enter_context(
            served(random_model, program, "--otlp-traces-endpoint", traces)
        )
        with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        _, stderr = process.communicate(timeout=END_S)
    assert rest, (first, stderr)
    assert rest[-1] == "data: [DONE]"
    assert any('"finish_reason":"length"' in line for line in rest)
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr
    assert f"serving {random_model} at http:" in stderr, stderr
    # What loading has to say comes before that.
    assert f"INFO: loading {random_model}" in stderr, stderr
    assert "INFO: prefixes of 64 tokens and more can be cached" in stderr, stderr
    assert "the collector of traces did not take the last ones within 2 s" in stderr


@pytest.mark.scenarios("B119")
def test_the_death_of_the_engine_ends_the_process_with_another_code(random_model: Path) -> None:
    with served(random_model, DYING) as (process, client):
        reply = client.post("/v1/completions", json={"prompt": "abc"})
        assert reply.status_code == 503
        assert client.get("/health").status_code == 503
        _, stderr = process.communicate(timeout=END_S)
    assert process.returncode == 1, stderr
    assert "headrace: error: the engine died" in stderr
    # Where it died, for whoever has to find out why.
    assert ", in step\nMemoryError: a test took" in stderr
