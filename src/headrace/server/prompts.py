"""Prompts to token ids, away from the event loop, hopeless ones refused by their size."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from headrace.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.server.protocol import ChatBody
    from headrace.text import ChatTemplate, Tokenizer

_LARGE_CHARS = 1 << 16
_PROBE_CHARS_PER_TOKEN = 8
_PROBE_SLACK = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request.

    Attributes:
        token_ids: What the engine gets.
        text: As the client wrote it, or None if it sent ids.
    """

    token_ids: list[int]
    text: str | None


class PromptModel(Protocol):
    """What must be known of a model to read its prompts; an engine is one.

    Attributes:
        model_name: Name that clients use.
        max_model_len: Most tokens in a sequence, prompt and output.
        vocab_size: Token ids are below it.
    """

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Text to tokens; None for a model that takes tokens only."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """Conversation to text."""

    @property
    def model_name(self) -> str: ...  # noqa: D102

    @property
    def max_model_len(self) -> int: ...  # noqa: D102

    @property
    def vocab_size(self) -> int: ...  # noqa: D102


class PromptReader:
    """Tokenises and renders in threads: small texts never wait for a huge one.

    Args:
        engine: The model: its tokenizer, template and limits are used.
    """

    def __init__(self, engine: PromptModel) -> None:
        self._engine = engine
        self._small = ThreadPoolExecutor(2, thread_name_prefix="headrace-text")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="headrace-long-text")

    def close(self) -> None:
        """End the threads; what they have begun is finished."""
        self._small.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: It has none.
        """
        if self._engine.tokenizer is None:
            raise RequestError(
                f"model {self._engine.model_name!r} has no tokenizer, so it takes prompts as token "
                "ids only; start the server with --tokenizer to use text",
                param="prompt",
            )
        return self._engine.tokenizer

    async def of_completion(
        self, value: object, *, max_prompts: int, add_special_tokens: bool = True
    ) -> list[Prompt]:
        """Read the `prompt` field: text, ids, or a list of either.

        Raises:
            RequestError: It is none of these, empty, too long, or has ids out of range.
        """
        prompts = await self.convert(partial(split_prompts, value), value)
        if len(prompts) > max_prompts:
            raise RequestError(
                f"prompt has {len(prompts)} prompts but at most {max_prompts} are allowed; "
                "send several requests",
                param="prompt",
            )
        read = []
        for prompt in prompts:
            if isinstance(prompt, str):
                ids = await self.tokenise(
                    prompt, add_special_tokens=add_special_tokens, param="prompt"
                )
                read.append(Prompt(ids, prompt))
            else:
                # Before the ids are looked at, which takes as long as there are many.
                self.check_length(prompt, param="prompt")
                self.check_ids(prompt, param="prompt")
                read.append(Prompt(prompt, None))
                # Others have their turn in between: many long lists take a while.
                await asyncio.sleep(0)
        for one in read:
            self.check_length(one.token_ids, param="prompt")
        return read

    async def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> Prompt:
        """Render and tokenise a conversation; the template writes BOS, so none is added.

        Raises:
            RequestError: The template refuses, the model has none, or the result is too long.
        """
        _ = self.tokenizer
        template = self._engine.chat_template
        if template is None:
            raise RequestError(
                f"model {self._engine.model_name!r} has no chat template; use /v1/completions or "
                "put a chat_template.jinja into its folder",
                param="messages",
            )
        render = partial(
            template.render, messages, add_generation_prompt=add_generation_prompt, tools=tools,
            documents=documents, template_kwargs=template_kwargs,
            continue_final_message=continue_final_message,
        )
        text = await self._run(render, _size_of(messages, tools, documents, template_kwargs))
        ids = await self.tokenise(text, add_special_tokens=False, param="messages")
        return Prompt(ids, text)

    async def of_chat_body(self, body: ChatBody) -> Prompt:
        """Render and tokenise the conversation of a checked body; raises as `of_chat` does."""
        kwargs = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        return await self.of_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            tools=body.tools,
            documents=body.documents,
            template_kwargs=kwargs,
            continue_final_message=bool(body.continue_final_message),
        )

    async def tokenise(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text.

        Raises:
            RequestError: It has surely more tokens than fit.
        """
        work = partial(self._tokenise, text, add_special_tokens=add_special_tokens, param=param)
        return await self._run(work, len(text))

    async def detokenise(self, ids: list[int]) -> str:
        """Text of token ids, special tokens included."""
        def work() -> str:
            self.check_ids(ids, param="tokens")
            return self.tokenizer.decode(ids, skip_special_tokens=False)

        return await self._run(work, len(ids))

    async def convert(self, work: Callable[[], T], *read: object) -> T:
        """Do what takes as long as what it reads is large: at once, or in a thread.

        Args:
            work: What to do.
            read: The JSON values that it reads.
        """
        size = _size_of(*read)
        return await self._run(work, size) if size > _LARGE_CHARS else work()

    def check_ids(self, ids: list[int], *, param: str) -> None:
        """Refuse ids that the model does not have."""
        size = self._engine.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            wrong = next(token for token in ids if not 0 <= token < size)
            raise RequestError(
                f"{param} has the token id {wrong} but ids are in 0..{size - 1}", param=param
            )

    def check_length(self, ids: list[int], *, param: str) -> None:
        """Refuse a prompt that is empty or leaves no room for a token."""
        limit = self._engine.max_model_len
        if not ids:
            raise RequestError(f"{param} is empty; give at least one token", param=param)
        if len(ids) >= limit:
            raise RequestError(
                f"{param} has {len(ids)} tokens but max_model_len is {limit}, which includes at "
                "least one token of output; shorten the prompt or raise max_model_len",
                param=param,
            )

    def _tokenise(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        tokenizer = self.tokenizer
        limit = self._engine.max_model_len
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise RequestError(
                f"{param} has half of a surrogate pair, which is no character", param=param
            ) from None
        least = tokenizer.min_tokens_of(num_bytes)
        probe = limit * _PROBE_CHARS_PER_TOKEN
        if least <= limit and len(text) > 2 * probe:
            # Most texts of this length are far too long: count the beginning before all of it.
            least = len(tokenizer.encode(text[:probe])) - _PROBE_SLACK
        if least > limit:
            raise RequestError(
                f"{param} has {len(text)} characters, at least {least} tokens, but max_model_len "
                f"is {limit}; shorten the prompt or raise max_model_len",
                param=param,
            )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def _run(self, work: Callable[[], T], size: int) -> T:
        pool = self._large if size > _LARGE_CHARS else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work)


def split_prompts(value: object) -> list[str | list[int]]:
    """Tell apart the four forms of a `prompt` field.

    Raises:
        RequestError: It has none of them.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if all(isinstance(item, str) or (isinstance(item, list) and _is_ids(item))
               for item in value):
            return value
    if value is None or value == []:
        raise RequestError("prompt is missing or empty", param="prompt")
    raise RequestError(
        "prompt must be text, a list of token ids, or a list of either", param="prompt"
    )


def _is_ids(value: list[object]) -> bool:
    # All at once: a body may have millions of them.
    return set(map(type, value)) <= {int}


def _size_of(*parts: object) -> int:
    """Characters of all texts in JSON values, and one for each value; not past what is large."""
    size = 0
    left = list(parts)
    while left and size <= _LARGE_CHARS:
        one = left.pop()
        size += 1
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, dict):
            left += one
            left += one.values()
        elif isinstance(one, list):
            # Not more of a list than is asked about: it may have millions.
            left += one[: _LARGE_CHARS + 1]
    return size
