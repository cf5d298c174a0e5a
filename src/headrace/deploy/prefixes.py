"""From a request's body to the keys of its prompt's prefixes, without the model's weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace.deploy.routing import KEY_BYTES
from headrace.engine.load import load_template, load_tokenizer
from headrace.engine.prefix_cache import chain_keys, last_reusable_boundary, root_key
from headrace.errors import RequestError
from headrace.models.config import ModelConfig
from headrace.server import messages, responses
from headrace.server.messages import MessagesBody
from headrace.server.prompts import PromptReader
from headrace.server.protocol import ChatBody, CompletionBody
from headrace.server.responses import ResponsesBody
from headrace.weights import read_config
from headrace.weights.resolve import resolve_model

if TYPE_CHECKING:
    from headrace.config import EngineConfig
    from headrace.server.bodies import BodyReader
    from headrace.server.protocol import SamplingBody
    from headrace.text import ChatTemplate, Tokenizer

_MAX_KEYS = 4096
"""Most boundaries that are looked at; a prefix beyond them counts as not shared."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextModel:
    """What reading prompts needs of a model; see `headrace.server.prompts.PromptModel`."""

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    model_name: str
    max_model_len: int
    vocab_size: int

    @classmethod
    def load(cls, config: EngineConfig) -> TextModel:
        """Read tokenizer, template and sizes of a config's model.

        Raises:
            ModelError: The folder cannot be used.
        """
        folder = resolve_model(config.model)
        sizes = ModelConfig.from_dict(read_config(folder))
        tokenizer = load_tokenizer(config, folder)
        return cls(
            tokenizer=tokenizer,
            chat_template=load_template(folder, tokenizer),
            model_name=config.served_model_name or config.model,
            max_model_len=config.max_model_len or sizes.max_position_embeddings,
            vocab_size=sizes.vocab_size,
        )


class PrefixReader:
    """Makes the keys that a replica's prefix cache will look up.

    Args:
        model: Reads prompts as the replicas do.
        config: Of the replicas: block sizes, and whether there is a cache.
        bodies: Checks bodies.
    """

    def __init__(self, model: TextModel, config: EngineConfig, bodies: BodyReader) -> None:
        self._prompts = PromptReader(model)
        self._config = config
        self._bodies = bodies

    def close(self) -> None:
        """End the threads."""
        self._prompts.close()

    async def keys_of(self, path: str, body: bytes) -> bytes:
        """Packed keys of the prompt's boundaries, the shortest prefix first.

        Args:
            path: The route.
            body: Of the request.

        Returns:
            Empty for a route without a prompt, a prompt below one boundary, and without a cache.

        Raises:
            RequestError: The request is wrong, as a replica would say too, or pins a prefix.
        """
        if self._config.prefix_cache == "none":
            return b""
        if path == "/v1/completions":
            completion = await self._bodies.check(body, CompletionBody)
            # Of several prompts the first decides: they are one request and stay together.
            first = completion.prompt
            if isinstance(first, list) and first and not isinstance(first[0], int):
                first = first[0]
            (prompt,) = await self._prompts.of_completion(
                first, max_prompts=1, add_special_tokens=completion.add_special_tokens is not False
            )
            return self._pack(prompt.token_ids, completion)
        chat = await self._chat_of(path, body)
        if chat is None:
            return b""
        prompt = await self._prompts.of_chat_body(chat)
        return self._pack(prompt.token_ids, chat)

    async def _chat_of(self, path: str, body: bytes) -> ChatBody | None:
        if path == "/v1/chat/completions":
            return await self._bodies.check(body, ChatBody)
        if path == "/v1/responses":
            asked = await self._bodies.check(body, ResponsesBody)
            return await self._prompts.convert(partial(responses.chat_of, asked), asked.input)
        if path == "/v1/messages":
            said = await self._bodies.check(body, MessagesBody)
            return await self._prompts.convert(partial(messages.chat_of, said), said.messages)
        return None

    def _pack(self, token_ids: list[int], body: SamplingBody) -> bytes:
        if body.cache_pin is not None:
            # Nobody could release it: the next request may go to another replica.
            raise RequestError(
                f"cache_pin {body.cache_pin!r:.100} would spare a prefix in one replica only; "
                "leave it out, or ask a server of its own (headrace serve)", param="cache_pin",
            )
        block, unit = self._config.block_size, self._config.state_block_size
        end = min(last_reusable_boundary(len(token_ids), unit), _MAX_KEYS * unit)
        keys = chain_keys(root_key(body.cache_salt), token_ids[:end], block)
        every = unit // block
        return b"".join(key[:KEY_BYTES] for key in keys[every - 1 :: every])
