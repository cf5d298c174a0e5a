"""Two ranks that share a model, in one process: features on and off, against plain decoding.

The oracle is the plain loop on parts of the same model, so everything is compared bit for bit; and
the plain loop on the whole model, whose sums are made in another order: tokens are compared.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import astuple
from functools import partial
from typing import Any

import pytest
import torch
from conformance import (
    GRID,
    VOCAB,
    Case,
    Job,
    make_config,
    make_jobs,
    pairwise,
    run_case,
    small_model,
)

from headrace import rt
from headrace.check.real import make_parallel_engine
from headrace.models.reference_loop import (
    RUNNING,
    ReferenceRun,
    build_caches,
    prompt_batch,
    run_reference,
)
from headrace.testing import on_all_ranks, tiny_family, tiny_parts

NUM_RANKS = 2
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "mode": ("async", "sync"),
    "layout": ("slots", "compact"),
    "scheme": ("columns", "replay:8"),
    "cache": ("align", "none"),
    "drafts": ("none", "scripted:3", "ngram:3", "mtp:2", "draft:same:3"),
    "pools": ("roomy", "preempt"),
    "graphs": ("off", "on"),
}
PAIRS = pairwise(FACTORS, seed=2)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5 of one key head": ("qwen3_5", {"linear_num_key_heads": 1, "num_key_value_heads": 1}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "qwen3_next": (
        "qwen3_5_moe",
        {
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            "linear_num_key_heads": 4,
            "tie_word_embeddings": False,
            "vocab_size": 161,
        },
    ),
    "nemotron_h": ("nemotron_h", {"n_groups": 4}),
    **{name: (name, {}) for name in ("lfm2", "lfm2_moe", "granite", "bamba", "mamba2")},
}
"""Family and sizes; a vocabulary need not come out even."""
TOLERANCE = 2e-4
"""Of logits, in units of their standard deviation (docs/architecture.md)."""


def parts_of(seed: int) -> list[Any]:
    return tiny_parts("qwen3_5", rt.local_groups(NUM_RANKS), seed, **SMALL)


def attached(models: list[Any]) -> list[Any]:
    for model in models:
        model.shard.group.attach(rt.Runtime.create("cpu"))
    return models


def solved(models: list[Any], job: Job) -> Job:
    """The answer of the plain loop on the parts; states are those of rank 0."""
    assert job.run is not None
    states = sorted(job.run.states)
    job.run, other = on_all_ranks(
        models,
        lambda model: run_reference(
            model, job.prompt, len(job.run.tokens), scan_grid=GRID, states_at=states,
        ),
    )
    assert job.run.logits.equal(other.logits)
    return job


def assert_as_on_one_device(parts: ReferenceRun, whole: ReferenceRun) -> None:
    """Equal tokens and close logits, up to where the two likeliest are closer than the error."""
    scale = float(whole.logits.std())
    for got, wanted, mine, token in zip(
        parts.logits, whole.logits, parts.tokens, whole.tokens, strict=False
    ):
        error = float((got - wanted).abs().max())
        assert error <= TOLERANCE * scale
        if mine != token:
            first, second = wanted.topk(2).values.tolist()
            assert first - second <= 2 * error, f"{mine} instead of {token}"
            return
    assert parts.tokens == whole.tokens


@pytest.fixture(scope="module")
def bench() -> tuple[int, list[Job]]:
    """A fresh random model's seed, and answers of its parts."""
    seed = secrets.randbits(32)
    print(f"model and prompts of seed {seed}")
    jobs = [
        job for job in make_jobs(small_model(seed), random.Random(seed), (1, 15, 16, 33, 48, 64))
        if job.params.temperature == 0.0
    ]
    models = attached(parts_of(seed))
    for job in jobs:
        whole = job.run
        solved(models, job)
        assert job.run is not None
        assert whole is not None
        assert_as_on_one_device(job.run, whole)
    return seed, jobs


@pytest.mark.matrix
@pytest.mark.parametrize("case", PAIRS, ids=lambda case: "-".join(map(str, astuple(case))))
def test_two_ranks_give_the_bits_of_plain_decoding_on_two_ranks(
    bench: tuple[int, list[Job]], case: Case
) -> None:
    seed, jobs = bench
    events = secrets.randbits(32)
    print(f"{case}, events of seed {events}")
    config = make_config(**case.options(), tensor_parallel_size=NUM_RANKS)
    draft_model = small_model(seed) if case.drafts.startswith("draft") else None
    models = parts_of(seed)
    engine = make_parallel_engine(
        config, models, [rt.Runtime.create("cpu") for _ in models], draft_model=draft_model
    )
    stats = run_case(models[0], case, jobs, random.Random(events), engine=engine)
    engine.close()
    if case.cache == "align":
        assert stats["checkpoints"]
        assert stats["hits"]
    if case.drafts.startswith(("scripted", "draft")):
        assert stats["accepted_tokens"], "no draft was ever kept, the case shows nothing"


# The small models of the last three have groups for two.
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [*((name, 2) for name in FAMILIES), *((name, 4) for name in [*FAMILIES][:-3])],
)
def test_parts_of_a_model_give_what_the_whole_gives(name: str, num_ranks: int) -> None:
    family, sizes = FAMILIES[name]
    seed = secrets.randbits(32)
    print(f"weights of seed {seed}")
    prompt = random.Random(seed).choices(range(2, VOCAB), k=29)
    run = partial(run_reference, prompt=prompt, num_tokens=12)
    # Variant B has random norms and gates.
    whole = run(tiny_family(family, seed, "B", **sizes))
    models = attached(tiny_parts(family, rt.local_groups(num_ranks), seed, "B", **sizes))
    for part in on_all_ranks(models, run):
        assert_as_on_one_device(part, whole)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_the_mtp_heads_of_parts_give_what_that_of_the_whole_gives(family: str) -> None:
    seed = secrets.randbits(32)
    print(f"weights of seed {seed}")
    prompt = random.Random(seed).choices(range(2, VOCAB), k=32)
    following = torch.tensor([*prompt[1:], 5])

    def draft_logits(model: Any) -> torch.Tensor:  # noqa: ANN401
        caches = build_caches(model, max_tokens=len(prompt), state_blocks=RUNNING + 1)
        batch = prompt_batch(model, prompt, 0, len(prompt))
        hidden = model.forward(batch, caches)
        logits: torch.Tensor = model.logits(model.mtp(batch, caches, hidden, following))
        return logits

    whole = draft_logits(tiny_family(family, seed, "B"))
    models = attached(tiny_parts(family, rt.local_groups(NUM_RANKS), seed, "B"))
    for part in on_all_ranks(models, draft_logits):
        assert float((part - whole).abs().max()) <= TOLERANCE * float(whole.std())
