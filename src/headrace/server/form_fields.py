"""What the fields of a request say about the form of its output.

OpenAI's `response_format` and vLLM's `structured_outputs` are the two ways to ask. Names of the
latter's parts that other servers take, or took, are understood as what they are there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError
from headrace.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.server.protocol import Body, SamplingBody

OTHER_NAMES = {
    # vLLM before 0.12.
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    # SGLang, and llama.cpp's server.
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
"""Fields of requests to parts of `structured_outputs`."""
_PARTS = ("json", "regex", "choice", "grammar", "json_object")
_NO_TAGS = (
    "forms inside of tags are not supported; offer the tags' contents as tools, or send "
    "structured_outputs with a grammar of the whole output"
)
_NO_PATTERN = "blanks of JSON are bounded here; leave it out, or send disable_any_whitespace"
_REFUSED_FIELDS = {"structural_tag": _NO_TAGS, "guided_whitespace_pattern": _NO_PATTERN}
_REFUSED_PARTS = {
    "structural_tag": _NO_TAGS,
    "whitespace_pattern": _NO_PATTERN,
    "disable_additional_properties": "put additionalProperties false into the schema",
}
# No form ever falls back to another library.
_WITHOUT_EFFECT = frozenset({"disable_fallback"})
_FIELDS = ("structured_outputs", *OTHER_NAMES, *_REFUSED_FIELDS)


def read_form(body: SamplingBody) -> StructuredOutputsParams | None:
    """The form that a request asks for, or None for free text.

    Raises:
        RequestError: It is malformed, of a kind that is not there, or asked for twice.
    """
    schema = read_response_format(body.response_format)
    given = {
        name: value for name in _FIELDS if (value := getattr(body, name, None)) is not None
    }
    if schema is not None:
        given["response_format"] = schema
    if len(given) > 1:
        first, second = list(given)[:2]
        raise RequestError(
            f"{first} and {second} both say what form the output has; send one of them", param=first
        )
    for name, value in given.items():
        if name == "response_format":
            return StructuredOutputsParams(json=value, param=name)
        if name in _REFUSED_FIELDS:
            raise RequestError(f"{name} is not supported: {_REFUSED_FIELDS[name]}", param=name)
        if name == "structured_outputs":
            return _structured_outputs(value)
        return _params(name, {OTHER_NAMES[name]: value})
    return None


def refuse_form(body: Body, remedy: str) -> None:
    """Refuse all these fields where the API has another one.

    Args:
        body: The request; its class need not list the fields.
        remedy: The field that asks for a form there.

    Raises:
        RequestError: One is given.
    """
    for name in (*_FIELDS, "response_format"):
        if getattr(body, name, None) is not None:
            raise RequestError(
                f"{name} is not supported here; use {remedy}, or /v1/chat/completions, which "
                "takes response_format and structured_outputs", param=name,
            )


def read_response_format(
    response_format: Mapping[str, Any] | None,
) -> dict[str, Any] | bool | None:
    """The JSON schema that a `response_format` asks for, or None for text.

    Raises:
        RequestError: It is malformed.
    """
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "structural_tag":
        raise RequestError(
            f"response_format is of type 'structural_tag': {_NO_TAGS}", param="response_format"
        )
    if kind not in ("json_object", "json_schema"):
        raise RequestError(
            f"response_format is of type {kind!r:.100}; use text, json_object or json_schema, or "
            "send structured_outputs with a regex, choice or grammar", param="response_format",
        )
    # OpenAI has the schema inside of json_schema; llama.cpp's server beside the type.
    described = response_format.get("json_schema", response_format)
    schema = described.get("schema") if isinstance(described, dict) else None
    if schema is None and kind == "json_object":
        return {"type": "object"}
    if not isinstance(schema, dict | bool):
        raise RequestError(
            f"response_format of type {kind} needs json_schema with a schema in it",
            param="response_format",
        )
    return schema


def _structured_outputs(given: dict[str, Any]) -> StructuredOutputsParams:
    name = "structured_outputs"
    parts = {key: value for key, value in given.items() if value is not None}
    for key, value in parts.items():
        if key in _REFUSED_PARTS and value is not False:
            raise RequestError(f"{name}.{key} is not supported: {_REFUSED_PARTS[key]}", param=name)
        if key not in (*_PARTS, *_REFUSED_PARTS, *_WITHOUT_EFFECT, "disable_any_whitespace"):
            raise RequestError(
                f"{name} has {key!r:.100}, which is unknown; use one of {', '.join(_PARTS)}",
                param=name,
            )
    compact = parts.get("disable_any_whitespace", False)
    if not isinstance(compact, bool):
        raise RequestError(f"{name}.disable_any_whitespace must be true or false", param=name)
    return _params(
        name, {key: parts[key] for key in _PARTS if key in parts}, is_compact=compact
    )


def _params(
    name: str, parts: dict[str, Any], *, is_compact: bool = False
) -> StructuredOutputsParams:
    schema = parts.get("json")
    if isinstance(schema, str):
        # As text it is known to this API too; what follows works on objects.
        try:
            parts = {**parts, "json": json.loads(schema)}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name}: json is no JSON: {error}", param=name) from error
    return StructuredOutputsParams(**parts, disable_any_whitespace=is_compact, param=name)
