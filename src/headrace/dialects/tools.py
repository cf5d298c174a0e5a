"""Tools as clients describe them, and calls as models make them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_TOOLS = 256
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Its name.
        parameters: JSON schema of its arguments, an object's.
        is_strict: Calls of it must fit the schema, also where none is required.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object"})
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model made.

    Attributes:
        name: Of the function.
        arguments: A JSON object, as text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may or must call.

    Attributes:
        tools: Those it may call; empty if none.
        is_required: It must call at least one.
        is_parallel: It may call several.
    """

    tools: tuple[Tool, ...] = ()
    is_required: bool = False
    is_parallel: bool = True


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """Read the `tools` of a chat request.

    Raises:
        RequestError: One is malformed or no function.
    """
    read: list[Tool] = []
    for place, tool in enumerate(tools or ()):
        where = f"tools[{place}]"
        kind = tool.get("type", "function")
        if kind != "function":
            raise RequestError(
                f"{where} is of type {kind!r}, but only functions can be called; leave it out",
                param="tools",
            )
        function = tool.get("function")
        if not isinstance(function, dict):
            raise RequestError(f"{where} needs a function", param="tools")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(
                f"{where} has the name {name!r:.100}; use 1 to 128 letters, digits or _ . : / -",
                param="tools",
            )
        parameters = function.get("parameters")
        if parameters is None:
            parameters = {"type": "object", "properties": {}}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise RequestError(
                f"{where}: parameters must be the JSON schema of an object, got "
                f"{parameters!r:.100}", param="tools",
            )
        _check_types(where, parameters)
        read.append(Tool(name, parameters, is_strict=function.get("strict") is True))
    if len(read) > MAX_TOOLS:
        raise RequestError(
            f"tools has {len(read)} functions but at most {MAX_TOOLS} are allowed", param="tools"
        )
    names = [tool.name for tool in read]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"tools names {name!r} twice", param="tools")
    return tuple(read)


def _check_types(where: str, parameters: Mapping[str, Any]) -> None:
    """Refuse a schema whose parts are of other types than every format of calls relies on."""

    def refuse(part: str, form: str, value: object) -> NoReturn:
        raise RequestError(
            f"{where}: {part} of parameters must be {form}, got {value!r:.100}", param="tools"
        )

    for part in ("properties", "$defs"):
        value = parameters.get(part)
        if value is not None and not isinstance(value, dict):
            refuse(part, "an object", value)
    required = parameters.get("required")
    if required is not None and not (
        isinstance(required, list) and all(isinstance(name, str) for name in required)
    ):
        refuse("required", "a list of names", required)
    for name, schema in (parameters.get("properties") or {}).items():
        if not isinstance(schema, dict | bool):
            refuse(f"{name!r:.100}", "a schema", schema)
        options = schema.get("enum") if isinstance(schema, dict) else None
        if options is not None and not isinstance(options, list):
            refuse(f"enum of {name!r:.100}", "a list", options)


def read_tool_choice(
    tools: tuple[Tool, ...], choice: str | Mapping[str, Any] | None, *, is_parallel: bool = True
) -> ToolChoice:
    """Read `tool_choice`: auto (the default with tools), none, required, or a function by name.

    Raises:
        RequestError: It is something else, or names a function that is not there.
    """
    if choice in (None, "auto", "none"):
        return ToolChoice(() if choice == "none" else tools, is_parallel=is_parallel)
    if not tools:
        raise RequestError(
            "tool_choice needs tools, and there is no function among them", param="tool_choice"
        )
    if choice == "required":
        return ToolChoice(tools, is_required=True, is_parallel=is_parallel)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {choice!r:.100}; use auto, none, required, or "
            '{"type": "function", "function": {"name": ...}}', param="tool_choice",
        )
    named = tuple(tool for tool in tools if tool.name == name)
    if not named:
        raise RequestError(
            f"tool_choice names {name!r}, which is not among tools", param="tool_choice"
        )
    return ToolChoice(named, is_required=True, is_parallel=False)
