"""What the config and the tensors of Mamba, FalconMamba, Mamba-2, Jamba and LFM2-MoE may say."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from headrace.errors import ModelError, WeightsError
from headrace.models.config import UNBOUNDED_LENGTH, ModelConfig
from headrace.models.reference_loop import run_reference
from headrace.models.registry import model_class
from headrace.testing import TINY_DICTS, random_weights

FAMILIES = ("mamba", "falcon_mamba", "mamba2", "jamba", "lfm2_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_name_in_the_place_of_another_is_named(family: str) -> None:
    config = ModelConfig.from_dict(TINY_DICTS[family]())
    build = model_class(config).from_weights
    weights = random_weights(config, 0)
    name = sorted(weights)[len(weights) // 2]
    without = {key: tensor for key, tensor in weights.items() if key != name}
    with pytest.raises(WeightsError, match=rf"missing.*{re.escape(name)}"):
        build(config, without, torch.float32)
    with pytest.raises(WeightsError, match=rf"{re.escape(name)}.*\(5,\)"):
        build(config, weights | {name: torch.zeros(5)}, torch.float32)
    with pytest.raises(WeightsError, match="renamed"):
        build(config, without | {"renamed": weights[name]}, torch.float32)


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_the_first_name_of_the_embedding_is_read_too(family: str) -> None:
    config = ModelConfig.from_dict(TINY_DICTS[family](tie_word_embeddings=True))
    cls, weights = model_class(config), random_weights(config, 0)
    old = dict(weights)
    old["backbone.embedding.weight"] = old.pop("backbone.embeddings.weight")
    old["lm_head.weight"] = old["backbone.embedding.weight"]  # A copy of the tied head.
    assert "backbone.embedding.weight" in cls.expected_tensors(config, old)
    first, second = (cls.from_weights(config, each, torch.float32) for each in (weights, old))
    prompt = list(range(9))
    assert torch.equal(
        run_reference(first, prompt, 2).logits, run_reference(second, prompt, 2).logits
    )


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2"])
def test_a_model_without_attention_has_no_longest_sequence(family: str) -> None:
    config = ModelConfig.from_dict(TINY_DICTS[family]())
    assert config.max_position_embeddings == UNBOUNDED_LENGTH
    assert config.attention_layers == ()
    assert config.num_kv_heads == config.head_dim == 0
    given = ModelConfig.from_dict(TINY_DICTS[family](max_position_embeddings=100))
    assert given.max_position_embeddings == 100


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("mamba2", {"n_groups": 4}, "n_groups"),
        ("mamba2", {"head_dim": 8}, "head_dim"),
        ("mamba2", {"conv_kernel": 1}, "conv_kernel"),
        ("mamba", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("mamba", {"conv_kernel": 1}, "conv_kernel"),
        ("mamba", {"time_step_rank": "half"}, "time_step_rank"),
        ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset"),
        ("jamba", {"expert_layer_offset": -1}, "expert_layer_offset"),
        ("jamba", {"attn_layer_period": 1, "attn_layer_offset": 0}, "layer_types"),
        ("jamba", {"attn_layer_period": 8, "attn_layer_offset": 6}, "layer_types"),
        ("jamba", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ("lfm2_moe", {"num_dense_layers": -1}, "num_dense_layers"),
        ("lfm2_moe", {"num_experts": 0}, "num_experts"),
        ("lfm2_moe", {"conv_L_cache": 1}, "conv_L_cache"),
    ],
)
def test_a_size_that_does_not_fit_is_named(family: str, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ModelError, match=name):
        ModelConfig.from_dict(TINY_DICTS[family](**changes))


def test_the_inner_width_is_what_the_config_says_or_what_expand_gives() -> None:
    raw = TINY_DICTS["falcon_mamba"]()
    assert ModelConfig.from_dict(raw).mamba.channels == 96  # type: ignore[attr-defined]
    del raw["intermediate_size"]
    assert ModelConfig.from_dict(raw).mamba.channels == 16 * 48  # type: ignore[attr-defined]


def test_one_expert_is_an_mlp_under_its_plain_names() -> None:
    config = ModelConfig.from_dict(TINY_DICTS["jamba"](num_experts=1, num_experts_per_tok=1))
    names = model_class(config).expected_tensors(config)
    assert "model.layers.1.feed_forward.gate_proj.weight" in names
    assert not any("experts" in name or "router" in name for name in names)


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2", "jamba"])
def test_bfloat16_stays_close(family: str) -> None:
    """Rates and states stay in float32, so a long prompt does not drift."""
    # A mixture may send a token that is close to a tie elsewhere.
    dense = {"num_experts": 1, "num_experts_per_tok": 1} if family == "jamba" else {}
    config = ModelConfig.from_dict(TINY_DICTS[family](**dense))
    weights = {name: w.bfloat16() for name, w in random_weights(config, 0, "B").items()}
    build = model_class(config).from_weights
    prompt = [7 * i % config.vocab_size for i in range(100)]
    want = run_reference(build(config, weights, torch.float32), prompt, 1).logits
    model = build(config, weights, torch.bfloat16)
    got = run_reference(model, prompt, 1).logits
    assert got.dtype == torch.float32
    assert float((got - want).abs().max()) < 0.2 * float(want.std())
    assert {spec.dtype for group in model.state_groups(0) for spec in group.state} <= {
        "bfloat16",
        "float32",
    }
