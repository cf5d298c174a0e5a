"""What every request passes before its route: keys, draining, request ids, the count in flight."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders

from headrace.errors import QueueFullError
from headrace.server.errors import (
    MESSAGES_PATH,
    KeyRefusedError,
    UnavailableError,
    error_response,
    error_status,
)
from headrace.server.metrics import CONCURRENCY_LIMIT
from headrace.server.page import PAGE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from headrace.server.metrics import Metrics

_LOG = logging.getLogger("headrace.access")
_FAULTS = logging.getLogger(__name__)
_OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics", "/ping"})
_MAX_ID_CHARS = 128


class Gate:
    """ASGI middleware. Plain, because the library's base class hides that a client went away.

    Args:
        app: What follows.
        api_keys: Accepted keys; none means no check.
        max_in_flight: More requests than these at once are refused; None sets no limit.
        metrics: Told of each refusal, of what fails without an answer, and of all answers.
        is_logging: Log a line for each request but probes.
        traced: Called with the headers of each request that is let in.

    Attributes:
        is_draining: Refuse new work; running requests go on.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        max_in_flight: int | None,
        metrics: Metrics,
        is_logging: bool,
        traced: Callable[[Headers], None],
    ) -> None:
        self._app = app
        self._max_in_flight = max_in_flight
        self._metrics = metrics
        self._is_logging = is_logging
        self._traced = traced
        self._keys = [key.encode() for key in api_keys]
        self.is_draining = False
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_in_flight(self) -> int:
        """Requests that need the engine and are not answered yet."""
        return self._num_in_flight

    async def wait_until_idle(self) -> None:
        """Return when no request that needs the engine is in flight."""
        await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _acceptable(headers.get("x-request-id")) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        begin = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = MutableHeaders(scope=message)
                sent.append("x-request-id", request_id)
                if scope["path"].startswith(MESSAGES_PATH):
                    sent.append("request-id", request_id)
            await send(message)

        if scope["path"] in _OPEN_PATHS or scope["path"].startswith(PAGE_PREFIX):
            await self._answered(scope, receive, send_with_id, lambda: status)
            return
        try:
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                self._metrics.refused(error_status(refusal), CONCURRENCY_LIMIT)
                await error_response(refusal, scope["path"])(scope, receive, send_with_id)
                return
            self._traced(headers)
            await self._pass_on(scope, receive, send_with_id, lambda: status)
        finally:
            duration_s = time.monotonic() - begin
            if status:
                # Without a route, as for a refusal, the path is the client's own invention.
                handler = getattr(scope.get("route"), "path", "none")
                self._metrics.answered(handler, scope["method"], status, duration_s)
            if self._is_logging:
                self._log(scope, request_id, status, duration_s)

    async def _answered(
        self, scope: Scope, receive: Receive, send: Send, status: Callable[[], int]
    ) -> None:
        """Let the application answer, and answer for it where it failed before it began to.

        The library would answer outside of the gate, where requests have no id and no log line.
        """
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if status():
                raise
            request_id = scope["state"]["request_id"]
            _FAULTS.error(
                "request %s failed", request_id, exc_info=error, extra={"request_id": request_id}
            )
            self._metrics.refused(error_status(error))
            await error_response(error, scope["path"])(scope, receive, send)

    async def _pass_on(
        self, scope: Scope, receive: Receive, send: Send, status: Callable[[], int]
    ) -> None:
        self._num_in_flight += 1
        self._idle.clear()
        try:
            await self._answered(scope, receive, send, status)
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._idle.set()

    def _log(self, scope: Scope, request_id: str, status: int, duration_s: float) -> None:
        """One line; a status of 0 means that the client went away before there was one."""
        host = (scope.get("client") or ("",))[0]
        _LOG.info(
            "%s %s %d in %.3f s for %s, request %s",
            # Encoded again: a line break in a path would begin a line of the client's own.
            scope["method"], quote(scope["path"]), status, duration_s, host, request_id,
            extra={
                "request_id": request_id, "method": scope["method"], "path": scope["path"],
                "status": status, "duration_s": round(duration_s, 6), "client": host,
            },
        )

    def _refusal(self, scope: Scope, headers: Headers) -> Exception | None:
        if scope["method"] != "OPTIONS" and not shows_key(headers, self._keys):
            return KeyRefusedError(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY or "
                "x-api-key: KEY"
            )
        if self.is_draining and scope["method"] == "POST":
            return UnavailableError("the server is shutting down; ask another one or try later")
        limit = self._max_in_flight
        if limit is not None and scope["method"] == "POST" and self._num_in_flight >= limit:
            return QueueFullError(
                f"{self._num_in_flight} requests are in flight and the limit is {limit}; try again "
                "later, or raise max_concurrent_requests"
            )
        return None


def shows_key(headers: Headers, keys: Sequence[bytes]) -> bool:
    """Whether a request may be answered: it has one of the keys, or there are none."""
    if not keys:
        return True
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer] if scheme.lower() == "bearer" else []
    given.append(headers.get("x-api-key", ""))
    # All pairs are compared, in constant time, so that timing says nothing about a key.
    matches = [hmac.compare_digest(one.strip().encode(), key) for one in given for key in keys]
    return any(matches)


def _acceptable(request_id: str | None) -> str | None:
    """A client's own id, if it may stand in a header and in logs."""
    if request_id and len(request_id) <= _MAX_ID_CHARS and request_id.isascii():
        return request_id if request_id.isprintable() else None
    return None
