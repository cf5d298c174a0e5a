"""An engine in a thread of its own, for an event loop: what the server talks to.

Commands go to the engine's thread through a queue; outputs come back once a step, in one call to
the event loop. The engine's thread alone touches the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sys
import threading
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine.engine import Engine
from headrace.engine.inspection import describe_parts
from headrace.engine.llm import chosen_config
from headrace.engine.step_trace import StepTracer
from headrace.errors import EngineDeadError, QueueFullError, RequestError
from headrace.outputs import CompletionOutput, RequestOutput
from headrace.sampling_params import check_kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from headrace.config import EngineConfig
    from headrace.grammar import CompiledGrammar
    from headrace.sampling_params import SamplingParams
    from headrace.text import ChatTemplate, GenerationDefaults, Tokenizer

_LOG = logging.getLogger(__name__)
_IDLE_WAIT_S = 0.2
_ARRIVALS_S = 0.02
_LOOK_AT_TRACE_S = 0.02
_COMPILE_S = 10.0
"""Longest wait for a grammar. The work itself is bounded; the queue before it may be long."""


@dataclass(slots=True)
class _Mailbox:
    """Where the outputs of one request go.

    Attributes:
        loop: Of the client.
        outputs: What it awaits.
        unstarted: Its only output if it is aborted before the engine knows it.
    """

    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput | BaseException | None]
    unstarted: RequestOutput | None = None


class AsyncLLM:
    """An engine behind an event loop.

    Args:
        config: Settings; alternatively give model and keyword arguments.
        engine: An engine that exists already; it must not be used elsewhere.
        step_timeout_s: A step that takes longer counts as the engine's death once somebody asks for
            its health; None lets it take as long as it likes.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        model: str = "demo",
        engine: Engine | None = None,
        step_timeout_s: float | None = None,
        **options: Any,  # noqa: ANN401 - fields of EngineConfig
    ) -> None:
        if engine is None:
            engine = Engine(chosen_config(model, config, options))
        self._engine = engine
        parts = engine.parts
        self.config = engine.config
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self.chat_template: ChatTemplate | None = parts.chat_template
        self.generation_defaults: GenerationDefaults = parts.generation_defaults
        self.model_name = parts.name
        self.max_model_len = parts.max_model_len
        self.vocab_size = parts.model_config.vocab_size
        self.min_cacheable_prefix_tokens = engine.min_cacheable_prefix_tokens
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # Apart from the others: a request of a thousand prompts takes seconds to add.
        self._arrivals: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._compiling = ThreadPoolExecutor(2, thread_name_prefix="headrace-grammar")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopping = False
        self._stats = engine.stats()
        self._is_traced = False
        self._step_timeout_s = step_timeout_s
        self._step_began_s: float | None = None

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncLLM:
        """Load the model of a config."""
        return cls(config)

    @property
    def error(self) -> BaseException | None:
        """What the engine died of, if it did."""
        return self._error

    async def start(self) -> None:
        """Start the engine's thread; idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
            self._thread.start()

    async def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield a request's outputs; closing the generator aborts the request.

        Raises:
            RequestError: It cannot be served as asked.
            QueueFullError: Too many requests wait.
            EngineDeadError: The engine has ended.
        """
        check_kind(sampling_params)
        await self.start()
        self._raise_if_dead()
        if isinstance(prompt, str):
            ids = await asyncio.to_thread(self._encode, prompt)
            text: str | None = prompt
        else:
            ids, text = prompt, None
        # Names of clients are never keys: the same one may be in use twice.
        name = f"{request_id or 'req'}-{uuid.uuid4().hex[:12]}"
        loop = asyncio.get_running_loop()
        mailbox = _Mailbox(loop, asyncio.Queue(), _unstarted(name, text, ids, sampling_params))
        arrival = time.monotonic()
        grammar: CompiledGrammar | None = None
        bad_words: tuple[tuple[int, ...], ...] | None = None

        def add() -> None:
            if name not in self._mailboxes:
                return  # Aborted since.
            try:
                self._engine.check_room(sampling_params.n)
                self._engine.add_request(
                    name, ids, sampling_params, prompt=text, arrival=arrival, grammar=grammar,
                    bad_words=bad_words,
                )
            except Exception as error:
                # One client's mistake, whatever it is; the others go on.
                self._mailboxes.pop(name, None)
                self._post([(mailbox, error)])

        # From here on an abort finds it, also while its grammar is being compiled.
        self._mailboxes[name] = mailbox
        try:
            grammar = await self._compile(sampling_params)
            bad_words = await self._bad_word_tokens(sampling_params)
            self._check_arrivals(name)
            self._arrivals.put(add)
            self._commands.put(_look)
            # Again: an engine that died since has buried its mailboxes without this one.
            self._raise_if_dead()
            while True:
                item = await mailbox.outputs.get()
                if isinstance(item, BaseException):
                    raise item
                assert item is not None
                if request_id is not None:
                    item.request_id = request_id
                yield item
                if item.finished:
                    return
        finally:
            if self._mailboxes.pop(name, None) is not None:
                self._commands.put(lambda: self._abort(name))

    async def abort(self, request_id: str) -> None:
        """Abort every request that was given this id; unknown ids are ignored."""
        # A copy, made at once: the engine's thread takes names away meanwhile.
        names = list(self._mailboxes)
        for name in [n for n in names if n.rpartition("-")[0] == request_id]:
            self._commands.put(lambda name=name: self._abort(name))  # type: ignore[misc]

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        await self._call(self._engine.reset_prefix_cache)

    async def cached_prefixes(self, limit: int) -> list[bytes]:
        """Chain keys of prefixes that prompts can resume from, at most `limit`, newest first."""
        found: list[bytes] = []
        await self._call(lambda: found.extend(self._engine.cached_prefixes(limit)))
        return found

    async def pins(self) -> dict[str, dict[str, int]]:
        """KV blocks and checkpoints that are spared from eviction, by the name of the pin."""
        found: dict[str, dict[str, int]] = {}
        await self._call(lambda: found.update(self._engine.pins()))
        return found

    async def release_pin(self, name: str) -> bool:
        """Let what a pin spares be evicted again; returns whether there was one."""
        released: list[bool] = []
        await self._call(lambda: released.append(self._engine.release_pin(name)))
        return released == [True]

    async def trace(self, num_steps: int, *, timeout_s: float) -> dict[str, Any]:
        """Record the next steps as a trace in Chrome's format, which Perfetto opens.

        Args:
            num_steps: Steps to record, at least 1.
            timeout_s: After so long the trace ends with the steps there are.

        Raises:
            RequestError: A trace is being taken already.
            EngineDeadError: The engine has ended.
        """
        if self._is_traced:
            raise RequestError("a trace is being taken; ask again when it is done", param="steps")
        self._is_traced = True
        tracer = StepTracer(self._engine, num_steps)
        end = time.monotonic() + timeout_s
        try:
            await self._call(tracer.start)
            while not tracer.is_done and time.monotonic() < end:
                self._raise_if_dead()
                await asyncio.sleep(_LOOK_AT_TRACE_S)
        finally:
            # Also when the client has gone: on the engine's thread, which alone may change it.
            self._commands.put(lambda: _try(tracer.stop))
            self._is_traced = False
        await self._call(tracer.stop)
        return tracer.document()

    async def check_health(self) -> None:
        """Raise if the engine has ended, or hangs.

        Raises:
            EngineDeadError: With what it died of.
        """
        self._notice_hanging()
        self._raise_if_dead()

    def stats(self) -> dict[str, Any]:
        """Figures as of the engine's last step."""
        return self._stats

    async def activity(self) -> dict[str, Any]:
        """Sequences and newest steps, as of the end of the step that is being taken.

        Raises:
            EngineDeadError: The engine has ended.
        """
        found: dict[str, Any] = {}
        await self._call(lambda: found.update(self._engine.activity()))
        return found

    async def describe(self) -> dict[str, Any]:
        """The loaded model's layers and memory, as JSON values."""
        # Nothing that it reads changes, so it need not be the engine's thread.
        return await asyncio.to_thread(describe_parts, self._engine.parts)

    async def shutdown(self) -> None:
        """Stop the thread; requests that are still running get an error."""
        self._stopping = True
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._commands.put(None)
        # One that hangs would not come; it is no reason for the process to stay.
        if self._thread is not None and not self._hangs():
            await asyncio.to_thread(self._thread.join, 10.0)
        # Its thread does this too, if it ever ran and does not hang.
        await asyncio.to_thread(self._engine.end_ranks)

    # The engine's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping and self._error is None:
                is_idle = not self._engine.has_work() and self._arrivals.empty()
                self._drain_commands(wait=is_idle)
                self._take_arrivals()
                self._engine.check_ranks()
                if not self._engine.has_work():
                    self._stats = self._engine.stats()
                    continue
                self._step_began_s = time.monotonic()
                outputs = self._engine.step()
                self._step_began_s = None
                if outputs:
                    self._deliver(outputs)
                self._stats = self._engine.stats()
        except BaseException as error:
            self._error = error  # Whatever it is, every client must hear of it.
            _LOG.critical("the engine died", exc_info=error)
        finally:
            self._bury()
            self._engine.close()

    def _drain_commands(self, *, wait: bool) -> None:
        with contextlib.suppress(queue.Empty):
            command = self._commands.get(timeout=_IDLE_WAIT_S) if wait else None
            while True:
                if command is not None:
                    command()
                command = self._commands.get_nowait()
                if command is None:
                    return

    def _check_arrivals(self, name: str) -> None:
        """Refuse a request while the engine, inside a long step, has not taken in many others.

        The engine bounds its own queue, but only when it looks: a step may take minutes, or hang.

        Raises:
            QueueFullError: As many have arrived as may wait.
        """
        limit, arrived = self._engine.config.max_waiting, self._arrivals.qsize()
        if arrived >= limit:
            # It never arrived, so the engine need not hear of its end.
            self._mailboxes.pop(name, None)
            raise QueueFullError(
                f"{arrived} requests have not been taken in yet and the limit is {limit}; try "
                "again later, or raise max_waiting"
            )

    def _take_arrivals(self) -> None:
        """Add new requests, for a while: then those who run have a step before there are more."""
        end = time.monotonic() + _ARRIVALS_S
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrivals.get_nowait()()
                if time.monotonic() > end and self._engine.has_work():
                    return

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        posts: list[tuple[_Mailbox, RequestOutput | BaseException]] = []
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue
            if output.finished:
                self._mailboxes.pop(output.request_id, None)
            posts.append((mailbox, output))
        self._post(posts)

    def _post(
        self, posts: Sequence[tuple[_Mailbox, RequestOutput | BaseException | None]]
    ) -> None:
        by_loop: dict[int, tuple[asyncio.AbstractEventLoop, list[Any]]] = {}
        for mailbox, item in posts:
            by_loop.setdefault(id(mailbox.loop), (mailbox.loop, []))[1].append((mailbox, item))
        for loop, items in by_loop.values():
            with contextlib.suppress(RuntimeError):  # The loop of a client that left is closed.
                loop.call_soon_threadsafe(_put_all, items)

    def _abort(self, name: str) -> None:
        output = self._engine.abort(name)
        mailbox = self._mailboxes.pop(name, None)
        if mailbox is not None:
            self._post([(mailbox, output or mailbox.unstarted)])

    def _bury(self) -> None:
        why = self._error
        text = "the engine was shut down" if why is None else f"the engine died: {why!r}"
        dead = EngineDeadError(f"{text}; restart the server")
        dead.__cause__ = why
        boxes = list(self._mailboxes.values())
        self._mailboxes.clear()
        self._post([(mailbox, dead) for mailbox in boxes])

    def _hangs(self) -> bool:
        began, limit = self._step_began_s, self._step_timeout_s
        if began is None or limit is None:
            return False
        return time.monotonic() - began > limit

    def _notice_hanging(self) -> None:
        """Give up an engine whose thread does not come back from a step."""
        if self._error is None and self._hangs():
            self._error = TimeoutError(f"a step took longer than {self._step_timeout_s:g} s")
            _LOG.critical("the engine hangs in a step, at\n%s", self._place())
            self._bury()

    def _place(self) -> str:
        """Where the engine's thread is."""
        assert self._thread is not None
        # The only way to another thread's frames; they are read at once and not kept.
        frame = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001
        return "".join(traceback.format_stack(frame)) if frame is not None else "no place: it ended"

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise EngineDeadError(f"the engine died: {self._error!r}; restart the server")
        if self._stopping:
            raise EngineDeadError("the engine was shut down; restart the server")

    async def _call(self, function: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        mailbox = _Mailbox(loop, asyncio.Queue())
        name = f"call {uuid.uuid4().hex}"  # No request's name: those end in a hyphen and digits.

        def run() -> None:
            error = _try(function)  # A question that goes wrong does not end the engine.
            if self._mailboxes.pop(name, None) is not None:
                self._post([(mailbox, error)])

        await self.start()
        # Like a request, so that an engine that dies answers this too.
        self._mailboxes[name] = mailbox
        self._commands.put(run)
        try:
            self._raise_if_dead()
            error = await mailbox.outputs.get()
        finally:
            self._mailboxes.pop(name, None)
        if isinstance(error, BaseException):
            raise error

    async def _compile(self, params: SamplingParams) -> CompiledGrammar | None:
        """Compile a request's grammar in a thread of its own: steps go on meanwhile."""
        if params.structured_outputs is None:
            return None
        work = asyncio.get_running_loop().run_in_executor(
            self._compiling, self._engine.compile_grammar, params
        )
        try:
            return await asyncio.wait_for(work, _COMPILE_S)
        except TimeoutError:
            name = params.structured_outputs.param
            raise RequestError(
                f"{name} could not be compiled within {_COMPILE_S:g} s; simplify it, or try again "
                "when fewer requests bring new schemas", param=name,
            ) from None

    async def _bad_word_tokens(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Tokenise bad words in a thread of its own: steps go on meanwhile."""
        if not params.bad_words:
            return ()
        return await asyncio.to_thread(self._engine.bad_word_tokens, params)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                f"model {self.model_name!r} has no tokenizer; send token ids", param="prompt"
            )
        return self.tokenizer.encode(text)


def _look() -> None:
    """Wakes the engine's thread: there are arrivals."""


def _unstarted(
    name: str, text: str | None, ids: list[int], params: SamplingParams
) -> RequestOutput:
    """The output of a request that was aborted before the engine knew it."""
    outputs = [
        CompletionOutput(index=index, text="", token_ids=[], finish_reason="abort")
        for index in range(params.n)
    ]
    return RequestOutput(
        request_id=name, prompt=text, prompt_token_ids=ids, outputs=outputs, finished=True
    )


def _try(function: Callable[[], None]) -> Exception | None:
    """Call it; returns what went wrong."""
    try:
        function()
    except Exception as error:
        return error
    return None


def _put_all(items: list[tuple[_Mailbox, RequestOutput | BaseException | None]]) -> None:
    for mailbox, item in items:
        mailbox.outputs.put_nowait(item)
