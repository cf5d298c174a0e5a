"""What a conversation asks of its output: tools, a form, reasoning apart from the answer.

Read in two steps, because how an output begins is known only when the prompt is rendered: first the
request's fields (`read_wish`), then, with the prompt, the form of the output (`ChatWish.form`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.dialects import ToolChoice, read_tool_choice, read_tools
from headrace.errors import RequestError
from headrace.structured_outputs import StructuredOutputsParams, inline_schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.dialects import Dialect, OutputParser, Start
    from headrace.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """How one output is written and read.

    Attributes:
        dialect: The model's.
        start: What it begins with.
        choice: Which calls it may hold.
        structure: What it must look like, or None.
        shown_token_ids: Special tokens that its parser needs as text.
    """

    dialect: Dialect
    start: Start
    choice: ToolChoice
    structure: StructuredOutputsParams | None
    shown_token_ids: tuple[int, ...]

    def parser(self) -> OutputParser:
        """A parser for one output."""
        return self.dialect.parser(self.start, self.choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWish:
    """What a request says about its output.

    Attributes:
        choice: Which functions may or must be called.
        wanted: Form of the answer, or None for free text.
    """

    choice: ToolChoice
    wanted: StructuredOutputsParams | None

    def form(
        self, dialect: Dialect, tokenizer: Tokenizer, prompt: str, continued: str | None
    ) -> OutputForm:
        """Settle how the output is written.

        Args:
            dialect: The model's.
            tokenizer: The model's.
            prompt: The rendered conversation.
            continued: Content of the last message, if the output goes on with it.

        Raises:
            RequestError: The model cannot write what is asked for.
        """
        start = dialect.start_of(prompt, continued)
        try:
            structure = self._structure(dialect, start, tokenizer)
        except RecursionError:
            raise RequestError(
                "a JSON schema is nested too deeply; flatten it, or name its parts in $defs",
                param="tools" if self.wanted is None else self.wanted.param,
            ) from None
        return OutputForm(
            dialect=dialect,
            start=start,
            choice=self.choice,
            structure=structure,
            shown_token_ids=dialect.shown_token_ids(
                tokenizer, with_tools=bool(self.choice.tools)
            ),
        )

    def _structure(
        self, dialect: Dialect, start: Start, tokenizer: Tokenizer
    ) -> StructuredOutputsParams | None:
        if self.choice.is_required:
            return StructuredOutputsParams(
                grammar=dialect.call_grammar(self.choice, tokenizer), param="tools",
                beginning=dialect.beginning(start, tokenizer), has_calls=True,
            )
        if self.wanted is None:
            if not any(tool.is_strict for tool in self.choice.tools):
                return None
            return StructuredOutputsParams(
                grammar=dialect.strict_grammar(self.choice, tokenizer), param="tools",
                beginning=dialect.beginning(start, tokenizer), has_calls=True,
            )
        beginning = dialect.beginning(start, tokenizer)
        if not self.choice.tools:
            return replace(self.wanted, beginning=beginning)
        # Either calls, or the answer in its form.
        calls = dialect.call_grammar(self.choice, tokenizer).replace("start:", "calls:", 1)
        schema = {"type": "object"} if self.wanted.json_object else self.wanted.json
        assert isinstance(schema, dict | bool), f"{self.wanted.kind} was let through"
        answer = inline_schema(schema, is_compact=self.wanted.disable_any_whitespace)
        return StructuredOutputsParams(
            grammar=f"start: calls | answer\nanswer: {answer}\n{calls}",
            param=self.wanted.param, beginning=beginning, has_calls=True,
        )


def read_wish(
    dialect: Dialect,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    parallel_tool_calls: bool | None,
    wanted: StructuredOutputsParams | None,
) -> ChatWish:
    """Read a chat request's fields about its calls.

    Raises:
        RequestError: One is malformed, or asks for calls of a model without them, or for calls
            beside a form that cannot hold them.
    """
    choice = read_tool_choice(
        read_tools(tools), tool_choice, is_parallel=parallel_tool_calls is not False
    )
    if choice.tools and dialect.tools is None:
        raise RequestError(
            "this model's chat template shows no format of tool calls that is known here; leave "
            "tools out, send tool_choice none to show them to the model as text, or name a format "
            "with --tool-call-parser", param="tools",
        )
    if choice.tools and wanted is not None and wanted.kind not in ("json", "json_object"):
        raise RequestError(
            f"{wanted.param} asks for a {wanted.kind}, and tools for calls; send tool_choice none, "
            "or ask for JSON, beside which calls can be told apart", param=wanted.param,
        )
    return ChatWish(choice=choice, wanted=wanted)
