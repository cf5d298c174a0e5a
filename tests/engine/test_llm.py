"""`LLM` between threads, under Ctrl-C, and after a step that failed."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
from conformance import assert_balanced, make_engine, small_model

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.errors import EngineDeadError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.models.qwen3_5 import Qwen35Model

LONG = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Qwen35Model:
    return small_model(3)


def tokens(llm: LLM, prompt: list[int]) -> list[int]:
    return list(llm.generate([prompt], LONG)[0].outputs[0].token_ids)


def test_threads_share_one_and_each_gets_its_own_tokens(model: Qwen35Model) -> None:
    llm = LLM(engine=make_engine(model))
    prompts = [[place + 2, 5, 7] for place in range(4)]
    alone = [tokens(llm, prompt) for prompt in prompts]
    found: dict[int, list[list[int]]] = {}

    def ask(place: int) -> None:
        found[place] = [tokens(llm, prompts[place]) for _ in range(3)]

    threads = [threading.Thread(target=ask, args=(place,), daemon=True) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    assert found == {place: [alone[place]] * 3 for place in range(4)}
    assert_balanced(llm.engine)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python's own handler: a shell starts what runs behind it with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("method", ["step", "add_request", "abort"])
def test_an_interrupt_waits_for_the_engine_and_leaves_it_whole(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    llm = LLM(engine=make_engine(model))
    alone = tokens(llm, [2, 3])
    inner = getattr(llm.engine, method)
    ends: list[bool] = []

    def interrupted(*args: Any, **options: Any) -> object:  # noqa: ANN401
        if not ends:
            signal.raise_signal(signal.SIGINT)
        result = inner(*args, **options)
        ends.append(True)
        return result

    monkeypatch.setattr(llm.engine, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[2, 3], [4, 5], [6, 7]], LONG)
    assert ends, "the interrupt did not wait"
    assert not llm._waiting
    monkeypatch.undo()
    assert tokens(llm, [2, 3]) == alone
    assert_balanced(llm.engine)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interrupts")
def test_a_second_interrupt_does_not_wait_and_a_step_cut_in_two_is_the_end(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(engine=make_engine(model))

    def stuck() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second interrupt was held back")

    monkeypatch.setattr(llm.engine, "step", stuck)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[2, 3]], LONG)
    with pytest.raises(EngineDeadError, match=r"engine died: KeyboardInterrupt\(\); make a new"):
        llm.generate([[2, 3]], LONG)


def test_after_a_step_that_failed_nothing_hangs(
    model: Qwen35Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(engine=make_engine(model))
    stream = llm.stream([2, 3], LONG)
    next(stream)

    def fail() -> None:
        raise MemoryError("a test took the memory away")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", fail)
        with pytest.raises(MemoryError):
            llm.generate([[4, 5]], LONG)
    for ask in (lambda: list(stream), lambda: llm.generate([[2, 3]], LONG)):
        with pytest.raises(EngineDeadError, match=r"the engine died: MemoryError.*; make a new"):
            ask()
    llm.shutdown()


def test_async_parameters_of_a_wrong_type_are_refused_by_name(model: Qwen35Model) -> None:
    async def ask() -> None:
        llm = AsyncLLM(engine=make_engine(model))
        await anext(llm.generate([2, 3], None))  # type: ignore[arg-type]

    with pytest.raises(RequestError, match="sampling_params has NoneType but must be"):
        asyncio.run(ask())
