"""`bench serve`: the same load against a server that speaks OpenAI's protocol.

Prompts are lists of random token ids, so the server's tokenizer is out of the way and lengths are
exact. Times are the client's: a token counts when its event has been read. httpx is needed here and
nowhere else in the benchmarks.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.options import as_json
from headrace.bench.report import Document, document
from headrace.bench.workload import arrival_times, percentiles, random_prompts, random_tokens
from headrace.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from headrace.bench.measure import Row
    from headrace.bench.options import ServeOptions

try:
    import httpx
except ImportError as error:
    raise ConfigError("bench serve needs httpx; pip install 'headrace[bench]'") from error

_WARMUP_REQUESTS = 2
_OK = 200
_MOST_OF_AN_ERROR = 300


@dataclass(slots=True, kw_only=True)
class Answer:
    """One request as the client saw it; times in seconds from the run's start.

    Attributes:
        begin_s: When it was sent.
        event_s: When each event with text or tokens was read.
        end_s: When the stream ended.
        prompt_tokens, cached_tokens, completion_tokens: As the server counts them.
        error: What went wrong, or empty.
    """

    begin_s: float = 0.0
    event_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""

    def take(self, event: dict[str, Any], now_s: float) -> None:
        """Take one event of the stream in."""
        if event.get("error"):
            self.error = str(event["error"].get("message", event["error"]))
        # Text may be held back, as half of a character is; the event marks the token all the same.
        if event.get("choices"):
            self.event_s.append(now_s)
        usage = event.get("usage") or {}
        if usage:
            self.prompt_tokens = usage.get("prompt_tokens", 0)
            self.completion_tokens = usage.get("completion_tokens", 0)
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens") or 0

    def inter_token_s(self) -> list[float]:
        """Times between tokens; those that come in one event share its time evenly."""
        gaps = [after - before for before, after in pairwise(self.event_s)]
        tokens = self.completion_tokens - 1
        if not gaps or tokens < 1:
            return []
        if tokens <= len(gaps):
            return gaps
        # How many came in which event is not said.
        return [sum(gaps) / tokens] * tokens


def measure_server(options: ServeOptions) -> Document:
    """Send the load and report what came back.

    Raises:
        ConfigError: There is no server, or it serves no model.
        HeadraceError: Every request failed.
    """
    seed = secrets.randbits(32) if options.load_seed is None else options.load_seed
    sys.stdout.write(f"load of seed {seed}\n")
    answers, model, seconds = asyncio.run(_load(options, seed))
    good = [answer for answer in answers if not answer.error]
    if not good:
        raise HeadraceError(f"all {len(answers)} requests failed; the first: {answers[0].error}")
    row = _row(options, good, seconds)
    failed = len(answers) - len(good)
    if failed:
        first = next(answer.error for answer in answers if answer.error)
        row["error"] = f"{failed} of {len(answers)} requests failed: {first}"
    settings = {"bench": "serve", **as_json(options), "load_seed": seed}
    return document(
        model=model, device=f"server at {options.url}", settings=settings, ceilings=None, rows=[row]
    )


async def _load(options: ServeOptions, seed: int) -> tuple[list[Answer], str, float]:
    rng = np.random.default_rng(seed)
    vocab = options.vocab_size
    prefix = random_tokens(rng, options.shared_prefix, vocab)
    count = options.requests + _WARMUP_REQUESTS
    prompts = random_prompts(rng, count, options.prompt_tokens, vocab, prefix)
    arrivals = arrival_times(rng, options.requests, options.arrival_rate)
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=options.url, headers=headers, limits=limits, timeout=options.timeout
    ) as client:
        model = options.served_model or await _first_model(client, options.url)
        for prompt in prompts[:_WARMUP_REQUESTS]:
            await _ask(client, _body(options, model, prompt), time.perf_counter())
        gate = asyncio.Semaphore(options.concurrency or options.requests)
        begin = time.perf_counter()

        async def one(prompt: list[int], arrival: float) -> Answer:
            await asyncio.sleep(max(0.0, begin + arrival - time.perf_counter()))
            async with gate:
                return await _ask(client, _body(options, model, prompt), begin)

        pairs = zip(prompts[_WARMUP_REQUESTS:], arrivals, strict=True)
        answers = await asyncio.gather(*(one(prompt, arrival) for prompt, arrival in pairs))
        return list(answers), model, time.perf_counter() - begin


async def _first_model(client: httpx.AsyncClient, url: str) -> str:
    try:
        reply = await client.get("/v1/models")
        models = reply.json()["data"] if reply.status_code == _OK else []
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise ConfigError(
            f"no OpenAI server answers at {url} ({type(error).__name__}); start one with "
            "`headrace serve`, or give --url"
        ) from error
    if not models:
        raise ConfigError(
            f"{url}/v1/models answers {reply.status_code} and lists no model; give --api-key or "
            "--served-model"
        )
    return str(models[0]["id"])


def _body(options: ServeOptions, model: str, prompt: list[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": options.output_tokens,
        "temperature": options.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], begin_s: float) -> Answer:
    answer = Answer(begin_s=time.perf_counter() - begin_s)
    try:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != _OK:
                text = (await reply.aread()).decode(errors="replace")
                answer.error = f"status {reply.status_code}: {text[:_MOST_OF_AN_ERROR]}"
                return answer
            async for line in reply.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    answer.take(json.loads(data), time.perf_counter() - begin_s)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = str(error) or type(error).__name__
    answer.end_s = time.perf_counter() - begin_s
    return answer


def _row(options: ServeOptions, good: list[Answer], seconds: float) -> Row:
    first = [answer.event_s[0] - answer.begin_s for answer in good if answer.event_s]
    whole = [answer.end_s - answer.begin_s for answer in good]
    generated = sum(answer.completion_tokens for answer in good)
    name = "all at once"
    if options.arrival_rate is not None:
        name = f"{options.arrival_rate:g} requests/s"
    elif options.concurrency is not None:
        name = f"at most {options.concurrency} at once"
    if options.shared_prefix:
        name += f", {options.shared_prefix} shared"
    return {
        "case": name,
        "batch": options.concurrency or options.requests,
        "requests": options.requests,
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        "completion_tokens": generated,
        "request": {
            "prompt_tokens": options.shared_prefix + options.prompt_tokens,
            "shared_prefix": options.shared_prefix,
            "output_tokens": options.output_tokens,
        },
        "seconds": seconds,
        "tokens_per_s": generated / seconds,
        "requests_per_s": len(good) / seconds,
        "time_to_first_token_s": statistics.median(first) if first else None,
        "time_to_first_token": percentiles(first),
        "inter_token_s": percentiles([gap for answer in good for gap in answer.inter_token_s()]),
        "request_s": percentiles(whole),
        # The server's own figures are at /stats and /metrics.
        "steps": None,
        "draft_tokens": None,
        "accepted_tokens": None,
        "acceptance_by_position": None,
        "host_waits_per_step": None,
        "floor_tokens_per_s": None,
        "share_of_floor": None,
    }
