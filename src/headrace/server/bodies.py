"""From the bytes of a request to a checked body."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic import ValidationError

from headrace.errors import RequestError
from headrace.server.errors import BodyTooLargeError, BodyTooSlowError
from headrace.server.protocol import KNOWN_WITHOUT_EFFECT, Body
from headrace.server.structure import check_structure

if TYPE_CHECKING:
    from starlette.requests import Request

_LOG = logging.getLogger(__name__)
_MAX_REMEMBERED = 1000
_MAX_SEARCHED_BYTES = 1 << 18
_LARGE_BYTES = 1 << 16

BodyT = TypeVar("BodyT", bound=Body)


class BodyReader:
    """Reads bodies; remembers which unknown fields it has warned about.

    Args:
        max_bytes: Largest body.
        timeout_s: Time a client has to send it.
    """

    def __init__(self, *, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._warned: set[str] = set()
        # One: large bodies wait for each other rather than all others for them.
        self._large = ThreadPoolExecutor(1, thread_name_prefix="headrace-body")

    def close(self) -> None:
        """End the thread; what it has begun is finished."""
        self._large.shutdown(wait=False, cancel_futures=True)

    async def read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """Read and check a request's body; raises what `read_bytes` and `check` raise."""
        return await self.check(await self.read_bytes(request), kind)

    async def read_bytes(self, request: Request) -> bytes:
        """Read a request's body.

        Raises:
            BodyTooLargeError: The body is over the limit; the rest of it is not read.
            BodyTooSlowError: It did not come in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._bytes(request)
        except TimeoutError:
            raise BodyTooSlowError(
                f"the body did not come within {self._timeout_s:g} s; send it faster, or raise "
                "body_timeout_s"
            ) from None

    async def check(self, data: bytes, kind: type[BodyT]) -> BodyT:
        """Check a body that has been read.

        Raises:
            RequestError: It is not JSON or has too many values, or a field has the wrong type.
        """
        if len(data) > _LARGE_BYTES:
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(self._large, _read_large, data, kind)
        else:
            body = checked(kind, _parse(data))
        self._warn_unknown(body)
        return body

    async def _bytes(self, request: Request) -> bytes:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            self._refuse(int(announced))
        parts = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_bytes:
                self._refuse(size)
            parts.append(part)
        return b"".join(parts)

    def _refuse(self, size: int) -> None:
        raise BodyTooLargeError(
            f"the body has {size} bytes or more but the limit is {self._max_bytes}; "
            "shorten the request or raise max_body_bytes"
        )

    def _warn_unknown(self, body: Body) -> None:
        for name in body.model_extra or ():
            if len(self._warned) >= _MAX_REMEMBERED:
                return  # There may be half a million of them.
            if name not in KNOWN_WITHOUT_EFFECT:
                self.warn_once(name, "is unknown and has no effect")

    def warn_once(self, name: str, what: str) -> None:
        """Warn about a field of a request, at the first request that has it.

        Args:
            name: The field.
            what: What is to be said about it.
        """
        # Bounded: the names come from clients.
        if name not in self._warned and len(self._warned) < _MAX_REMEMBERED:
            self._warned.add(name)
            _LOG.warning("request field %r %s", name[:100], what)


def checked(kind: type[BodyT], fields: dict[str, Any]) -> BodyT:
    """A body of fields.

    Raises:
        RequestError: One has the wrong type, or one is missing.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _readable(error) from None


def _read_large(data: bytes, kind: type[BodyT]) -> BodyT:
    check_structure(data)
    return checked(kind, _parse(data))


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        _refuse_not_finite(data)
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {type(value).__name__}")
    return value


def _refuse_not_finite(data: bytes) -> None:
    """Name the parameter where a body is JSON but for NaN and infinities, or numbers beyond them.

    The strict parser stops there without saying where.
    """
    if len(data) > _MAX_SEARCHED_BYTES:
        return  # Looking takes its time, and that of everybody else.
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    for name, item in value.items() if isinstance(value, dict) else ():
        found = _not_finite(item)
        if found is not None:
            raise RequestError(f"{name} must be finite, got {found}", param=name)


def _not_finite(value: object) -> float | None:
    """A number in JSON values that is not finite, or None."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, float) and not math.isfinite(one):
            return one
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
    return None


def _readable(error: ValidationError) -> RequestError:
    """The first fault, in words and with the parameter's name."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = first["loc"]
    param = str(place[0]) if place else None
    where = ".".join(str(part) for part in place)
    if first["type"] == "missing":
        return RequestError(f"{where} is missing", param=param)
    return RequestError(f"{where}: {first['msg']}", param=param)
