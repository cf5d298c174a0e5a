"""Errors as OpenAI's clients expect them: one object, the status repeated in `code`."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response

from headrace.errors import (
    ConfigError,
    EngineDeadError,
    HeadraceError,
    NotFoundError,
    QueueFullError,
    RequestError,
)


class BodyTooLargeError(HeadraceError):
    """The request's body is over the limit (HTTP 413)."""


class BodyTooSlowError(HeadraceError):
    """The request's body did not come in time (HTTP 408)."""


class KeyRefusedError(HeadraceError):
    """No API key, or a wrong one (HTTP 401)."""


class UnavailableError(HeadraceError):
    """The server is loading or draining (HTTP 503)."""


_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPES = {405: "invalid_request_error", 413: "request_too_large", 503: "overloaded_error"}
_SERVER_ERROR = 500
_DRAIN_RETRY_S = 5


def error_status(error: BaseException) -> int:
    """HTTP status of an exception."""
    for kind, status in (
        (RequestError, 400),
        (ConfigError, 400),
        (KeyRefusedError, 401),
        (NotFoundError, 404),
        (BodyTooSlowError, 408),
        (BodyTooLargeError, 413),
        (QueueFullError, 429),
        (UnavailableError, 503),
        (EngineDeadError, 503),
    ):
        if isinstance(error, kind):
            return status
    return _SERVER_ERROR


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The error object of a status."""
    kind = _TYPE_OF_STATUS.get(status)
    if kind is None:
        kind = "server_error" if status >= _SERVER_ERROR else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_body_of(error: BaseException) -> dict[str, Any]:
    """The error object of an exception; what we did not foresee is not shown to clients."""
    status = error_status(error)
    if status == _SERVER_ERROR:
        return error_body(status, "internal error; the server's log has the details")
    return error_body(status, str(error), getattr(error, "param", None))


def shaped_error(body: dict[str, Any]) -> dict[str, Any]:
    """An error object in Anthropic's form."""
    error = body["error"]
    kind = "api_error" if error["code"] == _SERVER_ERROR else error["type"]
    kind = _MESSAGES_TYPES.get(error["code"], kind)
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


def shaped(body: dict[str, Any], path: str) -> dict[str, Any]:
    """An error object as the clients of a path expect it."""
    return shaped_error(body) if path.startswith(MESSAGES_PATH) else body


def error_response(error: BaseException, path: str = "") -> Response:
    """The whole answer to a request that failed.

    Args:
        error: Why.
        path: Of the request: Anthropic's clients expect another form than OpenAI's.
    """
    status = error_status(error)
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, UnavailableError):
        headers["Retry-After"] = str(_DRAIN_RETRY_S)
    elif isinstance(error, KeyRefusedError):
        headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, BodyTooLargeError | BodyTooSlowError):
        # The rest of the body is not read, so the connection cannot be used again.
        headers["Connection"] = "close"
    return json_response(shaped(error_body_of(error), path), status, headers)


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Answer with JSON."""
    return Response(
        orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS),
        status_code=status, media_type="application/json", headers=headers,
    )
