"""Calls in the XML of Qwen3-Coder, Qwen3.5 and Nemotron 3: a tag per parameter, values as text.

Nothing is escaped, as the models' templates have it. A value ends at a closing tag that is followed
by what must follow one, so a text may hold tags that are followed by something else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.dialects.formats import ToolFormat, Unread, literal, object_text
from headrace.dialects.json_scan import NotJsonError, end_of_value, kind_of, value_in
from headrace.dialects.parameters import (
    NoShapeError,
    Shape,
    Writer,
    Written,
    extra_names,
    plain_shape,
    resolved,
    shape_rules,
    shapes_of,
    value_rule,
)
from headrace.dialects.tools import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.dialects.formats import Mark
    from headrace.dialects.tools import Tool

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
# Blanks are spelled out where the grammar has them too: its library has other ones in `\s`.
_VALUE_END = re.compile(
    r"</parameter>(?=[ \t\r\n]*(?:<parameter=[^>\n]+>|</function>[ \t\r\n]*\Z))"
)
_CALL_END = re.compile(r"</parameter>.*</function>[ \t\r\n]*\Z", re.DOTALL)
_JSON_END = re.compile(r"[ \t\r\n]*</parameter>")
_PARAMETER_END = "</parameter>"
_END = "</function>"
_NAME = re.compile(r"[^\s\x00-\x1f>]+(?: +[^\s\x00-\x1f>]+)*")
_TEXTS = r"""
FREE: /(?s:.*)/ & ~/(?s:.*)<\/parameter>[ \t\r\n]*(<parameter=|<\/function>)(?s:.*)/ & ~/(?s:.*)<\/parameter>(?s:.*)<\/function>[ \t\r\n]*<\/tool_call>(?s:.*)/
THENMORE: FREE "\n</parameter>\n<parameter="
THENEND: FREE "\n</parameter>\n</function>"
"""  # noqa: E501 - a terminal is one line
"""Texts, and what must follow their closing tags: more parameters, or the end of the call."""
_ANNOTATIONS = frozenset({
    "type", "title", "description", "default", "examples", "example", "deprecated", "readOnly",
    "writeOnly", "$comment", "$id", "$schema",
})
_ANYOF = "leave it out, or put the schema into an anyOf"
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class XmlCalls(ToolFormat):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`."""

    name = "qwen3_coder"
    opens = "<tool_call>"
    closes = "</tool_call>"

    def read(self, body: str, tools: Sequence[Tool]) -> list[Call] | Unread:
        """See `ToolFormat`."""
        head = _FUNCTION.match(body)
        if head is None:
            return Unread.MALFORMED
        name = head[1].strip()
        schemas = _schemas(name, tools)
        arguments: dict[str, str] = {}
        place = head.end()
        while parameter := _PARAMETER.match(body, place):
            key = parameter[1].strip()
            found = _read_value(body, parameter.end(), schemas(key))
            if isinstance(found, Unread):
                return found
            arguments[key], place = found
        rest = body[place:].strip()
        if rest == _END and name:
            return [Call(name, object_text(arguments))]
        return Unread.MALFORMED if rest or not name else Unread.OPEN

    def check(self, tool: Tool) -> None:
        """See `ToolFormat`. Texts stand without quotes and are free: nothing can bound them."""
        _rules("call", tool, is_enforced=True)

    def grammar(self, tools: Sequence[Tool], mark: Mark, *, is_parallel: bool) -> str:
        """See `ToolFormat`. Texts are free; see `check`."""
        more = ' ("\\n" marked)*' if is_parallel else ""
        rules = [
            f"start: marked{more}",
            f'marked: {mark(self.opens)} "\\n" call "\\n" {mark(self.closes)}',
            f"call: {' | '.join(f'call{place}' for place in range(len(tools)))}",
            _TEXTS,
        ]
        for place, tool in enumerate(tools):
            try:
                rules += _rules(f"call{place}", tool, is_enforced=True)
            except NoShapeError:
                rules += _rules(f"call{place}", tool, is_enforced=False)
        return "\n".join(rules) + "\n"


def _rules(name: str, tool: Tool, *, is_enforced: bool) -> list[str]:
    """Rules of one function's calls.

    Raises:
        NoShapeError: They cannot be held to its schema.
    """
    shapes = shapes_of(tool) if is_enforced else [plain_shape(tool).without(_is_unwritable)]
    if is_enforced:
        _check(tool, shapes)
    starts, rules = shape_rules(name, shapes, partial(_writer, tool))
    head = literal(f"<function={tool.name}>\n")
    return [f"{name}: {head} ({' | '.join(starts)})", *rules]


def _is_unwritable(key: str) -> bool:
    return _NAME.fullmatch(key) is None


def _writer(tool: Tool, name: str, shape: Shape) -> tuple[list[str], Writer]:
    """Rules of a shape's values, and how its parameters are written.

    A text's end takes the beginning of what follows along: after it a list is `open` (the next tag
    has begun) or `ended`.
    """
    rules: list[str] = []
    heads: list[dict[str, str]] = []
    ways: list[list[Written]] = []
    for place, key in enumerate(shape.properties):
        heads.append({
            "closed": literal(f"<parameter={key}>\n"), "open": literal(f"{key}>\n")
        })
        ways.append(_ways(f"{name}v{place}", tool, shape.properties[key], rules))
    for index, extra in enumerate(shape.extras, len(heads)):
        terminal = f"{name}x{index}".upper()
        names = extra_names(extra, shape.properties, _NAME.pattern)
        rules += [
            f"{terminal}N: {names}",
            f'{terminal}O: {terminal}N ">\\n"',
            f'{terminal}C: "<parameter=" {terminal}N ">\\n"',
        ]
        heads.append({"closed": f"{terminal}C", "open": f"{terminal}O"})
        ways.append(_ways(f"{name}v{index}", tool, extra.schema, rules))

    def parameter(place: int, mood: str) -> list[Written]:
        if mood == "ended":
            return []
        head = heads[place][mood]
        return [Written(f"{head} {way.symbols}", way.mood) for way in ways[place]]

    ends = {"closed": literal(_END), "ended": ""}
    return rules, Writer(parameter=parameter, end=ends.get, mood="closed")


def _ways(name: str, tool: Tool, schema: object, rules: list[str]) -> list[Written]:
    """How a value and its closing tag are written; a rule that this needs is added to `rules`."""
    schema = _written_as(schema, tool)
    options = _options(schema)
    tail = literal("\n</parameter>\n")
    if options:
        return [Written("(" + " | ".join(map(literal, options)) + f") {tail}", "closed")]
    if _is_text(schema):
        return [Written("THENMORE", "open"), Written("THENEND", "ended")]
    rules.append(f"{name}: {value_rule(schema, tool)}")
    return [Written(f"{name} {tail}", "closed")]


def _check(tool: Tool, shapes: Sequence[Shape]) -> None:
    """Refuse what cannot be written, bounded, or read in one way only.

    Raises:
        NoShapeError: There is something.
    """
    keys = dict.fromkeys(key for shape in shapes for key in shape.properties)
    for key in keys:
        if _is_unwritable(key):
            raise NoShapeError(f"the parameter name {key!r:.100}", "give it another name")
        said = [schema for shape in shapes for schema in shape.schemas_of(key)]
        _check_values(said, tool, f"{key!r:.100}")
    extras = [extra.schema for shape in shapes for extra in shape.extras]
    if extras:
        _check_values(extras, tool, "parameters that are not listed")


def _check_values(schemas: Sequence[object], tool: Tool, what: str) -> None:
    written = [_written_as(schema, tool) for schema in schemas]
    for schema in written:
        fault = _unenforced(schema)
        if fault is not None:
            raise NoShapeError(f"{fault} for {what}", _ANYOF)
    if not _is_one_way(written):
        raise NoShapeError(f"both texts and other values, in different cases, for {what}", _ANYOF)


def _is_one_way(written: Sequence[object]) -> bool:
    """Whether a value can be read without knowing which of the schemas it was written for."""
    if all(one == written[0] for one in written) or not any(map(_is_text, written)):
        return True
    return all(_is_text(one) and not _may_be_other(one) for one in written)


# Reading -----------------------------------------------------------------------------------------


def _schemas(name: str, tools: Sequence[Tool]) -> Callable[[str], _Reading]:
    """How to read the values of a function's parameters, by key."""
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        return lambda _: _Reading(None, None)
    try:
        shapes = shapes_of(tool)
    except NoShapeError:
        shapes = [plain_shape(tool)]

    def schema_of(key: str) -> _Reading:
        written = [_written_as(one, tool) for shape in shapes for one in shape.schemas_of(key)]
        schema = written[0] if written and _is_one_way(written) else None
        return _Reading(schema, _kinds(written, tool))

    return schema_of


def _read_value(body: str, start: int, reading: _Reading) -> tuple[str, int] | Unread:
    """JSON of the value that begins at `start`, and the place behind its closing tag."""
    if not _is_text(reading.schema):
        try:
            end = _JSON_END.match(body, end_of_value(body, start))
        except NotJsonError as error:
            # A closing tag inside a string closes nothing.
            if error.is_cut:
                return Unread.OPEN
            end = None
        value = None if end is None else _json(body[start : end.start()], reading)
        if end is not None and value is not None:
            return value, end.end()
    found = _VALUE_END.search(body, start)
    if found is None:
        return Unread.MALFORMED if _CALL_END.search(body, start) else Unread.OPEN
    text = body[start : found.start()].removeprefix("\n").removesuffix("\n")
    return _value(text, reading), found.end()


@dataclass(frozen=True, slots=True)
class _Reading:
    """What is known of a value.

    Attributes:
        schema: Its schema, or None.
        kinds: Those it may be of, or None if that is not known.
    """

    schema: object
    kinds: frozenset[str] | None


def _value(text: str, reading: _Reading) -> str:
    """JSON of what a parameter's text means under its schema; text, if it means nothing else."""
    schema = reading.schema
    as_text = json.dumps(text, ensure_ascii=False)
    options = _options(schema)
    if text in options:
        return json.dumps(options[text], ensure_ascii=False)
    if _is_text(schema) and not _may_be_other(schema):
        return as_text
    value = _json(text, reading)
    return as_text if value is None or (_is_text(schema) and value.startswith('"')) else value


def _json(text: str, reading: _Reading) -> str | None:
    """A text that is JSON of a kind that is wanted; where none may be a text, of any kind."""
    plain = text.strip()
    try:
        value = value_in(_PYTHON_WORDS.get(plain, plain))
    except NotJsonError:
        return None
    kind, kinds = kind_of(value), reading.kinds
    if kinds is None or kind in kinds or "string" not in kinds:
        return value
    return value if kind == "integer" and "number" in kinds else None


def _kinds(schemas: Sequence[object], tool: Tool) -> frozenset[str] | None:
    """Kinds of values that schemas name; None if one of them does not."""
    kinds: set[str] = set()
    seen: set[int] = set()
    todo = list(schemas)
    while todo:
        one = resolved(todo.pop(), tool)
        if not isinstance(one, dict):
            return None
        if id(one) in seen:
            continue
        seen.add(id(one))
        said = one.get("type")
        given = [one["const"]] if "const" in one else one.get("enum")
        options = one.get("anyOf") or one.get("oneOf")
        if said is not None:
            kinds.update(map(str, said if isinstance(said, list) else [said]))
        elif isinstance(given, list):
            kinds.update(kind_of(json.dumps(value)) for value in given)
        elif isinstance(options, list):
            todo += options
        else:
            return None
    return frozenset(kinds)


# Schemas of values -------------------------------------------------------------------------------


def _written_as(schema: object, tool: Tool) -> object:
    """A schema, or what it refers to if that is a text that can be written as one."""
    plain = resolved(schema, tool)
    return plain if _is_text(plain) and _unenforced(plain) is None else schema


def _is_text(schema: object) -> bool:
    """Whether a value is text as it stands: it may be a string, or anything."""
    if not isinstance(schema, dict):
        return True
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return "string" in kinds
    if kinds is None:
        options = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(options, list):
            return any(isinstance(option, str) for option in options)
        return not any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf", "properties"))
    return bool(kinds == "string")


def _options(schema: object) -> dict[str, Any]:
    """What one of the values that a text may be is written as, to the value; empty if it is free.

    Texts stand for themselves, other values as JSON.
    """
    if not isinstance(schema, dict) or not _is_text(schema):
        return {}
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(given, list):
        return {}
    said = schema.get("type")
    kinds = said if isinstance(said, list) else [said]
    written: dict[str, Any] = {}
    for option in given:
        kind = kind_of(json.dumps(option))
        if said is not None and kind not in kinds and (kind, kinds) != ("integer", ["number"]):
            continue
        is_plain = isinstance(option, str)
        written.setdefault(option if is_plain else json.dumps(option, ensure_ascii=False), option)
    return {} if any(_PARAMETER_END in text for text in written) else written


def _unenforced(schema: object) -> str | None:
    """What a text's schema asks for beside being one; None if that is nothing."""
    if schema is False:
        return "the schema false"
    if not isinstance(schema, dict) or not _is_text(schema):
        return None
    kinds = schema.get("type")
    listed = kinds if isinstance(kinds, list) else []
    for kind in ("array", "object"):
        if kind in listed:
            return f"the types string and {kind}"
    known = _ANNOTATIONS | ({"enum", "const"} if _options(schema) else set())
    return next((key for key in schema if key not in known and not key.startswith("x-")), None)


def _may_be_other(schema: object) -> bool:
    """Whether a value that may be text may be something else too."""
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return any(kind != "string" for kind in kinds)
    return kinds is None and "enum" in schema
