"""The page at `/`: chat, the engine at work, the model as a picture. Files are under `static/`."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.responses import Response

from headrace.errors import NotFoundError
from headrace.server.errors import json_response
from headrace.server.openapi import error_answers

if TYPE_CHECKING:
    from fastapi import FastAPI

    from headrace.server.engine import ServedEngine

PAGE_PREFIX = "/page/"
"""Files of the page; they hold no secret and need no key."""

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing but our own files and our own API; no inline script or style, no frame around it.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # A restarted server may be a newer one.
    "cache-control": "no-cache",
}


def add_page(app: FastAPI, engine: ServedEngine) -> None:
    """Add the page's files and the two routes that only it needs."""
    static = files("headrace.server") / "static"
    contents = {file.name: file.read_bytes() for file in static.iterdir() if file.is_file()}

    def send(name: str) -> Response:
        if name not in contents:
            raise NotFoundError(f"the page has no file {name!r}; open / instead")
        kind = _TYPES[name.rpartition(".")[2]]
        return Response(contents[name], headers={"content-type": kind, **_HEADERS})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return send("index.html")

    @app.get(PAGE_PREFIX + "{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        return send(name)

    @app.get("/model", responses=error_answers())
    async def model() -> Response:
        """The model's layers and memory, as `headrace inspect --json` has them."""
        return json_response(await engine.describe())

    @app.get("/activity", responses=error_answers())
    async def activity() -> Response:
        """Sequences that run and wait, and the times of the newest steps."""
        return json_response(await engine.activity())
