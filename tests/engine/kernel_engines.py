"""An engine with kernels beside one with PyTorch operations, for the same requests."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from conformance import GREEDY, VOCAB, Job, make_engine, script_for, solve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.engine.engine import Engine
    from headrace.outputs import RequestOutput

TOLERANCE = 2e-4
"""Of a difference, in standard deviations: where bits are not promised."""


def serve(
    engine: Engine, jobs: Sequence[Job], preempt_at: Sequence[int] = ()
) -> list[RequestOutput]:
    """Run requests to their end; before some steps a running sequence is preempted."""
    for index, job in enumerate(jobs):
        request = engine.add_request(str(index), job.prompt, job.params)
        if job.script is not None:
            engine.worker.scripts[request.sequences[0].seq_id] = job.script
    done: dict[str, RequestOutput] = {}
    for step in itertools.count():
        if not engine.has_work():
            break
        if step in preempt_at:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return [done[str(index)] for index in range(len(jobs))]


def assert_close(output: RequestOutput, expected: RequestOutput) -> bool:
    """Compare one request as far as its tokens are the same; returns whether all of them are.

    A token may differ only where the two likeliest are closer than twice the difference of logits.
    """
    mine, reference = output.outputs[0], expected.outputs[0]
    assert mine.logprobs is not None
    assert reference.logprobs is not None
    for place, (entry, wanted) in enumerate(zip(mine.logprobs, reference.logprobs, strict=True)):
        got = np.array([entry[token].logprob for token in range(VOCAB)])
        want = np.array([wanted[token].logprob for token in range(VOCAB)])
        error = np.abs(got - want).max()
        assert error <= TOLERANCE * want.std(), f"position {place}: {error=}, std {want.std()}"
        if mine.token_ids[place] != reference.token_ids[place]:
            best = np.sort(want)[-2:]
            assert best[1] - best[0] < 2 * error, f"position {place}: a token differs, no tie"
            print(f"position {place}: a near tie, the rest is not compared")
            return False
    return True


def assert_same_pools(engine: Engine, reference: Engine) -> None:
    """Everything that outlives a step is the same, up to rounding.

    Of a ring the inputs: what else it keeps of a token is the kernel's own.
    """
    pools, wanted = engine.worker.pools, reference.worker.pools
    pairs = []
    if engine.worker.fixed.model.num_kv_layers:
        pairs = [("k", pools.k, wanted.k), ("v", pools.v, wanted.v)]
    for group, ring, group_2, ring_2 in zip(
        pools.states, pools.rings, wanted.states, wanted.rings, strict=True
    ):
        pairs += [(name, group[name], group_2[name]) for name in group]
        pairs += [(name, ring[name], ring_2[name]) for name in ring if name == "conv_input"]
    for name, buffer, buffer_2 in pairs:
        got, want = engine.parts.runtime.read(buffer), reference.parts.runtime.read(buffer_2)
        assert want.any(), f"nothing was written to {name}"
        error = float((got - want).abs().max() / want[want != 0].std())
        assert error <= TOLERANCE, f"{name}: {error} standard deviations"


def compare(
    model: Any,  # noqa: ANN401
    lengths: Sequence[int],
    num_tokens: int,
    seed: int,
    preempt_at: Sequence[int] = (),
    **options: Any,  # noqa: ANN401
) -> Engine:
    """Serve the same requests by kernels and by PyTorch operations; returns the first engine.

    A script's drafts are right for a few tokens each time.
    """
    rng = random.Random(seed)
    jobs = []
    for length in lengths:
        prompt = [rng.randrange(2, VOCAB) for _ in range(length)]
        job = solve(model, Job(prompt, replace(GREEDY, max_tokens=num_tokens)))
        if options["speculative"].startswith("scripted"):
            job.script = script_for(job, int(options["speculative"][-1]), rng)
        jobs.append(job)
    engines = [make_engine(model, deterministic=False, kernels=kernels, seed=seed, **options)
               for kernels in ("triton", "torch")]
    for engine in engines:
        engine.scheduler.policy = None
    outputs = [serve(engine, jobs, preempt_at) for engine in engines]
    pairs = list(zip(*outputs, strict=True))
    are_same = [assert_close(mine, reference) for mine, reference in pairs]
    if all(are_same):
        assert_same_pools(*engines)
    return engines[0]


def scheme_options(scheme: str, drafts: str) -> dict[str, Any]:
    """Settings of a case: bases are written every fourth token."""
    interval = 4 if scheme == "replay" else None
    return {"state_scheme": scheme, "replay_interval": interval, "speculative": drafts}
