"""Damage at the start of an answer: every kind of cache, every layer, erased or swapped."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.damage import damageable, damaged_outputs
from headrace.engine.engine import Engine
from headrace.engine.load import load_parts
from headrace.errors import ConfigError
from headrace.testing import tiny_model

if TYPE_CHECKING:
    from headrace.engine.damage import Damaged, How

PARAMS = SamplingParams(temperature=0, max_tokens=3, logprobs=5, ignore_eos=True)
# Inside the first KV block, and beyond the second.
LENGTHS = (9, 40, 70)
PROMPTS = [[(7 * i + 3 * n) % 50 + 1 for i in range(length)] for n, length in enumerate(LENGTHS)]
CACHES: list[tuple[Damaged, int]] = [
    ("state", 0), ("conv", 0), ("state", 2), ("conv", 2), ("kv", 1), ("kv", 3),
]  # fmt: skip


def open_engine(**options: object) -> Engine:
    sizes = {"max_num_seqs": 4, "max_model_len": 128}
    config = damageable(EngineConfig(device="cpu", **sizes, **options))  # type: ignore[arg-type]
    model = tiny_model(0)
    assert model.config.layer_types == ("linear_attention", "full_attention") * 2
    return Engine(config, parts=load_parts(config, model=model, has_text=False))


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.set_num_threads(1)
    return open_engine(speculative="none")


def logprobs(outputs: list) -> list[list[dict[int, float]]]:  # type: ignore[type-arg]
    return [
        [
            {token: found.logprob for token, found in place.items()}
            for place in o.outputs[0].logprobs
        ]
        for o in outputs
    ]


def whole(engine: Engine) -> list[list[dict[int, float]]]:
    return logprobs(LLM(engine=engine).generate(PROMPTS, PARAMS))


@pytest.mark.parametrize("how", ["zero", "swap"])
@pytest.mark.parametrize(("what", "layer"), CACHES)
def test_each_cache_of_each_layer_can_be_damaged_alone(
    what: Damaged, layer: int, how: How, engine: Engine
) -> None:
    before = whole(engine)

    hurt = logprobs(damaged_outputs(engine, PROMPTS, PARAMS, what, layer=layer, how=how))

    for mine, theirs in zip(before, hurt, strict=True):
        assert mine[0] == theirs[0], "the first token comes from before the damage"
        assert mine[1] != theirs[1]
    assert whole(engine) == before


def test_damage_of_every_layer_is_not_that_of_one(engine: Engine) -> None:
    one = logprobs(damaged_outputs(engine, PROMPTS, PARAMS, "state", layer=0))
    every = logprobs(damaged_outputs(engine, PROMPTS, PARAMS, "state"))

    assert all(a[1] != b[1] for a, b in zip(one, every, strict=True))


def test_swapped_caches_are_those_of_the_prompt_that_ended_before(engine: Engine) -> None:
    twins = [PROMPTS[2], PROMPTS[2]]
    before = logprobs(LLM(engine=engine).generate(twins, PARAMS))

    for what in ("state", "conv"):
        same = logprobs(damaged_outputs(engine, twins, PARAMS, what, how="swap"))
        assert same == before, "one's own content comes back"


@pytest.mark.parametrize(
    ("state_scheme", "speculative"), [("columns", "mtp:2"), ("replay", "mtp:2")]
)
def test_swaps_find_the_state_in_both_schemes(state_scheme: str, speculative: str) -> None:
    engine = open_engine(state_scheme=state_scheme, speculative=speculative)
    twins = [PROMPTS[2], PROMPTS[2]]
    before = logprobs(LLM(engine=engine).generate(twins, PARAMS))

    assert logprobs(damaged_outputs(engine, twins, PARAMS, "state", how="swap")) == before
    hurt = logprobs(damaged_outputs(engine, PROMPTS, PARAMS, "state", how="swap"))
    assert all(a[1] != b[1] for a, b in zip(whole(engine), hurt, strict=True))


@pytest.mark.parametrize(
    ("what", "layer", "how", "prompts", "says"),
    [
        ("kv", 0, "zero", 2, "layer 0 has no kv; layers that have it: 1, 3"),
        ("state", 4, "zero", 2, "layer 4 has no state; layers that have it: 0, 2"),
        ("state", 0, "shuffle", 2, "how is 'shuffle'; choose one of zero, swap"),
        ("state", 0, "swap", 1, "swapping needs two prompts or more, not 1"),
    ],
)
def test_damage_that_cannot_be_done_is_refused(
    what: Damaged, layer: int, how: How, prompts: int, says: str, engine: Engine
) -> None:
    with pytest.raises(ConfigError, match=says):
        damaged_outputs(engine, PROMPTS[:prompts], PARAMS, what, layer=layer, how=how)


def test_damage_of_a_model_that_devices_share_is_refused(engine: Engine) -> None:
    """Damage would reach the part of rank 0 alone."""
    refusal = r"tensor_parallel_size is 2, .* use tensor_parallel_size 1, or leave damage out"
    with pytest.raises(ConfigError, match=refusal):
        damageable(EngineConfig(model="nano", tensor_parallel_size=2))
    shared = copy.copy(engine)
    shared.config = replace(engine.config, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=refusal):
        damaged_outputs(shared, PROMPTS, PARAMS, "state")


def test_a_prompt_whose_answer_ends_at_once_still_gives_its_caches(engine: Engine) -> None:
    first = next(iter(whole(engine)[-1][0]))
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=5, stop_token_ids=[first])

    hurt = logprobs(damaged_outputs(engine, PROMPTS, params, "state", how="swap"))

    assert len(hurt[-1]) == 1
    assert hurt[0][1] != whole(engine)[0][1]
