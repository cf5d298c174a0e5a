"""The prompts of one request through the engine, their outputs merged into one stream."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from headrace.errors import EngineDeadError, RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from headrace.outputs import RequestOutput
    from headrace.sampling_params import SamplingParams
    from headrace.server.engine import ServedEngine
    from headrace.server.prompts import Prompt

_AHEAD = 64
"""Outputs of a request that may wait for a slow reader before its prompts are held back."""


class FormLostError(RequestError):
    """The form that was asked for could not be followed to the end."""


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt with its parameters.

    Attributes:
        prompt: What to answer.
        params: How.
    """

    prompt: Prompt
    params: SamplingParams


def outputs_of(
    engine: ServedEngine, works: Sequence[Work], request_id: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Answer all prompts of a request at once; closing the generator aborts what is unfinished.

    Args:
        engine: What answers.
        works: The prompts.
        request_id: Of the request; see `prompt_id` for those of its prompts.

    Returns:
        A generator of the index of a prompt and an output of it. It raises RequestError,
        QueueFullError and EngineDeadError as the engine does.
    """
    if len(works) == 1:
        return _single(engine, works[0], request_id)
    return _merged(engine, works, request_id)


def prompt_id(request_id: str, index: int, num_prompts: int) -> str:
    """The engine's name for one prompt of a request."""
    return request_id if num_prompts == 1 else f"{request_id}.{index}"


async def _single(
    engine: ServedEngine, work: Work, request_id: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    async with aclosing(_generate(engine, work, request_id)) as outputs:
        async for output in outputs:
            yield 0, output


async def _merged(
    engine: ServedEngine, works: Sequence[Work], request_id: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    queue: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue(_AHEAD)
    pumping = asyncio.create_task(_pump_all(engine, works, request_id, queue))
    try:
        while (item := await queue.get()) is not None:
            yield item
        await _raise_first(pumping)
    finally:
        pumping.cancel()
        await asyncio.wait([pumping])
        if not pumping.cancelled():
            # Of a reader who left in the meantime: the loop would log what nobody asked for.
            pumping.exception()


async def _pump_all(
    engine: ServedEngine,
    works: Sequence[Work],
    request_id: str,
    queue: asyncio.Queue[tuple[int, RequestOutput] | None],
) -> None:
    async def pump(index: int, work: Work) -> None:
        name = prompt_id(request_id, index, len(works))
        async with aclosing(_generate(engine, work, name)) as outputs:
            async for output in outputs:
                await queue.put((index, output))

    try:
        async with asyncio.TaskGroup() as group:
            for index, work in enumerate(works):
                group.create_task(pump(index, work))
    except Exception:
        # One failed prompt fails the request: the reader need not see what the others had ready.
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)
        raise
    await queue.put(None)


async def _raise_first(task: asyncio.Task[None]) -> None:
    """Raise the first of the prompts' exceptions instead of the group of them."""
    try:
        await task
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


async def _generate(
    engine: ServedEngine, work: Work, request_id: str
) -> AsyncGenerator[RequestOutput, None]:
    """The engine's outputs for one prompt; one that ends in an error is raised."""
    outputs = cast(
        "AsyncGenerator[RequestOutput, None]",
        engine.generate(work.prompt.token_ids, work.params, request_id),
    )
    async with aclosing(outputs):
        async for output in outputs:
            for choice in output.outputs:
                if choice.finish_reason != "error":
                    continue
                wanted = work.params.structured_outputs
                if wanted is not None and isinstance(choice.stop_reason, str):
                    raise FormLostError(
                        f"{wanted.param} cannot be followed further: {choice.stop_reason}; "
                        "simplify it", param=wanted.param,
                    )
                raise EngineDeadError(f"request {request_id} failed in the engine")
            yield output
