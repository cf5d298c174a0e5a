"""The OpenAPI document: bodies are read by hand, so their schemas are put in by hand too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.server.messages import CountTokensBody, MessagesBody
from headrace.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    TraceBody,
)
from headrace.server.responses import ResponsesBody

if TYPE_CHECKING:
    from headrace.server.protocol import Body

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
_MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_STATUSES = {
    400: "The request is wrong.",
    401: "The API key is missing or wrong.",
    404: "No such model or route.",
    408: "The body did not come in time.",
    413: "The body is over the limit.",
    429: "Too many requests wait.",
    500: "An internal error.",
    503: "Loading, draining, or the engine has ended.",
}


def body_of(kind: type[Body]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is of this kind."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def error_answers(
    *, streams: bool = False, is_text: bool = False, is_messages: bool = False
) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route.

    Args:
        streams: It may also answer with a stream of events.
        is_text: It answers with text instead of JSON.
        is_messages: Its errors have Anthropic's form.
    """
    error = "MessagesError" if is_messages else "Error"
    content = {"application/json": {"schema": {"$ref": _REF.format(model=error)}}}
    answers: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": content} for status, text in _STATUSES.items()
    }
    done: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if is_text:
        done = {"text/plain": {"schema": {"type": "string"}}}
    if streams:
        done["text/event-stream"] = {}
    answers[200] = {"description": "The answer.", "content": done}
    return answers


def add_schemas(document: dict[str, Any]) -> dict[str, Any]:
    """Put the schemas that routes refer to into the document."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = _ERROR
    schemas["MessagesError"] = _MESSAGES_ERROR
    for kind in (
        ChatBody, CompletionBody, ResponsesBody, MessagesBody, CountTokensBody, TokenizeBody,
        DetokenizeBody, TraceBody,
    ):
        schema = kind.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
    return document
