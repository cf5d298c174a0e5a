"""How model families write reasoning and tool calls, and how such text is read back.

A `Dialect` is what one model speaks: marks of reasoning, a format of tool calls, or neither. It is
found in the chat template or named by a setting. `OutputParser` reads text as it comes;
`Dialect.call_grammar` says how calls must be written where they are required.
"""

from headrace.dialects.dialect import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Dialect,
    Start,
    find_dialect,
)
from headrace.dialects.parser import OutputParser, Piece
from headrace.dialects.tools import Call, Tool, ToolChoice, read_tool_choice, read_tools

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Call",
    "Dialect",
    "OutputParser",
    "Piece",
    "Start",
    "Tool",
    "ToolChoice",
    "find_dialect",
    "read_tool_choice",
    "read_tools",
]
