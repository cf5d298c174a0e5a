"""The engine's figures for Prometheus, read when it asks."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

    from headrace.server.engine import ServedEngine

LABELS = ("model_name", "engine")

#: Key of `stats()` to the name and the help of a plain counter.
_COUNTERS = {
    "prompt_tokens": (
        "vllm:prompt_tokens", "Prompt tokens that reached the caches, computed or found there.",
    ),
    "cached_prompt_tokens": ("vllm:prompt_tokens_cached", "Prompt tokens not computed."),
    "generated_tokens": ("vllm:generation_tokens", "Tokens generated."),
    "preemptions": ("vllm:num_preemptions", "Sequences that gave up their blocks."),
    "steps": ("headrace:steps", "Steps taken."),
    "forward_tokens": ("headrace:forward_tokens", "Tokens that went through the model."),
    "host_waits": ("headrace:host_waits", "Times the host waited for the device."),
    "finished_requests": ("headrace:finished_requests", "Requests that have ended in any way."),
    "wasted_tokens": (
        "headrace:wasted_tokens",
        "Tokens through the model that came to nothing: rejected drafts, rows of ended sequences.",
    ),
    "early_enqueues": (
        "headrace:early_enqueues", "Steps enqueued before the results of the last one were read."
    ),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Tokens proposed."),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Proposed tokens kept."),
}
_GAUGES = {
    "running": ("vllm:num_requests_running", "Sequences in the batch."),
    "waiting": ("vllm:num_requests_waiting", "Sequences that wait for room."),
}


class EngineCollector(Collector):
    """Reads the engine's figures when Prometheus asks.

    Args:
        engine: Whose.
        values: Of `LABELS`.
    """

    def __init__(self, engine: ServedEngine, values: tuple[str, ...]) -> None:
        self._engine = engine
        self._values = values

    def collect(self) -> Iterator[Metric]:
        """All of them, as they are now."""
        stats = self._engine.stats()
        for key, (name, text) in _GAUGES.items():
            yield self._gauge(name, text, stats.get(key, 0))
        for key, (name, text) in _COUNTERS.items():
            yield self._counter(name, text, stats.get(key, 0))
        yield from self._states_of_waiting(stats)
        yield from self._steps(stats)
        yield from self._pools(stats)
        yield from self._cache(stats, stats.get("prefix_cache", {}))
        yield from self._store(stats.get("state_store") or {})
        yield from self._drafts(stats)

    def _states_of_waiting(self, stats: dict[str, Any]) -> Iterator[Metric]:
        deferred = stats.get("deferred", 0)
        yield self._gauges(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait for room, or for a prompt that another one computes.", "reason",
            {"capacity": stats.get("waiting", 0) - deferred, "deferred": deferred},
        )
        yield self._gauges(
            "vllm:engine_sleep_state", "Always awake: there is no sleep mode.", "sleep_state",
            {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
        )

    def _steps(self, stats: dict[str, Any]) -> Iterator[Metric]:
        tally = stats.get("step_tokens", {"limits": [], "counts": [0], "sum": 0})
        yield histogram(
            "vllm:iteration_tokens_total",
            "Prompt tokens computed and tokens generated in a step.", self._values, tally,
        )
        yield self._gauge(
            "headrace:host_waits_per_step", "Times the host waited for the device, per step.",
            stats.get("host_waits_per_step", 0),
        )

    def _drafts(self, stats: dict[str, Any]) -> Iterator[Metric]:
        drafted = stats.get("drafted_by_position", [])
        yield self._counter(
            "vllm:spec_decode_num_drafts", "Times tokens were proposed.", sum(drafted[:1])
        )
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Proposed tokens kept, by position.",
            "position", _by_place(stats.get("accepted_by_position", [])),
        )
        yield self._gauges(
            "headrace:spec_decode_acceptance", "Share of drafts kept, by position.", "position",
            _by_place(stats.get("acceptance_by_position", [])),
        )

    def _pools(self, stats: dict[str, Any]) -> Iterator[Metric]:
        kv = stats.get("kv_blocks", {})
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use.", _share(kv))
        config = InfoMetricFamily("vllm:cache_config", "Sizes of the KV cache.", labels=LABELS)
        config.add_metric(self._values, {
            "block_size": str(self._engine.config.block_size),
            "num_gpu_blocks": str(kv.get("total", 0)),
        })
        yield config
        for field, text in (
            ("total", "KV blocks in the pool."),
            ("used", "KV blocks that sequences hold."),
            ("cached", "KV blocks that hold a cached prefix."),
        ):
            yield self._gauge(f"headrace:kv_blocks_{field}", text, kv.get(field, 0))
        yield self._counter(
            "headrace:kv_block_evictions", "Cached KV blocks that had to make room.",
            kv.get("evictions", 0),
        )
        states = stats.get("state_blocks", [])
        worst = max((_share(pool) for pool in states), default=0.0)
        yield self._gauge("headrace:mamba_usage", "Share of state blocks in use.", worst)
        for field, text in (
            ("total", "State blocks in the pool."),
            ("used", "State blocks that sequences hold."),
            ("cached", "State blocks that hold a checkpoint."),
        ):
            yield self._gauges(
                f"headrace:state_blocks_{field}", text, "group",
                _by_place([pool.get(field, 0) for pool in states]),
            )
        yield self._counters(
            "headrace:state_block_evictions", "Checkpoints that had to make room.", "group",
            _by_place([pool.get("evictions", 0) for pool in states]),
        )

    def _cache(self, stats: dict[str, Any], cache: dict[str, Any]) -> Iterator[Metric]:
        hits = cache.get("hit_tokens", 0)
        stored = (stats.get("state_store") or {}).get("hit_tokens", 0)
        yield self._counter(
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up, again after each preemption.", cache.get("query_tokens", 0),
        )
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found.", hits)
        yield self._counters(
            "vllm:prompt_tokens_cached_by_source", "Prompt tokens found, by where they lay.",
            "source", {"device": hits - stored, "state_store": stored},
        )
        yield self._counters(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "source",
            {"local_compute": stats.get("computed_prompt_tokens", 0),
             "local_cache_hit": stats.get("cached_prompt_tokens", 0)},
        )
        yield self._counters(
            "headrace:prefix_cache_missed_tokens", "Prompt tokens computed, by reason.", "reason",
            cache.get("missed_tokens", {}),
        )

    def _store(self, store: dict[str, Any]) -> Iterator[Metric]:
        yield self._counter(
            "headrace:state_store_hits", "Prompts whose prefix came from the state store.",
            store.get("hits", 0),
        )
        yield self._counters(
            "headrace:state_store_misses",
            "Prompts that the state store had nothing for, and pieces that were of no use, by "
            "reason.", "reason", store.get("misses", {}),
        )
        yield self._counter(
            "headrace:state_store_dropped_pieces",
            "Pieces of prefixes that were not saved: too many were on their way.",
            store.get("dropped_pieces", 0),
        )
        yield self._counter(
            "headrace:state_store_failed_writes", "Pieces that the disk did not take.",
            store.get("failed_writes", 0),
        )
        yield self._gauges(
            "headrace:state_store_bytes", "Bytes of prefixes in the state store.", "tier",
            {tier: store.get(f"{tier}_bytes", 0) for tier in ("memory", "disk")},
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _gauges(
        self, name: str, text: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        family = GaugeMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._values, key), value)
        return family

    def _counters(
        self, name: str, text: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._values, key), value)
        return family


def histogram(
    name: str, text: str, values: tuple[str, ...], figures: Mapping[str, Any]
) -> Metric:
    """A histogram of counts that were made already.

    Args:
        name: Of the metric.
        text: Its help.
        values: Of `LABELS`.
        figures: Of a `headrace.engine.tally.Tally`.
    """
    family = HistogramMetricFamily(name, text, labels=LABELS)
    limits = [*(str(float(limit)) for limit in figures["limits"]), "+Inf"]
    buckets = list(zip(limits, accumulate(figures["counts"]), strict=True))
    family.add_metric(values, buckets, sum_value=figures["sum"])
    return family


def _by_place(values: list[float]) -> dict[str, float]:
    return {str(place): value for place, value in enumerate(values)}


def _share(pool: dict[str, Any]) -> float:
    return pool.get("used", 0) / max(1, pool.get("total", 0))
