"""OpenTelemetry traces: one span per prompt that was answered, a child of the client's.

The libraries (`pip install 'headrace[otel]'`) are imported only if an endpoint is set. Names of
attributes stand in one table, since their conventions are still in development.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.outputs import RequestOutput
    from headrace.sampling_params import SamplingParams

_LOG = logging.getLogger(__name__)
SPAN = "llm_request"
ATTRIBUTES = {
    "id": "gen_ai.request.id",
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "n": "gen_ai.request.n",
    "model": "gen_ai.response.model",
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "completion_tokens": "gen_ai.usage.completion_tokens",
    "in_queue": "gen_ai.latency.time_in_queue",
    "to_first_token": "gen_ai.latency.time_to_first_token",
    "e2e": "gen_ai.latency.e2e",
    "in_prefill": "gen_ai.latency.time_in_model_prefill",
    "in_decode": "gen_ai.latency.time_in_model_decode",
    "cached_tokens": "headrace.cached_tokens",
    "accepted_tokens": "headrace.accepted_tokens",
    "preemptions": "headrace.preemptions",
}


class Tracing(Protocol):
    """Where finished prompts are told."""

    def enter(self, headers: Mapping[str, str]) -> None:
        """Take the client's span from its headers, for what the current task does."""

    def finished(
        self, output: RequestOutput, num_generated: int, params: SamplingParams, model: str
    ) -> None:
        """Tell of a prompt that was answered."""

    async def close(self) -> None:
        """Send what is left, if that does not take long."""


def make_tracing(endpoint: str | None) -> Tracing:
    """Tracing that sends to a URL, or none.

    Args:
        endpoint: Where traces go over HTTP, such as http://localhost:4318/v1/traces.

    Raises:
        ConfigError: The libraries are not installed.
    """
    if endpoint is None:
        return NoTracing()
    try:
        # Imported here: they take a tenth of a second and are optional.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "otlp_traces_endpoint needs OpenTelemetry; pip install 'headrace[otel]'"
        ) from error
    return SpanTracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


class NoTracing:
    """Tells nobody."""

    def enter(self, headers: Mapping[str, str]) -> None:
        """Do nothing."""

    def finished(
        self, output: RequestOutput, num_generated: int, params: SamplingParams, model: str
    ) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class SpanTracing:
    """Makes spans.

    Args:
        processor: A SpanProcessor of opentelemetry-sdk, which gets them.
        close_timeout_s: Longest wait for the last ones to be sent.
    """

    def __init__(
        self,
        processor: Any,  # noqa: ANN401 - of an optional library
        *,
        close_timeout_s: float = 2.0,
    ) -> None:
        from opentelemetry import context  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        self._context = context
        self._propagator = TraceContextTextMapPropagator()
        resource = Resource.create({"service.name": "headrace"})
        # At the exit of the process it would wait once more.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._close_timeout_s = close_timeout_s
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headrace")

    def enter(self, headers: Mapping[str, str]) -> None:
        """Take the client's span; the context ends with the connection's task."""
        self._context.attach(self._propagator.extract(dict(headers)))

    def finished(
        self, output: RequestOutput, num_generated: int, params: SamplingParams, model: str
    ) -> None:
        """Make the span of a prompt, from its arrival to its end."""
        times = output.metrics
        end = times.finished_time_s or time.monotonic()
        # The engine's clock has no date: reckoned back from now.
        offset_s = time.time() - time.monotonic()
        span = self._tracer.start_span(SPAN, start_time=_ns(times.arrival_time_s + offset_s))
        for name, value in _facts(output, num_generated, params, model, end).items():
            if value is not None:
                span.set_attribute(ATTRIBUTES[name], value)
        span.end(end_time=_ns(end + offset_s))

    async def close(self) -> None:
        """Send what is left; a collector that does not answer in time loses it.

        The library waits half a minute for such a one. So it waits in a thread of its own, which
        neither the event loop nor the end of the process waits for.
        """
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # Too late: the loop is closed.
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=send, name="headrace-traces", daemon=True).start()
        try:
            await asyncio.wait_for(sent.wait(), self._close_timeout_s)
        except TimeoutError:
            _LOG.warning(
                "the collector of traces did not take the last ones within %g s; they are lost",
                self._close_timeout_s,
            )


def _facts(
    output: RequestOutput, num_generated: int, params: SamplingParams, model: str, end: float
) -> dict[str, Any]:
    times = output.metrics
    begin, first = times.first_scheduled_time_s, times.first_token_time_s
    return {
        "id": output.request_id,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "n": params.n,
        "model": model,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": num_generated,
        "in_queue": None if begin is None else begin - times.arrival_time_s,
        "to_first_token": None if first is None else first - times.arrival_time_s,
        "e2e": end - times.arrival_time_s,
        "in_prefill": None if begin is None or first is None else first - begin,
        "in_decode": None if first is None else end - first,
        "cached_tokens": output.num_cached_tokens,
        "accepted_tokens": times.num_accepted_draft_tokens,
        "preemptions": times.num_preemptions,
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
