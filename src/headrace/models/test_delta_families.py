"""What the configs and checkpoints of OLMo hybrid, Kimi Linear and MiniMax may say."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import ModelError, UnsupportedModelError, WeightsError
from headrace.models.config import FULL, KIMI_DELTA, LINEAR, ModelConfig
from headrace.models.kimi_linear import KimiLinearConfig
from headrace.models.minimax import MiniMaxConfig
from headrace.models.registry import model_class
from headrace.testing import TINY_DICTS, random_weights

FAMILIES = ("kimi_linear", "minimax", "olmo_hybrid")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("rope_parameters", None),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("layer_types", ["linear_attention", "sliding_attention"] * 2),
        ("layer_types", ["linear_attention"] * 4),
        ("linear_conv_kernel_dim", 1),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_olmo_hybrid_refuses_other_maths_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        ModelConfig.from_dict(TINY_DICTS["olmo_hybrid"](**{field: value}))


def test_olmo_hybrid_names_heads_that_do_not_fit() -> None:
    with pytest.raises(ModelError, match="linear_num_value_heads 3"):
        ModelConfig.from_dict(TINY_DICTS["olmo_hybrid"](linear_num_value_heads=3))


def test_olmo_hybrid_derives_what_is_not_given() -> None:
    raw = TINY_DICTS["olmo_hybrid"](layer_types=None, num_hidden_layers=5)
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
        del raw[f"linear_{name}"]
    config = ModelConfig.from_dict(raw)
    assert config.layer_types == (LINEAR, LINEAR, LINEAR, FULL, LINEAR)
    shapes = model_class(config).expected_tensors(config)
    assert shapes["model.layers.0.linear_attn.k_conv1d.weight"] == (36, 1, 4)
    assert shapes["model.layers.0.linear_attn.v_conv1d.weight"] == (72, 1, 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("shared_intermediate_size", 16),
        ("num_local_experts", 0),
        ("num_attention_heads", 6),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("layer_types", ["linear_attention", "sliding_attention"] * 2),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_minimax_refuses_other_maths_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        ModelConfig.from_dict(TINY_DICTS["minimax"](**{field: value}))


def published_minimax(**changes: object) -> dict[str, object]:
    """The same model as MiniMax's own files spell it."""
    own_names = {"model_type": "minimax_text_01", "architectures": ["MiniMaxText01ForCausalLM"]}
    raw = TINY_DICTS["minimax"](**own_names)
    del raw["layer_types"]
    raw |= {"attn_type_list": [0, 1, 0, 1], "rotary_dim": 8, "postnorm": True}
    spelled = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    for later, own in spelled.items():
        for side in ("alpha", "beta"):
            raw[f"layernorm_{own}_{side}"] = raw.pop(f"{later}_{side}_factor")
    return raw | {"shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"} | changes


def test_minimax_reads_both_spellings() -> None:
    own = ModelConfig.from_dict(published_minimax())
    later = ModelConfig.from_dict(TINY_DICTS["minimax"]())
    assert isinstance(own, MiniMaxConfig)
    assert isinstance(later, MiniMaxConfig)
    assert own.sums == later.sums
    assert own.layer_types == later.layer_types
    assert (own.rotary_dim, later.rotary_dim) == (8, 16)
    assert own.slopes[0] == later.slopes[0]
    assert own.slopes[1][0] == pytest.approx(0.25 * (1 - 1 / 3 + 1e-5), rel=1e-9)
    shapes = model_class(own).expected_tensors(own)
    assert shapes == model_class(later).expected_tensors(later)


@pytest.mark.parametrize("value", [None, False])
def test_minimax_refuses_sums_from_before_the_norm(value: object) -> None:
    raw = published_minimax(postnorm=value)
    if value is None:
        del raw["postnorm"]
    with pytest.raises(UnsupportedModelError, match="postnorm is False"):
        ModelConfig.from_dict(raw)


def test_minimax_refuses_stored_decay_rates_that_are_not_its_own() -> None:
    config = ModelConfig.from_dict(TINY_DICTS["minimax"]())
    assert isinstance(config, MiniMaxConfig)
    name = "model.layers.0.self_attn.slope_rate"
    rates = torch.tensor(config.slopes[0]).view(4, 1, 1)
    weights = random_weights(config, 0)
    build = model_class(config).from_weights
    build(config, weights | {name: rates.bfloat16()}, torch.float32)
    with pytest.raises(WeightsError, match=f"{name}.*other decay rates"):
        build(config, weights | {name: rates * 1.1}, torch.float32)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mla_use_nope", False),
        ("rope_scaling", {"type": "yarn"}),
        ("q_lora_rank", 16),
        ("num_key_value_heads", 2),
        ("moe_layer_freq", 2),
        ("moe_router_activation_func", "softmax"),
        ("topk_method", "greedy"),
        ("num_experts", 0),
        ("num_nextn_predict_layers", 1),
        ("layer_types", ["linear_attention", "sliding_attention"] * 2),
        ("mlp_layer_types", ["dense", "sparse", "sparse", "none"]),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_kimi_linear_refuses_other_maths_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        ModelConfig.from_dict(TINY_DICTS["kimi_linear"](**{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts_per_token", 7),
        ("num_expert_group", 4),
        ("num_shared_experts", 0),
        ("model_max_length", None),
        ("linear_attn_config", {"kda_layers": [1, 2, 3], "full_attn_layers": [3, 4]}),
    ],
)
def test_kimi_linear_names_sizes_that_do_not_fit(field: str, value: object) -> None:
    name = {"num_experts_per_token": "num_experts_per_tok"}.get(field, field)
    name = {"model_max_length": "max_position_embeddings"}.get(name, name)
    with pytest.raises(ModelError, match=name):
        ModelConfig.from_dict(TINY_DICTS["kimi_linear"](**{field: value}))


def test_kimi_linear_keeps_one_latent_of_a_token() -> None:
    config = ModelConfig.from_dict(TINY_DICTS["kimi_linear"]())
    assert isinstance(config, KimiLinearConfig)
    assert config.layer_types == (KIMI_DELTA, FULL, KIMI_DELTA, FULL)
    assert config.is_sparse == (False, True, True, True)
    assert config.kv_width == 20 + 8


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_a_misshapen_and_an_unexpected_tensor_are_named(family: str) -> None:
    config = ModelConfig.from_dict(TINY_DICTS[family]())
    build = model_class(config).from_weights
    weights = random_weights(config, 0)
    for name in weights:
        without = {key: tensor for key, tensor in weights.items() if key != name}
        with pytest.raises(WeightsError, match=rf"missing.*{name}"):
            build(config, without, torch.float32)
        with pytest.raises(WeightsError, match=rf"{name}.*\(5, 3\)"):
            build(config, weights | {name: torch.zeros(5, 3)}, torch.float32)
    with pytest.raises(WeightsError, match=r"model\.layers\.9\.mystery"):
        build(config, weights | {"model.layers.9.mystery": torch.zeros(1)}, torch.float32)
