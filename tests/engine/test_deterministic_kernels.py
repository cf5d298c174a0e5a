"""E1 with kernels: `deterministic` and `kernels` triton give the same bits whatever else runs.

The oracle is the plain loop with the same kernels, one request and one token at a time. Cheap cases
have the kernels' specifications in their place, which work row by row: they show that the engine
asks for the right things. Those in the interpreter show that what is launched gives bits that no
batch mate, chunk, draft or preemption changes.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conformance import (
    GREEDY,
    VOCAB,
    Case,
    Job,
    assert_checkpoints,
    assert_same_bits,
    drive,
    make_engine,
    make_jobs,
    pairwise,
    run_case,
    script_for,
    solve,
)

from headrace.config import EngineConfig
from headrace.engine.load import check_deterministic, load_parts
from headrace.errors import ConfigError
from headrace.models.layers.recomputed import RUN
from headrace.models.registry import model_class
from headrace.testing import (
    KERNEL_SIZES,
    random_weights,
    tiny_config,
    tiny_family,
    tiny_model,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], **KERNEL_SIZES,
}  # fmt: skip
"""One recurrent and one attention layer with an MTP head; the state matters."""

FACTORS = {
    "mode": ("sync", "async"),
    "layout": ("slots", "compact"),
    "scheme": ("columns", "replay:4"),
    "cache": ("align", "none"),
    "drafts": ("none", "scripted:3", "mtp:2"),
    "budget": (24, 64),  # even numbers: bitwise mode
    "pools": ("roomy", "preempt", "tight"),
    "graphs": ("off", "on"),
}
CASES = pairwise(FACTORS, seed=0)
FEW = 4
"""Cases that run always."""


def test_all_pairs_of_features_are_among_the_cases() -> None:
    pairs = {(a, b) for a in FACTORS for b in FACTORS if a < b}
    for a, b in pairs:
        met = {(getattr(case, a), getattr(case, b)) for case in CASES}
        assert len(met) == len(FACTORS[a]) * len(FACTORS[b])


@pytest.mark.usefixtures("references_only")
@pytest.mark.parametrize(
    "case",
    [
        case if index < FEW else pytest.param(case, marks=pytest.mark.full)
        for index, case in enumerate(CASES)
    ],
    ids=str,
)
def test_what_kernels_are_asked_for_gives_the_same_bits(case: Case) -> None:
    seed = secrets.randbits(32)
    print(f"{seed=}")
    rng = random.Random(seed)
    model = tiny_model(seed=seed, **SIZES)
    # More generated tokens than a run holds, so that several are computed again.
    jobs = make_jobs(model, rng, [5, 18, 33], "fixed")
    jobs[0] = solve(
        model, Job(jobs[0].prompt, replace(GREEDY, max_tokens=RUN + 5)), states=True,
        kernels="fixed",
    )
    stats = run_case(model, replace(case, kernels="triton"), jobs, rng)
    if case.cache == "align":
        assert stats["checkpoints"]
    if case.pools == "preempt":
        assert stats["preemptions"]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("case", "dtype", "lengths", "num_tokens"),
    [
        (Case(scheme="replay:4", drafts="scripted:2", budget=16, pools="preempt"), torch.float32,
         [18, 3], 4),
        *(
            pytest.param(
                Case(layout=layout, scheme=scheme, drafts=drafts, budget=32, pools="preempt",
                     graphs=graphs),
                dtype, [33, 18, 5], 11, marks=pytest.mark.full,
            )
            for dtype in (torch.float32, torch.bfloat16)
            for layout, scheme, drafts, graphs in (
                ("slots", "columns", "mtp:2", "on"), ("compact", "replay:4", "scripted:3", "off"),
                ("compact", "columns", "none", "off"), ("slots", "replay:4", "mtp:1", "on"),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_give_the_same_bits_whatever_else_runs(
    case: Case, dtype: torch.dtype, lengths: list[int], num_tokens: int
) -> None:
    """Together, in chunks, with drafts and preempted at least once; then again, with hits."""
    seed = secrets.randbits(32)
    print(f"{seed=}")
    config = tiny_config(**SIZES)
    model = model_class(config).from_weights(config, random_weights(config, seed), dtype)
    serve_and_compare(model, case, lengths, num_tokens, random.Random(seed))


@pytest.mark.full
@pytest.mark.interpreter
def test_kernels_of_a_mixture_of_experts_give_the_same_bits() -> None:
    seed = secrets.randbits(32)
    print(f"{seed=}")
    sizes = {name: SIZES[name] for name in ("vocab_size", "num_hidden_layers", "layer_types")}
    model = tiny_family("qwen3_5_moe", seed=seed, **sizes, **KERNEL_SIZES)
    case = Case(drafts="mtp:2", budget=32, pools="preempt")
    serve_and_compare(model, case, [18, 5], 6, random.Random(seed))


def serve_and_compare(
    model: Any,  # noqa: ANN401
    case: Case,
    lengths: Sequence[int],
    num_tokens: int,
    rng: random.Random,
) -> None:
    """Serve prompts that share what they can, and the first one again; compare with the loop."""
    shared = [rng.randrange(2, VOCAB) for _ in range(max(lengths))]
    jobs = [
        solve(model, Job([*shared[: length - 1], 2 + i], replace(GREEDY, max_tokens=num_tokens)),
              states=True, kernels="fixed")
        for i, length in enumerate(lengths)
    ]  # fmt: skip
    engine = make_engine(model, **replace(case, kernels="triton").options())
    engine.scheduler.policy = None
    assert engine.worker.fixed.kernels == "fixed"
    for job in jobs:
        if case.drafts.startswith("scripted"):
            job.script = script_for(job, case.num_drafts, rng)
    outputs = drive(engine, jobs, rng, preempt=0.2)
    outputs += drive(engine, jobs[:1])
    assert outputs[-1].num_cached_tokens
    for job, output in zip([*jobs, jobs[0]], outputs, strict=True):
        assert_same_bits(job, output)
    assert assert_checkpoints(engine, jobs)
    assert engine.scheduler.num_preemptions


# Settings ---------------------------------------------------------------------------------------


def resolved(model: Any, **settings: Any) -> EngineConfig:  # noqa: ANN401
    config = EngineConfig(model="tiny", device="cpu", max_model_len=64, max_num_seqs=2, **settings)
    return load_parts(config, model=model).config


def test_kernels_are_deterministic_if_that_is_asked_for() -> None:
    model = tiny_model(**SIZES)
    assert resolved(model, kernels="triton", deterministic=True).kernels == "triton"
    assert not resolved(model, kernels="triton").deterministic


def test_a_state_that_is_rounded_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"state_dtype is bfloat16.*; use state_dtype float32"):
        resolved(
            tiny_model(**SIZES), kernels="triton", deterministic=True, state_dtype="bfloat16"
        )


def test_heads_that_do_not_fit_tiles_of_all_drafts_are_refused() -> None:
    model = tiny_model(**SIZES | {"num_attention_heads": 16, "num_key_value_heads": 1})
    assert resolved(model, kernels="triton").kernels == "triton"
    with pytest.raises(ConfigError, match=r"a KV head has 16 query heads.*take 8 at most; leave"):
        resolved(model, kernels="triton", deterministic=True)


@pytest.mark.parametrize(
    ("family", "asked", "message"),
    [
        ("qwen3_5", "torch", "kernels alone give the same bits, but kernels is 'torch'; leave"),
        ("lfm2", "auto", "but no kernel serves the layers of Lfm2.*; leave.*on the CPU"),
    ],
)
def test_a_gpu_without_kernels_promises_no_bits(family: str, asked: str, message: str) -> None:
    config = EngineConfig(device="cuda", deterministic=True, kernels="torch")
    with pytest.raises(ConfigError, match=message):
        check_deterministic(config, tiny_family(family).config, asked)


def test_several_gpus_are_refused() -> None:
    config = EngineConfig(
        device="cuda", deterministic=True, kernels="triton", state_dtype="float32",
        tensor_parallel_size=2,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2.*; use one, or leave"):
        check_deterministic(config, tiny_config(**SIZES), "auto")


def test_families_whose_operations_follow_the_batch_are_refused() -> None:
    config = EngineConfig(device="cuda", deterministic=True, kernels="triton")
    with pytest.raises(ConfigError, match=r"operations of Granite.*follow.*kernels torch"):
        check_deterministic(config, tiny_family("granite").config, "auto")
