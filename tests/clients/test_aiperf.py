"""A load generator that people use, unchanged: its counts and the server's are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import headrace

if TYPE_CHECKING:
    from tests.clients.conftest import Clients

pytestmark = pytest.mark.clients

NUM_REQUESTS = 12
TOKENIZER = Path(headrace.__file__).parent / "assets" / "demo"


def test_aiperf_counts_what_the_server_counts(clients: Clients, tmp_path: Path) -> None:
    clients.need("aiperf")
    # It refuses local tokenizers with HF_HUB_OFFLINE. An endpoint at which nobody listens keeps it
    # from the internet as well.
    environment = {
        **{name: value for name, value in clients.environment.items()
           if name not in {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"}},
        "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub"),
    }
    clients.run(
        [
            str(Path(clients.python).parent / "aiperf"), "profile", "--model", "demo",
            "--url", clients.url, "--endpoint-type", "chat", "--streaming",
            "--tokenizer", str(TOKENIZER), "--use-server-token-count",
            "--concurrency", "4", "--request-count", str(NUM_REQUESTS),
            "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16",
            "--extra-inputs", "ignore_eos:true", "--output-artifact-dir", "out", "--ui", "none",
        ],
        tmp_path, environment=environment,
    )
    found = json.loads((tmp_path / "out/profile_export_aiperf.json").read_text())
    assert not found["was_cancelled"]
    assert found["error_summary"] == []
    assert found["request_count"]["avg"] == found["completed_request_count"]["avg"] == NUM_REQUESTS
    # With ignore_eos each answer is as long as was asked for, reasoning included.
    assert found["total_usage_completion_tokens"]["avg"] == 16 * NUM_REQUESTS
    assert found["total_usage_prompt_tokens"]["avg"] > 64 * NUM_REQUESTS
    assert found["time_to_first_token"]["count"] == NUM_REQUESTS
    # It warns without this field, and then knows nothing of the cache.
    assert "total_usage_prompt_cache_read_tokens" in found
    scraped = json.loads((tmp_path / "out/server_metrics_export.json").read_text())
    assert scraped["summary"]["endpoints_successful"] == [f"{clients.url}/metrics"]
    for name, count in (
        ("vllm:request_success", NUM_REQUESTS),
        ("vllm:generation_tokens", 16 * NUM_REQUESTS),
        ("vllm:prompt_tokens", found["total_usage_prompt_tokens"]["avg"]),
    ):
        total = sum(series["stats"]["total"] for series in scraped["metrics"][name]["series"])
        assert total == count, (name, total, count)
