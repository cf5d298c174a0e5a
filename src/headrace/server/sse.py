"""Server-sent events, one `data:` line each."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"

# JSON may hold these as they are, but readers that split text into lines would split at them.
_LINE_ENDS = (
    (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"),
)


def event(value: object) -> bytes:
    """One event with a JSON value."""
    return b"data: " + one_line(orjson.dumps(value)) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """One event with a JSON object, named after the object's type."""
    return b"event: %b\n%b" % (str(value["type"]).encode(), event(value))


def error_event(body: dict[str, object]) -> bytes:
    """The last event of a stream that fails."""
    return event(body)


def json_text(text: str) -> bytes:
    """A JSON string that no reader of lines splits."""
    data = orjson.dumps(text)
    return data if text.isascii() else one_line(data)


def one_line(data: bytes) -> bytes:
    """Escape characters at which text splits into lines."""
    for raw, escaped in _LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    return data
