"""Asynchronous scheduling really runs ahead, and the host waits for nothing but its tickets."""

from __future__ import annotations

import secrets

import pytest
from conformance import make_engine, small_model

from headrace import rt
from headrace.check.real import RealTarget
from headrace.sampling_params import SamplingParams

MOST_SEEDS = 6
LEAST_SHARE = 0.9


@pytest.mark.sim
def test_the_next_step_is_enqueued_before_the_last_ones_results_are_read() -> None:
    first = secrets.randbits(20)
    print(f"seeds from {first}")
    target = RealTarget()
    steady = early = 0
    for seed in range(first, first + MOST_SEEDS):
        runtime = rt.Runtime.create("sim", seed=seed, policy="lazy")
        assert target.run(runtime, seed) == []
        assert not runtime.reports, str(runtime.reports[0])
        steady += target.num_steady_steps
        early += target.num_early_steps
    print(f"{early} of {steady} steady steps were enqueued early")
    assert early >= LEAST_SHARE * steady
    assert steady > 0, "no workload of these seeds was asynchronous"


def test_wasted_work_counts_rejected_drafts_and_dropped_rows() -> None:
    seed = secrets.randbits(20)
    print(f"{seed=}")
    engine = make_engine(small_model(seed), speculative="ngram:3")
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine.add_request("a", [5, 6, 5, 6, 5, 6, 5], params)
    while engine.has_work():
        engine.step()
    stats = engine.stats()
    rejected = stats["draft_tokens"] - stats["accepted_tokens"]
    assert stats["draft_tokens"] > 0
    assert stats["wasted_tokens"] >= rejected
    assert stats["forward_tokens"] == 7 + 23 + stats["wasted_tokens"]
