"""Level E1 on a real device: the same bits whatever else runs, however a request is served.

Kernels are compiled here, which the tests in the interpreter cannot show. The oracle is the plain
loop on the same device, one request and one token at a time.
"""

from __future__ import annotations

import random
import secrets
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.load import load_parts
from headrace.models.config import ModelConfig
from headrace.models.reference_loop import run_reference
from headrace.models.registry import model_class
from headrace.sampling_params import SamplingParams
from headrace.testing import KERNEL_SIZES, TINY_DICTS, random_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
VOCAB, NUM_TOKENS, MAX_LENGTH = 160, 28, 448
SHAPES: dict[str, dict[str, Any]] = {
    # More than one run of a product's columns, and more than one tile of its outputs.
    "qwen3_5": {"hidden_size": 256, "intermediate_size": 1280, "num_hidden_layers": 4},
    "qwen3_5_moe": {},
}
CASES = [
    # family, dtype, layout, scheme, drafts, asynchronous, budget, graphs, preempted
    ("qwen3_5", "bfloat16", "slots", "columns", "none", True, 160, "on", True),
    ("qwen3_5", "bfloat16", "slots", "replay", "mtp:3", True, 160, "on", False),
    ("qwen3_5", "bfloat16", "compact", "replay", "scripted:3", True, 64, "off", True),
    ("qwen3_5", "bfloat16", "compact", "columns", "ngram:3", False, 576, "on", True),
    ("qwen3_5", "float32", "slots", "replay", "scripted:7", True, 64, "on", True),
    ("qwen3_5_moe", "bfloat16", "slots", "replay", "mtp:1", True, 128, "on", True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_request_has_the_same_bits_whatever_else_runs(case: tuple[Any, ...]) -> None:
    family, dtype, layout, scheme, drafts, is_async, budget, graphs, is_preempted = case
    seed = secrets.randbits(32)
    print(f"{seed=}")
    rng = random.Random(seed)
    config = ModelConfig.from_dict(
        TINY_DICTS[family](vocab_size=VOCAB, **(KERNEL_SIZES | SHAPES[family]))
    )
    weights = {name: tensor.to("cuda") for name, tensor in random_weights(config, seed).items()}
    model: Any = model_class(config).from_weights(config, weights, getattr(torch, dtype))
    shared = [rng.randrange(2, VOCAB) for _ in range(130)]
    prompts = [
        shared[: rng.choice([0, 64, 100])] + [rng.randrange(2, VOCAB) for _ in range(length)]
        for length in (1, 4, 63, 64, 65, 130, 17, 40, 300)
    ]
    truths = [run_reference(model, prompt, NUM_TOKENS, kernels="fixed") for prompt in prompts]
    engine = Engine(
        settings := EngineConfig(
            model="tiny", device="cuda", dtype=dtype, deterministic=True, kernels="triton",
            max_num_seqs=5, max_model_len=MAX_LENGTH, num_kv_blocks=170, num_state_blocks=90,
            max_num_batched_tokens=budget, batch_layout=layout, state_scheme=scheme,
            speculative=drafts, async_scheduling=is_async, graphs=graphs, check_invariants=True,
        ),
        parts=load_parts(settings, model=model),
    )  # fmt: skip
    assert engine.worker.fixed.kernels == "fixed"
    engine.scheduler.policy = None
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=-1)
    for round_ in range(2):
        outputs = serve(engine, prompts, truths, params, rng, drafts, preempts=is_preempted)
        for index, (output, truth) in enumerate(zip(outputs, truths, strict=True)):
            made = output.outputs[0]
            assert made.token_ids == truth.tokens, f"round {round_}, prompt {index}"
            for place, entry in enumerate(made.logprobs):
                row = truth.logits[place].float().cpu().numpy()
                peak = row.max()
                want = row - (peak + np.log(np.exp(row - peak).sum(dtype=np.float64)))
                got = np.array([entry[token].logprob for token in range(VOCAB)])
                assert (got == want.astype(np.float64)).all(), f"{round_=} {index=} {place=}"
    figures = engine.stats()
    assert figures["prefix_cache"]["hit_tokens"]
    assert not is_preempted or figures["preemptions"]


def serve(
    engine: Engine,
    prompts: list[list[int]],
    truths: list[Any],
    params: SamplingParams,
    rng: random.Random,
    drafts: str,
    *,
    preempts: bool,
) -> list[Any]:
    """Serve all, arriving one after another; some are preempted again and again."""
    waiting = list(enumerate(prompts))
    rng.shuffle(waiting)
    done: dict[int, Any] = {}
    steps = 0
    while waiting or engine.has_work():
        if waiting and rng.random() < 0.5:
            index, prompt = waiting.pop()
            request = engine.add_request(f"{index}", prompt, params)
            if drafts.startswith("scripted"):
                truth = np.array(prompt + truths[index].tokens, dtype=np.int64)
                most = int(drafts[-1]) + 1
                kept = [rng.randrange(-1, most) for _ in range(MAX_LENGTH)]
                keep = np.array(kept, dtype=np.int64)
                engine.worker.scripts[request.sequences[0].seq_id] = (truth, keep)
        steps += 1
        if preempts and steps % 9 == 0 and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        done |= {int(o.request_id): o for o in engine.step() if o.finished}
    return [done[index] for index in range(len(prompts))]
