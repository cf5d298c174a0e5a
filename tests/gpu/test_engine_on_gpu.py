"""The engine on a real device, under the checker, against the plain loop on the CPU.

float32 on both sides; results must agree within 2e-4 of the logits' standard deviation, and a token
may differ only where the reference's two best logits are closer than twice the difference.
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
from headrace.engine.llm import LLM
from headrace.engine.load import load_parts
from headrace.models.config import ModelConfig
from headrace.models.reference_loop import run_reference
from headrace.models.registry import model_class
from headrace.sampling_params import SamplingParams
from headrace.testing import KERNEL_SIZES, TINY_DICTS, random_weights

if TYPE_CHECKING:
    from headrace.models.batch import Kernels
    from headrace.models.reference_loop import ReferenceRun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TOLERANCE = 2e-4
VOCAB = 160
NUM_TOKENS = 24
CASES = [
    (kernels, layout, scheme, drafter, cache)
    for kernels in ("torch", "triton")
    for layout in ("slots", "compact")
    for scheme in ("columns", "replay")
    for drafter, cache in (("none", "align"), ("mtp:3", "align"), ("ngram:3", "none"),
                           ("scripted:3", "align"))
]


OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    # A mixture of experts may send a token that is close to a tie elsewhere: none here.
    "falcon_mamba": {},
    "jamba": {"num_experts": 1, "num_experts_per_tok": 1},
    "lfm2": {},
    "mamba2": {},
}


def models(seed: int, family: str = "qwen3_5", **changes: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """The same random model on the CPU and on the device."""
    config = ModelConfig.from_dict(TINY_DICTS[family](vocab_size=VOCAB, **changes))
    weights = random_weights(config, seed)
    cls = model_class(config)
    on_device = {name: tensor.to("cuda") for name, tensor in weights.items()}
    return (
        cls.from_weights(config, weights, torch.float32),
        cls.from_weights(config, on_device, torch.float32),
    )


def compare(tokens: list[int], logprobs: list[Any], reference: ReferenceRun) -> tuple[float, int]:
    """Check one request; returns its largest error in standard deviations and near ties met."""
    worst, ties = 0.0, 0
    for place, (token, entry) in enumerate(zip(tokens, logprobs, strict=True)):
        expected = reference.logits[place].log_softmax(-1).numpy()
        got = np.array([entry[candidate].logprob for candidate in range(VOCAB)])
        error = float(np.abs(got - expected).max())
        worst = max(worst, error / float(reference.logits[place].std()))
        assert worst <= TOLERANCE, f"position {place}: logits differ by {worst:.2e} of their std"
        if token != reference.tokens[place]:
            best = np.sort(expected)[-2:]
            assert best[1] - best[0] < 2 * error, f"position {place}: a token differs without a tie"
            return worst, ties + 1
    return worst, ties


@pytest.mark.parametrize(("kernels", "layout", "scheme", "drafter", "cache"), CASES)
def test_everything_on_equals_the_plain_loop(
    kernels: Kernels,
    layout: Literal["slots", "compact"],
    scheme: Literal["columns", "replay"],
    drafter: str,
    cache: Literal["none", "align"],
) -> None:
    seed = secrets.randbits(32)
    print(f"{seed=}")
    pair = models(seed, **KERNEL_SIZES)
    serve_and_compare(
        *pair, random.Random(seed), layout, scheme, drafter, cache, kernels=kernels
    )


@pytest.mark.parametrize("heads", [(2, 4, 64), (4, 4, 128), (1, 8, 256)], ids=str)
@pytest.mark.parametrize("scheme", ["columns", "replay"])
def test_kernels_serve_heads_of_every_size(
    scheme: Literal["columns", "replay"], heads: tuple[int, int, int]
) -> None:
    seed = secrets.randbits(32)
    print(f"{seed=}")
    kv_heads, num_heads, head_dim = heads
    pair = models(
        seed, num_key_value_heads=kv_heads, num_attention_heads=num_heads, head_dim=head_dim,
        linear_key_head_dim=head_dim // 2, linear_value_head_dim=head_dim // 2,
    )
    serve_and_compare(
        *pair, random.Random(seed), "slots", scheme, "scripted:3", "align", kernels="triton"
    )


def test_a_gpu_takes_kernels_by_itself() -> None:
    _, on_gpu = models(0, **KERNEL_SIZES)
    config = EngineConfig(
        model="tiny", device="cuda", max_num_seqs=2, max_model_len=128, num_kv_blocks=40,
        num_state_blocks=20,
    )
    assert load_parts(config, model=on_gpu).worker.fixed.kernels == "triton"


@pytest.mark.parametrize("family", OTHER_FAMILIES)
@pytest.mark.parametrize(("layout", "scheme"), [("slots", "replay"), ("compact", "columns")])
def test_other_kinds_of_state_equal_the_plain_loop(
    family: str, layout: Literal["slots", "compact"], scheme: Literal["columns", "replay"]
) -> None:
    seed = secrets.randbits(32)
    print(f"{seed=}")
    pair = models(seed, family, **OTHER_FAMILIES[family])
    serve_and_compare(*pair, random.Random(seed), layout, scheme, "scripted:3", "align")


def serve_and_compare(
    on_cpu: Any,  # noqa: ANN401
    on_gpu: Any,  # noqa: ANN401
    rng: random.Random,
    layout: Literal["slots", "compact"],
    scheme: Literal["columns", "replay"],
    drafter: str,
    cache: Literal["none", "align"],
    *,
    kernels: Kernels = "torch",
) -> None:
    """Serve prompts with shared prefixes on the device and compare with the loop on the CPU."""
    shared = [rng.randrange(2, VOCAB) for _ in range(130)]
    prompts = [
        shared[: rng.choice([0, 64, 100])] + [rng.randrange(2, VOCAB) for _ in range(length)]
        for length in (1, 4, 63, 64, 65, 130, 17, 40)
    ]
    references = [run_reference(on_cpu, prompt, NUM_TOKENS) for prompt in prompts]
    config = EngineConfig(
        model="tiny", device="cuda", dtype="float32", rt_backend="cuda_checked", max_num_seqs=5,
        max_model_len=320, num_kv_blocks=70, num_state_blocks=60, max_num_batched_tokens=160,
        batch_layout=layout, state_scheme=scheme, speculative=drafter, prefix_cache=cache,
        kernels=kernels, check_invariants=True,
    )
    engine = Engine(config, parts=load_parts(config, model=on_gpu))
    if drafter.startswith("scripted"):
        for index, (prompt, run) in enumerate(zip(prompts, references, strict=True)):
            truth = np.array(prompt + run.tokens, dtype=np.int64)
            keep = np.array([rng.randrange(-1, 4) for _ in range(320)], dtype=np.int64)
            engine.worker.scripts[index + 1] = (truth, keep)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=-1)
    outputs = LLM(engine=engine).generate(prompts, params)
    figures = [
        compare(output.outputs[0].token_ids, output.outputs[0].logprobs or [], reference)
        for output, reference in zip(outputs, references, strict=True)
    ]
    runtime = engine.parts.runtime
    runtime.finish()
    assert not runtime.reports, str(runtime.reports[0])
    worst, ties = max(figure[0] for figure in figures), sum(figure[1] for figure in figures)
    print(f"largest error {worst:.2e} standard deviations, {ties} near ties")


def test_erasing_the_state_changes_the_logits_on_the_device() -> None:
    _, on_gpu = models(secrets.randbits(32))
    config = EngineConfig(
        model="tiny", device="cuda", dtype="float32", speculative="none", max_num_seqs=2,
        max_model_len=128, async_scheduling=False, num_kv_blocks=40, num_state_blocks=20,
    )
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=-1)
    changes = []
    for erase in (False, True):
        engine = Engine(config, parts=load_parts(config, model=on_gpu))
        engine.add_request("a", list(range(2, 40)), params)
        outputs = engine.step()
        if erase:
            for pool in (*engine.worker.pools.states[0].values(),
                         *engine.worker.pools.rings[0].values()):
                engine.parts.runtime.write(pool, torch.zeros(pool.shape, dtype=pool.dtype))
        while engine.has_work():
            outputs = engine.step() or outputs
        logprobs = outputs[-1].outputs[0].logprobs
        assert logprobs is not None
        changes.append([logprobs[1][token].logprob for token in range(VOCAB)])
    change = max(abs(a - b) for a, b in zip(*changes, strict=True))
    assert change > 0.1, f"the state does not matter in this model: {change=}"
