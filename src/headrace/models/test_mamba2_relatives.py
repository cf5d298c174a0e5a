"""What the configs and checkpoints of Bamba, Falcon-H1, Nemotron-H and Zamba2 may say."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from headrace.errors import ModelError, UnsupportedModelError, WeightsError
from headrace.models.config import (
    FULL,
    MAMBA2,
    MAMBA2_AND_ATTENTION,
    MLP,
    MOE,
    ModelConfig,
)
from headrace.models.reference_loop import run_reference
from headrace.models.registry import model_class
from headrace.testing import TINY_DICTS, random_weights

FAMILIES = ("bamba", "falcon_h1", "nemotron_h", "zamba2")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}


def parse(family: str, **changes: Any) -> Any:  # noqa: ANN401
    return ModelConfig.from_dict(TINY_DICTS[family](**changes))


def logits(config: Any, weights: dict[str, torch.Tensor]) -> torch.Tensor:  # noqa: ANN401
    model = model_class(config).from_weights(config, weights, torch.float32)
    return run_reference(model, list(range(9)), 2).logits


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("bamba", "hidden_act", "gelu"),
        ("bamba", "attention_bias", True),
        ("bamba", "mlp_bias", True),
        ("bamba", "mamba_proj_bias", True),
        ("bamba", "num_experts", 4),
        ("bamba", "sliding_window", 128),
        ("bamba", "attn_rotary_emb", 12),
        ("bamba", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("bamba", "rope_parameters", YARN),
        ("bamba", "time_step_limit", [0.001, 100.0]),
        ("bamba", "layers_block_type", ["mamba", "attention", "mamba", "sliding"]),
        ("bamba", "mamba_d_conv", 1),
        ("bamba", "quantization_config", {"bits": 4}),
        ("falcon_h1", "hidden_act", "gelu"),
        ("falcon_h1", "attention_bias", True),
        ("falcon_h1", "mlp_bias", True),
        ("falcon_h1", "mamba_proj_bias", True),
        ("falcon_h1", "projectors_bias", True),
        ("falcon_h1", "mamba_use_mlp", False),
        ("falcon_h1", "attn_layer_indices", [0]),
        ("falcon_h1", "sliding_window", 128),
        ("falcon_h1", "partial_rotary_factor", 0.5),
        ("falcon_h1", "rope_scaling", YARN),
        ("falcon_h1", "layer_types", ["hybrid", "hybrid", "mamba"]),
        ("falcon_h1", "time_step_limit", [0.0, 100.0]),
        ("nemotron_h", "mlp_hidden_act", "silu"),
        ("nemotron_h", "mamba_hidden_act", "gelu"),
        ("nemotron_h", "use_bias", True),
        ("nemotron_h", "mlp_bias", True),
        ("nemotron_h", "attention_bias", True),
        ("nemotron_h", "mamba_proj_bias", True),
        ("nemotron_h", "sliding_window", 128),
        ("nemotron_h", "n_shared_experts", 2),
        ("nemotron_h", "time_step_limit", [0.001, {"__float__": "Infinity"}]),
        ("nemotron_h", "hybrid_override_pattern", "ME*-X"),
        ("nemotron_h", "hybrid_override_pattern", "ME-E-"),
        ("nemotron_h", "hybrid_override_pattern", "E*-E-"),
        ("nemotron_h", "num_nextn_predict_layers", 2),
        ("nemotron_h", "mtp_hybrid_override_pattern", "*M"),
        ("zamba2", "hidden_act", "silu"),
        ("zamba2", "add_bias_linear", True),
        ("zamba2", "use_conv_bias", False),
        ("zamba2", "use_long_context", True),
        ("zamba2", "sliding_window", 128),
        ("zamba2", "ft_lora", True),
        ("zamba2", "gated_linear_unit", False),
        ("zamba2", "use_shared_block_lora", False),
        ("zamba2", "num_key_value_heads", 2),
        ("zamba2", "attention_head_dim", 12),
        ("zamba2", "attention_hidden_size", 48),
        ("zamba2", "rope_scaling", YARN),
        ("zamba2", "partial_rotary_factor", 0.5),
        ("zamba2", "time_step_limit", [0.001, 1.0]),
        ("zamba2", "layers_block_type", ["mamba", "hybrid", "mamba", "attention"]),
        ("zamba2", "layers_block_type", None),
    ],
)
def test_a_value_that_changes_the_maths_is_refused_by_name(
    family: str, field: str, value: object
) -> None:
    # The message may name the setting as the family calls it today.
    names = {
        "attention_head_dim": "head_dim",
    }
    shown = names.get(field, field)
    if field == "hybrid_override_pattern" and "X" not in str(value):
        shown = "layer_types"
    with pytest.raises(UnsupportedModelError, match=shown):
        parse(family, **{field: value})


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("bamba", "mamba_n_heads", 5),
        ("bamba", "mamba_d_head", 8),
        ("bamba", "mamba_n_groups", 4),
        ("bamba", "intermediate_size", 0),
        ("bamba", "attn_layer_indices", [1, 7]),
        ("falcon_h1", "layer_types", ["hybrid"] * 2),
        ("falcon_h1", "mamba_d_ssm", 60),
        ("falcon_h1", "ssm_multipliers", [1.0, 1.0]),
        ("falcon_h1", "mlp_multipliers", [1.0, 0.0]),
        ("falcon_h1", "key_multiplier", 0),
        ("falcon_h1", "lm_head_multiplier", "1"),
        ("nemotron_h", "num_hidden_layers", 4),
        ("nemotron_h", "layers_block_type", ["mamba", "moe", "attention", "mlp", "mlp"]),
        ("nemotron_h", "norm_eps", 1e-6),
        ("nemotron_h", "mamba_num_groups", 4),
        ("nemotron_h", "mamba_dt_limit", [0.001, 1.0]),
        ("nemotron_h", "n_group", 3),
        ("nemotron_h", "num_experts_per_tok", 9),
        ("nemotron_h", "moe_latent_size", 0),
        ("nemotron_h", "routed_scaling_factor", 0),
        ("zamba2", "ffn_hidden_size", 60),
        ("zamba2", "mamba_headdim", 8),
        ("zamba2", "num_attention_heads", 7),
        ("zamba2", "num_mem_blocks", 0),
        ("zamba2", "lora_rank", 4),
        ("zamba2", "hybrid_layer_ids", [0, 2, 3]),
    ],
)
def test_sizes_that_do_not_fit_are_named(family: str, field: str, value: object) -> None:
    with pytest.raises(ModelError, match=field):
        parse(family, **{field: value})


def test_layer_kinds_are_read_from_every_spelling() -> None:
    own = MAMBA2, MAMBA2_AND_ATTENTION
    assert parse("bamba").layer_types == (MAMBA2, FULL) * 2
    listed = ["mamba", "attention", "linear_attention", "full_attention"]
    assert parse("bamba", layers_block_type=listed).layer_types == (MAMBA2, FULL) * 2
    assert parse("falcon_h1").layer_types == (MAMBA2_AND_ATTENTION,) * 3
    assert parse("nemotron_h").layer_types == (MAMBA2, MOE, FULL, MLP, MAMBA2)
    words = ["mamba", "moe", "attention", "mlp", "mamba"]
    assert (
        parse("nemotron_h", hybrid_override_pattern=None, layers_block_type=words).layer_types
        == parse("nemotron_h").layer_types
    )
    assert parse("zamba2").layer_types == (own[0], own[1], own[1], own[1])
    for family in FAMILIES:
        config = parse(family)
        assert config.attention_layers
        assert config.linear_layers


def test_a_layer_of_experts_or_an_mlp_has_neither_state_nor_keys() -> None:
    config = parse("nemotron_h")
    assert config.linear_layers == (0, 4)
    assert config.attention_layers == (2,)
    model = model_class(config).from_weights(config, random_weights(config, 0), torch.float32)
    assert model.num_kv_layers == 2  # with the MTP head's
    assert model.state_groups(0)[0].layers == (0, 4)


def test_the_mtp_head_of_nemotron_follows_its_own_pattern() -> None:
    assert parse("nemotron_h", mtp_hybrid_override_pattern=None).mtp_layer_types == (FULL, MOE)
    config = parse("nemotron_h", mtp_hybrid_override_pattern="E*-")
    assert config.mtp_layer_types == (MOE, FULL, MLP)
    shapes = model_class(config).expected_tensors(config)
    assert shapes["mtp.layers.0.eh_proj.weight"] == (48, 96)
    assert shapes["mtp.layers.2.final_layernorm.weight"] == (48,)
    assert "mtp.layers.1.enorm.weight" not in shapes
    assert parse("nemotron_h", num_nextn_predict_layers=0).num_mtp_layers == 0
    # What the loader makes of a checkpoint that lacks the head which its config announces.
    bare = dataclasses.replace(config, num_mtp_layers=0)
    assert not [name for name in model_class(bare).expected_tensors(bare) if "mtp" in name]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_missing_misshapen_and_unexpected_tensor_is_named(family: str) -> None:
    config = parse(family)
    build = model_class(config).from_weights
    weights = random_weights(config, 0)
    for name in weights:
        without = {key: tensor for key, tensor in weights.items() if key != name}
        with pytest.raises(WeightsError, match=rf"missing.*{name}"):
            build(config, without, torch.float32)
        with pytest.raises(WeightsError, match=rf"{name}.*\(5, 3\)"):
            build(config, weights | {name: torch.zeros(5, 3)}, torch.float32)
        with pytest.raises(WeightsError, match=rf"{name}_"):
            build(config, without | {f"{name}_": weights[name]}, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_is_the_embedding(family: str) -> None:
    tied = parse(family, tie_word_embeddings=True)
    weights = random_weights(tied, 0)
    (embedding,) = (tensor for name, tensor in weights.items() if "embed" in name)
    untied = parse(family, tie_word_embeddings=False)
    head = {"lm_head.weight": embedding.clone()}
    assert torch.equal(logits(tied, weights), logits(untied, weights | head))
    assert torch.equal(logits(tied, weights), logits(tied, weights | head))


def test_nemotron_is_read_under_the_names_of_transformers_too() -> None:
    config = parse("nemotron_h", num_nextn_predict_layers=0)
    weights = random_weights(config, 0)
    want = logits(config, weights)
    renamed = {name.replace("backbone.", "model."): tensor for name, tensor in weights.items()}
    assert torch.equal(logits(config, renamed), want)
    stacked = {name: tensor for name, tensor in renamed.items() if ".experts." not in name}
    for part in ("up_proj", "down_proj"):
        own = [f"model.layers.1.mixer.experts.{i}.{part}.weight" for i in range(8)]
        stacked[f"model.layers.1.mixer.experts.{part}"] = torch.stack([renamed[n] for n in own])
    assert torch.equal(logits(config, stacked), want)


def test_zamba2_takes_copies_of_shared_blocks_and_names_one_that_differs() -> None:
    config = parse("zamba2")
    weights = random_weights(config, 0)
    assert config.block_homes == (1, 2)
    copies = {
        name.replace("layers.1.", "layers.3."): tensor.clone()
        for name, tensor in weights.items()
        if "layers.1.shared_transformer." in name
    }
    assert torch.equal(logits(config, weights | copies), logits(config, weights))
    name = "model.layers.3.shared_transformer.self_attn.k_proj.weight"
    copies[name][0, 0] += 1.0
    with pytest.raises(WeightsError, match=rf"{name}.*layers\.1\."):
        logits(config, weights | copies)


PUBLISHED: dict[str, tuple[str, dict[str, Any], float]] = {
    "Bamba-9B": (
        "bamba",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "attn_layer_indices": [9, 18, 27],
            "attn_rotary_emb": 64,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_n_heads": 128,
        },
        9.78e9,
    ),
    "Falcon-H1-0.5B": (
        "falcon_h1",
        {
            "vocab_size": 32784,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_d_head": 64,
            "mamba_d_ssm": 1536,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_n_heads": 24,
        },
        521e6,
    ),
    "Nemotron-3-Nano-30B-A3B": (
        "nemotron_h",
        {
            "vocab_size": 131072,
            "hidden_size": 2688,
            "num_hidden_layers": 52,
            "hybrid_override_pattern": ("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_head_dim": 64,
            "mamba_num_heads": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "moe_intermediate_size": 1856,
            "moe_latent_size": None,
            "moe_shared_expert_intermediate_size": 3712,
            "num_nextn_predict_layers": 0,
        },
        31.6e9,
    ),
    "Zamba2-1.2B": (
        "zamba2",
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 38,
            "layers_block_type": [
                "hybrid" if i in (5, 11, 17, 23, 29, 35) else "mamba" for i in range(38)
            ],
            "hybrid_layer_ids": [5, 11, 17, 23, 29, 35],
            "num_mem_blocks": 1,
            "adapter_rank": 128,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "attention_head_dim": 128,
            "attention_hidden_size": 4096,
            "mamba_d_state": 128,
            "mamba_headdim": 64,
            "mamba_ngroups": 1,
            "n_mamba_heads": 64,
        },
        1.215e9,
    ),
}
"""Sizes of published models, and the number of parameters that their pages give."""


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_sizes_give_the_published_number_of_parameters(name: str) -> None:
    family, sizes, parameters = PUBLISHED[name]
    config = parse(family, **sizes)
    shapes = model_class(config).expected_tensors(config)
    total = sum(math.prod(shape) for shape in shapes.values())
    assert total == pytest.approx(parameters, rel=2e-3)
