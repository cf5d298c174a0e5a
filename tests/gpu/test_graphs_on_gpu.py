"""Captured steps on a real device: the same bits as launched ones, no waiting, no allocating.

Speed is measured by `benchmarks/h200_table.py`, groups "plain" and "forced" beside "graphs off".
"""

from __future__ import annotations

import random
import secrets
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.load import load_parts
from headrace.models.config import ModelConfig
from headrace.models.registry import model_class
from headrace.ops.token_choice import choose_tokens
from headrace.sampling_params import SamplingParams
from headrace.testing import KERNEL_SIZES, TINY_DICTS, random_weights
from headrace.worker.sampler import SamplingTensors, lowest_argmax, sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace import rt
    from headrace.worker.graphs import StepGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
VOCAB = 160


def model_on_device(
    seed: int, vocab_size: int = VOCAB, dtype: torch.dtype = torch.float32
) -> Any:  # noqa: ANN401
    config = ModelConfig.from_dict(TINY_DICTS["qwen3_5"](vocab_size=vocab_size, **KERNEL_SIZES))
    weights = {name: tensor.to("cuda") for name, tensor in random_weights(config, seed).items()}
    return model_class(config).from_weights(config, weights, dtype)


def make_engine(model: Any, **settings: Any) -> Engine:  # noqa: ANN401
    sizes: dict[str, Any] = {
        "max_model_len": 320, "num_kv_blocks": 200, "num_state_blocks": 120,
        "max_num_batched_tokens": 160, "dtype": "float32",
    }  # fmt: skip
    config = EngineConfig(model="tiny", device="cuda", **(sizes | settings))
    engine = Engine(config, parts=load_parts(config, model=model, draft_model=model))
    engine.scheduler.policy = None
    return engine


def serve(engine: Engine, seed: int, *, scripted: bool) -> list[tuple[list[int], Any]]:
    """Requests of which some ask for logits and some are sampled; tokens and logits of each."""
    rng = random.Random(seed)
    for index in range(9):
        prompt = [rng.randrange(2, VOCAB) for _ in range(rng.choice((3, 30, 70, 130)))]
        params = SamplingParams(
            temperature=0.8 if index == 4 else 0.0, seed=index, max_tokens=24 + index,
            ignore_eos=True, logprobs=-1 if index in (3, 4) else None,
        )  # fmt: skip
        request = engine.add_request(str(index), prompt, params)
        if scripted:
            script = np.array([rng.randrange(VOCAB) for _ in range(320)], dtype=np.int64)
            keep = np.array([rng.randrange(-1, 4) for _ in range(320)], dtype=np.int64)
            engine.worker.scripts[request.sequences[0].seq_id] = (script, keep)
    done = {}
    while engine.has_work():
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = output.outputs[0]
    return [
        (
            done[index].token_ids,
            [[entry[token].logprob for token in range(VOCAB)] for entry in done[index].logprobs]
            if done[index].logprobs is not None else None,
        )
        for index in range(9)
    ]  # fmt: skip


def launch_only(graphs: StepGraphs, stream: rt.Stream) -> None:
    """Choose sizes as if steps were captured, and launch them one by one all the same."""
    seen: set[Any] = set()

    def run(
        part: str, size: Any, kind: Any, enqueue: Callable[[rt.Stream], None]  # noqa: ANN401
    ) -> None:
        if (part, size, kind) in seen:
            graphs._captured[kind].add(size)
        seen.add((part, size, kind))
        enqueue(stream)

    graphs.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("drafts", ["none", "mtp:3", "scripted:3", "ngram:2", "draft:x:2"])
@pytest.mark.parametrize("scheme", ["columns", "replay"])
@pytest.mark.parametrize("layout", ["slots", "compact"])
def test_captured_steps_give_the_bits_of_launched_ones(
    layout: Literal["slots", "compact"], scheme: Literal["columns", "replay"], drafts: str
) -> None:
    """Both pad their steps, so that all products have the same shapes; under the checker."""
    seed = secrets.randbits(32)
    print(f"{seed=}")
    model = model_on_device(seed)
    results = []
    for is_captured in (True, False):
        engine = make_engine(
            model, rt_backend="cuda_checked", batch_layout=layout, state_scheme=scheme,
            speculative=drafts, max_num_seqs=6, seed=seed % 1000, graphs="on",
        )  # fmt: skip
        graphs = engine.worker.graphs
        assert graphs is not None
        if not is_captured:
            launch_only(graphs, engine.parts.runtime.stream("compute"))
        results.append(serve(engine, seed, scripted=drafts.startswith("scripted")))
        runtime = engine.parts.runtime
        runtime.finish()
        assert not runtime.reports, str(runtime.reports[0])
        assert bool(graphs.num_replays) == is_captured
    for captured, launched in zip(*results, strict=True):
        assert captured == launched


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("drafts", ["none", "mtp:3", "draft:x:2"])
@pytest.mark.parametrize("scheme", ["columns", "replay"])
def test_a_steady_step_waits_for_nothing_and_allocates_nothing(
    scheme: Literal["columns", "replay"], drafts: str
) -> None:
    """Past two column boundaries, so that steps with moves of states are captured too."""
    model = model_on_device(secrets.randbits(32))
    engine = make_engine(model, state_scheme=scheme, speculative=drafts, max_num_seqs=5)
    graphs = engine.worker.graphs
    assert graphs is not None, "a GPU captures by itself where kernels serve the model"
    for index in range(5):
        params = SamplingParams(temperature=0.0, max_tokens=250, ignore_eos=True)
        engine.add_request(str(index), [3 + index] * 20, params)
    # Boundaries at 64 and 128 tokens: the first use of each kind of step is launched, the second
    # one captured.
    while min((len(seq.token_ids) for seq in engine.scheduler.running), default=0) < 140:
        engine.step()
    before = torch.cuda.memory_stats()
    replays, steps = graphs.num_replays, engine.worker.num_steps
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(20):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    assert engine.worker.num_steps - steps == 20
    assert graphs.num_replays - replays == 20, "every step is one replay"
    for name in ("allocation.all.allocated", "segment.all.allocated", "num_device_alloc"):
        assert after.get(name) == before.get(name), name


def test_sizes_share_their_memory() -> None:
    """The memory that is set aside serves the logits of all sizes, small ones first."""
    model = model_on_device(0, 200_000, torch.bfloat16)
    engine = make_engine(
        model, speculative="none", max_num_seqs=64, num_kv_blocks=600, num_state_blocks=400,
        dtype="bfloat16",
    )  # fmt: skip
    sizes = []
    for count in (1, 2, 4, 8, 16, 24, 32, 48, 64):
        for index in range(count):
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            engine.add_request(f"{count}-{index}", [5, 6, 7 + index % 50], params)
        while engine.has_work():
            engine.step()
        # What is cached for launched steps is not the graphs'.
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_reserved())
    print(f"reserved by size, MiB: {[size >> 20 for size in sizes]}")
    assert engine.worker.graphs is not None
    assert len(engine.worker.graphs._graphs) >= 7
    # Each for itself would have 200,000 x 6 bytes a row: 240 MB in all, against 77 at start.
    assert sizes[-1] - sizes[0] < 64 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_equal_logits_is_chosen(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(secrets.randbits(32))
    for rows, vocab in ((1, 7), (3, 1000), (33, 248_320)):
        # Few values, so that the largest one occurs many times.
        values = torch.randint(0, 4, (rows, vocab), generator=generator).to(dtype)
        assert torch.equal(lowest_argmax(values.cuda()).cpu(), lowest_argmax(values))
        assert torch.equal(choose_tokens(values.cuda()).cpu(), lowest_argmax(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_draws_what_pytorch_draws_bit_for_bit(dtype: torch.dtype) -> None:
    seed = secrets.randbits(32)
    print(f"{seed=}")
    generator = torch.Generator().manual_seed(seed)
    for rows, vocab in ((1, 7), (33, 1000), (257, 248_320)):
        logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype).cuda()
        params = SamplingTensors(
            temperature=(torch.rand(rows, generator=generator) * 2).masked_fill(
                torch.arange(rows) % 5 == 0, 0.0
            ).cuda(),
            top_k=torch.full((rows,), vocab).cuda(), top_p=torch.ones(rows).cuda(),
            min_p=torch.zeros(rows).cuda(),
            seed=torch.randint(-(2**62), 2**62, (rows,), generator=generator).cuda(),
            position=torch.randint(0, 2**20, (rows,), generator=generator).cuda(),
        )
        for filters in (False, True):
            by_kernel, by_torch = (
                sample(logits, params, is_all_greedy=False, filters=filters, kernels=kernels)
                for kernels in ("triton", "torch")
            )
            assert torch.equal(by_kernel, by_torch)
