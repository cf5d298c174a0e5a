"""Outputs of the engine in OpenAI's words: whole answers and chunks of streams.

Chunks are put together from bytes that do not change during a stream; nothing passes through a
model class on the way out.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import orjson

from headrace.server.logprobs import CompletionLogprobs, chat_logprobs
from headrace.server.sse import DONE, error_event, event, json_text, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.dialects import Call, OutputParser, Piece
    from headrace.outputs import CompletionOutput, RequestOutput
    from headrace.server.forms import OutputForm
    from headrace.server.generation import Work
    from headrace.text import Tokenizer


class Answer(ABC):
    """One answer under way: choices of all prompts, and the count of tokens.

    Args:
        request_id: Shown as `id`.
        model: Name shown to the client.
        works: The prompts, in the order of their choices.
        tokenizer: None if the model has none.
        include_usage: End a stream with the count of tokens.

    Attributes:
        request_id: As given.
    """

    chunk_object: str

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        works: Sequence[Work],
        tokenizer: Tokenizer | None,
        include_usage: bool = False,
    ) -> None:
        self.request_id = request_id
        self._works = works
        self._tokenizer = tokenizer
        self._include_usage = include_usage
        self._base = {"id": request_id, "created": int(time.time()), "model": model}
        head = orjson.dumps({**self._base, "object": self.chunk_object})
        self._chunk_head = b"data: " + one_line(head)[:-1] + b',"choices":[{"index":'
        self._num_completion_tokens = 0
        self._num_cached = [0] * len(works)
        self._missed: list[dict[str, int]] = [{}] * len(works)
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def chunks(self, place: int, output: RequestOutput) -> bytes:
        """Events for one output of a stream; may be none.

        Args:
            place: Which of the request's prompts.
            output: What is new.
        """
        self._num_cached[place] = output.num_cached_tokens
        self._missed[place] = output.missed_tokens
        events = b""
        for choice in output.outputs:
            index = self._index(place, choice)
            if index in self._ended:
                continue
            if index not in self._begun:
                self._begun.add(index)
                events += self._first_chunk(index, place, output)
            self._num_completion_tokens += len(choice.token_ids)
            if (
                choice.text
                or choice.finish_reason is not None
                or (choice.logprobs and self._wants_logprobs(place))
            ):
                events += self._text_chunk(index, place, choice)
            if choice.finish_reason is not None:
                self._ended.add(index)
                events += self._last_chunk(index, choice)
        return events

    def end(self) -> bytes:
        """Events that end a stream."""
        if not self._include_usage:
            return DONE
        chunk = {**self._base, "object": self.chunk_object, "choices": [], "usage": self.usage()}
        return event(chunk) + DONE

    def error(self, body: dict[str, Any]) -> bytes:
        """The last event of a stream that fails."""
        return error_event(body)

    def whole(self, outputs: Sequence[tuple[int, RequestOutput]]) -> dict[str, Any]:
        """The answer in one piece.

        Args:
            outputs: Place of the prompt and its last output, for each choice at least once.
        """
        choices: dict[int, dict[str, Any]] = {}
        num_tokens: dict[int, int] = {}
        for place, output in outputs:
            self._num_cached[place] = output.num_cached_tokens
            self._missed[place] = output.missed_tokens
            for choice in output.outputs:
                index = self._index(place, choice)
                num_tokens[index] = len(choice.token_ids)
                choices[index] = {
                    "index": index,
                    **self._whole_choice(place, output, choice),
                    "stop_reason": choice.stop_reason,
                }
        self._num_completion_tokens = sum(num_tokens.values())
        return {
            **self._base,
            "object": self.chunk_object.removesuffix(".chunk"),
            "choices": [choices[index] for index in sorted(choices)],
            "usage": self.usage(),
            "system_fingerprint": None,
        }

    def usage(self) -> dict[str, Any]:
        """Counts of tokens; `missed_tokens` says why prompt tokens were computed."""
        num_prompt = sum(len(work.prompt.token_ids) for work in self._works)
        missed: dict[str, int] = {}
        for reasons in self._missed:
            for reason, count in reasons.items():
                missed[reason] = missed.get(reason, 0) + count
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": num_prompt + self._num_completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(self._num_cached),
                "missed_tokens": missed,
            },
        }

    def _index(self, place: int, choice: CompletionOutput) -> int:
        return place * self._works[place].params.n + choice.index

    def _wants_logprobs(self, place: int) -> bool:
        return self._works[place].params.logprobs is not None

    def _chunk(self, index: int, fields: bytes, finish: bytes = b"null") -> bytes:
        return b'%b%d,%b,"finish_reason":%b}]}\n\n' % (self._chunk_head, index, fields, finish)

    @abstractmethod
    def _first_chunk(self, index: int, place: int, output: RequestOutput) -> bytes: ...

    @abstractmethod
    def _text_chunk(self, index: int, place: int, choice: CompletionOutput) -> bytes: ...

    @abstractmethod
    def _last_chunk(self, index: int, choice: CompletionOutput) -> bytes: ...

    @abstractmethod
    def _whole_choice(
        self, place: int, output: RequestOutput, choice: CompletionOutput
    ) -> dict[str, Any]: ...


def _finish(choice: CompletionOutput, reason: str) -> bytes:
    """The end of a chunk with a finish reason, and vLLM's field that says which stop it was."""
    return b'"%b","stop_reason":%b' % (
        reason.encode(), one_line(orjson.dumps(choice.stop_reason))
    )


class ChatAnswer(Answer):
    """Answers of /v1/chat/completions.

    Args:
        form: How the outputs are written.
        reasoning_field: Name of the field of reasoning, or both.
        arguments: See `Answer`.
    """

    chunk_object = "chat.completion.chunk"

    def __init__(
        self, *, form: OutputForm, reasoning_field: str, **arguments: Any  # noqa: ANN401
    ) -> None:
        super().__init__(**arguments)
        self._form = form
        self._reasoning_fields = (
            ("reasoning_content", "reasoning") if reasoning_field == "both" else (reasoning_field,)
        )
        self._parsers: dict[int, OutputParser] = {}

    def _first_chunk(self, index: int, place: int, output: RequestOutput) -> bytes:
        del place, output
        self._parsers[index] = self._form.parser()
        return self._chunk(
            index, b'"delta":{"role":"assistant","content":""},"logprobs":null'
        )

    def _text_chunk(self, index: int, place: int, choice: CompletionOutput) -> bytes:
        logprobs = self._logprobs(place, choice) if choice.logprobs else None
        told = b"null" if logprobs is None else one_line(orjson.dumps(logprobs))
        parser = self._parsers[index]
        if parser.is_plain:
            if not choice.text and logprobs is None:
                return b""
            fields = b'"delta":{"content":%b},"logprobs":%b' % (json_text(choice.text), told)
            return self._chunk(index, fields)
        num_calls = parser.num_calls
        pieces = parser.feed(choice.text)
        if choice.finish_reason is not None:
            pieces += parser.finish()
        deltas = self._deltas(pieces, num_calls)
        if not deltas and logprobs is not None:
            deltas = [{"content": ""}]
        chunks = b""
        for delta in deltas:
            fields = b'"delta":%b,"logprobs":%b' % (one_line(orjson.dumps(delta)), told)
            chunks += self._chunk(index, fields)
            told = b"null"  # The tokens' values are told once, with the first of their chunks.
        return chunks

    def _deltas(self, pieces: Sequence[Piece], num_calls: int) -> list[dict[str, Any]]:
        """One delta per piece; each has content, without which some clients fail."""
        deltas: list[dict[str, Any]] = []
        for piece in pieces:
            if piece.call is not None:
                call = {"index": num_calls, **_call(piece.call)}
                deltas.append({"content": "", "tool_calls": [call]})
                num_calls += 1
            elif piece.kind == "reasoning":
                deltas.append({"content": "", **dict.fromkeys(self._reasoning_fields, piece.text)})
            else:
                deltas.append({"content": piece.text})
        return deltas

    def _last_chunk(self, index: int, choice: CompletionOutput) -> bytes:
        # Content is there although empty: some clients fail on a delta without it.
        reason = _finish_reason(choice, self._parsers[index])
        return self._chunk(
            index, b'"delta":{"content":""},"logprobs":null', _finish(choice, reason)
        )

    def _whole_choice(
        self, place: int, output: RequestOutput, choice: CompletionOutput
    ) -> dict[str, Any]:
        del output
        parser = self._form.parser()
        pieces = [*parser.feed(choice.text), *parser.finish()]
        texts = {
            kind: "".join(piece.text for piece in pieces if piece.kind == kind)
            for kind in ("reasoning", "content")
        }
        calls = [_call(piece.call) for piece in pieces if piece.call is not None]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": texts["content"] or (None if calls else ""),
            "refusal": None,
        }
        if texts["reasoning"]:
            message.update(dict.fromkeys(self._reasoning_fields, texts["reasoning"]))
        if calls:
            message["tool_calls"] = calls
        return {
            "message": message,
            "logprobs": self._logprobs(place, choice),
            "finish_reason": _finish_reason(choice, parser),
        }

    def _logprobs(self, place: int, choice: CompletionOutput) -> dict[str, Any] | None:
        top = self._works[place].params.logprobs
        if top is None or choice.logprobs is None:
            return None
        return chat_logprobs(
            choice.token_ids, choice.logprobs, top=top, tokenizer=self._tokenizer
        )


def _call(call: Call) -> dict[str, Any]:
    """A call in OpenAI's words, with an id of its own."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _finish_reason(choice: CompletionOutput, parser: OutputParser) -> str:
    reason = str(choice.finish_reason)
    return "tool_calls" if reason == "stop" and parser.num_calls else reason


class CompletionAnswer(Answer):
    """Answers of /v1/completions.

    Args:
        echo: Begin each text with the prompt.
        is_scoring: The client asked for no new tokens, only for the prompt's log-probabilities.
        num_returned: Completions of each prompt to return; None for all that are drawn.
        wants_logprobs: Whether to return log-probabilities, if the parameters ask for them.
        arguments: See `Answer`.
    """

    chunk_object = "text_completion"

    def __init__(
        self,
        *,
        echo: bool = False,
        is_scoring: bool = False,
        num_returned: int | None = None,
        wants_logprobs: bool = True,
        **arguments: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**arguments)
        self._echo = echo
        self._is_scoring = is_scoring
        self._num_returned = num_returned
        self._may_have_logprobs = wants_logprobs
        self._scores: dict[int, float] = {}
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def _first_chunk(self, index: int, place: int, output: RequestOutput) -> bytes:
        if not self._echo:
            return b""
        logprobs = self._prompt_logprobs(index, place, output)
        return self._text_and_logprobs(index, self._prompt_text(place), logprobs)

    def _text_chunk(self, index: int, place: int, choice: CompletionOutput) -> bytes:
        logprobs = self._new_logprobs(index, place, choice)
        if self._is_scoring or not (choice.text or choice.logprobs):
            return b""
        return self._text_and_logprobs(index, choice.text, logprobs)

    def _last_chunk(self, index: int, choice: CompletionOutput) -> bytes:
        finish = _finish(choice, str(choice.finish_reason))
        return self._chunk(index, b'"text":"","logprobs":null', finish)

    def whole(self, outputs: Sequence[tuple[int, RequestOutput]]) -> dict[str, Any]:
        """See `Answer`; of more samples than are returned, those with the likeliest tokens."""
        answer = super().whole(outputs)
        if self._num_returned is None:
            return answer
        best: list[dict[str, Any]] = []
        for place in range(len(self._works)):
            drawn = [each for each in answer["choices"] if self._place(each["index"]) == place]
            drawn.sort(key=lambda each: self._scores[each["index"]], reverse=True)
            best += drawn[: self._num_returned]
        for index, each in enumerate(best):
            each["index"] = index
        return answer | {"choices": best}

    def _place(self, index: int) -> int:
        return index // self._works[0].params.n

    def _whole_choice(
        self, place: int, output: RequestOutput, choice: CompletionOutput
    ) -> dict[str, Any]:
        index = self._index(place, choice)
        if choice.cumulative_logprob is not None and choice.token_ids:
            self._scores[index] = choice.cumulative_logprob / len(choice.token_ids)
        else:
            self._scores[index] = float("-inf")
        text = "" if self._is_scoring else choice.text
        parts = []
        if self._echo:
            text = self._prompt_text(place) + text
            parts.append(self._prompt_logprobs(index, place, output))
        if not self._is_scoring:
            parts.append(self._new_logprobs(index, place, choice))
        return {
            "text": text, "logprobs": _joined(parts), "finish_reason": choice.finish_reason
        }

    def _wants_logprobs(self, place: int) -> bool:
        return self._may_have_logprobs and super()._wants_logprobs(place)

    def usage(self) -> dict[str, Any]:
        """Counts of tokens; a step taken only to score a prompt is not counted."""
        if self._is_scoring:
            self._num_completion_tokens = 0
        return super().usage()

    def _text_and_logprobs(
        self, index: int, text: str, logprobs: dict[str, list[Any]] | None
    ) -> bytes:
        fields = b'"text":%b,"logprobs":%b' % (
            json_text(text),
            b"null" if logprobs is None else one_line(orjson.dumps(logprobs)),
        )
        return self._chunk(index, fields)

    def _prompt_text(self, place: int) -> str:
        prompt = self._works[place].prompt
        if prompt.text is not None:
            return prompt.text
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _prompt_logprobs(
        self, index: int, place: int, output: RequestOutput
    ) -> dict[str, list[Any]] | None:
        if output.prompt_logprobs is None:
            return None
        ids = self._works[place].prompt.token_ids
        return self._entries(index, place).of(ids, output.prompt_logprobs)

    def _new_logprobs(
        self, index: int, place: int, choice: CompletionOutput
    ) -> dict[str, list[Any]] | None:
        if choice.logprobs is None or not self._wants_logprobs(place):
            return None
        return self._entries(index, place).of(choice.token_ids, choice.logprobs)

    def _entries(self, index: int, place: int) -> CompletionLogprobs:
        if index not in self._logprobs:
            top = self._works[place].params.logprobs or 0
            self._logprobs[index] = CompletionLogprobs(top=top, tokenizer=self._tokenizer)
        return self._logprobs[index]


def _joined(parts: Sequence[dict[str, list[Any]] | None]) -> dict[str, list[Any]] | None:
    joined: dict[str, list[Any]] | None = None
    for part in parts:
        if part is None:
            continue
        if joined is None:
            joined = part
        else:
            for name, values in part.items():
                joined[name] += values
    return joined
