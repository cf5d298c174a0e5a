"""Kill replicas, routers and proxies under load, and check every answer.

    python examples/deploy/chaos.py --seconds 300

Each answer is compared with that of an engine of its own that nobody disturbs. An answer is
*right*, or its client was *told* that it failed (an HTTP error, an error event, a broken
connection). What is neither is *lost* (a stream that just ends, no answer in time) or *wrong*
(other tokens); the last line must say `lost 0, wrong 0`. Needs headrace[ray,bench].
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass

import httpx
import ray
from ray import serve

from headrace import LLM, EngineConfig, SamplingParams
from headrace.deploy.ray_app import APP_NAME, make_app
from headrace.deploy.settings import DeploySettings
from headrace.server.settings import ServerSettings

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal")
MAX_TOKENS = 24
ANSWER_TIMEOUT_S = 60.0
PARTS = {
    "replica": f"SERVE_REPLICA::{APP_NAME}#replica#",
    "router": f"SERVE_REPLICA::{APP_NAME}#router#",
    "proxy": "SERVE_PROXY_ACTOR-",
}
"""What Ray calls the actors that are killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says."""

    seconds: float
    replicas: int
    clients: int
    kill_every: float
    model: str
    port: int
    seed: int

    @property
    def url(self) -> str:
        """Where to ask."""
        return f"http://127.0.0.1:{self.port}/v1/completions"


def make_prompts() -> list[str]:
    """Prompts in groups that share a long beginning, so that routing has something to do."""
    prompts = []
    for group in range(4):
        facts = " ".join(
            f"The code of {name} is {1000 * (group + 1) + 37 * place}."
            for place, name in enumerate(NAMES)
        )
        prompts += [f"{facts} The code of {name} is" for name in NAMES[:5]]
    return prompts


def undisturbed(model: str, prompts: list[str]) -> dict[str, str]:
    """The right answers."""
    llm = LLM(model=model)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0))
    return {
        prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)
    }


async def ask(
    client: httpx.AsyncClient, url: str, prompt: str, right: str, *, streams: bool
) -> str:
    """Send one request; returns right, lost, wrong, or how its client was told."""
    body = {
        "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": streams,
    }
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            if streams:
                return await _ask_stream(client, url, body, right)
            answer = await client.post(url, json=body)
            if answer.is_error:
                return f"told by HTTP {answer.status_code}"
            return "right" if answer.json()["choices"][0]["text"] == right else "wrong"
    except TimeoutError:
        return "lost"
    except httpx.ConnectError:
        return "told by a refused connection"
    except httpx.TransportError:
        return "told by a broken connection"


async def _ask_stream(
    client: httpx.AsyncClient, url: str, body: dict[str, object], right: str
) -> str:
    text, told, is_done = "", "", False
    try:
        async with client.stream("POST", url, json=body) as answer:
            if answer.is_error:
                return f"told by HTTP {answer.status_code}"
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    is_done = True
                elif data:
                    event = json.loads(data)
                    told = "told by an event" if "error" in event else told
                    text += event["choices"][0]["text"] if "choices" in event else ""
    except httpx.ConnectError:
        raise
    except httpx.TransportError:
        told = "told by a broken connection"
    if not right.startswith(text):
        return "wrong"
    if is_done:
        return "right" if text == right else "wrong"
    return told or "lost"


def deploy(options: Options, version: int) -> None:
    """Deploy; another version of what runs already replaces its replicas one by one."""
    settings = DeploySettings(
        min_replicas=options.replicas, max_replicas=options.replicas, routers=2, cpus=0.5,
    )
    engine = EngineConfig(model=options.model, max_num_seqs=32 + version)
    serve.run(make_app(engine, ServerSettings(), settings), name=APP_NAME)


async def disturb(options: Options, draw: random.Random, done: Counter[str]) -> None:
    """Kill one part after the other, then replace all replicas, and so on."""
    turns = ["replica", "router", "replica", "proxy", "all replaced"]
    while True:
        await asyncio.sleep(options.kill_every)
        part = turns[sum(done.values()) % len(turns)]
        if part not in PARTS:
            await asyncio.to_thread(deploy, options, done[part] + 1)
            done[part] += 1
            print(part, flush=True)
            continue
        names = [
            one["name"] for one in ray.util.list_named_actors(all_namespaces=True)
            if one["name"].startswith(PARTS[part])
        ]
        if not names:
            continue
        name = draw.choice(sorted(names))
        try:
            ray.kill(ray.get_actor(name, namespace="serve"))
        except ValueError:
            continue  # It has ended since.
        done[part] += 1
        print(f"killed {part} {name}", flush=True)


async def load(options: Options, answers: dict[str, str]) -> tuple[Counter[str], Counter[str]]:
    """Ask without a pause while parts are killed and replaced.

    Returns:
        Answers by their outcome, disturbances by their kind.
    """
    draw = random.Random(options.seed)  # noqa: S311 - which part is killed, no secret
    outcomes: Counter[str] = Counter()
    done: Counter[str] = Counter()
    end = time.monotonic() + options.seconds
    limits = httpx.Limits(max_connections=options.clients)

    async def client_loop(client: httpx.AsyncClient, place: int) -> None:
        prompts = list(answers)
        turn = place
        while time.monotonic() < end:
            prompt = prompts[turn % len(prompts)]
            outcome = await ask(
                client, options.url, prompt, answers[prompt], streams=turn % 2 == 0
            )
            outcomes[outcome] += 1
            turn += 1 + place
            if outcome.startswith("told"):
                await asyncio.sleep(0.1)

    # `ask` has a timeout of its own.
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:  # noqa: S113
        disturbing = asyncio.create_task(disturb(options, draw, done))
        await asyncio.gather(*(client_loop(client, place) for place in range(options.clients)))
        disturbing.cancel()
        await asyncio.wait({disturbing})
        if not disturbing.cancelled():
            disturbing.result()
    return outcomes, done


def main() -> int:
    """Deploy, disturb, count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kill-every", type=float, default=10.0, help="seconds")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    options = Options(**vars(parser.parse_args()))
    print(f"seed {options.seed}", flush=True)
    answers = undisturbed(options.model, make_prompts())
    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": options.port})
        deploy(options, 0)
        outcomes, done = asyncio.run(load(options, answers))
    finally:
        serve.shutdown()
        ray.shutdown()
    print("disturbed:", ", ".join(f"{count} {kind}" for kind, count in sorted(done.items())))
    for outcome, count in outcomes.most_common():
        print(f"{count:6} {outcome}")
    print(f"lost {outcomes['lost']}, wrong {outcomes['wrong']}")
    is_good = not outcomes["lost"] and not outcomes["wrong"]
    return 0 if is_good and outcomes["right"] and done else 1


if __name__ == "__main__":
    sys.exit(main())
