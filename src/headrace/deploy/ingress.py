"""The router's application: reads a request, picks a replica, relays its answer.

A request is sent to another replica only while its client has got nothing, so no answer is ever
put together from two. Once something was sent, a lost replica ends the stream with an error event.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from headrace.deploy.messages import REPLICA_HEADER, ForwardedRequest, ReplicaLostError
from headrace.errors import HeadraceError, NotFoundError
from headrace.server.errors import (
    MESSAGES_PATH,
    error_body_of,
    error_response,
    error_status,
    shaped_error,
)
from headrace.server.gate import shows_key
from headrace.server.replies import unless_gone
from headrace.server.sse import error_event, named_event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

    from headrace.deploy.messages import Forward, Message
    from headrace.deploy.prefixes import PrefixReader
    from headrace.server.bodies import BodyReader

_LOG = logging.getLogger(__name__)
_OF_ONE_REPLICA = ("/metrics", "/stats", "/activity", "/trace", "/cache/pins")
_UNAVAILABLE = 503


class Ingress:
    """ASGI application of a router.

    Args:
        forward: Sends a request to a replica.
        prefixes: Reads prompts.
        bodies: Reads bodies.
        api_keys: Accepted keys; a request without one is not looked into, a replica refuses it.
        max_retries: Replicas to ask after the first one.
    """

    def __init__(
        self, forward: Forward, prefixes: PrefixReader, bodies: BodyReader, *,
        api_keys: Sequence[str], max_retries: int,
    ) -> None:
        self._forward = forward
        self._prefixes = prefixes
        self._bodies = bodies
        self._keys = [key.encode() for key in api_keys]
        self._max_retries = max_retries

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ASGI request, or live through the application's beginning and end."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        assert scope["type"] == "http", f"{scope['type']=}"
        try:
            request = await self._read(scope, receive)
        except ClientDisconnect:
            return  # In the middle of its own body.
        except Exception as error:
            if not isinstance(error, HeadraceError):
                _LOG.exception("a request for %s could not be read", scope["path"])
            await error_response(error, scope["path"])(scope, receive, send)
            return
        # A task: a client that goes away ends it, and so the work of its replica.
        work = asyncio.create_task(self._answer(request, scope, receive, send))
        await unless_gone(work, receive)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._prefixes.close()
        self._bodies.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _read(self, scope: Scope, receive: Receive) -> ForwardedRequest:
        path = scope["path"]
        if path.startswith(_OF_ONE_REPLICA):
            raise NotFoundError(
                f"{path} is about one replica of several; Ray's dashboard and metrics have all of "
                "them, and headrace serve has this route"
            )
        body = await self._bodies.read_bytes(Request(scope, receive))
        keys = b""
        if scope["method"] == "POST" and shows_key(Headers(scope=scope), self._keys):
            keys = await self._prefixes.keys_of(path, body)
        return ForwardedRequest.of_scope(scope, body, keys)

    async def _answer(
        self, request: ForwardedRequest, scope: Scope, receive: Receive, send: Send
    ) -> None:
        relay = _Relay(request.path, send)
        for left in range(self._max_retries, -1, -1):
            is_last = left == 0
            try:
                refused_by = await self._ask(request, relay, is_last=is_last)
            except ReplicaLostError as error:
                if relay.has_sent:
                    _LOG.warning("an answer broke off: %s", error)
                    await relay.break_off(error)
                    return
                if is_last:
                    await error_response(error, request.path)(scope, receive, send)
                    return
                _LOG.warning("a request is sent again: %s", error)
                continue
            except HeadraceError as error:
                await error_response(error, request.path)(scope, receive, send)
                return
            if refused_by is None:
                return
            _LOG.warning("a request is sent again: replica %s is not available", refused_by)
            request = request.avoiding(refused_by)

    async def _ask(
        self, request: ForwardedRequest, relay: _Relay, *, is_last: bool
    ) -> str | None:
        """Relay one replica's answer.

        Returns:
            The replica, if it cannot serve now and another one can be asked; else None.
        """
        async with aclosing(self._forward(request)) as answer:
            async for message in answer:
                if message["type"] == "http.response.start" and (
                    message["status"] == _UNAVAILABLE and not is_last
                ):
                    return dict(message["headers"]).get(REPLICA_HEADER, b"").decode()
                await relay.take(message)
        if not relay.is_complete:
            raise ReplicaLostError("the replica ended its answer early; send the request again")
        return None


class _Relay:
    """Passes one answer on to the client, its head together with the first of its body.

    Attributes:
        has_sent: The client has got something.
        is_complete: It has got everything.
    """

    def __init__(self, path: str, send: Send) -> None:
        self._path = path
        self._send = send
        self._head: Message | None = None
        self.has_sent = False
        self.is_complete = False

    async def take(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            # Kept until there is a body: without one the client has got nothing that binds us.
            self._head = message
            return
        if not self.has_sent:
            assert self._head is not None, f"{message['type']=} before the head"
            self.has_sent = True
            await self._send(self._head)
        self.is_complete = not message.get("more_body", False)
        await self._send(message)

    async def break_off(self, error: ReplicaLostError) -> None:
        """End a stream with an error event, as a replica would.

        Raises:
            ReplicaLostError: It is no stream of events; the connection must break.
        """
        assert self._head is not None
        kind = dict(self._head["headers"]).get(b"content-type", b"")
        if self.is_complete or not kind.startswith(b"text/event-stream"):
            raise error
        event = _last_event(self._path, error)
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _last_event(path: str, error: ReplicaLostError) -> bytes:
    """The error in the form of the path's clients."""
    body = error_body_of(error)
    if path.startswith(MESSAGES_PATH):
        return named_event(shaped_error(body))
    if path == "/v1/responses":
        message = body["error"]["message"]
        return named_event({
            "type": "error", "code": str(error_status(error)), "message": message, "param": None,
            "error": body["error"],
        })
    return error_event(body)
