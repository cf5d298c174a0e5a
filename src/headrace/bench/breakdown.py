"""Where a decode step's time goes: by launch, by kernel, and as a trace.

Launches of the runtime become named ranges of torch's profiler, so that every kernel has a launch
above it. The profiler slows the host down: use it for shares, and the plain runs for speed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, record_function

from headrace.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from headrace.engine.engine import Engine

_PREFIX = "launch: "
_MOST_KERNELS = 40
_SETTLING_STEPS = 4


def profile_decode(
    engine: Engine,
    prompts: list[list[int]],
    num_steps: int,
    *,
    temperature: float = 0.0,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Profile steps in which all prompts are decoding.

    Args:
        engine: An idle engine.
        prompts: Token ids; as many as the batch.
        num_steps: Steps to profile.
        temperature: 0 is greedy.
        trace: Where to write the trace, in Chrome's format, which Perfetto opens.

    Returns:
        `steps`, `step_ms` (profiled, so slower than plain), `device_busy_share`, `launches` and
        `kernels`: name to milliseconds a step, calls a step and share, the longest first. Times are
        the device's, or on a CPU the host's.
    """
    drafts = engine.parts.sizes.max_drafts
    budget = engine.parts.sizes.max_tokens
    # The first prompts decode while the last ones are still being computed.
    ahead = sum(len(prompt) for prompt in prompts) // budget + 2
    needed = (num_steps + _SETTLING_STEPS + ahead) * (1 + drafts) + 1
    params = SamplingParams(
        temperature=temperature, max_tokens=needed, ignore_eos=True,
        output_kind=OutputKind.DELTA,
    )  # fmt: skip
    waiting = set()
    for number, prompt in enumerate(prompts):
        request_id = f"profile-{number}"
        engine.add_request(request_id, prompt, params)
        waiting.add(request_id)
    ids = list(waiting)
    while waiting and engine.has_work():
        waiting -= {output.request_id for output in engine.step()}
    for _ in range(_SETTLING_STEPS):
        engine.step()
    on_gpu = engine.parts.runtime.backend.startswith("cuda")
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    engine.parts.runtime.synchronize()
    with _named_launches(engine), profile(activities=activities) as profiler:
        begin = time.perf_counter()
        done = 0
        while done < num_steps and engine.has_work():
            engine.step()
            done += 1
        engine.parts.runtime.synchronize()
        seconds = time.perf_counter() - begin
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_work():
        engine.step()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return _summary(profiler.events() or (), max(1, done), seconds, on_gpu=on_gpu)


@contextmanager
def _named_launches(engine: Engine) -> Iterator[None]:
    """Let the profiler see launches and graph replays by name."""
    runtime = engine.parts.runtime
    launch, replay = runtime.launch, runtime.replay_graph

    def named_launch(op: Any, stream: Any, **arguments: Any) -> None:  # noqa: ANN401
        with record_function(_PREFIX + op.name):
            launch(op, stream, **arguments)

    def named_replay(graph: Any, stream: Any, rows: Any) -> None:  # noqa: ANN401
        names = "+".join(dict.fromkeys(one.op.name for one in graph.launches))
        with record_function(f"{_PREFIX}graph of {names}"):
            replay(graph, stream, rows)

    vars(runtime).update(launch=named_launch, replay_graph=named_replay)
    try:
        yield
    finally:
        for name in ("launch", "replay_graph"):
            vars(runtime).pop(name, None)


def _summary(
    events: Iterable[Any], steps: int, seconds: float, *, on_gpu: bool
) -> dict[str, Any]:
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    launches: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    ranges: dict[str, float] = defaultdict(float)
    spans: list[tuple[float, float]] = []
    for event in events:
        is_range = event.name.startswith(_PREFIX)
        on_device = event.device_type.name == "CUDA"
        if is_range and not on_device:
            total = event.device_time_total if on_gpu else event.cpu_time_total
            _add(launches[event.name.removeprefix(_PREFIX)], total)
        elif is_range:
            # The same range on the device's line: what it spans there, gaps included.
            ranges[event.name.removeprefix(_PREFIX)] += event.time_range.elapsed_us()
        elif on_device and not getattr(event, "is_user_annotation", False):
            _add(kernels[event.name], event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
        elif not on_gpu:
            _add(kernels[event.name], event.self_cpu_time_total)
    for name, span in ranges.items():
        if not launches[name][0]:
            launches[name][0] = span
    busy = _union(spans)
    return {
        "steps": steps,
        "step_ms": 1e3 * seconds / steps,
        "device_busy_share": busy / (1e6 * seconds) if on_gpu and seconds else None,
        "launches": _table(launches, steps, len(launches)),
        "kernels": _table(kernels, steps, _MOST_KERNELS),
    }


def _add(entry: list[float], microseconds: float) -> None:
    entry[0] += microseconds
    entry[1] += 1


def _union(spans: list[tuple[float, float]]) -> float:
    """Microseconds covered by at least one span."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def _table(entries: dict[str, list[float]], steps: int, most: int) -> list[dict[str, Any]]:
    total = sum(time_us for time_us, _ in entries.values()) or 1.0
    ordered = sorted(entries.items(), key=lambda entry: -entry[1][0])
    return [
        {
            "name": name,
            "ms_per_step": time_us / 1e3 / steps,
            "calls_per_step": calls / steps,
            "share": time_us / total,
        }
        for name, (time_us, calls) in ordered[:most]
    ]
