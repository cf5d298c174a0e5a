"""What the server needs of an engine: AsyncLLM has it, and so do test doubles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.config import EngineConfig
    from headrace.outputs import RequestOutput
    from headrace.sampling_params import SamplingParams
    from headrace.text import ChatTemplate, GenerationDefaults, Tokenizer


class ServedEngine(Protocol):
    """An engine that answers many requests at once.

    Attributes:
        model_name: Name that clients use.
        max_model_len: Most tokens in a sequence, prompt and output.
        vocab_size: Token ids are below it.
        min_cacheable_prefix_tokens: Shortest prefix that can hit; None without a prefix cache.
    """

    config: EngineConfig
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    generation_defaults: GenerationDefaults
    model_name: str
    max_model_len: int
    vocab_size: int
    min_cacheable_prefix_tokens: int | None

    async def start(self) -> None:
        """Load what is not loaded and begin to take steps."""

    def generate(
        self, prompt: str | list[int], sampling_params: SamplingParams,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a prompt; closing the generator aborts the work.

        Raises:
            RequestError, QueueFullError, EngineDeadError: When first asked for an output.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request early."""

    async def pins(self) -> dict[str, dict[str, int]]:
        """What is spared from eviction, by the name of the pin."""
        ...

    async def release_pin(self, name: str) -> bool:
        """Let what a pin spares be evicted again; returns whether there was one."""
        ...

    async def trace(self, num_steps: int, *, timeout_s: float) -> dict[str, Any]:
        """Record the next steps as a trace in Chrome's format.

        Raises:
            RequestError: A trace is being taken already.
        """
        ...

    async def check_health(self) -> None:
        """Return if the engine can answer.

        Raises:
            EngineDeadError: It cannot.
        """

    def stats(self) -> dict[str, Any]:
        """Figures of the moment and of the engine's life; keys in `headrace.server.metrics`."""
        ...

    async def activity(self) -> dict[str, Any]:
        """Sequences and newest steps; keys in `headrace.engine.engine.Engine.activity`.

        Raises:
            EngineDeadError: The engine has ended.
        """
        ...

    async def describe(self) -> dict[str, Any]:
        """The model's layers and memory: the keys of `inspect --json` and a few settings."""
        ...

    async def shutdown(self) -> None:
        """End all work and free everything."""
