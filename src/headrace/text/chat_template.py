"""The checkpoint's chat template, rendered in a sandbox."""

from __future__ import annotations

import datetime
import json
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from headrace.errors import ModelError, RequestError
from headrace.text.files import read_json_object_if_present

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2.parser import Parser

MAX_RENDERED_CHARS = 64 * 1024 * 1024
MAX_RENDER_S = 10.0
_MAX_REPEATED = 1_000_000
_WIDE_FORMAT = re.compile(r"%[^%a-zA-Z]*(\d{4,}|\*)")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: marks the assistant's part for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The library's sandbox, which bounds neither memory nor the length of one operation."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: object, right: object
    ) -> object:
        """Refuse the operations by which a short template makes an endless string or number."""
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if (
                    isinstance(sequence, str | list | tuple)
                    and isinstance(times, int)
                    and len(sequence) * times > _MAX_REPEATED
                ):
                    _refuse(f"the template repeats a sequence {times} times")
        if operator == "**" and isinstance(right, int | float) and abs(right) > 64:  # noqa: PLR2004
            _refuse(f"the template raises a number to the power {right}")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            _refuse(f"the template formats with the width of {left!r}")
        return super().call_binop(context, operator, left, right)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    *,
    sort_keys: bool = False,
    ensure_ascii: bool = False,
) -> str:
    """Render a value as models were trained on it: no HTML escapes, no ASCII escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A conversation to the text the model was trained on.

    Args:
        source: The template's text.
        special_tokens: Names such as `bos_token` that the template may use.
        name: Where it came from, for messages.

    Raises:
        ModelError: The template has a syntax error.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str] | None = None,
        name: str = "chat template",
    ) -> None:
        self.source = source
        self.name = name
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"{name} has a syntax error in line {error.lineno}: {error.message}; "
                "correct the one in the model's folder"
            ) from error

    @classmethod
    def from_folder(
        cls, path: str | Path, *, special_tokens: Mapping[str, str] | None = None
    ) -> ChatTemplate | None:
        """Read chat_template.jinja, else `chat_template` of tokenizer_config.json.

        Returns:
            The template, or None where the folder has none (a base model).

        Raises:
            ModelError: The template has a syntax error, or a file is damaged.
        """
        folder = Path(path)
        file = folder / "chat_template.jinja"
        if file.is_file():
            try:
                source = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"{file} cannot be read: {error}") from error
            return cls(source, special_tokens=special_tokens, name=str(file))
        file = folder / "tokenizer_config.json"
        said = read_json_object_if_present(file).get("chat_template")
        if isinstance(said, list):
            named = {
                entry.get("name"): entry.get("template")
                for entry in said if isinstance(entry, dict)
            }
            said = named.get("default")
        if said is None:
            return None
        if not isinstance(said, str):
            raise ModelError(f"{file}: chat_template must be text, found {type(said).__name__}")
        return cls(said, special_tokens=special_tokens, name=f"chat_template of {file}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Render a conversation.

        Args:
            messages: Role and content each; content that is a list of text parts is joined.
            add_generation_prompt: End with the beginning of the assistant's turn.
            tools: Functions the model may call, for templates that show them.
            documents: Documents for templates that show them.
            template_kwargs: The template's own options, such as `enable_thinking`.
            continue_final_message: End inside the last message, an assistant's, right after its
                content; there is no generation prompt then.

        Raises:
            RequestError: The template refuses (its own message), or a message is malformed.
        """
        plain = [_plain_message(place, message) for place, message in enumerate(messages)]
        mark = ""
        if continue_final_message:
            # Found again whatever the template does around it: it may trim, or add a line end.
            mark = f"[end-{secrets.token_hex(16)}]"
            _mark_end(plain, mark)
        variables = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "messages": plain,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = self._render(variables)
        if not continue_final_message:
            return text
        end = text.rfind(mark)
        if end < 0:
            raise RequestError(
                "the chat template does not show the last message's content, so it cannot be "
                "continued; leave continue_final_message out", param="continue_final_message",
            )
        return text[:end]

    def _render(self, variables: Mapping[str, object]) -> str:
        deadline = time.monotonic() + MAX_RENDER_S
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    _refuse(f"the rendered conversation is over {MAX_RENDERED_CHARS} characters")
                if time.monotonic() > deadline:
                    _refuse(f"rendering took over {MAX_RENDER_S:g} s")
        except RecursionError:
            raise RequestError("the chat template recurses too deeply", param="messages") from None
        except jinja2.TemplateError as error:
            message = error.message or type(error).__name__
            raise RequestError(
                f"the chat template refuses: {message}", param="messages"
            ) from error
        except Exception as error:
            # The template's own code failed on these messages, e.g. indexed past a list's end.
            raise RequestError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error
        return "".join(parts)


def _mark_end(messages: Sequence[dict[str, Any]], mark: str) -> None:
    """Put a mark behind the content of the last message."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise RequestError(
            "continue_final_message needs a last message of the assistant with text; the last one "
            f"is of {last.get('role', 'nobody')}", param="continue_final_message",
        )
    last["content"] += mark


def _plain_message(place: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Give a message the form templates expect: text content, parsed tool arguments."""
    where = f"messages[{place}]"
    given: object = message
    if not isinstance(given, Mapping):
        raise RequestError(
            f"{where} is of type {type(given).__name__} but must have a role and content, such as "
            '{"role": "user", "content": "..."}', param="messages",
        )
    plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    if not isinstance(plain.get("role"), str):
        raise RequestError(f"{where} needs a role", param="messages")
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(_part_text(where, part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"{where}.content must be text or a list of parts, got {type(content).__name__}",
            param="messages",
        )
    if "reasoning" in plain:
        plain.setdefault("reasoning_content", plain["reasoning"])
    calls = plain.get("tool_calls")
    if calls is not None:
        plain["tool_calls"] = [_plain_call(where, call) for call in _list(where, calls)]
    return plain


def _list(where: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise RequestError(f"{where}.tool_calls must be a list", param="messages")
    return value


def _part_text(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text", None) and isinstance(text, str):
        return text
    raise RequestError(
        f"{where} has a content part of type {kind!r}; this model reads text only", param="messages"
    )


def _plain_call(where: str, call: object) -> dict[str, Any]:
    """Parse the arguments: clients send JSON text, templates loop over an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError(f"{where}.tool_calls needs a function in each call", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = (
                json.loads(arguments, parse_int=_number) if arguments.strip() else {}
            )
        except (ValueError, RecursionError) as error:
            fault = "nested too deeply" if isinstance(error, RecursionError) else "not JSON"
            raise RequestError(
                f"{where}.tool_calls: the arguments of {function.get('name')!r} are {fault}",
                param="messages",
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def _number(digits: str) -> int | float:
    """A whole number; one with more digits than Python makes a number of loses them."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)
