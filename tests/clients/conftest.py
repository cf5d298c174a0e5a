"""One server with the demo model, and the interpreter that has the clients.

The clients' libraries pin others; `CLIENTS_PYTHON=/venv/bin/python` names an interpreter of
an environment of their own (`pip install 'headrace[clients]'` there), else this one is used.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

START_S = 240.0
LIMIT_S = 280.0
PROGRAM = "from headrace.cli.main import main; main()"


@dataclass(frozen=True)
class Clients:
    """Runs clients against a server.

    Attributes:
        url: The server's.
        process: The server.
    """

    url: str
    process: subprocess.Popen[bytes]

    @property
    def python(self) -> str:
        return os.environ.get("CLIENTS_PYTHON", sys.executable)

    @property
    def environment(self) -> dict[str, str]:
        """Nothing is asked for on the internet."""
        return {
            **os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "key",
            "ANTHROPIC_API_KEY": "key", "SERVER": self.url, "DO_NOT_TRACK": "1",
        }

    def need(self, module: str) -> str:
        """Skip without a library; returns its version."""
        found = subprocess.run(
            [self.python, "-c", f"import importlib.metadata as m; print(m.version({module!r}))"],
            capture_output=True, text=True, check=False,
        )
        if found.returncode:
            pytest.skip(f"{self.python} has no {module}; pip install 'headrace[clients]'")
        version = found.stdout.strip()
        print(f"{module} {version}")
        return version

    def run(
        self, command: list[str], folder: Path, *, limit_s: float = LIMIT_S,
        environment: dict[str, str] | None = None,
    ) -> str:
        """Run a client to its end and return what it printed."""
        done = subprocess.run(
            command, cwd=folder, env=environment or self.environment, capture_output=True,
            text=True, check=False, timeout=limit_s,
        )
        assert self.process.poll() is None, "the server ended"
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout

    def script(self, text: str, folder: Path) -> str:
        """Run a Python script with the clients' interpreter."""
        return self.run([self.python, "-c", text], folder)


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with serving("demo", max_model_len=4096) as made:
        yield made


@pytest.fixture(scope="session")
def serve_model() -> Callable[..., contextlib.AbstractContextManager[Clients]]:
    """For tests that need a server of their own: `with serve_model(model, max_model_len=…)`."""
    return serving


@contextlib.contextmanager
def serving(model: str, *, max_model_len: int) -> Iterator[Clients]:
    """Start a server in a process of its own; it ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", PROGRAM, "serve", model, "--port", str(port),
               "--max-model-len", str(max_model_len), "--log-level", "warning"]
    with subprocess.Popen(command) as process:
        try:
            _wait(url, process)
            yield Clients(url, process)
        finally:
            process.terminate()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    poll = threading.Event()
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, "the server ended before it began"
            assert time.monotonic() < end, "the server did not start in time"
            poll.wait(0.2)
