"""One batch of requests through an engine, with times and counts."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.bench.waits import DeviceWaits
from headrace.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.outputs import RequestOutput

_IDLE_S = 0.0005


@dataclass(slots=True, kw_only=True)
class Round:
    """What one batch of requests took.

    Attributes:
        seconds: From the first request's arrival to the last one's end.
        is_complete: False if time was up before the end; figures are then of no use.
        prompt_tokens, cached_tokens, completion_tokens: Over all requests.
        first_token_s: From each request's arrival to its first token.
        request_s: From each request's arrival to its end.
        inter_token_s: Between the arrivals of a request's tokens; tokens that arrive together
            share the time. Empty unless streamed.
        steps: Engine steps.
        drafted, accepted: Drafts by place.
        host_waits: Times the host waited for the device.
        device_waits: Steps before which the device had run dry; None where that is not known.
        steady_steps: Steps that could be told.
        preemptions: Sequences that had to give their memory back.
        graphs: Captured steps, or parts of one: launched (their size's first time), captured and
            replayed; None without graphs.
    """

    seconds: float = 0.0
    is_complete: bool = True
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    host_waits: int = 0
    device_waits: int | None = None
    steady_steps: int = 0
    preemptions: int = 0
    graphs: dict[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When requests are handed over.

    Attributes:
        arrivals: Seconds from the start, one per request; None: all at once.
        concurrency: Most unfinished requests; None: no limit.
        is_streamed: Note when each token arrives.
        deadline_s: On time.perf_counter()'s clock; then everything is aborted.
    """

    arrivals: list[float] | None = None
    concurrency: int | None = None
    is_streamed: bool = False
    deadline_s: float | None = None


_AT_ONCE = Pace()


def run_round(
    engine: Engine,
    prompts: list[list[int]],
    output_tokens: int,
    *,
    temperature: float = 0.0,
    pace: Pace = _AT_ONCE,
) -> Round:
    """Generate the same number of tokens for every prompt.

    Args:
        engine: An idle engine.
        prompts: Token ids.
        output_tokens: Of each; the end of sequence is ignored.
        temperature: 0 is greedy.
        pace: When requests are handed over.
    """
    params = SamplingParams(
        temperature=temperature,
        max_tokens=output_tokens,
        ignore_eos=True,
        output_kind=OutputKind.DELTA if pace.is_streamed else OutputKind.FINAL_ONLY,
    )
    before = _counts(engine)
    result = Round()
    with DeviceWaits(engine) as waits:
        _serve(engine, prompts, params, pace, result)
    while engine.has_work():
        # Steps in flight give their blocks back.
        engine.step()
    after = _counts(engine)
    result.steps = after["steps"] - before["steps"]
    result.host_waits = after["host_waits"] - before["host_waits"]
    result.preemptions = after["preemptions"] - before["preemptions"]
    for name, values in (("drafted", result.drafted), ("accepted", result.accepted)):
        values.extend(b - a for a, b in zip(before[name], after[name], strict=True))
    if after["graphs"]:
        result.graphs = {name: after["graphs"][name] - before["graphs"][name]
                         for name in after["graphs"]}
    result.device_waits, result.steady_steps = waits.num_waits, waits.num_steps
    return result


class _Stream:
    """Arrival times of one request's tokens."""

    __slots__ = ("arrival_s", "last_s")

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.last_s: float | None = None


def _serve(
    engine: Engine,
    prompts: list[list[int]],
    params: SamplingParams,
    pace: Pace,
    result: Round,
) -> None:
    arrivals = pace.arrivals or [0.0] * len(prompts)
    todo = deque(enumerate(prompts))
    most = pace.concurrency or len(prompts)
    live: dict[str, _Stream] = {}
    begin = time.perf_counter()
    # Request metrics are on another clock.
    offset = time.monotonic() - begin
    while todo or live:
        now = time.perf_counter()
        if pace.deadline_s is not None and now > pace.deadline_s:
            result.is_complete = False
            for request_id in live:
                engine.abort(request_id)
            break
        while todo and len(live) < most and begin + arrivals[todo[0][0]] <= now:
            number, prompt = todo.popleft()
            # A request held back by the limit comes when it is let in.
            arrival = now if pace.concurrency else begin + arrivals[number]
            request_id = f"bench-{number}"
            engine.add_request(request_id, prompt, params, arrival=arrival + offset)
            live[request_id] = _Stream(arrival)
        if not engine.has_work():
            time.sleep(_IDLE_S)
            continue
        for output in engine.step():
            stream = live[output.request_id]
            if pace.is_streamed:
                _note_tokens(output, stream, result)
            if output.finished:
                del live[output.request_id]
                _note_end(output, stream, result, offset)
    result.seconds = time.perf_counter() - begin


def _note_tokens(output: RequestOutput, stream: _Stream, result: Round) -> None:
    count = sum(len(completion.token_ids) for completion in output.outputs)
    if not count:
        return
    now = time.perf_counter()
    result.completion_tokens += count
    if stream.last_s is not None:
        result.inter_token_s.extend([(now - stream.last_s) / count] * count)
    stream.last_s = now


def _note_end(output: RequestOutput, stream: _Stream, result: Round, offset: float) -> None:
    metrics = output.metrics
    result.prompt_tokens += len(output.prompt_token_ids)
    result.cached_tokens += output.num_cached_tokens
    if stream.last_s is None:
        result.completion_tokens += sum(len(each.token_ids) for each in output.outputs)
    if metrics.first_token_time_s is not None:
        result.first_token_s.append(metrics.first_token_time_s - offset - stream.arrival_s)
    if metrics.finished_time_s is not None:
        result.request_s.append(metrics.finished_time_s - offset - stream.arrival_s)


def _counts(engine: Engine) -> dict[str, Any]:
    graphs = engine.worker.graphs
    return {
        "graphs": {} if graphs is None else {
            "launched": graphs.num_launches, "captured": graphs.num_captures,
            "replayed": graphs.num_replays,
        },
        "steps": engine.worker.num_steps,
        "host_waits": engine.parts.runtime.stats.syncs,
        "preemptions": engine.scheduler.num_preemptions,
        "drafted": list(engine.drafted_by_position),
        "accepted": list(engine.accepted_by_position),
    }
