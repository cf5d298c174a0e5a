"""A server on a real socket in front of an engine that only pretends.

The pretended engine has the contract of the real one: it yields deltas or one final output, aborts
when its generator is closed, and raises at the first iteration. Texts are scripted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from headrace.config import EngineConfig
from headrace.errors import EngineDeadError, RequestError
from headrace.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprob
from headrace.sampling_params import OutputKind, SamplingParams
from headrace.server.app import create_app
from headrace.server.runner import Server, listen, make_server
from headrace.server.settings import ServerSettings
from headrace.text import ChatTemplate, GenerationDefaults, TextStream, Tokenizer

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Iterator

    from headrace.server.engine import ServedEngine

SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        ["the lamp post by the house, hello there"] * 9,
        trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=SPECIAL, show_progress=False,
        ),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return Tokenizer(backend, config={"bos_token": "<s>", "eos_token": "<|im_end|>"})


class FakeEngine:
    """Answers every prompt with `reply`, one token per turn of the event loop.

    Attributes:
        reply: Text of every answer, cut by stops and max_tokens.
        pause: If set, generation waits on it after the first token.
        failure: Raised at the first iteration.
        failure_after: Raised after so many tokens.
        aborted: Ids of requests whose generator was closed early.
        active: Ids of requests being answered.
        seen: Prompts and parameters, in order of arrival.
    """

    def __init__(self) -> None:
        self.config = EngineConfig(model="fake-folder")
        self.tokenizer: Tokenizer | None = make_tokenizer()
        self.chat_template: ChatTemplate | None = ChatTemplate(
            TEMPLATE, special_tokens=self.tokenizer.special_tokens
        )
        self.generation_defaults = GenerationDefaults()
        self.model_name = "fake"
        self.max_model_len = 64
        self.min_cacheable_prefix_tokens = 16
        self.pinned = {"system": {"kv_blocks": 4, "checkpoints": 1}}
        self.vocab_size = self.tokenizer.vocab_size
        self.reply = "hello there by the lamp post"
        self.pause: threading.Event | None = None
        self.failure: Exception | None = None
        self.failure_after: int | None = None
        self.dead = False
        self.aborted: list[str] = []
        self.active: set[str] = set()
        self.stopped: set[str] = set()
        self.seen: list[tuple[str | list[int], SamplingParams]] = []

    async def start(self) -> None:
        pass

    async def shutdown(self) -> None:
        pass

    async def abort(self, request_id: str) -> None:
        self.stopped.add(request_id)

    async def pins(self) -> dict[str, dict[str, int]]:
        return self.pinned

    async def activity(self) -> dict[str, Any]:
        return {"sequences": [], "steps": []}

    async def describe(self) -> dict[str, Any]:
        return {
            "name": self.model_name, "architecture": "Fake", "parameters": 7, "dtype": "float32",
            "device": "cpu", "state_dtype": "float32", "max_model_len": self.max_model_len,
            "speculative": "none", "prefix_cache": "align", "min_cacheable_prefix_tokens": 16,
            "layers": [{"index": 0, "kind": "full_attention"}, {"index": 1, "kind": "mamba2"}],
            "state_groups": [{"kind": "mamba2", "layers": [1], "bytes_per_block": 64}],
            "mtp_layers": 0, "weight_bytes": 28, "kv_bytes_per_token": 8, "block_size": 16,
            "state_bytes_per_sequence": 64, "fits": [{"context_tokens": 64, "sequences": 2}],
        }

    async def release_pin(self, name: str) -> bool:
        return self.pinned.pop(name, None) is not None

    async def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError("the engine died of a test; restart the server")

    async def trace(self, num_steps: int, *, timeout_s: float) -> dict[str, Any]:
        return {"traceEvents": [], "otherData": {"steps": num_steps, "within_s": timeout_s}}

    def stats(self) -> dict[str, Any]:
        return {
            "running": len(self.active), "waiting": 0, "steps": 3, "generated_tokens": 7,
            "forward_tokens": 12, "finished_requests": 1, "preemptions": 0, "draft_tokens": 4,
            "accepted_tokens": 2, "host_waits_per_step": 1.0,
            "drafted_by_position": [4], "accepted_by_position": [2],
            "kv_blocks": {"total": 10, "used": 5, "free": 5, "cached": 0},
            "state_blocks": [{"total": 4, "used": 1, "free": 3, "cached": 1}],
            "prefix_cache": {
                "query_tokens": 9, "hit_tokens": 4, "missed_tokens": {"last_token": 5}
            },
            "acceptance_by_position": [0.5], "prompt_tokens": 9, "deferred": 0,
            "computed_prompt_tokens": 5, "cached_prompt_tokens": 4,
            "step_tokens": {"limits": [1, 8], "counts": [1, 2, 0], "sum": 12},
        }

    async def generate(
        self, prompt: str | list[int], sampling_params: SamplingParams,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        assert isinstance(prompt, list)
        assert request_id is not None
        self.seen.append((prompt, sampling_params))
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        if len(prompt) + (sampling_params.max_tokens or 0) > self.max_model_len:
            raise RequestError("the server let too much through", param="max_tokens")
        # Before it counts as active: a test may change `reply` from then on.
        turns = [self._turns(prompt, index, sampling_params) for index in range(sampling_params.n)]
        self.active.add(request_id)
        finished = False
        try:
            while any(turns):
                outputs = [turn.pop(0) for turn in turns if turn]
                last = not any(turns)
                if sampling_params.output_kind is OutputKind.DELTA:
                    yield self._output(request_id, prompt, outputs, last, sampling_params)
                await self._between(request_id, len(self.seen))
                if request_id in self.stopped:
                    rest = [CompletionOutput(index=0, text="", token_ids=[],
                                             finish_reason="abort")]
                    yield self._output(request_id, prompt, rest, True, sampling_params)  # noqa: FBT003
                    finished = True
                    return
            if sampling_params.output_kind is OutputKind.FINAL_ONLY:
                finals = [self._final(prompt, index, sampling_params)
                          for index in range(sampling_params.n)]
                yield self._output(request_id, prompt, finals, True, sampling_params)  # noqa: FBT003
            finished = True
        finally:
            self.active.discard(request_id)
            if not finished:
                self.aborted.append(request_id)

    async def _between(self, request_id: str, turn: int) -> None:
        if self.failure_after is not None and turn >= self.failure_after:
            raise EngineDeadError("the engine died in a step; restart the server")
        while self.pause and not self.pause.is_set() and request_id not in self.stopped:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)

    def _turns(
        self, prompt: list[int], index: int, params: SamplingParams
    ) -> list[CompletionOutput]:
        tokenizer = self.tokenizer
        assert params.max_tokens is not None
        if tokenizer is None:
            ids = list(range(5, 5 + params.max_tokens))
            return [
                CompletionOutput(
                    index=index, text="", token_ids=[token],
                    finish_reason="length" if token == ids[-1] else None,
                )
                for token in ids
            ]
        ids = tokenizer.encode(self.reply, add_special_tokens=False)[: params.max_tokens]
        assert not isinstance(params.stop, str)
        stream = TextStream(tokenizer, prompt_token_ids=prompt, stop=params.stop)
        turns = []
        for place, token in enumerate(ids):
            match = stream.append([token])
            done = match is not None or place == len(ids) - 1
            reason = "stop" if match or len(ids) < params.max_tokens else "length"
            turns.append(CompletionOutput(
                index=index, text=stream.take_delta(final=done), token_ids=[token],
                logprobs=[self._candidates(token, params.logprobs)]
                if params.logprobs is not None else None,
                finish_reason=reason if done else None,  # type: ignore[arg-type]
                stop_reason=match.stop if match else None,
            ))
            if match:
                break
        return turns

    def _final(self, prompt: list[int], index: int, params: SamplingParams) -> CompletionOutput:
        turns = self._turns(prompt, index, params)
        logprobs = [entry for turn in turns for entry in turn.logprobs or []]
        return CompletionOutput(
            index=index, text="".join(turn.text for turn in turns),
            token_ids=[token for turn in turns for token in turn.token_ids],
            logprobs=logprobs if params.logprobs is not None else None,
            finish_reason=turns[-1].finish_reason, stop_reason=turns[-1].stop_reason,
        )

    def _candidates(self, token: int, top: int) -> dict[int, TokenLogprob]:
        assert self.tokenizer is not None
        others = [(token, -0.123456789), *((100 + k, -1.0 - k) for k in range(top - 1))]
        if top > 1:
            others[-1] = (others[-1][0], -math.inf)
        return {
            other: TokenLogprob(
                logprob=value, rank=rank + 1, decoded_token=self.tokenizer.decode_token(other)
            )
            for rank, (other, value) in enumerate(others)
        }

    def _output(
        self, request_id: str, prompt: list[int], outputs: list[CompletionOutput],
        last: bool, params: SamplingParams,  # noqa: FBT001
    ) -> RequestOutput:
        prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None
        if params.prompt_logprobs is not None:
            wanted = params.prompt_logprobs
            prompt_logprobs = [None, *(self._candidates(token, wanted) for token in prompt[1:])]
        return RequestOutput(
            request_id=request_id, prompt=None, prompt_token_ids=prompt, outputs=outputs,
            finished=last, num_cached_tokens=2, missed_tokens={"last_token": len(prompt) - 2},
            prompt_logprobs=prompt_logprobs,
            metrics=RequestMetrics(
                arrival_time_s=1.0, first_scheduled_time_s=1.5, first_token_time_s=2.0,
                finished_time_s=3.0 if last else None,
            ),
        )


@dataclass
class Running:
    """A server that runs in a thread."""

    url: str
    engine: Any
    server: Server
    thread: threading.Thread
    client: httpx.Client
    listener: socket.socket

    def post(self, path: str, body: object) -> httpx.Response:
        return self.client.post(path, json=body)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Events of a stream; asserts that it ends as OpenAI's do."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            data = reply.read().decode()
        events = data.split("\n\n")
        assert events.pop() == ""
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]


class Start(Protocol):
    """Starts a server: `with serve(engine, api_keys=...) as server`."""

    def __call__(
        self, engine: ServedEngine | None = None, settings: ServerSettings | None = None
    ) -> contextlib.AbstractContextManager[Running]: ...


@contextlib.contextmanager
def running(
    engine: ServedEngine, settings: ServerSettings | None = None
) -> Iterator[Running]:
    chosen = settings or ServerSettings(log_level="warning")
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = make_server(create_app(engine, chosen), engine, chosen)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with httpx.Client(base_url=url, timeout=20) as client:
            listener_is_up(server, thread)
            yield Running(url, engine, server, thread, client, listener)
    finally:
        # After a failure too: the thread would keep the whole run from ending.
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()


def listener_is_up(server: Server, thread: threading.Thread) -> None:
    poll = threading.Event()
    while not server.started:
        assert thread.is_alive(), "the server ended before it began"
        poll.wait(0.005)


@pytest.fixture(scope="session")
def shared() -> Iterator[Running]:
    with running(FakeEngine()) as server:
        yield server


@pytest.fixture
def serving(shared: Running) -> Running:
    """A server with a fresh engine; the server itself is shared, starting one takes a while."""
    shared.engine.__init__()
    return shared


@pytest.fixture
def engine(serving: Running) -> FakeEngine:
    fake: FakeEngine = serving.engine
    return fake


@pytest.fixture
def fake_engine() -> FakeEngine:
    """An engine that nothing serves yet."""
    return FakeEngine()


@pytest.fixture(scope="session")
def start_server() -> Start:
    """For tests that need a server of their own."""

    def start(
        engine: ServedEngine | None = None, settings: ServerSettings | None = None
    ) -> contextlib.AbstractContextManager[Running]:
        return running(engine or FakeEngine(), settings)

    return start


@pytest.fixture
def serve(start_server: Start) -> Start:
    return start_server
