"""What HTTP costs: tokens per second of 64 streams through the server, against the engine alone.

The same prompts and lengths twice: in an engine in this process, and through `headrace serve` in a
process of its own, read by a client that does as little as it can. Prints JSON; exit 1 if the
server is more than --goal slower. Where other processes share the processor, look at the overhead
by processor time, which they disturb less.

    python benchmarks/server_overhead.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams

_PROGRAM = "from headrace.cli.main import main; main()"
_START_S = 300.0


def prompts_of(count: int, vocab: int) -> list[list[int]]:
    """Prompts that differ; there is no prefix cache in which they could be found again."""
    return [
        [1 + (index * 31 + place * 7) % (vocab - 1) for place in range(24)]
        for index in range(count)
    ]


def engine_alone(options: dict[str, Any], count: int, num_tokens: int) -> dict[str, Any]:
    """Generate without a server."""
    with LLM(**options) as llm:
        vocab = llm.engine.parts.model_config.vocab_size
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        llm.generate(prompts_of(count, vocab), params)  # Warm up.
        begin, worked = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts_of(count, vocab), params)
        seconds, worked = time.perf_counter() - begin, time.process_time() - worked
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "tokens": tokens, "tokens_per_s": round(tokens / seconds, 1),
        "cpu_us_per_token": round(worked / tokens * 1e6, 1), "vocab_size": vocab,
    }


def through_server(
    options: dict[str, Any], count: int, num_tokens: int, vocab: int
) -> dict[str, Any]:
    """Generate through a server in another process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [
        part for name, value in options.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = [sys.executable, "-c", _PROGRAM, "serve", "--port", str(port), *flags,
               "--log-level", "warning"]
    with subprocess.Popen(command) as server:  # noqa: S603 - our own program
        try:
            wait_until_ready(port, server)
            asyncio.run(all_streams(port, prompts_of(count, vocab), num_tokens))  # Warm up.
            begin, worked = time.perf_counter(), cpu_s(server.pid)
            counts = asyncio.run(all_streams(port, prompts_of(count, vocab), num_tokens))
            seconds, worked = time.perf_counter() - begin, cpu_s(server.pid) - worked
        finally:
            server.terminate()
    tokens = sum(counts)
    return {
        "tokens": tokens, "tokens_per_s": round(tokens / seconds, 1),
        "cpu_us_per_token": round(worked / tokens * 1e6, 1),
    }


def wait_until_ready(port: int, server: subprocess.Popen[bytes]) -> None:
    """Return when the server answers.

    Raises:
        RuntimeError: It ended, or did not begin in time.
    """
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError("the server ended before it began")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError("the server did not begin in time")


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def all_streams(port: int, prompts: list[list[int]], num_tokens: int) -> list[int]:
    """Ask for all at once; returns the completion tokens of each, as the server counts them."""
    return await asyncio.gather(*(one_stream(port, prompt, num_tokens) for prompt in prompts))


async def one_stream(port: int, prompt: list[int], num_tokens: int) -> int:
    """Read one stream to its end, without looking at it before."""
    body = json.dumps({
        "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    await writer.drain()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    usage = next(
        line for line in reversed(answer.splitlines()) if b'"usage"' in line
    )
    count: int = json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
    return count


def main() -> int:
    """Measure both, print, compare with the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--speculative", default="none")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="the better of so many counts")
    parser.add_argument("--goal", type=float, default=0.15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = {
        "model": args.model, "speculative": args.speculative, "max_num_seqs": args.streams,
        "max_model_len": 256, "prefix_cache": "none",
    }
    engines, servers = [], []
    for _ in range(args.rounds):
        engines.append(engine_alone(options, args.streams, args.tokens))
        vocab = engines[-1]["vocab_size"]
        servers.append(through_server(options, args.streams, args.tokens, vocab))
    engine = max(engines, key=lambda row: row["tokens_per_s"])
    server = max(servers, key=lambda row: row["tokens_per_s"])
    overhead = 1 - server["tokens_per_s"] / engine["tokens_per_s"]
    by_cpu = (
        min(row["cpu_us_per_token"] for row in servers)
        / min(row["cpu_us_per_token"] for row in engines) - 1
    )
    document = {
        "settings": {**options, "streams": args.streams, "tokens": args.tokens},
        "engine": engines, "server": servers,
        "overhead": round(overhead, 3), "overhead_by_cpu": round(by_cpu, 3), "goal": args.goal,
    }
    text = json.dumps(document, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0 if overhead < args.goal else 1


if __name__ == "__main__":
    sys.exit(main())
