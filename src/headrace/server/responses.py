"""OpenAI's Responses API, without a store: bodies to conversations, outputs to items and events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pydantic import Field

from headrace.errors import RequestError
from headrace.server.bodies import checked
from headrace.server.form_fields import refuse_form
from headrace.server.items import Item, ItemAnswer
from headrace.server.protocol import ChatBody, Listed, SamplingBody
from headrace.server.sse import json_text, named_event

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PREFIXES = {"reasoning": "rs_", "content": "msg_", "call": "fc_"}
_REFUSED = {
    "previous_response_id": "responses are not stored; send the whole conversation in input",
    "conversation": "conversations are not stored; send the whole conversation in input",
    "prompt": "prompt templates are not stored; send instructions and input",
    "background": "a response in the background would have to be stored; leave it out",
    "store": "responses are not stored; send store false",
    "top_logprobs": "log-probabilities are not part of responses here; use /v1/chat/completions",
}
_SAME_NAMES = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens",
    "include_stop_str_in_output", "cache_salt", "cache_checkpoint", "cache_pin",
    "parallel_tool_calls", "chat_template_kwargs",
)
_OTHER_NAMES = {"max_tokens": "max_output_tokens"}
# Reasoning comes back whole in its items, so nothing has to be encrypted to be sent again.
_INCLUDED_ANYWAY = ("reasoning.encrypted_content",)


class ResponsesBody(SamplingBody):
    """POST /v1/responses."""

    input: str | Listed[dict[str, Any]] = Field(description="Text, or the items so far.")
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    include: Listed[str] | None = None


def chat_of(body: ResponsesBody) -> ChatBody:
    """The conversation that a body asks to go on with.

    Raises:
        RequestError: It asks for what needs a store, or holds what this server cannot read.
    """
    for name, remedy in _REFUSED.items():
        if getattr(body, name):
            raise RequestError(f"{name} is not supported: {remedy}", param=name)
    _refuse_others(body)
    fields = {name: getattr(body, name) for name in _SAME_NAMES}
    tools, choice = _choice(_tools(body.tools), body.tool_choice)
    fields |= {
        "messages": _messages(body),
        "tools": tools or None,
        "tool_choice": choice,
        "max_tokens": body.max_output_tokens,
        "reasoning_effort": _effort(body.reasoning),
        "response_format": _form((body.text or {}).get("format")),
    }
    return checked(
        ChatBody, {name: value for name, value in fields.items() if value is not None}
    )


def _refuse_others(body: ResponsesBody) -> None:
    """Refuse what would change the answer, and is not there or has another name here."""
    refuse_form(body, "text.format")
    for name, other in _OTHER_NAMES.items():
        if getattr(body, name) is not None:
            raise RequestError(
                f"{name} is not a field of /v1/responses; use {other}", param=name
            )
    if body.n not in (None, 1):
        raise RequestError(
            f"n is {body.n}, but a response has one answer; use /v1/chat/completions", param="n"
        )
    if body.truncation not in (None, "disabled"):
        raise RequestError(
            f"truncation is {body.truncation!r:.100}, but nothing is left out of a conversation "
            "here; use disabled, and shorten the input where it is too long", param="truncation",
        )
    for one in body.include or ():
        if one not in _INCLUDED_ANYWAY:
            raise RequestError(
                f"include has {one!r:.100}, which this server does not have; leave it out",
                param="include",
            )


def _effort(reasoning: dict[str, Any] | None) -> str | None:
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise RequestError(
            f"reasoning.effort must be text, got {effort!r:.100}", param="reasoning"
        )
    return effort


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = (
        [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    )
    messages = list(_turns(items))
    leading = [] if body.instructions is None else [body.instructions]
    # Templates know one system turn, at the beginning: what stands there becomes one.
    while messages and messages[0]["role"] == "system":
        leading.append(_plain(messages.pop(0)["content"]))
    if leading:
        messages.insert(0, {"role": "system", "content": "\n\n".join(leading)})
    if all(message["role"] == "system" for message in messages):
        raise RequestError("input is empty; give at least one message", param="input")
    return messages


def _turns(items: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Messages; reasoning, text and calls of one answer are one message of the assistant."""
    answer: dict[str, Any] | None = None
    for place, item in enumerate(items):
        where = f"input[{place}]"
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            if answer is not None:
                yield answer
                answer = None
            yield _message(where, item)
        elif kind == "function_call_output":
            if answer is not None:
                yield answer
                answer = None
            output = item.get("output")
            yield {
                "role": "tool", "tool_call_id": item.get("call_id"), "content": _plain(output)
            }
        elif kind in ("message", "function_call", "reasoning"):
            if answer is not None and kind == "reasoning":
                yield answer
                answer = None
            answer = _add(answer or {"role": "assistant", "content": ""}, kind, item)
        else:
            raise RequestError(
                f"{where} is of type {kind!r:.100}; this server reads message, function_call, "
                "function_call_output and reasoning", param="input",
            )
    if answer is not None:
        yield answer


def _message(where: str, item: dict[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if role not in ("user", "system", "developer"):
        raise RequestError(
            f"{where} has the role {role!r:.100}; use user, assistant, system or developer",
            param="input",
        )
    return {
        "role": "system" if role == "developer" else role, "content": _plain(item.get("content"))
    }


def _add(answer: dict[str, Any], kind: str, item: dict[str, Any]) -> dict[str, Any]:
    if kind == "message":
        answer["content"] += _plain(item.get("content"))
    elif kind == "reasoning":
        text = _plain(item.get("content") or item.get("summary") or "")
        if text:
            answer["reasoning_content"] = answer.get("reasoning_content", "") + text
    else:
        answer.setdefault("tool_calls", []).append({
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments") or "{}"},
        })
    return answer


def _plain(content: object) -> str:
    """Text of a content: text itself, or parts with text in them."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"input has a content part of type {kind!r:.100}; this model reads text only",
                param="input",
            )
        texts.append(text)
    return "\n".join(texts)


def _tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Functions; clients also list tools that only the vendor's servers run, which are left out."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description") or "",
                "parameters": tool.get("parameters") or {"type": "object", "properties": {}},
                # Templates show tools as they stand: only what holds is said.
                **({"strict": True} if tool.get("strict") is True else {}),
            },
        }
        for tool in given or () if tool.get("type") == "function"
    ]


def _choice(
    tools: list[dict[str, Any]], given: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    if not isinstance(given, dict):
        return tools, given
    if given.get("type") == "function":
        return tools, {"type": "function", "function": {"name": given.get("name")}}
    if given.get("type") == "allowed_tools":
        listed = given.get("tools")
        names = [
            one.get("name") for one in (listed if isinstance(listed, list) else ())
            if isinstance(one, dict)
        ]
        allowed = [tool for tool in tools if tool["function"]["name"] in names]
        return allowed, str(given.get("mode", "auto"))
    raise RequestError(
        f"tool_choice is of type {given.get('type')!r:.100}; use auto, none, required, function or "
        "allowed_tools", param="tool_choice",
    )


def _form(given: object) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise RequestError("text.format must be an object", param="text")
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


class ResponsesAnswer(ItemAnswer):
    """Answers of /v1/responses.

    Args:
        body: The request, parts of which are repeated.
        arguments: See `ItemAnswer`.
    """

    def __init__(self, *, body: ResponsesBody, **arguments: Any) -> None:  # noqa: ANN401
        super().__init__(**arguments)
        self._created = int(time.time())
        self._request = body
        self._num_events = 0

    def error(self, body: dict[str, Any]) -> bytes:
        """The last event of a stream that fails, with the fields of either form of clients."""
        error = body["error"]
        return self._event({
            "type": "error", "code": str(error["code"]), "message": error["message"],
            "param": error["param"], "error": error,
        })

    def _event(self, fields: dict[str, Any]) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event({**fields, "sequence_number": number})

    def _begin_events(self) -> bytes:
        response = self._response("in_progress")
        return self._event({"type": "response.created", "response": response}) + self._event(
            {"type": "response.in_progress", "response": response}
        )

    def _item_begin(self, item: Item) -> bytes:
        shown = self._shown(item, "in_progress") | ({"content": []} if item.call is None else {})
        if item.call is not None:
            shown["arguments"] = ""
        events = self._event(
            {"type": "response.output_item.added", "output_index": item.index, "item": shown}
        )
        if item.call is None:
            events += self._event({
                "type": "response.content_part.added", **self._place(item), "content_index": 0,
                "part": _part(item, ""),
            })
        return events

    def _item_text(self, item: Item, text: str) -> bytes:
        kind = {
            "content": b"response.output_text.delta",
            "reasoning": b"response.reasoning_text.delta",
            "call": b"response.function_call_arguments.delta",
        }[item.kind]
        extra = {
            "content": b'"content_index":0,"logprobs":[],', "reasoning": b'"content_index":0,',
            "call": b"",
        }[item.kind]
        number = self._num_events
        self._num_events += 1
        return (
            b'event: %b\ndata: {"type":"%b","item_id":"%b","output_index":%d,%b"delta":%b,'
            b'"sequence_number":%d}\n\n'
            % (kind, kind, self._id(item).encode(), item.index, extra, json_text(text), number)
        )

    def _item_end(self, item: Item) -> bytes:
        place = self._place(item)
        if item.call is not None:
            events = self._event({
                "type": "response.function_call_arguments.done", **place,
                "name": item.call.name, "arguments": item.text,
            })
        else:
            kind = "output_text" if item.kind == "content" else "reasoning_text"
            told: dict[str, Any] = {"logprobs": []} if item.kind == "content" else {}
            events = self._event({
                "type": f"response.{kind}.done", **place, "content_index": 0, "text": item.text,
                **told,
            })
            events += self._event({
                "type": "response.content_part.done", **place, "content_index": 0,
                "part": _part(item, item.text),
            })
        return events + self._event({
            "type": "response.output_item.done", "output_index": item.index,
            "item": self._shown(item, "completed"),
        })

    def _end_events(self) -> bytes:
        response = self._body()
        return self._event({"type": f"response.{response['status']}", "response": response})

    def _body(self) -> dict[str, Any]:
        assert self.last is not None, "the answer has ended"
        is_cut = self.last.finish_reason in ("length", "abort")
        response = self._response("incomplete" if is_cut else "completed")
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["output"] = [self._shown(item, "completed") for item in self.items]
        num_prompt = len(self._work.prompt.token_ids)
        response["usage"] = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": num_prompt + self._num_tokens,
        }
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body, params = self._request, self._work.params
        return {
            "id": self.request_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _id(self, item: Item) -> str:
        return _PREFIXES[item.kind] + item.name

    def _place(self, item: Item) -> dict[str, Any]:
        return {"item_id": self._id(item), "output_index": item.index}

    def _shown(self, item: Item, status: str) -> dict[str, Any]:
        head = {"id": self._id(item), "status": status}
        if item.call is not None:
            return {
                **head, "type": "function_call", "call_id": f"call_{item.name}",
                "name": item.call.name, "arguments": item.text,
            }
        content = [_part(item, item.text)]
        if item.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}


def _part(item: Item, text: str) -> dict[str, Any]:
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
