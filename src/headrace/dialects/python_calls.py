"""Calls as LFM2 writes them: a list of Python calls with keyword arguments."""

from __future__ import annotations

import ast
import json
import re
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.dialects.formats import ToolFormat, Unread, literal, object_text
from headrace.dialects.json_scan import NotJsonError, end_of_value, skip_blanks, value_in
from headrace.dialects.parameters import (
    NoShapeError,
    Shape,
    Writer,
    Written,
    extra_names,
    plain_shape,
    shape_rules,
    shapes_of,
    value_rule,
)
from headrace.dialects.tools import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.dialects.formats import Mark
    from headrace.dialects.tools import Tool

_NAMES = {"true": True, "false": False, "null": None}
"""JSON's words for what Python calls True, False and None: models mix them."""
_PYTHON_WORD = re.compile(r"(True|False|None)(?=\s*[,)])")
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
_LETTERS = r"[^\s\x00-\x1f()\[\]{},='\"]+"
_NAME = re.compile(f"{_LETTERS}(?: +{_LETTERS})*")
"""Names are not quoted: they need not be identifiers, and end before what is part of a call."""
_FUNCTION = re.compile(rf"\s*({_LETTERS})\(\s*")
_KEY = re.compile(rf"({_NAME.pattern})\s*=\s*")
_COMMA = re.compile(r"\s*,\s*")


class PythonCalls(ToolFormat):
    """`<|tool_call_start|>[name(key="value"), ...]<|tool_call_end|>`."""

    name = "lfm2"
    opens = "<|tool_call_start|>"
    closes = "<|tool_call_end|>"

    def read(self, body: str, tools: Sequence[Tool]) -> list[Call] | Unread:
        """See `ToolFormat`."""
        del tools
        body = body.strip()
        try:
            return _json_valued(body)
        except NotJsonError as error:
            if error.is_cut:
                return Unread.OPEN
        return _python(body)

    def check(self, tool: Tool) -> None:
        """See `ToolFormat`."""
        _rules("call", tool, is_enforced=True)

    def grammar(self, tools: Sequence[Tool], mark: Mark, *, is_parallel: bool) -> str:
        """See `ToolFormat`. Values are JSON, which `read` understands."""
        more = ' (", " call)*' if is_parallel else ""
        rules = [
            f'start: {mark(self.opens)} "[" call{more} "]" {mark(self.closes)}',
            f"call: {' | '.join(f'call{place}' for place in range(len(tools)))}",
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
    for key in (key for shape in shapes for key in shape.properties):
        if _is_unwritable(key):
            raise NoShapeError(f"the parameter name {key!r:.100}", "give it another name")
    starts, rules = shape_rules(name, shapes, partial(_writer, tool))
    return [f'{name}: {literal(tool.name + "(")} ({" | ".join(starts)})', *rules]


def _is_unwritable(key: str) -> bool:
    return _NAME.fullmatch(key) is None


def _writer(tool: Tool, name: str, shape: Shape) -> tuple[list[str], Writer]:
    """Rules of a shape's values, and how its parameters are written: commas between them."""
    rules = []
    heads = []
    for place, (key, schema) in enumerate(shape.properties.items()):
        heads.append(literal(f"{key}="))
        rules.append(f"{name}v{place}: {value_rule(schema, tool)}")
    for place, extra in enumerate(shape.extras, len(heads)):
        terminal = f"{name}x{place}".upper()
        rules += [
            f"{terminal}N: {extra_names(extra, shape.properties, _NAME.pattern)}",
            f'{terminal}: {terminal}N "="',
            f"{name}v{place}: {value_rule(extra.schema, tool)}",
        ]
        heads.append(terminal)

    def parameter(place: int, mood: str) -> list[Written]:
        comma = "" if mood == "first" else '", " '
        return [Written(f"{comma}{heads[place]} {name}v{place}", "more")]

    return rules, Writer(parameter=parameter, end=lambda _: '")"', mood="first")


def _json_valued(body: str) -> list[Call]:
    """Calls all of whose values are JSON, which are taken as they stand.

    Text in double quotes may be JSON and Python, and differ: there it is taken as JSON.

    Raises:
        NotJsonError: The text is something else.
    """
    calls = []
    is_list = body.startswith("[")
    at = int(is_list)
    while True:
        head = _FUNCTION.match(body, at)
        if head is None:
            raise NotJsonError(body, at, wanted="call")
        arguments, at = _arguments(body, head.end())
        calls.append(Call(head[1], object_text(arguments)))
        comma = _COMMA.match(body, at) if is_list else None
        if comma is None:
            break
        at = comma.end()
    if body[at:].strip() != ("]" if is_list else ""):
        raise NotJsonError(body, at, wanted="end")
    return calls


def _arguments(body: str, at: int) -> tuple[dict[str, str], int]:
    """Names and JSON of the arguments from `at` on, and the place behind them."""
    arguments: dict[str, str] = {}
    if body.startswith(")", at):
        return arguments, at + 1
    while True:
        key = _KEY.match(body, at)
        if key is None:
            raise NotJsonError(body, at, wanted="name")
        word = _PYTHON_WORD.match(body, key.end())
        at = word.end() if word else end_of_value(body, key.end())
        arguments[key[1]] = _JSON_WORDS[word[1]] if word else body[key.end() : at]
        comma = _COMMA.match(body, at)
        if comma is None:
            break
        at = comma.end()
    at = skip_blanks(body, at)
    if not body.startswith(")", at):
        raise NotJsonError(body, at, wanted="end")
    return arguments, at + 1


def _python(body: str) -> list[Call] | Unread:
    """Calls with values of Python, which become JSON."""
    try:
        with warnings.catch_warnings():
            # A text with a backslash that Python would rather see doubled.
            warnings.simplefilter("ignore")
            tree = ast.parse(body, mode="eval").body
    except SyntaxError as error:
        is_cut = "unterminated" in (error.msg or "")
        return Unread.OPEN if is_cut else Unread.MALFORMED
    except (ValueError, RecursionError, MemoryError):
        return Unread.MALFORMED
    nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    try:
        return [_call(node) for node in nodes] or Unread.MALFORMED
    except (ValueError, RecursionError):
        return Unread.MALFORMED


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keywords")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** in a call")
        arguments[keyword.arg] = _value(keyword.value)
    # No number of Python is infinite as JSON, and halves of surrogate pairs are no text.
    return Call(
        _dotted(node.func), value_in(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    )


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise ValueError("not a name")


def _value(node: ast.expr) -> Any:  # noqa: ANN401 - a JSON value
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(
            isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys
        ):
            names = [key.value for key in keys if isinstance(key, ast.Constant)]
            return {str(name): _value(value) for name, value in zip(names, values, strict=True)}
    raise ValueError("not a value of JSON")
