"""`headrace top` and `headrace trace` against servers, and traces of an engine."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from headrace.cli.main import run_command
from headrace.cli.top import screen
from headrace.cli.trace import trace_engine
from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Running, Start


def stats(scale: int) -> dict[str, Any]:
    return {
        "model": "tiny", "version": "1", "running": 3, "waiting": 2, "steps": 10 * scale,
        "generated_tokens": 30 * scale, "prompt_tokens": 50 * scale, "forward_tokens": 80 * scale,
        "host_waits": 5 * scale, "draft_tokens": 20 * scale, "accepted_tokens": 15 * scale,
        "acceptance_by_position": [0.8, 0.4], "preemptions": 1,
        "kv_blocks": {"total": 10, "used": 5, "cached": 3, "free": 2},
        "state_blocks": [{"total": 4, "used": 1, "cached": 1, "free": 2}],
        "prefix_cache": {
            "hit_tokens": 10 * scale, "query_tokens": 40 * scale,
            "missed_tokens": {"evicted": 7, "last_token": 9, "salt": 0},
        },
    }


def test_the_screen_shows_rates_pools_hits_and_reasons() -> None:
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(screen(stats(1), stats(2), 2.0))
    text = captured.get()
    rows = {line[:22].strip(): line[22:].strip() for line in text.splitlines() if line.strip()}
    assert rows["sequences"] == "3 running, 2 waiting"
    assert rows["generated"] == "15.0 tokens/s"
    assert rows["steps"] == "5.0 /s, 8.0 tokens each"
    assert rows["host waits"] == "0.50 a step"
    assert rows["drafts kept"] == "75.0%"
    assert rows["by position, ever"] == "80% 40%"
    assert rows["KV blocks"].endswith("5 used, 3 cached of 10")
    assert rows["KV blocks"].count("█") == 15
    assert rows["KV blocks"].count("▒") == 9
    assert rows["prefix hits"] == "25.0%"
    assert rows["missed: last_token"] == "9"
    assert "missed: salt" not in rows
    assert text.index("last_token") < text.index("evicted")


def test_top_once_prints_a_servers_figures(
    serving: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["top", serving.url, "--once", "--interval", "0.01"]) == 0
    text = capsys.readouterr().out
    assert "headrace" in text
    assert "fake" in text
    assert "5 used, 0 cached of 10" in text
    assert "missed: last_token" in text


def test_a_server_that_is_not_there_is_an_error_with_a_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "t.json")
    for command in (["top", "http://127.0.0.1:9", "--once"],
                    ["trace", "127.0.0.1:9", "--output", file]):
        assert run_command(command) == 1
        assert "start a server with headrace serve" in capsys.readouterr().err
    assert run_command(["top", "ftp://x", "--once"]) == 2


def test_a_key_that_is_missing_is_told(
    serve: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(settings=ServerSettings(api_keys=("k",), log_level="warning")) as server:
        assert run_command(["top", server.url, "--once", "--interval", "0"]) == 1
        assert "401: the API key is missing" in capsys.readouterr().err
        command = ["top", server.url, "--once", "--interval", "0.01", "--api-key", "k"]
        assert run_command(command) == 0


def spans(document: dict[str, Any], lane: str) -> list[dict[str, Any]]:
    """Complete events of a lane, in order; checks what a viewer needs of every event."""
    lanes = {
        event["tid"]: event["args"]["name"] for event in document["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    found = []
    for event in document["traceEvents"]:
        assert event["ph"] in "MX"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["tid"] in lanes
            if lane in lanes[event["tid"]]:
                found.append(event)
    return sorted(found, key=lambda event: event["ts"])


@pytest.mark.parametrize("is_async", [False, True])
def test_a_trace_has_the_parts_of_every_step_in_order(
    random_model: Path, *, is_async: bool
) -> None:
    config = EngineConfig(
        model=str(random_model), max_num_seqs=4, num_kv_blocks=60, num_state_blocks=24,
        async_scheduling=is_async, speculative="none",
    )
    document = trace_engine(config, prompt="abc", batch=2, num_steps=5)
    assert document["otherData"]["steps"] == 5
    host, device = spans(document, "engine thread"), spans(document, "device")
    for name in ("schedule", "stage", "execute", "wait", "update"):
        of_it = [event["args"]["step"] for event in host
                 if event["name"] == name and "step" in event["args"]]
        assert of_it[:5] == [1, 2, 3, 4, 5], name
    steps = [event for event in device if event["name"].startswith("step ")]
    assert [event["name"] for event in steps[:5]] == [f"step {n}" for n in range(1, 6)]
    for step in steps:
        number = int(step["name"].removeprefix("step "))
        forward, = (e for e in device if e["name"] == "forward" and e["args"]["step"] == number)
        assert step["ts"] <= forward["ts"]
        assert forward["ts"] + forward["dur"] <= step["ts"] + step["dur"] + 0.01
    # A step is enqueued before the last one's results are read, or not, as the setting says.
    execute = next(e for e in host if e["name"] == "execute" and e["args"]["step"] == 2)
    update = next(e for e in host if e["name"] == "update" and e["args"]["step"] == 1)
    assert (execute["ts"] < update["ts"]) is is_async


def test_a_server_at_work_is_traced_and_goes_on(
    random_model: Path, start_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(
        model=str(random_model), max_num_seqs=4, num_kv_blocks=60, num_state_blocks=24
    )
    engine = AsyncLLM(config)
    file = tmp_path / "trace.json"
    body = {"prompt": "abc", "max_tokens": 30, "ignore_eos": True, "temperature": 0}
    with start_server(engine, ServerSettings(log_level="warning")) as server:
        plain = server.post("/v1/completions", body).json()["choices"][0]["text"]
        done = threading.Event()
        texts: list[str] = []

        def work() -> None:
            while not done.is_set():
                texts.append(server.post("/v1/completions", body).json()["choices"][0]["text"])

        working = threading.Thread(target=work)
        working.start()
        code = run_command(["trace", server.url, "--steps", "8", "--output", str(file)])
        done.set()
        working.join()
        assert code == 0, capsys.readouterr().err
        assert set(texts) == {plain}
        document = json.loads(file.read_text())
        assert document["otherData"]["steps"] == 8
        assert len([e for e in spans(document, "engine thread") if e["name"] == "update"]) == 8
        assert "step" not in vars(engine._engine), "the engine is as it was"

        # Nothing happens: the trace ends, and says so.
        idle = ["trace", server.url, "--timeout", "0.05", "--output", str(tmp_path / "none")]
        assert run_command(idle) == 1
        assert "send the server requests" in capsys.readouterr().err
        for wrong in ({"steps": 0}, {"timeout_s": 0}, {"steps": "x"}):
            assert server.post("/trace", wrong).status_code == 400
