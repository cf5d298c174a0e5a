"""A replica: an engine and the application of `headrace serve`, called instead of listened to."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Protocol

from starlette.datastructures import MutableHeaders

from headrace.deploy.messages import REPLICA_HEADER
from headrace.deploy.routing import pack_keys
from headrace.server.app import create_app
from headrace.server.engine import ServedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from headrace.deploy.messages import ForwardedRequest, Message
    from headrace.server.settings import ServerSettings

_LOG = logging.getLogger(__name__)


class CachingEngine(ServedEngine, Protocol):
    """A served engine that can say which prefixes it holds."""

    async def cached_prefixes(self, limit: int) -> list[bytes]:
        """Chain keys of prefixes that prompts can resume from, at most `limit`."""
        ...


class Replica:
    """Answers forwarded requests.

    Args:
        name: Stands in a header of every answer.
        engine: What answers.
        settings: The server's; host and port have no effect.
        max_summary_keys: Most prefixes in a summary.
    """

    def __init__(
        self, name: str, engine: CachingEngine, settings: ServerSettings, *, max_summary_keys: int
    ) -> None:
        self._name = name
        self._engine = engine
        self._app = create_app(engine, settings)
        self._max_summary_keys = max_summary_keys
        self._life = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._is_started = False

    async def start(self) -> None:
        """Start the engine; idempotent."""
        async with self._starting:
            if not self._is_started:
                await self._life.enter_async_context(self._app.router.lifespan_context(self._app))
                self._is_started = True

    async def stop(self) -> None:
        """End the engine; what still runs gets an error."""
        await self._life.aclose()

    async def check_health(self) -> None:
        """Start on the first call; raise EngineDeadError if the engine has ended or hangs."""
        await self.start()
        await self._engine.check_health()

    async def summary(self) -> dict[str, Any]:
        """What a router should know: `keys`, packed, of prefixes that prompts can resume from."""
        await self.start()
        keys = await self._engine.cached_prefixes(self._max_summary_keys)
        return {"keys": pack_keys(keys)}

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        """Yield the ASGI messages of the answer; closing it is the client going away."""
        await self.start()
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        is_gone = asyncio.Event()
        received = iter([{"type": "http.request", "body": request.body, "more_body": False}])

        async def receive() -> Message:
            message = next(received, None)
            if message is None:
                await is_gone.wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message: Any) -> None:  # noqa: ANN401 - any of ASGI's mappings
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append(REPLICA_HEADER.decode(), self._name)
            messages.put_nowait(message)

        async def run() -> None:
            try:
                await self._app(request.scope(), receive, send)
            finally:
                messages.put_nowait(None)

        work = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await work
        finally:
            # An answer that is not asked for any more ends as one whose client has hung up.
            is_gone.set()
            await asyncio.wait({work})
