"""Figures for Prometheus: vLLM's names, which dashboards know, and ours.

What requests went through is observed here, at most once a step; the engine's own figures are read
when Prometheus asks (`headrace.server.engine_metrics`). Limits of buckets include those of vLLM,
whose dashboards ask for shares below them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from headrace.engine.tally import Tally
from headrace.server.engine_metrics import LABELS, EngineCollector, histogram

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from headrace.outputs import RequestMetrics, RequestOutput
    from headrace.sampling_params import SamplingParams
    from headrace.server.engine import ServedEngine

_TOO_MANY = 429
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40,
    50, 60, 120, 240, 480, 960, 1920, 7680,
)
_TO_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)
_BETWEEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
    7.5, 10, 20, 40, 80,
)
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_TOKENS = tuple(mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5))
_REASONS = ("stop", "length", "abort", "error")
QUEUE_LIMIT, CONCURRENCY_LIMIT = "max_num_queued_reqs", "max_concurrent_requests"


class Metrics:
    """The figures of one server.

    Args:
        engine: Where gauges and counters come from.
    """

    def __init__(self, engine: ServedEngine) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._values = (engine.model_name, "0")
        self._registry.register(EngineCollector(engine, self._values))
        ProcessCollector(registry=self._registry)
        self._time_to_first = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _TO_FIRST
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between tokens of a request.",
            _BETWEEN,
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", _SECONDS
        )
        self._queued = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival to first step.", _SECONDS
        )
        self._prompt = self._histogram(
            "vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS
        )
        self._computed = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Tokens of a prompt that were not cached.",
            _TOKENS,
        )
        self._generated = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for a prompt.", _TOKENS
        )
        self._longest = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a prompt's longest choice.",
            _TOKENS,
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "First step to first token.", _SECONDS
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "First to last token.", _SECONDS
        )
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds", "First step to last token.", _SECONDS
        )
        self._preemptions = self._histogram(
            "vllm:request_num_preemptions", "Times a request gave up its blocks.", _PREEMPTIONS
        )
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "Most tokens a request may get.", _TOKENS
        )
        self._choices = self._histogram(
            "vllm:request_params_n", "Choices a request asks for.", _CHOICES
        )
        self._between = _Between(self._values)
        self._registry.register(self._between)
        self._ended = Counter(
            "vllm:request_success",
            "Choices that ended, by reason; abort if the client left or the time was over.",
            (*LABELS, "finished_reason"), registry=self._registry,
        )
        for reason in _REASONS:
            self._ended.labels(*self._values, reason)
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests refused because of a limit, by the limit.",
            ("model_name", "reason"), registry=self._registry,
        )
        for limit in (QUEUE_LIMIT, CONCURRENCY_LIMIT):
            self._rejections.labels(engine.model_name, limit)
        self._errors = Counter(
            "headrace:requests_refused", "Requests answered with an error, by status.",
            (*LABELS, "status"), registry=self._registry,
        )
        self._answers = Counter(
            "http_requests", "Requests over HTTP, probes aside.",
            ("handler", "method", "status"), registry=self._registry,
        )
        self._durations = Histogram(
            "http_request_duration_seconds", "Arrival to the last byte of the answer.",
            ("handler", "method"), buckets=_SECONDS, registry=self._registry,
        )

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def refused(self, status: int, limit: str = QUEUE_LIMIT) -> None:
        """Count a request answered with an error.

        Args:
            status: Of the answer.
            limit: What was reached, if the status says that something was.
        """
        self._errors.labels(*self._values, str(status)).inc()
        if status == _TOO_MANY:
            self._rejections.labels(self._values[0], limit).inc()

    def answered(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Observe a request over HTTP.

        Args:
            handler: The route, with the names of its parameters; "none" without one.
            method: GET, POST and so on.
            status: Of the answer.
            seconds: From its arrival to the end of the answer.
        """
        self._answers.labels(handler, method, f"{status // 100}xx").inc()
        self._durations.labels(handler, method).observe(seconds)

    def began(self, times: RequestMetrics) -> None:
        """Observe the first token of a prompt."""
        if times.first_token_time_s is not None:
            self._time_to_first.observe(times.first_token_time_s - times.arrival_time_s)

    def between_tokens(self, seconds: float, num_tokens: int) -> None:
        """Observe the time since a stream's last tokens, which the new ones share evenly."""
        self._between.tally.add(seconds / num_tokens, num_tokens)

    def ended(self, reason: str, num_choices: int = 1) -> None:
        """Count choices that ended."""
        self._ended.labels(*self._values, reason).inc(num_choices)

    def finished(
        self, output: RequestOutput, num_generated: list[int], params: SamplingParams
    ) -> None:
        """Observe a prompt whose choices have all ended.

        Args:
            output: Its last output.
            num_generated: Tokens generated for each of its choices.
            params: Its parameters.
        """
        times, total = output.metrics, sum(num_generated)
        self._choices.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)
        self._parts(times)
        end = times.finished_time_s or time.monotonic()
        self._whole.observe(end - times.arrival_time_s)
        self._prompt.observe(len(output.prompt_token_ids))
        self._computed.observe(len(output.prompt_token_ids) - output.num_cached_tokens)
        self._generated.observe(total)
        self._longest.observe(max(num_generated, default=0))
        self._preemptions.observe(times.num_preemptions)
        if times.first_scheduled_time_s is not None:
            self._queued.observe(times.first_scheduled_time_s - times.arrival_time_s)
        if times.first_token_time_s is not None and total > 1:
            self._per_token.observe((end - times.first_token_time_s) / (total - 1))

    def _parts(self, times: RequestMetrics) -> None:
        begin, first, end = (
            times.first_scheduled_time_s, times.first_token_time_s, times.finished_time_s
        )
        if begin is not None and first is not None:
            self._prefill.observe(first - begin)
        if first is not None and end is not None:
            self._decode.observe(end - first)
        if begin is not None and end is not None:
            self._inference.observe(end - begin)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, LABELS, buckets=buckets, registry=self._registry)
        return family.labels(*self._values)


class _Between(Collector):
    """Times between tokens: a tally, since one step gives many equal values at once.

    Args:
        values: Of `LABELS`.
    """

    def __init__(self, values: tuple[str, ...]) -> None:
        self._values = values
        self.tally = Tally(_BETWEEN)

    def collect(self) -> Iterator[Metric]:
        yield histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens; drafts kept share theirs.",
            self._values, self.tally.figures(),
        )
