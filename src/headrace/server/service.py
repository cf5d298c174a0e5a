"""The answers to requests: from a checked body to a reply. Routes are in `headrace.server.app`."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.dialects import find_dialect
from headrace.errors import EngineDeadError, NotFoundError, RequestError
from headrace.server import messages, responses
from headrace.server.answers import ChatAnswer, CompletionAnswer
from headrace.server.bodies import BodyReader
from headrace.server.form_fields import read_form
from headrace.server.forms import read_wish
from headrace.server.generation import FormLostError, Work, outputs_of, prompt_id
from headrace.server.observer import Observer
from headrace.server.prompts import PromptReader
from headrace.server.replies import JsonReply, StreamReply
from headrace.server.sampling import (
    chat_params,
    completion_params,
    cut_to_context,
    with_form,
)
from headrace.server.tracing import make_tracing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from starlette.responses import Response

    from headrace.outputs import RequestOutput
    from headrace.sampling_params import SamplingParams
    from headrace.server.answers import Answer
    from headrace.server.engine import ServedEngine
    from headrace.server.forms import ChatWish, OutputForm
    from headrace.server.items import ItemAnswer
    from headrace.server.messages import CountTokensBody, MessagesBody
    from headrace.server.metrics import Metrics
    from headrace.server.protocol import ChatBody, CompletionBody, SamplingBody, TokenizeBody
    from headrace.server.responses import ResponsesBody
    from headrace.server.settings import ServerSettings


class Service:
    """Answers requests with an engine.

    Args:
        engine: Started before the first request.
        settings: The server's.
        metrics: Observed as prompts finish.
    """

    def __init__(
        self, engine: ServedEngine, settings: ServerSettings, metrics: Metrics
    ) -> None:
        self.engine = engine
        self.bodies = BodyReader(
            max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
        )
        self.prompts = PromptReader(engine)
        self._max_prompts = settings.max_prompts
        self._reasoning_field = settings.reasoning_field
        template = engine.chat_template
        self.dialect = find_dialect(
            None if template is None else template.source,
            tool_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
        )
        self._request_timeout_s = settings.request_timeout_s
        self.tracing = make_tracing(settings.otlp_traces_endpoint)
        self._expiring: set[asyncio.Task[None]] = set()
        self._metrics = metrics
        self._names = {engine.model_name, engine.config.model}
        self._active: set[str] = set()

    def enter_trace(self, headers: Mapping[str, str]) -> None:
        """Let what the current task does be part of the client's trace."""
        self.tracing.enter(headers)

    async def close(self) -> None:
        """End threads and send what is left of traces."""
        self.bodies.close()
        self.prompts.close()
        await self.tracing.close()

    async def abort_all(self) -> None:
        """End all requests now; their clients get what there is, with finish reason abort."""
        for name in list(self._active):
            await self.engine.abort(name)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not the one served; no name means it.

        Raises:
            NotFoundError: The name is another one.
        """
        if name and name not in self._names:
            raise NotFoundError(
                f"model {name!r:.200} is not served here; the model is {self.engine.model_name!r}"
            )

    async def chat(self, body: ChatBody) -> Response:
        """Answer a conversation."""
        self.check_model(body.model)
        work, form = await self._chat_work(body)
        works = [work]
        answer = ChatAnswer(
            request_id=f"chatcmpl-{uuid.uuid4().hex}",
            model=self.engine.model_name,
            works=works,
            tokenizer=self.engine.tokenizer,
            include_usage=_includes_usage(body),
            form=form,
            reasoning_field=self._reasoning_field,
        )
        return self._reply(body, works, answer)

    async def respond(self, body: ResponsesBody) -> Response:
        """Answer a conversation in the form of the Responses API."""
        self.check_model(body.model)
        work, form = await self._chat_work(
            await self.prompts.convert(partial(responses.chat_of, body), body.input)
        )
        answer = responses.ResponsesAnswer(
            body=body, **self._answer_arguments(f"resp_{uuid.uuid4().hex}", work, form)
        )
        return self._reply(body, [work], answer)

    async def message(self, body: MessagesBody) -> Response:
        """Answer a conversation in the form of the Messages API."""
        self.check_model(body.model)
        work, form = await self._chat_work(
            await self.prompts.convert(partial(messages.chat_of, body), body.messages)
        )
        if "budget_tokens" in (body.thinking or {}):
            # Clients must send it; refusing it would refuse all thinking.
            self.bodies.warn_once(
                "thinking.budget_tokens", "has no effect: max_tokens bounds thinking and answer"
            )
        answer = messages.MessagesAnswer(
            **self._answer_arguments(f"msg_{uuid.uuid4().hex}", work, form)
        )
        return self._reply(body, [work], answer)

    async def count_tokens(self, body: CountTokensBody) -> dict[str, Any]:
        """Tokens of a conversation in the form of the Messages API."""
        self.check_model(body.model)
        chat = await self.prompts.convert(partial(messages.chat_of, body), body.messages)
        prompt = await self.prompts.of_chat_body(chat)
        return {"input_tokens": len(prompt.token_ids)}

    async def complete(self, body: CompletionBody) -> Response:
        """Continue one or more prompts."""
        self.check_model(body.model)
        params = await self.prompts.convert(
            partial(completion_params, body, self.engine.generation_defaults), vars(body)
        )
        prompts = await self.prompts.of_completion(
            body.prompt,
            max_prompts=self._max_prompts,
            add_special_tokens=body.add_special_tokens is not False,
        )
        self._check_room(len(prompts), params.n)
        limit = self.engine.max_model_len
        works = [
            Work(p, cut_to_context(params, num_prompt_tokens=len(p.token_ids), limit=limit))
            for p in prompts
        ]
        answer = CompletionAnswer(
            request_id=f"cmpl-{uuid.uuid4().hex}",
            model=self.engine.model_name,
            works=works,
            tokenizer=self.engine.tokenizer,
            include_usage=_includes_usage(body),
            echo=bool(body.echo),
            is_scoring=body.max_tokens == 0,
            num_returned=(body.n or 1) if params.n > (body.n or 1) else None,
            wants_logprobs=body.logprobs is not None,
        )
        return self._reply(body, works, answer)

    def _check_room(self, num_prompts: int, n: int) -> None:
        """Refuse a list that the queue would not take even if nobody waited.

        With 429 its client would try again for ever; or, worse, be served now and then.
        """
        limit = self.engine.config.max_waiting
        if num_prompts > 1 and num_prompts * n > limit:
            raise RequestError(
                f"prompt has {num_prompts} prompts, with n {n} that is {num_prompts * n} "
                f"sequences, but at most {limit} may wait; send several requests, or raise "
                "max_waiting", param="prompt",
            )

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """Token ids of a prompt or a conversation, the same that generation would use."""
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            prompt = await self.prompts.of_chat(
                body.messages,
                add_generation_prompt=body.add_generation_prompt is not False,
                tools=body.tools,
                template_kwargs=body.chat_template_kwargs,
                continue_final_message=bool(body.continue_final_message),
            )
            ids = prompt.token_ids
        else:
            ids = await self.prompts.tokenise(
                body.prompt or "",
                add_special_tokens=body.add_special_tokens is not False,
                param="prompt",
            )
        texts = None
        if body.return_token_strs:
            texts = [self.prompts.tokenizer.decode_token(token) for token in ids]
        return {
            "count": len(ids),
            "max_model_len": self.engine.max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }

    async def _chat_work(self, body: ChatBody) -> tuple[Work, OutputForm]:
        """A conversation's prompt with its parameters, and how its output is written."""
        def read() -> tuple[SamplingParams, ChatWish]:
            return chat_params(body, self.engine.generation_defaults), read_wish(
                self.dialect, tools=body.tools, tool_choice=body.tool_choice,
                parallel_tool_calls=body.parallel_tool_calls, wanted=read_form(body),
            )

        params, wish = await self.prompts.convert(read, vars(body))
        prompt = await self.prompts.of_chat_body(body)
        self.prompts.check_length(prompt.token_ids, param="messages")
        form = wish.form(
            self.dialect, self.prompts.tokenizer, prompt.text or "",
            _continued(body),
        )
        params = with_form(params, form)
        limit = self.engine.max_model_len
        num_tokens = len(prompt.token_ids)
        return Work(prompt, cut_to_context(params, num_prompt_tokens=num_tokens, limit=limit)), form

    def _answer_arguments(self, request_id: str, work: Work, form: OutputForm) -> dict[str, Any]:
        return {
            "request_id": request_id,
            "model": self.engine.model_name,
            "work": work,
            "form": form,
            "tokenizer": self.prompts.tokenizer,
        }

    def _reply(
        self, body: SamplingBody | MessagesBody, works: Sequence[Work], answer: Answer | ItemAnswer
    ) -> Response:
        request_id = answer.request_id
        if body.stream:
            events = self._events(works, answer, request_id)
            return StreamReply(events, self._metrics.refused, answer.error)

        async def whole() -> object:
            outputs = [item async for item in self._outputs(works, request_id)]
            return answer.whole(outputs)

        return JsonReply(whole, self._metrics.refused)

    async def _events(
        self, works: Sequence[Work], answer: Answer | ItemAnswer, request_id: str
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._outputs(works, request_id)) as outputs:
            async for place, output in outputs:
                events = answer.chunks(place, output)
                if events:
                    yield events
        yield answer.end()

    async def _outputs(
        self, works: Sequence[Work], request_id: str
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The engine's outputs; what finishes is observed."""
        observer = Observer(
            [work.params for work in works], self._metrics, self.tracing, self.engine.model_name
        )
        names = {prompt_id(request_id, index, len(works)) for index in range(len(works))}
        self._active |= names
        timer = self._expire_later(names)
        try:
            async with aclosing(outputs_of(self.engine, works, request_id)) as outputs:
                async for place, output in outputs:
                    observer.see(place, output)
                    yield place, output
        except (EngineDeadError, FormLostError):
            observer.give_up("error")
            raise
        except (asyncio.CancelledError, GeneratorExit):
            observer.give_up("abort")
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._active -= names

    def _expire_later(self, names: set[str]) -> asyncio.TimerHandle | None:
        """Let requests end with what there is when their time is over."""
        if self._request_timeout_s is None:
            return None

        async def expire() -> None:
            for name in names:
                await self.engine.abort(name)

        def begin() -> None:
            task = asyncio.create_task(expire())
            self._expiring.add(task)
            task.add_done_callback(self._expiring.discard)

        return asyncio.get_running_loop().call_later(self._request_timeout_s, begin)


def _continued(body: ChatBody) -> str | None:
    """The text that the output goes on with."""
    if not body.continue_final_message:
        return None
    content = body.messages[-1].get("content")
    return content if isinstance(content, str) else str(content)


def _includes_usage(body: SamplingBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)
