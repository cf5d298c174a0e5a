"""Questions to a running server: JSON in and out, its errors as ours."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from headrace.errors import ConfigError, HeadraceError

DEFAULT_URL = "http://127.0.0.1:8000"


class ServerError(HeadraceError):
    """A server cannot be reached or answers with an error."""


def ask_server(
    url: str,
    path: str,
    *,
    api_key: str | None = None,
    body: dict[str, Any] | None = None,
    timeout_s: float = 10.0,
) -> dict[str, Any]:
    """Ask a server and return its JSON object.

    Args:
        url: Where it is, such as http://127.0.0.1:8000.
        path: Of the route.
        api_key: Shown to it.
        body: What to post; None gets.
        timeout_s: How long to wait.

    Raises:
        ConfigError: The URL is none of HTTP.
        ServerError: It cannot be reached, or answers with an error.
    """
    if "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no URL of a server; give one like {DEFAULT_URL}")
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked
        url.rstrip("/") + path,
        data=None if body is None else json.dumps(body).encode(),
        headers=headers,
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:  # noqa: S310
            answer = json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            raise ServerError(f"{url} answers with {error.code}: {_message(error)}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(
            f"{url} cannot be asked: {reason}; start a server with headrace serve, or give its URL"
        ) from error
    if not isinstance(answer, dict):
        raise ServerError(f"{url}{path} answers with something else than a JSON object")
    return answer


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return error.reason
