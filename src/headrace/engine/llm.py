"""Offline use: `LLM.generate` and `LLM.chat`, spelled as vLLM's, and `LLM.stream`."""

from __future__ import annotations

import signal
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.errors import ConfigError, EngineDeadError, RequestError
from headrace.sampling_params import SamplingParams, check_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Sequence as Seq
    from types import FrameType, TracebackType

    from headrace.outputs import RequestOutput
    from headrace.text import ChatTemplate, GenerationDefaults, Tokenizer

    Prompt = str | list[int]


def make_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Build a config from keyword arguments.

    Raises:
        ConfigError: An option is unknown; the closest name is given.
    """
    known = [field.name for field in fields(EngineConfig)]
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"unknown engine option {name!r}{hint}")
    return EngineConfig(model=model, **options)


def chosen_config(
    model: str, config: EngineConfig | None, options: Mapping[str, Any]
) -> EngineConfig:
    """The settings that a caller gives whole, or one by one.

    Raises:
        ConfigError: They are given both ways, or are wrong.
    """
    given: object = config
    if given is None:
        return make_config(model, options)
    if not isinstance(given, EngineConfig):
        raise ConfigError(f"config is {type(given).__name__} but must be an EngineConfig")
    if options:
        raise ConfigError(
            f"{', '.join(sorted(options))} and config are both given; put all into config"
        )
    return given


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block; a second one does not.

    A step that is cut in two leaves blocks that nobody owns, so an interrupt between two steps is
    the only kind after which the engine can be used.
    """
    previous = signal.getsignal(signal.SIGINT)
    is_ours = threading.current_thread() is threading.main_thread() and callable(previous)
    if not is_ours:
        yield  # Signals are handled by the main thread alone, or by nobody.
        return
    assert callable(previous)
    came: list[tuple[int, FrameType | None]] = []

    def later(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            previous(number, frame)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if came:
        previous(*came[0])


class LLM:
    """An engine in the thread that asks; several may ask, and take their steps in turns.

    Args:
        model: "demo", a folder, or a hub id.
        config: Settings; alternatively give them as keyword arguments.
        engine: An engine that exists already.
        options: Fields of EngineConfig.

    Raises:
        ConfigError: A setting is unknown or wrong.
        ModelError: The model cannot be used.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        config: EngineConfig | None = None,
        engine: Engine | None = None,
        **options: Any,  # noqa: ANN401 - fields of EngineConfig
    ) -> None:
        if engine is None:
            engine = Engine(chosen_config(model, config, options))
        self.engine = engine
        self._is_shut_down = False
        self._death: BaseException | None = None
        self._lock = threading.RLock()
        self._next_id = 0
        self._waiting: dict[str, deque[RequestOutput]] = {}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self.engine.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""
        return self.engine.parts.chat_template

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """What the checkpoint recommends."""
        return self.engine.parts.generation_defaults

    @property
    def config(self) -> EngineConfig:
        """The resolved settings."""
        return self.engine.config

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: It has none.
        """
        if self.tokenizer is None:
            raise ConfigError(f"model {self.config.model!r} has no tokenizer.json")
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts together.

        Args:
            prompts: One prompt or several, as text or as token ids.
            sampling_params: One for all, or one each; the checkpoint's defaults if left out.
            use_tqdm: Accepted for compatibility.

        Returns:
            Final outputs, in the prompts' order.

        Raises:
            RequestError: A prompt or a parameter is wrong; none of the prompts was started.
        """
        del use_tqdm
        many = _as_list(prompts)
        if sampling_params is None:
            sampling_params = self.generation_defaults.sampling_params()
        if not isinstance(sampling_params, (list, tuple)):
            sampling_params = [sampling_params] * len(many)  # type: ignore[list-item]
        if len(sampling_params) != len(many):
            raise RequestError(
                f"{len(many)} prompts but {len(sampling_params)} sampling_params; give one for "
                "all or one each", param="sampling_params",
            )
        ids: list[str] = []
        try:
            # All or none, and known to be here: an interrupt waits for the last of them.
            with self._turn():
                for prompt, params in zip(many, sampling_params, strict=True):
                    ids.append(self._add(prompt, params, deque(maxlen=1)))
            return [self._final(request_id) for request_id in ids]
        finally:
            self._leave(ids)

    def chat(
        self,
        messages: Seq[Mapping[str, Any]] | Seq[Seq[Mapping[str, Any]]],
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Seq[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several together.

        Raises:
            RequestError: A message or a parameter is wrong, or the model has no chat template.
        """
        if not isinstance(messages, (list, tuple)):
            raise RequestError(
                f"messages is {type(messages).__name__} but must be a list of messages, or a list "
                "of such lists", param="messages",
            )
        many = [messages] if messages and not isinstance(messages[0], (list, tuple)) else messages
        prompts = [
            self.chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                continue_final_message=continue_final_message,
            )
            for conversation in many
        ]
        return self.generate(prompts, sampling_params)

    def chat_prompt(
        self,
        messages: Seq[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Seq[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, as the model's chat template writes it.

        Raises:
            RequestError: The template refuses the messages, or the model has none.
        """
        if self.chat_template is None:
            raise RequestError(
                f"model {self.config.model!r} has no chat template; use generate with a prompt",
                param="messages",
            )
        text = self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
        )
        return self.get_tokenizer().encode(text, add_special_tokens=False)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield one request's outputs as they come; closing the iterator aborts it."""
        if sampling_params is None:
            sampling_params = self.generation_defaults.sampling_params()
        ids: list[str] = []
        try:
            with self._turn():
                ids.append(self._add(prompt, sampling_params, deque()))
            while (output := self._next(ids[0])) is not None:
                yield output
                if output.finished:
                    return
        finally:
            self._leave(ids)

    def pins(self) -> dict[str, dict[str, int]]:
        """KV blocks and checkpoints that are spared from eviction, by the name of the pin."""
        return self.engine.pins()

    def release_pin(self, name: str) -> bool:
        """Let what a pin spares be evicted again; returns whether there was one."""
        return self.engine.release_pin(name)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.engine.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        """Counters and gauges."""
        return self.engine.stats()

    def shutdown(self) -> None:
        """Finish what is in flight; afterwards every request is an `EngineDeadError`."""
        with self._turn():
            try:
                self._drain()
            finally:
                self._is_shut_down = True
                self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Some work of the engine: no other thread's meanwhile, and not to be cut in two."""
        with self._lock, _uninterrupted():
            yield

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDeadError(
                f"the engine died: {self._death!r}; make a new LLM"
            ) from self._death

    def _step(self) -> None:
        """Take a step and hand its outputs to their owners."""
        try:
            outputs = self.engine.step()
        except BaseException as error:
            # What the step had done by then, nobody knows.
            self._death = error
            raise
        for output in outputs:
            owner = self._waiting.get(output.request_id)
            if owner is not None:
                owner.append(output)

    def _add(self, prompt: Prompt, params: SamplingParams, outputs: deque[RequestOutput]) -> str:
        if self._is_shut_down:
            raise EngineDeadError(
                "this LLM was shut down and answers nothing more; make a new one"
            )
        self._raise_if_dead()
        check_kind(params)
        text = prompt if isinstance(prompt, str) else None
        ids = self.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        self._next_id += 1
        request_id = f"req-{self._next_id}"
        self.engine.add_request(request_id, ids, params, prompt=text)
        self._waiting[request_id] = outputs
        return request_id

    def _final(self, request_id: str) -> RequestOutput:
        while (output := self._next(request_id)) is not None:
            if output.finished:
                return output
        raise RequestError(f"request {request_id} was aborted before it was finished")

    def _next(self, request_id: str) -> RequestOutput | None:
        """The request's next output; None if it was aborted behind its owner's back.

        Several may wait in turns (streams inside streams, or threads): each step's outputs go to
        their owners.
        """
        mine = self._waiting[request_id]
        while not mine:
            with self._turn():
                if mine:
                    break
                self._raise_if_dead()
                if not self.engine.has_work():
                    return None
                self._step()
        return mine.popleft()

    def _leave(self, request_ids: list[str]) -> None:
        """Stop waiting; what has not ended is aborted."""
        with self._turn():
            for request_id in request_ids:
                if self._death is None:
                    self.engine.abort(request_id)
                self._waiting.pop(request_id, None)
            if not self._waiting:
                self._drain()

    def _drain(self) -> None:
        """Take in steps in flight, so that their blocks are back in the pools."""
        while self._death is None and self.engine.has_work():
            self._step()


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise RequestError(
            f"prompts is {type(prompts).__name__} but must be text, token ids, or a list of either",
            param="prompts",
        )
    if prompts and isinstance(prompts[0], int):
        return [list(prompts)]
    return list(prompts)
