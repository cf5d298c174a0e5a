"""What the host and the device do in some steps, as a trace that Perfetto opens.

Times are taken around the parts of a step by wrapping them for as long as the trace lasts; an
engine that is not traced pays nothing. On the CPU backend launches run where they are enqueued, so
their spans are the device's. On a GPU they are the host's enqueuing, and the device's lane shows a
step from its last launch to the moment its results were read.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.engine.engine import Engine

_HOST, _DEVICE = 1, 2
_CPU = "cpu"


class StepTracer:
    """Records the next steps of an engine; used on the engine's thread.

    Args:
        engine: What is traced.
        num_steps: Steps to record, at least 1.

    Attributes:
        num_recorded: Steps recorded so far.
    """

    def __init__(self, engine: Engine, num_steps: int) -> None:
        assert num_steps >= 1, f"{num_steps=}"
        self._engine = engine
        self._num_steps = num_steps
        self._is_inline = engine.parts.runtime.backend == _CPU
        self._events: list[dict[str, Any]] = []
        self._wrapped: list[tuple[object, str]] = []
        self._origin = time.perf_counter()
        self._last_end = 0.0
        self._step: int | None = None
        self._launched: dict[int, tuple[float, float]] = {}
        self.num_recorded = 0

    @property
    def is_done(self) -> bool:
        """Whether all steps have been recorded."""
        return self.num_recorded >= self._num_steps

    def start(self) -> None:
        """Begin to record."""
        engine = self._engine
        self._origin = time.perf_counter()
        self._wrap(engine, "step", self._around_step)
        self._wrap(engine, "_take_in", self._around_update)
        self._wrap(engine.scheduler, "schedule", self._around_schedule)
        self._wrap(engine.worker, "execute", self._around_execute)
        self._wrap(engine.worker._stager, "stage", self._spanning("stage"))  # noqa: SLF001
        runtime = engine.parts.runtime
        for name in ("launch", "replay_graph"):
            self._wrap(runtime, name, self._around_launch)

    def stop(self) -> None:
        """Leave the engine as it was; may be called more than once."""
        while self._wrapped:
            holder, name = self._wrapped.pop()
            vars(holder).pop(name, None)

    def document(self) -> dict[str, Any]:
        """The trace: Chrome's JSON object format."""
        pid = os.getpid()
        device = self._engine.parts.runtime.backend
        names = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "headrace"}},
            _lane(pid, _HOST, "engine thread"),
        ]
        if self._is_inline:
            names.append(_lane(pid, _DEVICE, "device (cpu: launches run on the engine's thread)"))
        else:
            names += [
                _lane(pid, _DEVICE + depth, f"device ({device}): enqueued to read, lane {depth}")
                for depth in range(self._engine.parts.depth)
            ]
        return {
            "traceEvents": names + [{**event, "pid": pid} for event in self._events],
            "displayTimeUnit": "ms",
            "otherData": {
                "steps": self.num_recorded, "backend": device,
                "model": self._engine.parts.name,
            },
        }

    # Wrappers ----------------------------------------------------------------------------------

    def _wrap(
        self, holder: Any, name: str, around: Callable[[Callable[..., Any]], Any]  # noqa: ANN401
    ) -> None:
        vars(holder)[name] = around(getattr(holder, name))
        self._wrapped.append((holder, name))

    def _spanning(self, name: str) -> Callable[[Callable[..., Any]], Any]:
        def around(inner: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
                begin = time.perf_counter()
                try:
                    return inner(*args, **kwargs)
                finally:
                    self._span(name, begin, time.perf_counter(), step=self._step)

            return call

        return around

    def _around_step(self, inner: Callable[[], Any]) -> Callable[[], Any]:
        def step() -> Any:  # noqa: ANN401 - passed through
            begin = time.perf_counter()
            try:
                return inner()
            finally:
                self._span("step", begin, time.perf_counter())
                if self.is_done:
                    self.stop()

        return step

    def _around_schedule(self, inner: Callable[[], Any]) -> Callable[[], Any]:
        def schedule() -> Any:  # noqa: ANN401 - passed through
            begin = time.perf_counter()
            planned = inner()
            self._last_end = time.perf_counter()
            counts: dict[str, Any] = {}
            if planned is not None:
                output = planned.output
                verify = output.verify
                counts = {
                    "step": output.step_id, "tokens": output.num_tokens,
                    "generating": 0 if verify is None else len(verify.seq_ids),
                    "prompts": len(output.known),
                }
            self._span("schedule", begin, self._last_end, **counts)
            return planned

        return schedule

    def _around_execute(self, inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def execute(output: Any) -> Any:  # noqa: ANN401 - passed through
            self._step = output.step_id
            begin = time.perf_counter()
            handle = inner(output)
            self._last_end = time.perf_counter()
            self._span("execute", begin, self._last_end, step=output.step_id)
            if self._is_inline:
                first, last = self._launched.pop(output.step_id, (begin, self._last_end))
                self._span(
                    f"step {output.step_id}", first, last, lane=_DEVICE, tokens=output.num_tokens
                )
            else:
                self._launched[output.step_id] = (begin, self._last_end)
            self._step = None
            return handle

        return execute

    def _around_launch(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def launch(what: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            begin = time.perf_counter()
            try:
                return inner(what, *args, **kwargs)
            finally:
                end = time.perf_counter()
                name = what.op.name if hasattr(what, "op") else getattr(what, "name", "graph")
                lane = _DEVICE if self._is_inline else _HOST
                self._span(name, begin, end, lane=lane, step=self._step)
                if self._is_inline and self._step is not None:
                    first, _ = self._launched.get(self._step, (begin, end))
                    self._launched[self._step] = (first, end)

        return launch

    def _around_update(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def update(step: Any, sampled: Any) -> Any:  # noqa: ANN401 - passed through
            begin = time.perf_counter()
            step_id = sampled.step_id
            # From the last thing the host did until the results were there.
            self._span("wait", min(self._last_end, begin), begin, step=step_id)
            if step_id in self._launched:
                _, enqueued = self._launched.pop(step_id)
                lane = _DEVICE + step_id % self._engine.parts.depth
                self._span(f"step {step_id}", enqueued, begin, lane=lane)
            outputs = inner(step, sampled)
            self._last_end = time.perf_counter()
            self._span("update", begin, self._last_end, step=step_id)
            self.num_recorded += 1
            return outputs

        return update

    def _span(
        self, name: str, begin: float, end: float, *, lane: int = _HOST, **facts: Any  # noqa: ANN401
    ) -> None:
        self._events.append({
            "ph": "X", "name": name, "tid": lane, "cat": "device" if lane >= _DEVICE else "host",
            "ts": round((begin - self._origin) * 1e6, 3), "dur": round((end - begin) * 1e6, 3),
            "args": {key: value for key, value in facts.items() if value is not None},
        })


def _lane(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
