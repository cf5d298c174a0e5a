"""Calls as JSON: Hermes (one object each), Nemotron and Granite (one list of objects)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from headrace.dialects.formats import ToolFormat, Unread, arguments_text, literal, schema_of
from headrace.dialects.json_scan import NotJsonError, items, members, value_in
from headrace.dialects.tools import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.dialects.formats import Mark
    from headrace.dialects.tools import Tool


class _JsonCalls(ToolFormat):
    """Objects of name and arguments between the marks, one or a list of them."""

    def read(self, body: str, tools: Sequence[Tool]) -> list[Call] | Unread:
        """See `ToolFormat`."""
        del tools
        try:
            value = value_in(body)
        except NotJsonError as error:
            return Unread.OPEN if error.is_cut else Unread.MALFORMED
        calls = []
        for item in items(value) if value.startswith("[") else [value]:
            call = _call(item)
            if call is None:
                return Unread.MALFORMED
            calls.append(call)
        return calls or Unread.MALFORMED


def _call(value: str) -> Call | None:
    """A call as JSON; None if the value is none."""
    said = members(value) if value.startswith("{") else {}
    name = json.loads(said["name"]) if said.get("name", "").startswith('"') else ""
    arguments = arguments_text(said.get("arguments", said.get("parameters", "null")))
    return Call(name, arguments) if name and arguments is not None else None


def _objects(tools: Sequence[Tool]) -> tuple[str, str]:
    """A rule for one object, and its alternatives: one per function."""
    names = [f"call{place}" for place in range(len(tools))]
    rules = "".join(
        f"{name}: {literal(start)} args{place} \"}}\"\nargs{place}: {schema_of(tool)}\n"
        for place, (name, tool) in enumerate(zip(names, tools, strict=True))
        for start in [f'{{"name": "{tool.name}", "arguments": ']
    )
    return f"call: {' | '.join(names)}\n", rules


class HermesCalls(_JsonCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once per call."""

    name = "hermes"
    opens = "<tool_call>"
    closes = "</tool_call>"

    def grammar(self, tools: Sequence[Tool], mark: Mark, *, is_parallel: bool) -> str:
        """See `ToolFormat`."""
        call, rules = _objects(tools)
        more = ' ("\\n" marked)*' if is_parallel else ""
        return (
            f"start: marked{more}\n"
            f'marked: {mark(self.opens)} "\\n" call "\\n" {mark(self.closes)}\n{call}{rules}'
        )


class _ListCalls(_JsonCalls):
    def grammar(self, tools: Sequence[Tool], mark: Mark, *, is_parallel: bool) -> str:
        """See `ToolFormat`."""
        call, rules = _objects(tools)
        more = ' (", " call)*' if is_parallel else ""
        end = f" {mark(self.closes)}" if self.closes else ""
        return f'start: {mark(self.opens)} "[" call{more} "]"{end}\n{call}{rules}'


class NemotronCalls(_ListCalls):
    """`<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`."""

    name = "nemotron"
    opens = "<TOOLCALL>"
    closes = "</TOOLCALL>"


class GraniteCalls(_ListCalls):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]` to the end (Granite 3)."""

    name = "granite"
    opens = "<|tool_call|>"
    closes = None
