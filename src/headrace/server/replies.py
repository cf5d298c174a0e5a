"""Answers that end the work when the client goes away, streamed or not."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from headrace.errors import HeadraceError
from headrace.server.errors import error_body_of, error_response, error_status, json_response
from headrace.server.sse import error_event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from starlette.types import Receive, Scope, Send

_LOG = logging.getLogger(__name__)
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies would collect a stream and deliver it at its end.
    (b"x-accel-buffering", b"no"),
]


async def _gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(work: asyncio.Task[None], receive: Receive) -> None:
    """Wait for the work, cancelling it if the client goes away first."""
    watch = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
        await asyncio.wait({work})
        if not work.cancelled():
            work.result()
    finally:
        work.cancel()
        watch.cancel()


class JsonReply(Response):
    """A JSON answer that takes a while.

    Args:
        work: Makes the answer; cancelled if the client goes away.
        refused: Called with the status of an answer that is an error.
    """

    def __init__(
        self, work: Callable[[], Awaitable[object]], refused: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._work = work
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ASGI request."""

        async def answer() -> None:
            try:
                response = json_response(await self._work())
            except Exception as error:
                self._refused(error_status(error))
                response = error_response(_logged(error, scope), scope["path"])
            await response(scope, receive, send)

        await unless_gone(asyncio.create_task(answer()), receive)


class StreamReply(Response):
    """A stream of events; its status is known when the first event is.

    Args:
        events: Bytes to send; closed if the client goes away.
        refused: Called with the status of an answer that is an error, or ends with one.
        on_error: The last event of a stream that fails, from the error object.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        refused: Callable[[int], None],
        on_error: Callable[[dict[str, Any]], bytes] = error_event,
    ) -> None:
        super().__init__()
        self._events = events
        self._refused = refused
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ASGI request."""

        async def pump() -> None:
            started = False
            try:
                async for event in self._events:
                    if not started:
                        started = True
                        await send({
                            "type": "http.response.start", "status": 200,
                            "headers": _STREAM_HEADERS,
                        })
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                self._refused(error_status(error))
                if not started:
                    response = error_response(_logged(error, scope), scope["path"])
                    await response(scope, receive, send)
                    return
                event = self._on_error(error_body_of(_logged(error, scope)))
                await send({"type": "http.response.body", "body": event, "more_body": True})
            finally:
                await self._events.aclose()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await unless_gone(asyncio.create_task(pump()), receive)


def _logged(error: Exception, scope: Scope) -> Exception:
    """Log what is a fault of ours rather than of the request."""
    if not isinstance(error, HeadraceError):
        request_id = scope.get("state", {}).get("request_id")
        _LOG.error(
            "request %s failed", request_id, exc_info=error, extra={"request_id": request_id}
        )
    return error
