"""The merged outputs of several prompts, when their reader leaves."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any, cast

import pytest

from headrace.errors import QueueFullError
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.server.generation import Work, outputs_of
from headrace.server.prompts import Prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.server.engine import ServedEngine


class HalfFullEngine:
    """Answers the first prompt with one output; refuses the second when told to."""

    def __init__(self) -> None:
        self.refuse = asyncio.Event()

    async def generate(
        self, prompt: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        del params
        if prompt == [2]:
            await self.refuse.wait()
            raise QueueFullError("9 sequences wait; try again later")
        yield RequestOutput(
            request_id=request_id, prompt=None, prompt_token_ids=prompt, outputs=[],
            finished=False,
        )
        await asyncio.sleep(60)


@pytest.mark.parametrize("turns", range(6))
def test_a_refusal_while_the_reader_leaves_is_nobodys_unretrieved_exception(turns: int) -> None:
    complaints: list[dict[str, Any]] = []

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
        engine = HalfFullEngine()
        works = [Work(Prompt([token], None), SamplingParams()) for token in (1, 2)]
        outputs = outputs_of(cast("ServedEngine", engine), works, "r")
        await anext(outputs)
        engine.refuse.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        await outputs.aclose()

    asyncio.run(leave())
    gc.collect()
    assert complaints == []
