"""Models in which nothing attends: their KV blocks hold token ids and nothing else."""

from __future__ import annotations

import random
import secrets
from typing import Any

import pytest
import torch
from conformance import VOCAB, Job, assert_same_bits, drive, make_engine, small_model, solve

from headrace.config import EngineConfig
from headrace.engine import load
from headrace.models.reference_loop import run_reference
from headrace.sampling_params import SamplingParams
from headrace.testing import tiny_family
from headrace.worker.state_scheme import Replay


def attention_free(seed: int) -> Any:  # noqa: ANN401
    return tiny_family("falcon_mamba", seed, vocab_size=VOCAB, num_hidden_layers=2)


@pytest.fixture(scope="module")
def model() -> Any:  # noqa: ANN401
    seed = secrets.randbits(32)
    print(f"model of seed {seed}")
    return attention_free(seed)


def draw(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def test_there_is_no_kv_memory_and_a_prefix_is_resumed_from_its_state(model: Any) -> None:  # noqa: ANN401
    engine = make_engine(model, num_state_blocks=40)
    for pool in (engine.worker.pools.k, engine.worker.pools.v):
        assert engine.parts.runtime.read(pool).numel() == 0
    job = solve(model, Job(draw(1, 40)))
    for hit in (0, 32):
        output = drive(engine, [job])[0]
        assert_same_bits(job, output)
        assert output.num_cached_tokens == hit


def test_penalties_count_tokens_of_a_resumed_prefix_too(model: Any) -> None:  # noqa: ANN401
    prompt = draw(2, 40)
    tokens = list(prompt)

    def choose(logits: torch.Tensor, position: int) -> int:
        del position
        logits = logits.clone()
        for token in set(tokens):
            logits[token] = logits[token] / 1.7 if logits[token] > 0 else logits[token] * 1.7
        tokens.append(int(logits.argmax()))
        return tokens[-1]

    want = run_reference(model, prompt, 12, choose=choose, scan_grid=16).tokens
    assert want != run_reference(model, prompt, 12, scan_grid=16).tokens
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, repetition_penalty=1.7)
    engine = make_engine(model, speculative="ngram:3")
    for _ in range(2):
        assert drive(engine, [Job(prompt, params)])[0].outputs[0].token_ids == want


@pytest.mark.parametrize("is_draft", [True, False])
def test_one_of_model_and_draft_model_may_attend(model: Any, is_draft: bool) -> None:  # noqa: ANN401, FBT001
    other = small_model(3)
    target, draft = (other, model) if is_draft else (model, other)
    engine = make_engine(target, draft_model=draft, speculative="draft:x:2", state_scheme="replay")
    jobs = [solve(target, Job(draw(n, n))) for n in (5, 20, 33)]
    for job, output in zip(jobs, drive(engine, jobs), strict=True):
        assert_same_bits(job, output)


def test_completions_of_one_prompt_share_it_and_part(model: Any) -> None:  # noqa: ANN401
    engine = make_engine(model)
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    (output,) = drive(engine, [Job(draw(4, 21), params)])
    texts = {tuple(completion.token_ids) for completion in output.outputs}
    assert len(texts) == 3


def test_a_device_keeps_memory_for_the_rings(
    model: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a device: sizes are numbers."""
    device, budget = torch.device("cuda"), 3 * 10**6
    monkeypatch.setattr(load, "_pool_budget", lambda *_: budget)
    config = EngineConfig(model="tiny", max_num_seqs=50, max_model_len=90)
    none = load.parse_speculative("none", model.config)
    scheme = load._scheme(config, none, 90, device, model.state_groups(0))
    assert isinstance(scheme, Replay)
    assert scheme.interval == 2
    sizes, _ = load._sizes(config, model, None, scheme, 0, 90, device)
    # Two layers of 96 channels, state 12, three inputs before the newest; all in float32.
    ring = 51 * scheme.ring_size * 2 * 4 * (2 * 96 + 12 + 96)
    tokens = (1 + 50 * 7) * 16 * 8
    assert sizes.num_kv_blocks == 1 + 50 * 7
    assert sizes.num_state_blocks == (budget - ring - tokens) // (2 * 4 * 96 * (12 + 3))
