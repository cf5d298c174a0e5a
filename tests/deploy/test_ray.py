"""Two replicas of `nano` under Ray on this machine: `pytest -m distributed` with headrace[ray]."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is missing: pip install 'headrace[ray]'"
)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "headrace.deploy.ray_app", raising=False)
    with pytest.raises(ConfigError, match=re.escape("pip install 'headrace[ray]'")):
        importlib.import_module("headrace.deploy.ray_app")


@dataclass(frozen=True, slots=True)
class Deployment:
    process: subprocess.Popen[str]
    url: str

    def complete(self, prompt: str, **fields: Any) -> httpx.Response:  # noqa: ANN401 - JSON
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    # A token of its own rather than one in the user's home.
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text("f" * 64)
    return {
        **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@pytest.fixture(scope="module")
def deployment(environment: dict[str, str]) -> Iterator[Deployment]:
    port = free_port()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "headrace", "deploy", "nano", "--min-replicas", "2",
            "--cpus", "0.5", "--port", str(port), "--shutdown-timeout", "5",
        ],
        env=environment, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(url, process)
        yield Deployment(process, url)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, output[-3000:]


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_until_up(url: str, process: subprocess.Popen[str]) -> None:
    """Wait until both replicas have answered."""
    end = time.monotonic() + START_TIMEOUT_S
    seen: set[str] = set()
    while len(seen) < 2:
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < end, f"only {seen} answered within {START_TIMEOUT_S:g} s"
        time.sleep(0.2)
        try:
            # New prefixes: each has its own order of replicas.
            body = {"prompt": f"{time.monotonic_ns()} and so on " * 12, "max_tokens": 1}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        except httpx.TransportError:
            continue
        if answer.is_success:
            seen.add(answer.headers["x-headrace-replica"])


def prefix(group: int) -> str:
    return f"In chapter {group} the code of Ann is {4711 + group}. " * 12


@needs_ray
@pytest.mark.distributed
def test_prompts_go_where_their_beginning_is_cached(deployment: Deployment) -> None:
    homes = []
    for group in range(8):
        first = deployment.complete(prefix(group))
        time.sleep(0.05)
        again = [deployment.complete(f"{prefix(group)}Number {turn}") for turn in range(3)]
        replica = first.headers["x-headrace-replica"]
        assert {one.headers["x-headrace-replica"] for one in again} == {replica}
        for one in again:
            assert one.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        homes.append(replica)
    assert len(set(homes)) == 2, "all prefixes went to one replica"


@needs_ray
@pytest.mark.distributed
def test_a_summary_keeps_prompts_together_when_routes_are_forgotten(
    deployment: Deployment
) -> None:
    replica = deployment.complete(prefix(50)).headers["x-headrace-replica"]
    time.sleep(7)  # Five periods: the router knows by the replica's own words alone.
    later = deployment.complete(prefix(50) + "And?")
    assert later.headers["x-headrace-replica"] == replica
    assert later.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


@needs_ray
@pytest.mark.distributed
def test_streams_pass_through_while_they_are_made(deployment: Deployment) -> None:
    body = {"prompt": prefix(0), "max_tokens": 200, "ignore_eos": True, "stream": True}
    times, text = [], ""
    with httpx.stream("POST", f"{deployment.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert len(answer.headers.get_list("x-request-id")) == 1
        for line in answer.iter_lines():
            if line.startswith("data: "):
                times.append(time.monotonic())
                text = line
    assert text == "data: [DONE]"
    assert len(times) > 20
    # Not collected: most of the events came well before the last one.
    assert times[len(times) // 2] < times[-1] - (times[-1] - times[0]) / 10


@needs_ray
@pytest.mark.distributed
def test_errors_are_those_of_the_server(deployment: Deployment) -> None:
    answer = deployment.complete("hello", temperature=-1)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature"
    assert httpx.get(f"{deployment.url}/health", timeout=30).status_code == 200
    assert httpx.get(f"{deployment.url}/v1/models", timeout=30).json()["data"][0]["id"] == "nano"


ANSWERS = {
    "right": (200, 'data: {"choices": [{"text": "4711"}]}\n\ndata: [DONE]\n\n'),
    "wrong": (200, 'data: {"choices": [{"text": "4712"}]}\n\n'),
    "lost": (200, 'data: {"choices": [{"text": "47"}]}\n\n'),
    "told by an event": (200, 'data: {"choices": [{"text": "47"}]}\n\ndata: {"error": {}}\n\n'),
    "told by HTTP 503": (503, "{}"),
}


@needs_ray
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of Ray's own, at its import.
@pytest.mark.parametrize("outcome", ANSWERS)
def test_the_script_tells_lost_and_wrong_from_right(
    monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    path = ROOT / "examples/deploy/chaos.py"
    spec = importlib.util.spec_from_file_location("chaos", path)
    assert spec is not None
    assert spec.loader is not None
    chaos = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "chaos", chaos)  # Where its dataclass looks itself up.
    spec.loader.exec_module(chaos)

    async def go() -> str:
        status, text = ANSWERS[outcome]
        transport = httpx.MockTransport(lambda _: httpx.Response(status, text=text))
        async with httpx.AsyncClient(transport=transport) as client:
            return await chaos.ask(client, "http://x", "prompt", "4711", streams=True)

    assert asyncio.run(go()) == outcome


@needs_ray
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_nothing_is_lost_and_nothing_wrong_while_parts_are_killed(
    environment: dict[str, str]
) -> None:
    """A short run of the script that is meant to run for five minutes."""
    done = subprocess.run(
        [
            sys.executable, "examples/deploy/chaos.py", "--seconds", "45", "--kill-every", "8",
            "--clients", "4", "--port", str(free_port()),
        ],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.rstrip().endswith("lost 0, wrong 0")


@needs_ray
@pytest.mark.distributed
def test_the_example_file_builds_an_application() -> None:
    done = subprocess.run(
        [sys.executable, "-c", (
            "import sys, yaml\n"
            "from headrace.deploy.ray_app import build\n"
            "one, = yaml.safe_load(open(sys.argv[1]))['applications']\n"
            "assert one['import_path'] == 'headrace.deploy.ray_app:build'\n"
            "print(type(build(one['args'])).__name__)\n"
            "try: build({'engine': {'modle': 'demo'}})\n"
            "except Exception as error: print(error)\n"
        ), "examples/deploy/serve.yaml"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    name, message = done.stdout.strip().split("\n")
    assert name == "Application"
    assert "args.engine has no setting 'modle'" in message


def test_the_example_file_names_settings_that_exist() -> None:
    from headrace.config import EngineConfig  # noqa: PLC0415
    from headrace.deploy.settings import DeploySettings  # noqa: PLC0415
    from headrace.server.settings import ServerSettings  # noqa: PLC0415

    text = (ROOT / "examples/deploy/serve.yaml").read_text(encoding="utf-8")
    (application,) = yaml.safe_load(text)["applications"]
    args = application["args"]
    assert EngineConfig(**args["engine"]).model == "demo"
    assert ServerSettings(**args["server"]).shutdown_timeout_s == 30
    assert DeploySettings(**args["deploy"]).max_replicas == 4
