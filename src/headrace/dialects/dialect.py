"""Which dialect a model speaks, and what a prompt says about how its output begins."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from headrace.dialects.formats import literal
from headrace.dialects.json_calls import GraniteCalls, HermesCalls, NemotronCalls
from headrace.dialects.parameters import NoShapeError
from headrace.dialects.parser import OutputParser
from headrace.dialects.python_calls import PythonCalls
from headrace.dialects.xml_calls import XmlCalls
from headrace.errors import ConfigError, RequestError
from headrace.structured_outputs import FreeBeginning

if TYPE_CHECKING:
    from headrace.dialects.formats import ToolFormat
    from headrace.dialects.tools import Tool, ToolChoice
    from headrace.text import Tokenizer

THINK_OPENS = "<think>"
THINK_CLOSES = "</think>"

_FORMATS: dict[str, ToolFormat] = {
    made.name: made
    for made in (HermesCalls(), XmlCalls(), GraniteCalls(), PythonCalls(), NemotronCalls())
}
TOOL_PARSERS = ("auto", "none", *_FORMATS)
REASONING_PARSERS = ("auto", "none", "think", "deepseek_r1")

# What a template that shows past calls writes; the first that occurs decides.
_MARKS_OF_FORMATS = (
    ("<function=", "qwen3_coder"),
    ("<|tool_call_start|>", "lfm2"),
    ("<TOOLCALL>", "nemotron"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
)


class Start(Enum):
    """What an output begins with."""

    CONTENT = "content"
    REASONING = "reasoning that the prompt has opened"
    EITHER = "either: the output opens reasoning itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one model writes reasoning and calls.

    Attributes:
        reasoning: none; think: marked by the prompt or the output; deepseek_r1: output begins with
            it unless the prompt has closed it.
        tools: Format of calls, or None.
    """

    reasoning: str = "none"
    tools: ToolFormat | None = None

    def start_of(self, prompt: str, continued: str | None = None) -> Start:
        """What an output begins with.

        Args:
            prompt: The rendered conversation.
            continued: Content of the last message, if the output goes on with it.
        """
        if self.reasoning == "none":
            return Start.CONTENT
        if continued:
            is_open = continued.rfind(THINK_OPENS) > continued.rfind(THINK_CLOSES)
            return Start.REASONING if is_open else Start.CONTENT
        end = prompt.rstrip()
        if end.endswith(THINK_OPENS):
            return Start.REASONING
        if end.endswith(THINK_CLOSES):
            return Start.CONTENT
        return Start.REASONING if self.reasoning == "deepseek_r1" else Start.EITHER

    def parser(self, start: Start, choice: ToolChoice) -> OutputParser:
        """A parser for one output.

        Args:
            start: See `start_of`.
            choice: What the request allows.
        """
        return OutputParser(
            has_reasoning=start is not Start.CONTENT,
            begins_in_reasoning=start is Start.REASONING,
            format_=self.tools if choice.tools else None,
            tools=choice.tools,
            max_calls=None if choice.is_parallel else 1,
        )

    def shown_token_ids(self, tokenizer: Tokenizer, *, with_tools: bool) -> tuple[int, ...]:
        """Special tokens whose text the parser needs."""
        marks: list[str | None] = []
        if self.reasoning != "none":
            marks += [THINK_OPENS, THINK_CLOSES]
        if with_tools and self.tools is not None:
            marks += [self.tools.opens, self.tools.closes]
        ids = [tokenizer.token_id(mark) for mark in marks if mark is not None]
        return tuple(token for token in ids if token is not None and token in tokenizer.special_ids)

    def beginning(self, start: Start, tokenizer: Tokenizer) -> FreeBeginning | None:
        """Reasoning that may come before a constrained output.

        Raises:
            RequestError: The output begins with reasoning whose end is no single token.
        """
        if start is Start.CONTENT:
            return None
        opens, closes = tokenizer.token_id(THINK_OPENS), tokenizer.token_id(THINK_CLOSES)
        if start is Start.EITHER:
            if opens is None or closes is None:
                return None
            return FreeBeginning(opens=opens, closes=closes)
        if closes is None:
            raise RequestError(
                f"the output begins with reasoning, whose end {THINK_CLOSES} is no token of this "
                "model, so its form cannot be enforced after it; turn reasoning off with "
                'chat_template_kwargs {"enable_thinking": false}, or ask for free text',
            )
        return FreeBeginning(closes=closes)

    def call_grammar(self, choice: ToolChoice, tokenizer: Tokenizer) -> str:
        """How the calls that a request requires must be written, in Lark's syntax.

        Raises:
            RequestError: The model has no format of calls, or it cannot hold one of these to its
                schema.
        """
        if self.tools is None:
            raise RequestError(
                "this model's chat template shows no format of tool calls that is known here, so "
                "none can be required; name one with --tool-call-parser", param="tool_choice",
            )

        for tool in choice.tools:
            if choice.is_required or tool.is_strict:
                self._check(self.tools, tool)

        def mark(text: str) -> str:
            # A mark that is a token is named, since its letters would be other tokens.
            return text if text in tokenizer.added_tokens else literal(text)

        return self.tools.grammar(choice.tools, mark, is_parallel=choice.is_parallel)

    @staticmethod
    def _check(format_: ToolFormat, tool: Tool) -> None:
        try:
            format_.check(tool)
        except NoShapeError as error:
            raise RequestError(
                f"function {tool.name!r} has {error}, which the calls of {format_.name} cannot be "
                f"held to; {error.remedy}, or use tool_choice auto without strict", param="tools",
            ) from error

    def strict_grammar(self, choice: ToolChoice, tokenizer: Tokenizer) -> str:
        """An output that is free text, and in which whatever begins as a call is one.

        Raises:
            RequestError: A call's beginning is no token, so free text cannot be told from it.
        """
        calls = self.call_grammar(choice, tokenizer).replace("start:", "calls:", 1)
        assert self.tools is not None
        if self.tools.opens not in tokenizer.added_tokens:
            raise RequestError(
                f"strict functions cannot be enforced with tool_choice auto: {self.tools.opens} is "
                "no token of this model; leave strict out, or use tool_choice required",
                param="tools",
            )
        # A regular expression never matches marks, which are tokens of their own.
        return f"start: free | free calls\nfree: /(.|\\n)*/\n{calls}"


def find_dialect(
    template: str | None, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> Dialect:
    """Find a model's dialect in its chat template.

    Args:
        template: The template's source, or None.
        tool_parser: A name of TOOL_PARSERS.
        reasoning_parser: A name of REASONING_PARSERS.

    Raises:
        ConfigError: A name is unknown.
    """
    for name, value, known in (
        ("tool-call-parser", tool_parser, TOOL_PARSERS),
        ("reasoning-parser", reasoning_parser, REASONING_PARSERS),
    ):
        if value not in known:
            raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(known)}")
    source = template or ""
    if tool_parser == "auto":
        tool_parser = next((name for mark, name in _MARKS_OF_FORMATS if mark in source), "none")
    if reasoning_parser == "auto":
        reasoning_parser = "think" if THINK_CLOSES in source else "none"
    return Dialect(reasoning=reasoning_parser, tools=_FORMATS.get(tool_parser))
