"""Anthropic's Messages API: bodies to conversations, outputs to its blocks and events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import Field

from headrace.errors import RequestError
from headrace.server.bodies import checked
from headrace.server.errors import shaped_error
from headrace.server.form_fields import refuse_form
from headrace.server.items import Item, ItemAnswer
from headrace.server.protocol import Body, ChatBody, Listed
from headrace.server.sse import json_text, named_event

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# A line that changes with every request and would keep prefixes from being found again.
_BILLING = "x-anthropic-billing-header"
_BLOCKS = {"reasoning": "thinking", "content": "text", "call": "tool_use"}
_MODES = {"auto": "auto", "any": "required", "none": "none"}


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens."""

    messages: Listed[dict[str, Any]] = Field(
        min_length=1,
        json_schema_extra={
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"enum": ["user", "assistant"]}},
            }
        },
    )
    system: str | Listed[dict[str, Any]] | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Listed[str] | None = None
    cache_salt: str | None = None
    cache_checkpoint: int | Listed[int] | None = None
    cache_pin: str | None = None


def chat_of(body: CountTokensBody) -> ChatBody:
    """The conversation that a body asks to go on with.

    Raises:
        RequestError: It holds what this server cannot read, by name.
    """
    messages = [*_system(body.system), *_turns(body.messages)]
    fields: dict[str, Any] = {
        "messages": messages,
        "tools": _tools(body.tools),
        "chat_template_kwargs": _thinking(body.thinking),
        "response_format": _form((body.output_config or {}).get("format")),
        **_choice(body.tool_choice),
    }
    if messages[-1]["role"] == "assistant":
        # The last words of the answer are given: it goes on behind them.
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        refuse_form(body, "output_config.format")
        fields |= {
            "max_tokens": body.max_tokens,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "cache_salt": body.cache_salt,
            "cache_checkpoint": body.cache_checkpoint,
            "cache_pin": body.cache_pin,
        }
    return checked(
        ChatBody, {name: value for name, value in fields.items() if value is not None}
    )


def _system(given: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": given}] if isinstance(given, str) else given or []
    texts = [_text("system", block) for block in blocks]
    kept = [text for text in texts if text and not text.startswith(_BILLING)]
    return [{"role": "system", "content": "\n\n".join(kept)}] if kept else []


def _turns(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise RequestError(
                f"{where} has the role {role!r:.100}; use user or assistant", param="messages"
            )
        if isinstance(content, str):
            turns.append({"role": role, "content": content})
        elif isinstance(content, list):
            turns += _assistant(where, content) if role == "assistant" else (
                _others(where, role, content)
            )
        else:
            raise RequestError(
                f"{where}.content must be text or a list of blocks", param="messages"
            )
    return turns


def _assistant(where: str, blocks: list[Any]) -> list[dict[str, Any]]:
    texts, reasoning, calls = [], [], []
    for block in blocks:
        kind = _kind(where, block)
        if kind == "tool_use":
            calls.append({
                "id": block.get("id"),
                "type": "function",
                "function": {
                    "name": block.get("name"), "arguments": json.dumps(block.get("input") or {}),
                },
            })
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(_text(where, block))
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        turn["reasoning_content"] = "".join(reasoning)
    if calls:
        turn["tool_calls"] = calls
    return [turn]


def _others(where: str, role: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """Results of tools are turns of their own, in their place among texts."""
    turns: list[dict[str, Any]] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            turns.append({"role": role, "content": "\n".join(texts)})
            texts.clear()

    for block in blocks:
        if _kind(where, block) != "tool_result":
            texts.append(_text(where, block))
            continue
        flush()
        content = block.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(_text(f"{where}.tool_result", part) for part in content)
        if block.get("is_error"):
            content = f"Error: {content}"
        turns.append(
            {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": str(content)}
        )
    flush()
    return turns or [{"role": role, "content": ""}]


def _kind(where: str, block: object) -> object:
    if not isinstance(block, dict):
        raise RequestError(f"{where} has a block that is no object", param="messages")
    return block.get("type")


def _text(where: str, block: Any) -> str:  # noqa: ANN401 - what a client sent
    if isinstance(block, dict) and block.get("type") == "text":
        text = block.get("text")
        if isinstance(text, str):
            return text
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__
    raise RequestError(
        f"{where} has a block of type {kind!r:.100}; this server reads text, tool_use, "
        "tool_result and thinking", param="system" if where == "system" else "messages",
    )


def _tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Functions of the client; tools that a vendor's servers would run cannot be called here."""
    own = [tool for tool in given or () if tool.get("type", "custom") == "custom"]
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
                # Templates show tools as they stand: only what holds is said.
                **({"strict": True} if tool.get("strict") is True else {}),
            },
        }
        for tool in own
    ] or None


def _choice(given: dict[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    fields: dict[str, Any] = {}
    if given.get("disable_parallel_tool_use") is True:
        fields["parallel_tool_calls"] = False
    mode = given.get("type")
    if mode == "tool":
        named = {"type": "function", "function": {"name": given.get("name")}}
        return {**fields, "tool_choice": named}
    if not isinstance(mode, str) or mode not in _MODES:
        raise RequestError(
            f"tool_choice is of type {mode!r:.100}; use auto, any, tool or none",
            param="tool_choice",
        )
    return {**fields, "tool_choice": _MODES[mode]}


def _thinking(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    return {"enable_thinking": given.get("type") != "disabled"}


def _form(given: object) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        raise RequestError(
            "output_config.format must be of type json_schema", param="output_config"
        )
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


class MessagesAnswer(ItemAnswer):
    """Answers of /v1/messages; see `ItemAnswer`."""

    def error(self, body: dict[str, Any]) -> bytes:
        """The last event of a stream that fails."""
        return named_event(shaped_error(body))

    def _begin_events(self) -> bytes:
        message = {
            **self._head(), "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": self._usage(),
        }
        return named_event({"type": "message_start", "message": message})

    def _item_begin(self, item: Item) -> bytes:
        empty = self._block(item) | {"text": "", "thinking": "", "input": {}}
        block = {name: empty[name] for name in self._block(item)}
        return named_event({
            "type": "content_block_start", "index": item.index, "content_block": block
        })

    def _item_text(self, item: Item, text: str) -> bytes:
        kind, field = {
            "content": (b"text_delta", b"text"),
            "reasoning": (b"thinking_delta", b"thinking"),
            "call": (b"input_json_delta", b"partial_json"),
        }[item.kind]
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":%b}}\n\n' % (item.index, kind, field, json_text(text))
        )

    def _item_end(self, item: Item) -> bytes:
        return named_event({"type": "content_block_stop", "index": item.index})

    def _end_events(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return named_event(delta) + named_event({"type": "message_stop"})

    def _body(self) -> dict[str, Any]:
        content = [self._block(item) for item in self.items]
        return {**self._head(), "content": content, **self._stop(), "usage": self._usage()}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.request_id, "type": "message", "role": "assistant", "model": self._model
        }

    def _block(self, item: Item) -> dict[str, Any]:
        kind = _BLOCKS[item.kind]
        if item.call is not None:
            # As the model wrote it: a parser would lose numbers, or stop at them.
            return {
                "type": kind, "id": f"toolu_{item.name}", "name": item.call.name,
                "input": orjson.Fragment(item.call.arguments),
            }
        if item.kind == "reasoning":
            return {"type": kind, "thinking": item.text, "signature": ""}
        return {"type": kind, "text": item.text}

    def _stop(self) -> dict[str, Any]:
        """Why it ended; an answer that was cut off says that it is not whole."""
        assert self.last is not None, "the answer has ended"
        text = self.last.stop_reason
        if self.last.finish_reason in ("length", "abort"):
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(text, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": text}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Counts; input_tokens are those that were computed, as this API has it."""
        num_prompt = len(self._work.prompt.token_ids)
        return {
            "input_tokens": num_prompt - self._num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": self._num_tokens,
        }
