"""Generated tokens through fused kernels give what PyTorch operations give, within a tolerance.

An engine with `kernels` "triton" and one with "torch" get the same requests; their tokens, logits
and all that their pools hold afterwards are compared. The tolerance is what docs/architecture.md
promises where bits are not promised: 2e-4 of the standard deviation.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from conformance import GREEDY, VOCAB, Job, make_engine
from kernel_engines import assert_close, compare, scheme_options, serve

from headrace.config import EngineConfig
from headrace.engine.load import load_parts, resolve_kernels, resolve_scheme
from headrace.errors import ConfigError
from headrace.models.layers import split_plan
from headrace.ops.paged_prefill import tiles
from headrace.rt import Effect
from headrace.rt.buffers import tensors_of
from headrace.rt.detector import RowBound, assert_effects
from headrace.testing import KERNEL_SIZES, tiny_family, tiny_model
from headrace.worker import launches

if TYPE_CHECKING:
    from headrace.models.batch import StepBatch
    from headrace.outputs import RequestOutput
    from headrace.rt.detector import Detector

LAYOUTS, SCHEMES = ("slots", "compact"), ("columns", "replay")


def model_of(seed: int, **sizes: Any) -> Any:  # noqa: ANN401
    """One recurrent and one attention layer with an MTP head; the state matters."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], **KERNEL_SIZES,
    }
    return tiny_model(seed=seed, **(settings | sizes))


def mixture_of(seed: int) -> Any:  # noqa: ANN401
    """The same layers with a mixture of experts in each, and in the MTP head."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 2, **KERNEL_SIZES}
    layer_types = ["linear_attention", "full_attention"]
    return tiny_family("qwen3_5_moe", seed=seed, layer_types=layer_types, **sizes)


@pytest.mark.usefixtures("references_only")
@pytest.mark.thinned
@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("drafts", ["none", "scripted:3", "mtp:2"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_kernels_are_told_fits_their_specification(
    layout: str, scheme: str, drafts: str, graphs: str
) -> None:
    """The references in place of the kernels: everything but the kernels' own code, and cheap."""
    seed = secrets.randbits(32)
    print(f"{seed=}")
    options = scheme_options(scheme, drafts)
    # Chunks, and generated tokens beside prompts; the fourth one waits for a slot.
    engine = compare(
        model_of(seed), [5, 17, 33, 9], 9, seed, batch_layout=layout, max_num_seqs=3,
        max_num_batched_tokens=32, graphs=graphs, **options,
    )
    assert engine.worker.fixed.kernels == "triton"


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("layout", "scheme", "drafts", "graphs", "lengths", "num_tokens"),
    [
        ("slots", "replay", "scripted:1", "off", [3, 2], 3),
        # A prompt of two pieces, and one beside generated tokens.
        ("compact", "columns", "none", "off", [21, 4], 2),
        *(
            pytest.param(layout, scheme, drafts, graphs, [5, 17, 33], 8, marks=pytest.mark.full)
            for layout in LAYOUTS
            for scheme in SCHEMES
            for drafts in ("none", "scripted:3", "mtp:2")
            for graphs in ("off", "on")
        ),
    ],
)
def test_kernels_give_what_pytorch_operations_give(
    layout: str,
    scheme: str,
    drafts: str,
    graphs: str,
    lengths: list[int],
    num_tokens: int,
    race_detector: Detector,
) -> None:
    """On the simulated device: no race between launches, nor in one, nor an undeclared effect."""
    seed = secrets.randbits(32)
    print(f"{seed=}")
    engine = compare(
        model_of(seed), lengths, num_tokens, seed, batch_layout=layout, rt_backend="sim",
        graphs=graphs, **scheme_options(scheme, drafts),
    )
    runtime, worker = engine.parts.runtime, engine.worker
    assert runtime.finish() == ()
    assert {launch.kernel for launch in race_detector.launches} == {
        "add_rms_norm_kernel", "attention_inputs_kernel", "gated_product_kernel",
        "gated_delta_decode_kernel", "paged_decode_kernel", "combine_splits_kernel",
        "best_of_parts_kernel", "best_of_row_kernel",
        "paged_prefill_kernel",
        "prefill_inputs_kernel", "prefill_window_kernel", "prefill_within_kernel",
        "prefill_along_kernel", "prefill_norm_kernel",
    }
    # What the kernels do is part of what their launch declares. Blocks 0 are no one's.
    effects = dict.fromkeys(("inputs", "work"), Effect.READ)
    effects |= dict.fromkeys(("k", "v", "states", "rings"), Effect.READ_WRITE)
    assert all(effect in launches.forward.effects[name] for name, effect in effects.items())
    pools = worker.pools
    arguments: dict[str, Any] = {
        "k": pools.k, "v": pools.v, "states": pools.states, "rings": pools.rings,
        "inputs": list(worker._inputs_of.values()), "work": worker._work,
    }
    if worker.graphs is not None:
        arguments["inputs"].append(worker.graphs.inputs)
    owned = {
        "k": range(1, worker.sizes.num_kv_blocks), "v": range(1, worker.sizes.num_kv_blocks),
        "states": range(1, worker.sizes.num_state_blocks),
        "rings": range(1, worker.sizes.max_num_seqs + 1),
    }
    assert_effects(
        race_detector.launches,
        effects,
        {name: tensors_of(name, value) for name, value in arguments.items()},  # type: ignore[misc]
        rows={name: RowBound(axis=1, reads=r, writes=r) for name, r in owned.items()},
        unused=("rings",) if scheme == "columns" else (),
    )


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("drafts", "graphs", "num_tokens"),
    [("none", "off", 3), pytest.param("mtp:2", "on", 8, marks=pytest.mark.full)],
)
def test_a_mixture_of_experts_by_kernels_gives_what_pytorch_operations_give(
    drafts: str, graphs: str, num_tokens: int, race_detector: Detector
) -> None:
    seed = secrets.randbits(32)
    print(f"{seed=}")
    engine = compare(
        mixture_of(seed), [5, 17], num_tokens, seed, rt_backend="sim", graphs=graphs,
        **scheme_options("columns", drafts),
    )
    assert engine.parts.runtime.finish() == ()
    kernels = {launch.kernel for launch in race_detector.launches}
    assert kernels >= {
        "route_kernel", "tiles_kernel", "expert_product_kernel", "add_experts_kernel",
    }


@pytest.mark.usefixtures("references_only")
@pytest.mark.thinned
@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("drafts", ["none", "scripted:3", "mtp:2"])
def test_what_the_kernels_of_a_mixture_are_told_fits_their_specification(
    drafts: str, graphs: str
) -> None:
    seed = secrets.randbits(32)
    print(f"{seed=}")
    compare(
        mixture_of(seed), [5, 17, 33, 9], 9, seed, max_num_seqs=3, max_num_batched_tokens=32,
        graphs=graphs, **scheme_options("columns", drafts),
    )


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("layout", "budget", "block_size", "lengths", "preempt_at"),
    [
        ("slots", 24, 4, [29, 3], []),
        *(
            pytest.param(layout, budget, size, [33, 41, 3], [5, 9], marks=pytest.mark.full)
            for layout in LAYOUTS
            for budget in (24, 64)
            for size in (4, 16)
        ),
    ],
)
def test_prompts_attend_in_a_kernel(
    layout: str,
    budget: int,
    block_size: int,
    lengths: list[int],
    preempt_at: list[int],
    race_detector: Detector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks of prompts, split and not, and tokens that are computed again after a preemption."""
    seed = secrets.randbits(32)
    print(f"{seed=}")
    monkeypatch.setattr(tiles, "_SPLIT_KEYS", 12)
    engine = compare(
        model_of(seed), lengths, 2 + len(preempt_at) * 4, seed, preempt_at, batch_layout=layout,
        rt_backend="sim", speculative="none", max_num_batched_tokens=budget,
        block_size=block_size,
    )
    assert engine.parts.runtime.finish() == ()
    assert engine.scheduler.num_preemptions == len(preempt_at)
    kernels = {launch.kernel for launch in race_detector.launches}
    assert {"paged_prefill_kernel", "add_parts_kernel"} <= kernels


@pytest.mark.usefixtures("references_only")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_prompts_that_go_on_from_a_cached_state_and_tokens_computed_again_fit_too(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step: a prompt behind a hit, generated tokens after a preemption, generating rows."""
    seed = secrets.randbits(32)
    print(f"{seed=}")
    model, rng = model_of(seed), random.Random(seed)
    shared = [rng.randrange(2, VOCAB) for _ in range(40)]
    jobs = [Job([*shared, 2 + i, 3], replace(GREEDY, max_tokens=7)) for i in range(3)]
    outputs, paths = [], set()
    plan = split_plan.plan_split

    def noted(batch: StepBatch, *args: Any) -> split_plan.SplitPlan:  # noqa: ANN401
        made = plan(batch, *args)
        has_source = made.prompts is not None and bool(made.prompts.rows[:, 3].any())
        paths.add((made.generating is not None, has_source, made.others is not None))
        return made

    monkeypatch.setattr("headrace.models.qwen3_5.plan_split", noted)
    for kernels in ("triton", "torch"):
        engine = make_engine(
            model, deterministic=False, kernels=kernels, seed=seed, async_scheduling=False,
            **scheme_options(scheme, "none"),
        )
        first = serve(engine, jobs[:1])
        done: dict[str, RequestOutput] = {}
        for index, job in enumerate(jobs[1:]):
            engine.add_request(str(index), job.prompt, job.params)
        for _ in range(3):
            done |= {one.request_id: one for one in engine.step() if one.finished}
        engine.scheduler.preempt(engine.scheduler.running[-1])
        # Its prompt comes first; its generated tokens are in the step of the next prompt.
        done |= {one.request_id: one for one in engine.step() if one.finished}
        engine.add_request("2", [*shared, 9, 9], jobs[0].params)
        while engine.has_work():
            done |= {one.request_id: one for one in engine.step() if one.finished}
        assert engine.scheduler.num_preemptions == 1
        outputs.append([*first, *(done[name] for name in sorted(done))])
    assert (True, True, True) in paths
    for mine, reference in zip(*outputs, strict=True):
        assert_close(mine, reference)


# Settings ---------------------------------------------------------------------------------------


def resolved(model: Any, **settings: Any) -> EngineConfig:  # noqa: ANN401
    config = EngineConfig(model="tiny", device="cpu", max_model_len=64, max_num_seqs=2, **settings)
    return load_parts(config, model=model).config


def test_a_cpu_runs_pytorch_operations_unless_told_otherwise() -> None:
    model = model_of(0)
    assert resolved(model).kernels == "torch"
    assert resolved(model).deterministic
    asked = resolved(model, kernels="triton")
    assert asked.kernels == "triton"
    assert not asked.deterministic


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("qwen", {"kernels": "cuda"}, "kernels is 'cuda'; choose auto, torch or triton"),
        ("lfm2", {}, "no kernel serves the layers of Lfm2.*; use kernels auto or torch"),
        ("odd", {}, "linear_value_head_dim is 12.*a power of 2; use kernels auto or torch"),
        ("short", {}, "linear_key_head_dim is 8.*need 16..128; use kernels auto or torch"),
        ("large", {}, "head_dim is 512.*need 16..256; use kernels auto or torch"),
        ("wide", {}, "a KV head has 64 query heads.*take 32 at most; use kernels auto or torch"),
    ],
)
def test_kernels_that_cannot_be_used_are_refused_with_the_remedy(
    model: str, settings: dict[str, Any], message: str
) -> None:
    made = {
        "qwen": lambda: model_of(0),
        "lfm2": lambda: tiny_family("lfm2"),
        "odd": lambda: model_of(0, linear_value_head_dim=12),
        "short": lambda: model_of(0, linear_key_head_dim=8),
        "large": lambda: model_of(0, head_dim=512),
        "wide": lambda: model_of(0, num_attention_heads=64, num_key_value_heads=1),
    }[model]()
    with pytest.raises(ConfigError, match=message):
        resolved(made, **{"kernels": "triton", **settings})


def test_a_cpu_without_the_interpreter_refuses_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.load.is_interpreted", lambda: False)
    with pytest.raises(ConfigError, match=r"device is a CPU.*kernels torch.*TRITON_INTERPRET=1"):
        resolved(model_of(0), kernels="triton")


def test_a_cuda_device_takes_kernels_where_there_are_some() -> None:
    qwen, lfm2 = model_of(0).config, tiny_family("lfm2").config
    config = EngineConfig(device="cuda", deterministic=False)
    assert resolve_kernels(config, qwen) == "triton"
    assert resolve_kernels(config, lfm2) == "torch"
    assert resolve_kernels(replace(config, kernels="torch"), qwen) == "torch"
    assert resolve_kernels(replace(config, deterministic=True), qwen) == "triton"


@pytest.mark.parametrize(
    ("changes", "without_drafts", "with_drafts"),
    [
        ({}, "columns", "replay"),
        ({"state_dtype": "float32"}, "columns", "replay"),
        ({"replay_interval": 8}, "replay", "replay"),
        ({"kernels": "torch"}, "replay", "replay"),
        ({"device": "cpu"}, "replay", "replay"),
        ({"state_scheme": "replay"}, "replay", "replay"),
    ],
)
def test_the_faster_scheme_is_taken(
    changes: dict[str, Any], without_drafts: str, with_drafts: str
) -> None:
    config = EngineConfig(model="x", device="cuda", kernels="triton", state_dtype="bfloat16")
    config = replace(config, **changes)
    assert resolve_scheme(config, has_drafts=False) == without_drafts
    assert resolve_scheme(config, has_drafts=True) == with_drafts


def test_a_draft_model_has_kernels_of_its_own() -> None:
    config = EngineConfig(
        model="tiny", device="cpu", max_model_len=64, max_num_seqs=2, speculative="draft:x:2",
        kernels="triton",
    )
    target = tiny_family("qwen3_5", vocab_size=VOCAB, **KERNEL_SIZES)
    draft = tiny_family("lfm2", vocab_size=VOCAB)
    with pytest.raises(ConfigError, match="no kernel serves the layers of Lfm2"):
        load_parts(config, model=target, draft_model=draft)
    parts = load_parts(config, model=target, draft_model=target)
    assert (parts.worker.fixed.kernels, parts.worker.fixed.draft_kernels) == ("triton", "triton")
    parts = load_parts(replace(config, kernels="auto"), model=target, draft_model=draft)
    assert (parts.worker.fixed.kernels, parts.worker.fixed.draft_kernels) == ("torch", "torch")
