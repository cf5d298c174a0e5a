"""AsyncLLM: clients that come, go and hang up at any moment, and an engine that dies."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from conformance import VOCAB, assert_balanced, make_engine, small_model

from headrace import LLM, SamplingParams
from headrace.engine.async_llm import AsyncLLM
from headrace.errors import EngineDeadError, QueueFullError, RequestError
from headrace.sampling_params import OutputKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from headrace.outputs import RequestOutput

MODEL = small_model(11)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def run(scene: Callable[[AsyncLLM], Awaitable[None]], **options: Any) -> AsyncLLM:  # noqa: ANN401
    """Play a scene against a fresh engine, within a minute."""
    llm = AsyncLLM(engine=make_engine(MODEL, **options))

    async def play() -> None:
        async with asyncio.timeout(60):
            try:
                await scene(llm)
            finally:
                await llm.shutdown()

    asyncio.run(play())
    return llm


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def idle(llm: AsyncLLM) -> None:
    """Until the engine has nothing to do: commands are served in order."""
    while llm._engine.has_work():
        await llm.reset_prefix_cache()


def test_answers_equal_those_of_the_synchronous_engine() -> None:
    prompts = [[2, 3, 4], [5] * 20, [6, 7]]
    expected = LLM(engine=make_engine(MODEL)).generate(prompts, SHORT)

    async def scene(llm: AsyncLLM) -> None:
        answers = await asyncio.gather(*(collect(llm.generate(p, SHORT)) for p in prompts))
        for answer, wanted in zip(answers, expected, strict=True):
            assert answer[-1].finished
            assert answer[-1].outputs[0].token_ids == wanted.outputs[0].token_ids

    run(scene)


def test_deltas_add_up_to_the_final_answer() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True,
                            output_kind=OutputKind.DELTA)

    async def scene(llm: AsyncLLM) -> None:
        pieces = await collect(llm.generate([2, 3], params))
        whole = await collect(llm.generate([2, 3], LONG))
        ids = [token for piece in pieces for c in piece.outputs for token in c.token_ids]
        assert ids == whole[-1].outputs[0].token_ids[:30]

    run(scene)


def test_b117_a_client_that_closes_its_generator_frees_its_work() -> None:
    async def scene(llm: AsyncLLM) -> None:
        for taken in range(4):
            stream = llm.generate([2, 3, 4], LONG)
            for _ in range(taken):
                await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
        await idle(llm)
        assert (await collect(llm.generate([2], SHORT)))[-1].finished

    assert_balanced(run(scene)._engine)


def test_b117_a_client_that_leaves_is_in_no_step_planned_after_the_engine_heard_of_it() -> None:
    heard: list[int] = []
    planned: list[tuple[int, int]] = []
    has_left = threading.Event()

    async def scene(llm: AsyncLLM) -> None:
        engine = llm._engine
        abort, execute = engine.abort, engine.worker.execute

        def heard_of(name: str) -> RequestOutput | None:
            heard.append(engine.worker.num_steps)
            return abort(name)

        def noted(output: Any) -> Any:  # noqa: ANN401 - passed through
            rows = len(output.known) + (0 if output.verify is None else len(output.verify.seq_ids))
            planned.append((engine.worker.num_steps, rows))
            if [both for _, both in planned].count(2) > 6:
                # By now both have their first token: neither may end before one leaves.
                assert has_left.wait(30)
            return execute(output)

        vars(engine)["abort"] = heard_of
        vars(engine.worker)["execute"] = noted
        params = SamplingParams(
            temperature=0.0, max_tokens=60, ignore_eos=True, output_kind=OutputKind.DELTA
        )
        stays, leaves = llm.generate([2, 3, 4], params), llm.generate([5, 6, 7], params)
        await asyncio.gather(anext(stays), anext(leaves))
        await leaves.aclose()  # type: ignore[attr-defined]
        has_left.set()
        await collect(stays)
        await idle(llm)

    llm = run(scene)
    (at,) = heard
    assert 2 in {rows for step, rows in planned if step < at}
    assert {rows for step, rows in planned if step >= at} == {1}
    assert_balanced(llm._engine)


def test_b117_a_cancelled_task_frees_its_work() -> None:
    async def scene(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(collect(llm.generate([2, n], LONG))) for n in range(6)]
        await anext(llm.generate([3], SHORT))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await idle(llm)

    assert_balanced(run(scene)._engine)


def test_b60_two_streams_with_one_id_are_answered_apart() -> None:
    async def scene(llm: AsyncLLM) -> None:
        first, second = await asyncio.gather(
            collect(llm.generate([2, 3], SHORT, "same")),
            collect(llm.generate([4, 5], SHORT, "same")),
        )
        assert first[-1].prompt_token_ids == [2, 3]
        assert second[-1].prompt_token_ids == [4, 5]
        assert {o.request_id for o in (*first, *second)} == {"same"}

    run(scene)


def test_abort_by_id_ends_the_stream_with_its_reason_and_is_idempotent() -> None:
    async def scene(llm: AsyncLLM) -> None:
        outputs = []
        async for output in llm.generate([2, 3], LONG, "victim"):
            outputs.append(output)
            await llm.abort("victim")
            await llm.abort("victim")
            await llm.abort("unknown")
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        await idle(llm)

    assert_balanced(run(scene)._engine)


@pytest.mark.parametrize("drafts", ["none", "ngram:3"])
def test_b56_aborts_at_random_moments_hurt_nobody_else(drafts: str) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    expected = LLM(engine=make_engine(MODEL)).generate([2, 3, 4], LONG)[0].outputs[0].token_ids

    async def client(llm: AsyncLLM) -> None:
        prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 50))]
        patience = rng.randint(0, 12)
        name = f"c{rng.randrange(10)}"
        async with contextlib.aclosing(llm.generate(prompt, LONG, name)) as stream:  # type: ignore[type-var]
            for _ in range(patience):
                with contextlib.suppress(StopAsyncIteration):
                    await anext(stream)
            if rng.random() < 0.3:
                await llm.abort(name)

    async def scene(llm: AsyncLLM) -> None:
        clients = [asyncio.create_task(client(llm)) for _ in range(30)]
        for _ in range(2):
            answer = await collect(llm.generate([2, 3, 4], LONG))
            assert answer[-1].outputs[0].token_ids == expected
        await asyncio.gather(*clients)
        await idle(llm)

    assert_balanced(run(scene, speculative=drafts)._engine)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([VOCAB], "vocabulary"),
        ("text", "no tokenizer"),
        ([1] * 500, "max_model_len"),
    ],
)
def test_a_bad_request_fails_alone(prompt: Any, message: str) -> None:  # noqa: ANN401
    async def scene(llm: AsyncLLM) -> None:
        good = asyncio.create_task(collect(llm.generate([2, 3], LONG)))
        with pytest.raises(RequestError, match=message):
            await collect(llm.generate(prompt, SHORT))
        assert (await good)[-1].finished
        assert (await collect(llm.generate([2], SHORT)))[-1].finished

    assert_balanced(run(scene)._engine)


@pytest.mark.parametrize("prompt", [5, None, [[1], 2], {"a": 1}])
def test_a_prompt_of_no_known_type_fails_alone(prompt: Any) -> None:  # noqa: ANN401
    async def scene(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError):
            await collect(llm.generate(prompt, SHORT))
        assert (await collect(llm.generate([2], SHORT)))[-1].finished

    run(scene)


def test_b119_a_dead_engine_answers_everybody_with_its_cause() -> None:
    async def scene(llm: AsyncLLM) -> None:
        def die(*_: object) -> None:
            raise RuntimeError("the device fell off")

        running = [asyncio.create_task(collect(llm.generate([2, n], LONG))) for n in range(3)]
        await anext(llm.generate([9], SHORT))
        llm._engine.worker.execute = die  # type: ignore[method-assign, assignment]
        for answer in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(answer, EngineDeadError)
            assert "the device fell off" in str(answer)
            assert isinstance(answer.__cause__, RuntimeError)
        with pytest.raises(EngineDeadError, match="restart the server"):
            await collect(llm.generate([2], SHORT))
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()

    run(scene)


def test_a_request_that_arrives_while_the_engine_dies_is_answered() -> None:
    """It has passed the first check when the engine buries its mailboxes."""

    async def scene(llm: AsyncLLM) -> None:
        await collect(llm.generate([2], SHORT))
        llm._encode = lambda _: _kill(llm)  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineDeadError):
            await collect(llm.generate("text", SHORT))

    def _kill(llm: AsyncLLM) -> list[int]:
        """Runs between the check and the mailbox: the engine dies and is buried meanwhile."""
        def die() -> None:
            raise RuntimeError("gone")

        llm._commands.put(die)
        assert llm._thread is not None
        llm._thread.join()
        return [2]

    run(scene)


def test_requests_after_shutdown_are_refused() -> None:
    async def scene(llm: AsyncLLM) -> None:
        stream = llm.generate([2, 3], LONG)
        await anext(stream)
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(stream)
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(llm.generate([2], SHORT))

    run(scene)


def test_a_cache_reset_waits_for_the_engine_and_running_requests_go_on() -> None:
    expected = LLM(engine=make_engine(MODEL)).generate([[2, 3, 4] * 8], LONG)[0].outputs[0]

    async def scene(llm: AsyncLLM) -> None:
        stream = llm.generate([2, 3, 4] * 8, LONG)
        output = await anext(stream)
        for _ in range(3):
            await llm.reset_prefix_cache()
            output = await anext(stream)
        async for last in stream:
            output = last
        assert output.outputs[0].token_ids == expected.token_ids

    run(scene)


def test_interleaved_streams_of_the_synchronous_engine_both_end() -> None:
    llm = LLM(engine=make_engine(MODEL))
    expected = [o.outputs[0].token_ids for o in llm.generate([[2, 3], [4, 5]], LONG)]
    first, second = llm.stream([2, 3], LONG), llm.stream([4, 5], SHORT)
    seen = [next(first).outputs[0].token_ids, next(second).outputs[0].token_ids]
    inner = llm.generate([[4, 5]], LONG)[0].outputs[0].token_ids
    for output in second:
        seen[1] = output.outputs[0].token_ids
    for output in first:
        seen[0] = output.outputs[0].token_ids
    assert [seen[0], inner] == expected
    assert seen[1] == expected[1][:4]
    assert_balanced(llm.engine)


def test_a_stream_that_is_closed_early_leaves_nothing_behind() -> None:
    llm = LLM(engine=make_engine(MODEL))
    stream = llm.stream([2, 3], LONG)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_balanced(llm.engine)


def test_an_aborted_stream_does_not_repeat_what_it_told() -> None:
    async def scene(llm: AsyncLLM) -> None:
        stream = llm.generate([2, 3], replace(LONG, output_kind=OutputKind.DELTA), "one")
        told = (await anext(stream)).outputs[0].token_ids
        await llm.abort("one")
        async for output in stream:
            told = told + output.outputs[0].token_ids
            last = output.outputs[0].finish_reason
        assert last == "abort"
        whole = (await collect(llm.generate([2, 3], LONG)))[-1].outputs[0].token_ids
        assert told == whole[: len(told)]

    run(scene)


def test_a_request_is_aborted_while_its_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(llm: AsyncLLM) -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def compile_slowly(_: SamplingParams) -> None:
            begun.set()
            await may_end.wait()

        monkeypatch.setattr(llm, "_compile", compile_slowly)
        answer = asyncio.create_task(collect(llm.generate([2, 3], LONG, "one")))
        await begun.wait()
        await llm.abort("one")
        may_end.set()
        outputs = await answer
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort"]
        assert outputs[0].request_id == "one"
        await idle(llm)
        assert not llm._engine.has_work()

    run(scene)


def test_a_question_that_goes_wrong_does_not_end_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(llm: AsyncLLM) -> None:
        def wrong() -> dict[str, Any]:
            raise ValueError("no such figure")

        monkeypatch.setattr(llm._engine, "activity", wrong)
        with pytest.raises(ValueError, match="no such figure"):
            await llm.activity()
        assert (await collect(llm.generate([2, 3], SHORT)))[-1].finished

    run(scene)


@pytest.mark.scenarios("B118")
def test_many_arrivals_at_once_leave_steps_to_those_who_run() -> None:
    events: list[str] = []

    async def scene(llm: AsyncLLM) -> None:
        engine = llm._engine
        add, step = engine.add_request, engine.step

        def slow_add(*arguments: Any, **options: Any) -> object:  # noqa: ANN401
            events.append("add")
            threading.Event().wait(0.015)
            return add(*arguments, **options)

        def seen_step() -> object:
            events.append("step")
            return step()

        engine.add_request = slow_add  # type: ignore[method-assign, assignment]
        engine.step = seen_step  # type: ignore[method-assign, assignment]
        running = llm.generate([1, 2], LONG)
        await anext(running)
        crowd = [asyncio.create_task(collect(llm.generate([3, 4], SHORT))) for _ in range(20)]
        await asyncio.gather(*crowd)
        await running.aclose()

    run(scene)
    text = " ".join(events)
    assert text.count("add") == 21
    # Fifteen milliseconds each, of twenty before a step is due: never more than two in a row.
    assert "add add add" not in text


def test_a_request_is_aborted_before_it_was_added() -> None:
    async def scene(llm: AsyncLLM) -> None:
        held = threading.Event()
        llm._commands.put(held.wait)
        asking = asyncio.create_task(collect(llm.generate([1, 2], LONG, "early")))
        while llm._arrivals.empty():
            await asyncio.sleep(0.001)
        await llm.abort("early")
        held.set()
        (output,) = await asking
        assert output.outputs[0].finish_reason == "abort"
        await idle(llm)
        assert llm.stats()["steps"] == 0

    assert_balanced(run(scene)._engine)


def test_a_long_step_bounds_those_who_arrive_meanwhile() -> None:
    async def scene(llm: AsyncLLM) -> None:
        held = threading.Event()
        llm._commands.put(held.wait)
        first = [asyncio.create_task(collect(llm.generate([1, 2], SHORT))) for _ in range(3)]
        while llm._arrivals.qsize() < len(first):
            await asyncio.sleep(0.001)
        waiting = llm._commands.qsize()
        for _ in range(20):
            with pytest.raises(QueueFullError, match="3 requests have not been taken in"):
                await anext(llm.generate([1, 2], SHORT))
        assert llm._arrivals.qsize() == len(first)
        assert llm._commands.qsize() == waiting, "nothing is left of those that were refused"
        held.set()
        for answer in await asyncio.gather(*first):
            assert answer[-1].outputs[0].finish_reason == "length"
        assert await collect(llm.generate([1, 2], SHORT))

    assert_balanced(run(scene, max_waiting=3)._engine)
