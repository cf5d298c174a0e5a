"""Processes that share a model: the tokens of one device, and what happens when one ends.

Each start of an engine starts Python again, so there are few tests, each with much in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from headrace import LLM, SamplingParams
from headrace.engine.async_llm import AsyncLLM
from headrace.errors import ConfigError, EngineDeadError, RankError
from headrace.parallel.leader import Leader

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.distributed

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
SETTINGS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 4096}
PROMPTS = [[7 * i % 250 for i in range(start, start + length)]
           for start, length in ((0, 3), (0, 64), (0, 130), (5, 200), (9, 1))]


def leader_of(llm: LLM) -> Leader:
    others = llm.engine.parts.others
    assert isinstance(others, Leader)
    return others


def process_of(leader: Leader, rank: int) -> int:
    return leader._ranks[rank].process_id


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_layout": "slots", "state_scheme": "replay", "speculative": "mtp:2"},
        {
            "batch_layout": "compact", "state_scheme": "columns", "speculative": "ngram:3",
            "async_scheduling": False, "graphs": "on", "max_num_batched_tokens": 96,
        },
    ],
    ids=["slots-replay-mtp-async", "compact-columns-ngram-sync-graphs"],
)
def test_two_processes_give_the_tokens_of_one(settings: dict[str, Any]) -> None:
    answers = []
    for size in (1, 2):
        with LLM("nano", **SETTINGS, **settings, tensor_parallel_size=size) as llm:
            # Twice: the second time prefixes hit.
            rounds = [llm.generate(PROMPTS, GREEDY) for _ in range(2)]
            assert sum(output.num_cached_tokens for output in rounds[1])
            answers.append([[o.outputs[0].token_ids for o in one] for one in rounds])
            processes = [] if size == 1 else [process_of(leader_of(llm), 1)]
    assert answers[0] == answers[1]
    assert answers[1][0] == answers[1][1]
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def later(seconds: float, number: int, leader: Leader, rank: int) -> threading.Timer:
    """Send a signal to a rank in a while."""
    timer = threading.Timer(seconds, os.kill, (process_of(leader, rank), number))
    timer.start()
    return timer


def ask_for_ever(llm: LLM) -> None:
    while True:
        llm.generate(PROMPTS, GREEDY)


def test_death_of_a_rank_ends_what_runs_with_an_error_that_names_it() -> None:
    with LLM("nano", **SETTINGS, tensor_parallel_size=2) as llm:
        leader = leader_of(llm)
        process = process_of(leader, 1)
        later(0.5, signal.SIGKILL, leader, 1)
        begin = time.monotonic()
        with pytest.raises(RankError) as caught:
            llm.generate(PROMPTS, ENDLESS)
        assert time.monotonic() - begin < 10.0
        assert f"rank 1 of 2 (process {process}) was ended by signal 9" in str(caught.value)
        with pytest.raises(EngineDeadError, match="rank 1 of 2"):
            llm.generate(PROMPTS, GREEDY)


def test_the_rank_that_hangs_is_named_and_all_end_in_time() -> None:
    # The others wait for it in a collective, and are not to blame.
    with LLM("nano", **SETTINGS, rank_timeout=6.0, tensor_parallel_size=4) as llm:
        leader = leader_of(llm)
        processes = [process_of(leader, rank) for rank in (1, 2, 3)]
        timer = later(0.5, signal.SIGSTOP, leader, 3)
        begin = time.monotonic()
        with pytest.raises(
            RankError, match=rf"rank 3 of 4 \(process {processes[2]}\) did not take step"
        ):
            ask_for_ever(llm)
        timer.join()
        assert time.monotonic() - begin < 30.0
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_server_without_work_notices_too() -> None:
    async def main() -> str:
        llm = AsyncLLM(model="nano", **SETTINGS, tensor_parallel_size=2)
        others = llm._engine.parts.others
        assert isinstance(others, Leader)
        await llm.start()
        os.kill(process_of(others, 1), signal.SIGTERM)
        try:
            for _ in range(100):
                await asyncio.sleep(0.1)
                await llm.check_health()
        except EngineDeadError as error:
            return str(error)
        finally:
            await llm.shutdown()
        return "it did not"

    assert "rank 1 of 2" in asyncio.run(main())


def test_an_error_of_another_rank_at_the_start_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The child alone finds a module that breaks loading.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'headrace.engine.follower' in sys.orig_argv:\n"
        "    import headrace.weights.load as load\n"
        "    def broken(*_, **__): raise OSError('no such disk')\n"
        "    load.StoredWeights._read = broken\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    with pytest.raises(RankError, match=r"rank 1 of 2 .* failed: OSError: no such disk"):
        LLM("nano", **SETTINGS, tensor_parallel_size=2)


def test_sizes_that_do_not_fit_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match="sizes that work are 1, 2, 4"):
        LLM("nano", tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="rank_timeout is 0 but must be above 0"):
        LLM("nano", tensor_parallel_size=2, rank_timeout=0.0)


@pytest.fixture
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server of two ranks: its address, and its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", "nano", "--port", "0",
         "--tensor-parallel-size", "2"],
        stderr=subprocess.PIPE, text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"serving nano at (\S+)", line)
        if found:
            break
    else:
        raise AssertionError(f"the server ended with {process.wait()}")
    yield found[1], process
    process.kill()
    process.wait()
    process.stderr.close()


def test_a_server_answers_and_ends_when_a_rank_does(
    server: tuple[str, subprocess.Popen[str]],
) -> None:
    url, process = server
    with LLM("nano", **SETTINGS) as llm:
        (wanted,) = llm.generate([PROMPTS[1]], GREEDY)
    body = {
        "model": "nano", "prompt": PROMPTS[1], "temperature": 0, "max_tokens": 24,
        "ignore_eos": True, "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"] == wanted.outputs[0].text
    events = []
    body |= {"max_tokens": 400, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == 2:
                os.kill(children_of(process.pid)[0], signal.SIGKILL)
    assert "rank 1 of 2" in events[-1]["error"]["message"]
    assert process.wait(30) == 1
    assert process.stderr is not None
    assert "rank 1 of 2" in process.stderr.read()


def children_of(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in path.read_text().split()]


def test_torchrun_starts_the_ranks() -> None:
    script = (
        "from headrace import LLM, SamplingParams\n"
        "with LLM('nano', max_num_seqs=8, max_model_len=4096, tensor_parallel_size=2) as llm:\n"
        "    outputs = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=9))\n"
        "print('TOKENS', outputs[0].outputs[0].token_ids)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--no-python", sys.executable, "-c", script],
        capture_output=True, text=True, timeout=120, check=False,
    )
    assert done.returncode == 0, done.stderr
    with LLM("nano", **SETTINGS) as llm:
        (wanted,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=9))
    # Once: the other rank ends where it makes its LLM.
    assert done.stdout == f"TOKENS {wanted.outputs[0].token_ids}\n"
