"""The router's application with pretended replicas: retries, broken streams, refusals."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from headrace.config import EngineConfig
from headrace.deploy.ingress import Ingress
from headrace.deploy.messages import REPLICA_HEADER, ReplicaLostError
from headrace.deploy.prefixes import PrefixReader, TextModel
from headrace.errors import QueueFullError
from headrace.server.bodies import BodyReader

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from headrace.deploy.messages import ForwardedRequest, Message

CONFIG = EngineConfig(model="nano")
CHAT = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/messages": {"messages": CHAT, "max_tokens": 5},
    "/v1/responses": {"input": CHAT},
}
LONG = "The code of Ann is 4711. " * 20


def head(status: int = 200, kind: bytes = b"text/event-stream", name: bytes = b"a") -> Message:
    return {
        "type": "http.response.start", "status": status,
        "headers": [(b"content-type", kind), (REPLICA_HEADER, name)],
    }


def part(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


LOST = ReplicaLostError("the replica with this request has ended; send the request again")
WHOLE = [head(), part(b"data: 1\n\n"), part(b"", more=False)]


class Replicas:
    """Gives one scripted answer after the other; an exception in a script is raised."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.asked: list[ForwardedRequest] = []
        self.num_closed = 0

    async def forward(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        self.asked.append(request)
        try:
            for step in self.scripts.pop(0):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                    continue
                yield step
        finally:
            self.num_closed += 1


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.load(CONFIG)


@pytest.fixture
def ingress(model: TextModel) -> Iterator[Callable[..., Ingress]]:
    bodies = BodyReader(max_bytes=1 << 16, timeout_s=5)
    prefixes = PrefixReader(model, CONFIG, bodies)

    def make(
        replicas: Replicas, *, api_keys: tuple[str, ...] = (), max_retries: int = 2
    ) -> Ingress:
        return Ingress(
            replicas.forward, prefixes, bodies, api_keys=api_keys, max_retries=max_retries
        )

    yield make
    prefixes.close()
    bodies.close()


def ask(
    app: Ingress, path: str = "/v1/completions", *, headers: dict[str, str] | None = None,
    **fields: object,
) -> httpx.Response:
    body = fields if path in BODIES else {"prompt": LONG, **fields}

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(post())


def test_an_answer_passes_through_as_it_is(ingress: Callable[..., Ingress]) -> None:
    replicas = Replicas(WHOLE)
    answer = ask(ingress(replicas), stream=True)
    assert (answer.status_code, answer.text) == (200, "data: 1\n\n")
    assert answer.headers["x-headrace-replica"] == "a"
    (asked,) = replicas.asked
    assert json.loads(asked.body) == {"prompt": LONG, "stream": True}
    assert len(asked.keys) > 0
    assert asked.scope()["path"] == "/v1/completions"


@pytest.mark.parametrize("before", [[], [head()]], ids=["before the head", "before the body"])
def test_a_request_is_sent_again_where_its_client_has_got_nothing(
    ingress: Callable[..., Ingress], before: list[Any]
) -> None:
    replicas = Replicas([*before, LOST], WHOLE)
    assert ask(ingress(replicas)).text == "data: 1\n\n"
    assert len(replicas.asked) == 2


def test_an_answer_is_never_put_together_from_two(ingress: Callable[..., Ingress]) -> None:
    replicas = Replicas([head(), part(b"data: 1\n\n"), LOST], WHOLE)
    events = ask(ingress(replicas)).text.split("\n\n")
    assert len(replicas.asked) == 1
    assert events[0] == "data: 1"
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == 503
    assert "[DONE]" not in "".join(events)


def test_an_answer_that_just_ends_is_an_error(ingress: Callable[..., Ingress]) -> None:
    replicas = Replicas([head(), part(b"data: 1\n\n")])
    assert "ended its answer early" in ask(ingress(replicas)).text


@pytest.mark.parametrize("path", BODIES)
def test_a_broken_stream_ends_with_an_error_in_the_form_of_its_clients(
    ingress: Callable[..., Ingress], path: str
) -> None:
    replicas = Replicas([head(), part(b"data: {}\n\n"), LOST])
    last = ask(ingress(replicas), path, **BODIES[path]).text.strip().split("\n\n")[-1]
    event = json.loads(last.rpartition("data: ")[2])
    assert "send the request again" in json.dumps(event)
    assert event.get("type") == (None if path == "/v1/chat/completions" else "error")


def test_the_connection_breaks_where_there_is_no_event_to_send(
    ingress: Callable[..., Ingress]
) -> None:
    replicas = Replicas([head(kind=b"application/json"), part(b"{"), LOST])
    with pytest.raises(ReplicaLostError):
        ask(ingress(replicas))


def test_a_replica_that_is_not_available_is_avoided(ingress: Callable[..., Ingress]) -> None:
    replicas = Replicas([head(503, b"application/json"), part(b"{}", more=False)], WHOLE)
    assert ask(ingress(replicas)).status_code == 200
    assert [one.avoided for one in replicas.asked] == [frozenset(), {"a"}]
    assert replicas.num_closed == 2


def test_the_last_replica_s_refusal_is_the_answer(ingress: Callable[..., Ingress]) -> None:
    refusal = [head(503, b"application/json"), part(b"{}", more=False)]
    replicas = Replicas(refusal, refusal)
    answer = ask(ingress(replicas, max_retries=1))
    assert (answer.status_code, answer.text) == (503, "{}")


def test_a_request_that_every_replica_lost_is_an_error(ingress: Callable[..., Ingress]) -> None:
    answer = ask(ingress(Replicas([LOST], [LOST], [LOST])))
    assert answer.status_code == 503
    assert "send the request again" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]


def test_full_queues_are_no_loss(ingress: Callable[..., Ingress]) -> None:
    answer = ask(ingress(Replicas([QueueFullError("full; try again later")])))
    assert answer.status_code == 429


def test_a_pin_is_refused_since_nobody_could_release_it(ingress: Callable[..., Ingress]) -> None:
    replicas = Replicas()
    answer = ask(ingress(replicas), cache_pin="system")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_pin"
    assert not replicas.asked


@pytest.mark.parametrize("path", ["/metrics", "/stats", "/cache/pins/x"])
def test_routes_about_one_replica_are_refused(ingress: Callable[..., Ingress], path: str) -> None:
    answer = ask(ingress(Replicas()), path)
    assert answer.status_code == 404
    assert path in answer.json()["error"]["message"]


def test_a_body_beyond_the_limit_is_refused_at_the_router(ingress: Callable[..., Ingress]) -> None:
    assert ask(ingress(Replicas()), prompt="a" * (1 << 17)).status_code == 413


def test_prompts_of_strangers_are_not_read(ingress: Callable[..., Ingress]) -> None:
    replicas = Replicas(WHOLE, WHOLE)
    app = ingress(replicas, api_keys=("secret",))
    ask(app)
    ask(app, headers={"x-api-key": "secret"})
    assert [bool(one.keys) for one in replicas.asked] == [False, True]


def test_a_client_that_goes_away_ends_the_work(ingress: Callable[..., Ingress]) -> None:
    replicas = Replicas([head(), part(b"data: 1\n\n"), asyncio.Event()])
    app = ingress(replicas)
    body = json.dumps({"prompt": "hello"}).encode()
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
        "headers": [], "client": None,
    }
    sent: list[Message] = []

    async def go() -> None:
        has_begun = asyncio.Event()
        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            message = next(received, None)
            if message is None:
                await has_begun.wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message: Any) -> None:  # noqa: ANN401 - any of ASGI's mappings
            sent.append(message)
            if message["type"] == "http.response.body":
                has_begun.set()

        await asyncio.wait_for(app(scope, receive, send), 10)

    asyncio.run(go())
    assert replicas.num_closed == 1
    assert len(sent) == 2
