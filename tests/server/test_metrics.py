"""What Prometheus sees: vLLM's names with their types and labels, and what is counted when."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.errors import EngineDeadError, QueueFullError
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.server.conftest import FakeEngine, Running, Start

DEADLINE_S = 10.0
GAUGES = {
    "vllm:num_requests_running": (), "vllm:num_requests_waiting": (),
    "vllm:num_requests_waiting_by_reason": ("reason",), "vllm:kv_cache_usage_perc": (),
    "vllm:engine_sleep_state": ("sleep_state",),
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
}
COUNTERS = {
    "vllm:prompt_tokens": (), "vllm:generation_tokens": (), "vllm:num_preemptions": (),
    "vllm:prompt_tokens_by_source": ("source",), "vllm:prompt_tokens_cached": (),
    "vllm:prompt_tokens_cached_by_source": ("source",),
    "vllm:prefix_cache_queries": (), "vllm:prefix_cache_hits": (),
    "vllm:request_success": ("finished_reason",), "vllm:spec_decode_num_drafts": (),
    "vllm:spec_decode_num_draft_tokens": (), "vllm:spec_decode_num_accepted_tokens": (),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("position",),
}
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds", "vllm:request_inference_time_seconds",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens", "vllm:request_prefill_kv_computed_tokens",
    "vllm:request_num_preemptions", "vllm:request_params_n", "vllm:request_params_max_tokens",
    "vllm:iteration_tokens_total",
)
#: Those without the labels of a model or an engine, as in vLLM.
OTHERS = {
    "vllm:admission_rejections": ("counter", {"model_name", "reason"}),
    "http_requests": ("counter", {"handler", "method", "status"}),
    "http_request_duration_seconds": ("histogram", {"handler", "method", "le"}),
    "process_start_time_seconds": ("gauge", set()),
    "process_resident_memory_bytes": ("gauge", set()),
    "process_cpu_seconds": ("counter", set()),
}
COMMON = {"model_name", "engine"}


def families(server: Running) -> dict[str, tuple[str, set[str]]]:
    """Name to type and labels."""
    text = server.client.get("/metrics").text
    return {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels})
        for family in text_string_to_metric_families(text)
    }


def value(server: Running, name: str, **labels: str) -> float:
    text = server.client.get("/metrics").text
    found = [
        sample.value
        for family in text_string_to_metric_families(text) for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(found)


def eventually(condition: Callable[[], object]) -> None:
    poll, end = threading.Event(), time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        poll.wait(0.002)


def test_vllms_names_have_vllms_types_and_labels(serving: Running) -> None:
    serving.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
    found = families(serving)
    wanted = {name: ("gauge", {*COMMON, *more}) for name, more in GAUGES.items()}
    wanted |= {name: ("counter", {*COMMON, *more}) for name, more in COUNTERS.items()}
    wanted |= dict.fromkeys(HISTOGRAMS, ("histogram", {*COMMON, "le"}))
    assert {name: found.get(name) for name in wanted} == wanted
    assert {name: found.get(name) for name in OTHERS} == OTHERS


def test_limits_of_buckets_hold_those_that_dashboards_compare_with(serving: Running) -> None:
    text = serving.client.get("/metrics").text
    for name, limits in {
        "vllm:time_to_first_token_seconds": ("0.25", "0.5", "1.0", "2.5", "5.0", "10.0"),
        "vllm:request_time_per_output_token_seconds": ("0.025", "0.05", "0.075", "0.1", "0.2"),
        "vllm:e2e_request_latency_seconds": ("0.3", "1.0", "15.0", "60.0", "7680.0"),
    }.items():
        for limit in limits:
            assert f'{name}_bucket{{engine="0",le="{limit}",model_name="fake"}}' in text, name


def test_all_reasons_are_there_before_anything_has_ended(serve: Start) -> None:
    # A rate needs a value to begin with.
    with serve() as server:
        text = server.client.get("/metrics").text
        for reason in ("stop", "length", "abort", "error"):
            assert f'finished_reason="{reason}",model_name="fake"}} 0.0' in text


def test_choices_that_end_in_different_steps_are_all_counted(serving: Running) -> None:
    before = value(serving, "vllm:request_success_total")
    serving.engine.reply = "hello there"
    events = serving.stream(
        "/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 30, "stop": None}
    )
    assert sum(e["choices"][0]["finish_reason"] is not None for e in events) == 2
    assert value(serving, "vllm:request_success_total") - before == 2


def test_a_client_that_leaves_is_counted_as_aborted(serving: Running) -> None:
    def aborted() -> float:
        return value(serving, "vllm:request_success_total", finished_reason="abort")

    before = aborted()
    serving.engine.pause = threading.Event()
    body = {"prompt": "a", "max_tokens": 9, "stream": True, "n": 2}
    with (
        httpx.Client(base_url=serving.url) as leaving,
        leaving.stream("POST", "/v1/completions", json=body) as reply,
    ):
        next(reply.iter_lines())
    eventually(lambda: aborted() - before == 2)


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engines_death_ends_is_counted_as_failed(
    serving: Running, *, stream: bool
) -> None:
    before = value(serving, "vllm:request_success_total", finished_reason="error")
    serving.engine.failure = EngineDeadError("the engine died; restart the server")
    serving.post("/v1/completions", {"prompt": "a", "stream": stream})
    after = value(serving, "vllm:request_success_total", finished_reason="error")
    assert after - before == 1


def test_refusals_are_counted_under_the_limit_that_was_reached(
    serve: Start, fake_engine: FakeEngine
) -> None:
    def refused(server: Running, reason: str) -> float:
        return value(server, "vllm:admission_rejections_total", reason=reason)

    with serve(fake_engine, ServerSettings(log_level="warning", max_concurrent_requests=1)) as one:
        fake_engine.failure = QueueFullError("9 sequences wait; try again later")
        assert one.post("/v1/completions", {"prompt": "a"}).status_code == 429
        assert refused(one, "max_num_queued_reqs") == 1
        fake_engine.failure = None
        fake_engine.pause = threading.Event()
        body = {"prompt": "a", "stream": True}
        with one.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            with httpx.Client(base_url=one.url) as other:
                assert other.post("/v1/completions", json={"prompt": "a"}).status_code == 429
            fake_engine.pause.set()
            assert list(lines)
        assert refused(one, "max_concurrent_requests") == 1


def test_requests_over_http_are_counted_by_route_and_status(serving: Running) -> None:
    def count(**labels: str) -> float:
        return value(serving, "http_requests_total", **labels)

    before = count(handler="none")
    served = count(handler="/v1/completions", status="2xx", method="POST")
    timed = value(serving, "http_request_duration_seconds_count", handler="/v1/completions")
    serving.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
    serving.client.get("/v1/models/a/b")
    serving.client.get("/made/up/by/the/client")
    serving.client.get("/health")
    assert count(handler="/v1/completions", status="2xx", method="POST") - served == 1
    assert value(
        serving, "http_request_duration_seconds_count", handler="/v1/completions"
    ) - timed == 1
    assert count(handler="/v1/models/{model_id:path}", status="4xx") > 0
    assert count(handler="none") - before == 1
    assert count(handler="/health") == 0


def test_prompts_count_while_they_are_computed(random_model: Path, serve: Start) -> None:
    config = EngineConfig(
        model=str(random_model), served_model_name="tiny", max_num_seqs=4, num_kv_blocks=200,
        num_state_blocks=64,
    )
    with serve(AsyncLLM(config), ServerSettings(log_level="warning")) as server:
        ids: list[Any] = list(range(1, 40))
        body = {"prompt": ids, "max_tokens": 24, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            assert httpx.get(f"{server.url}/stats").json()["prompt_tokens"] == len(ids)
            assert list(lines)
        assert value(server, "vllm:prompt_tokens_total") == len(ids)
        assert value(
            server, "vllm:prompt_tokens_by_source_total", source="local_compute"
        ) == len(ids)
        total = value(server, "vllm:iteration_tokens_total_sum")
        assert total == len(ids) + value(server, "vllm:generation_tokens_total")
        assert value(server, "vllm:iteration_tokens_total_count") == value(
            server, "headrace:steps_total"
        )
