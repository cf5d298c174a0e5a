"""A replica without Ray: real engine, forwarded requests, and the keys both sides must agree on."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from headrace import AsyncLLM, EngineConfig
from headrace.deploy.messages import REPLICA_HEADER, ForwardedRequest
from headrace.deploy.prefixes import PrefixReader, TextModel
from headrace.deploy.replica import Replica
from headrace.deploy.routing import num_held, unpack_keys
from headrace.errors import EngineDeadError
from headrace.server.bodies import BodyReader
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.deploy.messages import Message

CONFIG = EngineConfig(model="nano", num_kv_blocks=256, num_state_blocks=64, max_num_seqs=8)
LONG = "The code of Ann is 4711. The code of Ben is 1234. " * 8


@asynccontextmanager
async def running(api_keys: tuple[str, ...] = ()) -> AsyncIterator[tuple[Replica, AsyncLLM]]:
    engine = AsyncLLM(CONFIG)
    replica = Replica("r1", engine, ServerSettings(api_keys=api_keys), max_summary_keys=100)
    await replica.check_health()
    try:
        yield replica, engine
    finally:
        await replica.stop()


def forwarded(path: str, fields: dict[str, Any]) -> ForwardedRequest:
    return ForwardedRequest(
        method="POST", path=path, query=b"", headers=(), client=None,
        body=json.dumps(fields).encode(),
    )


async def whole(replica: Replica, request: ForwardedRequest) -> tuple[Message, bytes]:
    messages = [message async for message in replica.answer(request)]
    assert not messages[-1].get("more_body", False)
    return messages[0], b"".join(message["body"] for message in messages[1:])


def completion(prompt: str = LONG, **fields: object) -> ForwardedRequest:
    return forwarded(
        "/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    )


def test_a_replica_answers_as_the_server_does_and_says_who_it_is() -> None:
    async def go() -> None:
        async with running() as (replica, _):
            head, body = await whole(replica, completion())
            assert head["status"] == 200
            assert dict(head["headers"])[REPLICA_HEADER] == b"r1"
            one = json.loads(body)["choices"][0]["text"]
            _, stream = await whole(replica, completion(stream=True))
            events = [line.removeprefix("data: ") for line in stream.decode().split("\n\n") if line]
            assert events.pop() == "[DONE]"
            assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == one

    asyncio.run(go())


def test_keys_are_checked_by_the_replica() -> None:
    async def go() -> None:
        async with running(api_keys=("secret",)) as (replica, _):
            head, _ = await whole(replica, completion())
            assert head["status"] == 401

    asyncio.run(go())


BODIES = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/responses": {"input": LONG},
}


@pytest.mark.parametrize("salt", [None, "mine"])
@pytest.mark.parametrize("path", BODIES)
def test_router_and_replica_agree_on_the_keys_of_a_prompt(path: str, salt: str | None) -> None:
    """The router's keys, made without the weights, are those that the replica says it holds."""
    limits = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 4}
    fields = {**BODIES[path], **limits, **({"cache_salt": salt} if salt else {})}
    bodies = BodyReader(max_bytes=1 << 20, timeout_s=5)
    reader = PrefixReader(TextModel.load(CONFIG), CONFIG, bodies)

    async def go() -> None:
        async with running() as (replica, _):
            request = forwarded(path, fields)
            keys = unpack_keys(await reader.keys_of(path, request.body))
            assert len(keys) >= 2
            assert num_held(keys, await held(replica)) == 0
            head, _ = await whole(replica, request)
            assert head["status"] == 200
            # All boundaries: the longest prefix that such a prompt can resume from.
            assert num_held(keys, await held(replica)) == len(keys)
            others = {**fields, "cache_salt": "another"}
            other = unpack_keys(await reader.keys_of(path, json.dumps(others).encode()))
            assert num_held(other, await held(replica)) == 0

    asyncio.run(go())
    reader.close()
    bodies.close()


async def held(replica: Replica) -> set[bytes]:
    return set(unpack_keys((await replica.summary())["keys"]))


def test_a_summary_is_bounded_and_keeps_the_newest() -> None:
    async def go() -> None:
        async with running() as (_, engine):
            replica = Replica("r2", engine, ServerSettings(), max_summary_keys=1)
            first = await replica.summary()
            assert first["keys"] == b""
            await whole(replica, completion())
            one = (await replica.summary())["keys"]
            await whole(replica, completion("Once upon a time " * 20))
            two = (await replica.summary())["keys"]
            assert len(one) == len(two) == 8
            assert one != two
            await engine.reset_prefix_cache()
            assert (await replica.summary())["keys"] == b""

    asyncio.run(go())


def test_an_answer_that_nobody_takes_is_aborted() -> None:
    async def go() -> None:
        async with running() as (replica, engine):
            request = completion(stream=True, max_tokens=2000, ignore_eos=True)
            async with aclosing(replica.answer(request)) as messages:
                async for message in messages:
                    if message["type"] == "http.response.body":
                        break
            async with asyncio.timeout(10):
                while (await engine.activity())["sequences"]:
                    await asyncio.sleep(0.01)

    asyncio.run(go())


def test_a_dead_engine_fails_the_health_check() -> None:
    async def go() -> None:
        async with running() as (replica, engine):
            await engine.shutdown()
            with pytest.raises(EngineDeadError):
                await replica.check_health()
            head, _ = await whole(replica, completion())
            assert head["status"] == 503

    asyncio.run(go())
