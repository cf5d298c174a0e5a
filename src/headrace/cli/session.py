"""A model opened for questions: prompts to tokens, tokens to text, figures of each answer."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace import LLM
from headrace.engine.inspection import inspect_model
from headrace.errors import RequestError
from headrace.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from headrace.config import EngineConfig
    from headrace.outputs import RequestOutput


DEFAULT_MAX_TOKENS = 512
"""Most tokens of an answer of `run` and `chat` where neither flag nor checkpoint says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one answer took; the keys of `run --json` (docs/interfaces.md).

    Args:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: The part of them taken from the prefix cache.
        completion_tokens: Tokens generated.
        time_to_first_token_s: From asking to the first token.
        tokens_per_s: Generated tokens after the first, by the time they took; None for one token.
        steps: Engine steps the request was in.
        draft_tokens: Tokens proposed by speculation.
        accepted_tokens: Proposed tokens that were kept.
        acceptance_by_position: Share kept of each draft position, over the engine's life.
        host_waits_per_step: Times the host waited for the device, per step.
        missed_tokens: Reason to number of prompt tokens that had to be computed.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    time_to_first_token_s: float | None
    tokens_per_s: float | None
    steps: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_by_position: list[float]
    host_waits_per_step: float | None
    missed_tokens: dict[str, int]


class Session:
    """One engine and the text side of its model.

    Use it as a context manager: the engine's threads and memory end with it.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Open the model.

        Raises:
            ConfigError: A setting is wrong.
            ModelError: The model cannot be used.
        """
        self.llm = LLM(config=config)
        self._last: _Progress | None = None

    def __enter__(self) -> Session:
        """Return the session itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the engine."""
        self.llm.shutdown()

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Render a conversation, and the tools on offer, into the tokens of a prompt.

        Raises:
            RequestError: The model has no chat template, or the template refuses.
        """
        return self.llm.chat_prompt(messages, tools=tools or None)

    def prompt_tokens(self, prompt: str, *, raw: bool) -> list[int]:
        """Tokenise a prompt: as one user turn if the model has a chat template, else as it is."""
        if raw or self.llm.chat_template is None:
            return self.llm.get_tokenizer().encode(prompt)
        return self.chat_tokens([{"role": "user", "content": prompt}])

    def sampling_params(self, *, seed: int | None, **given: object) -> SamplingParams:
        """Fill what was not given from the checkpoint's generation_config.json.

        Where neither says how long an answer may be, it may have `DEFAULT_MAX_TOKENS`: a small
        model that misses its end would go on to the end of the context.
        """
        params = self.llm.generation_defaults.sampling_params(
            **given, seed=seed, output_kind=OutputKind.DELTA
        )
        if params.max_tokens is None:
            params = replace(params, max_tokens=max(DEFAULT_MAX_TOKENS, params.min_tokens))
        return params

    def notes(self, params: SamplingParams) -> list[str]:
        """What to tell of the last answer: that it ended by its length and not by itself."""
        if self.finish_reason != "length" or self.figures().completion_tokens != params.max_tokens:
            return []
        return [f"the answer was cut after {params.max_tokens} tokens; --max-tokens N allows more"]

    def stream(self, prompt_token_ids: list[int], params: SamplingParams) -> Iterator[str]:
        """Yield an answer's text piece by piece; `figures` tells afterwards what it took."""
        progress = _Progress(started_s=time.monotonic())
        self._last = progress
        # Closed at once when the reader stops early, so that the engine is not left with the work.
        with closing(self.llm.stream(prompt_token_ids, params)) as outputs:  # type: ignore[type-var]
            for output in outputs:
                progress.add(output)
                if output.outputs[0].text:
                    yield output.outputs[0].text

    def answers(self, prompts: list[list[int]], params: SamplingParams) -> list[str]:
        """Answer many prompts together and return their texts, in order."""
        whole = replace(params, output_kind=OutputKind.FINAL_ONLY)
        return [output.outputs[0].text for output in self.llm.generate(prompts, whole)]

    def memory(self) -> tuple[int, int]:
        """Most bytes of recurrent state of a sequence, and bytes of keys and values of a token."""
        found = inspect_model(self.llm.config)
        return found.state_bytes_per_sequence, found.kv_bytes_per_token

    @property
    def finish_reason(self) -> str | None:
        """Why the last answer ended; None if it was interrupted."""
        if self._last is None or self._last.output is None:
            return None
        return self._last.output.outputs[0].finish_reason

    def figures(self) -> Figures:
        """Return what the last answer took, as far as it came."""
        progress = self._last
        if progress is None or progress.output is None:
            raise RequestError("nothing was asked yet")
        output, stats = progress.output, self.llm.stats()
        return Figures(
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens,
            completion_tokens=progress.num_tokens,
            time_to_first_token_s=progress.time_to_first_token_s,
            tokens_per_s=progress.tokens_per_s,
            steps=output.metrics.num_steps,
            draft_tokens=output.metrics.num_draft_tokens,
            accepted_tokens=output.metrics.num_accepted_draft_tokens,
            acceptance_by_position=list(stats.get("acceptance_by_position") or []),
            host_waits_per_step=stats.get("host_waits_per_step"),
            missed_tokens=dict(output.missed_tokens),
        )


@dataclass(slots=True, kw_only=True)
class _Progress:
    """One answer on its way; times on time.monotonic()'s clock."""

    started_s: float
    first_s: float | None = None
    first_tokens: int = 0
    last_s: float = 0.0
    num_tokens: int = 0
    output: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        self.output = output
        new = len(output.outputs[0].token_ids)
        if not new:
            return
        self.last_s = time.monotonic()
        if self.first_s is None:
            self.first_s, self.first_tokens = self.last_s, new
        self.num_tokens += new

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def tokens_per_s(self) -> float | None:
        if self.first_s is None or self.last_s <= self.first_s:
            return None
        return (self.num_tokens - self.first_tokens) / (self.last_s - self.first_s)
