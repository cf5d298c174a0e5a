"""What every format of tool calls has."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from headrace.dialects.json_scan import NotJsonError, value_in
from headrace.structured_outputs import inline_schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.dialects.tools import Call, Tool


_COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
"""What may list parameters elsewhere than in `properties`."""

Mark = Callable[[str], str]


class Unread(Enum):
    """Why text between the marks is no call."""

    OPEN = "it goes on: the closing mark stands inside a string"
    MALFORMED = "it is no call"


class ToolFormat(ABC):
    """One way of writing calls.

    Attributes:
        name: What settings call it.
        opens: Mark before calls.
        closes: Mark after them; None if they last to the end of the output.
    """

    name: str
    opens: str
    closes: str | None

    @abstractmethod
    def read(self, body: str, tools: Sequence[Tool]) -> list[Call] | Unread:
        """Read the text between the marks.

        Args:
            body: The text.
            tools: Functions of the request, whose schemas say what values mean.
        """

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], mark: Mark, *, is_parallel: bool) -> str:
        """A grammar (Lark's syntax) of an output that is nothing but calls of these functions.

        Args:
            tools: The functions.
            mark: Writes a mark as the grammar needs it: as a token, or as text.
            is_parallel: Whether there may be several calls.
        """

    def check(self, tool: Tool) -> None:  # noqa: B027 - most formats can write all schemas
        """Refuse a function whose calls this format's grammar would not hold to their schema.

        Raises:
            NoShapeError: Its schema asks for what the grammar cannot enforce.
        """


def literal(text: str) -> str:
    """A text as a literal of the grammar, which is also how JSON has it."""
    return json.dumps(text, ensure_ascii=False)


def schema_of(tool: Tool) -> str:
    """A function's parameters as a rule: an object, nothing beside what is listed."""
    schema = {"type": "object", **tool.parameters}
    if not schema.keys() & _COMBINING:
        schema.setdefault("properties", {})
        schema.setdefault("additionalProperties", False)
    return inline_schema(schema)


def arguments_text(value: str) -> str | None:
    """Arguments as a JSON object's text, or None if they are none.

    Args:
        value: JSON; some models write the object as text, or null where there are no arguments.
    """
    if value.startswith('"'):
        inner: str = json.loads(value)
        if not inner.strip():
            return "{}"
        try:
            value = value_in(inner)
        except NotJsonError:
            return None
    if value == "null":
        return "{}"
    return value if value.startswith("{") else None


def object_text(members: Mapping[str, str]) -> str:
    """An object's text.

    Args:
        members: Name to the value's JSON.
    """
    return "{" + ", ".join(f"{literal(name)}: {value}" for name, value in members.items()) + "}"
