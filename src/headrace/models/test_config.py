"""What a config.json may say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from headrace.errors import ModelError, UnsupportedModelError, WeightsError
from headrace.models.config import ModelConfig
from headrace.models.reference_loop import run_reference
from headrace.models.registry import FAMILIES, model_class
from headrace.testing import TINY_DICTS, random_weights, tiny_config

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("num_experts", 4),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("quantization_config", {"bits": 4}),
        ("layer_types", ["linear_attention", "sliding_attention"] * 2),
        ("mtp_num_hidden_layers", 2),
        ("mtp_use_dedicated_embeddings", True),
    ],
)
def test_a_value_that_changes_the_maths_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        tiny_config(**{field: value})


def test_qwen3_next_without_a_number_of_experts_is_a_mixture() -> None:
    config = tiny_config(model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"])
    shapes = model_class(config).expected_tensors(config)
    assert shapes["model.layers.0.mlp.gate.weight"] == (512, 48)
    assert shapes["mtp.layers.0.mlp.experts.511.up_proj.weight"] == (512, 48)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 0),
        ("norm_topk_prob", False),
        ("decoder_sparse_step", 2),
        ("mlp_only_layers", [1]),
    ],
)
def test_a_mixture_refuses_other_maths_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        ModelConfig.from_dict(TINY_DICTS["qwen3_5_moe"](**{field: value}))


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_experts_are_read_as_one_tensor_or_many(is_split: bool, is_nested: bool) -> None:  # noqa: FBT001
    config = ModelConfig.from_dict(TINY_DICTS["qwen3_5_moe"]())
    cls = model_class(config)
    weights = random_weights(config, 0)
    model = cls.from_weights(config, weights, torch.float32)
    spelled: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        own = name.replace("model.", "model.language_model.", 1) if is_nested else name
        if not is_split or ".experts." not in name:
            spelled[own] = tensor
            continue
        for i, expert in enumerate(tensor):
            prefix = own.partition("experts.")[0] + f"experts.{i}."
            parts = {"down_proj": expert}
            if name.endswith("gate_up_proj"):
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            spelled |= {f"{prefix}{part}.weight": value for part, value in parts.items()}
    assert {k: tuple(v.shape) for k, v in spelled.items()} == cls.expected_tensors(config, spelled)
    again = cls.from_weights(config, spelled, torch.float32)
    prompt = list(range(9))
    assert torch.equal(
        run_reference(again, prompt, 2).logits, run_reference(model, prompt, 2).logits
    )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_5", {"rope_parameters": False}, "rope_parameters is False, it must be an object"),
        ("bamba", {"rope_theta": True}, "rope_theta is True, it must be a finite number"),
        ("granite", {"num_local_experts": ""}, "num_local_experts is '', it must be an integer"),
        ("qwen3_5", {"mtp_num_hidden_layers": True}, "mtp_num_hidden_layers is True"),
        ("nemotron_h", {"num_nextn_predict_layers": True}, "num_nextn_predict_layers is True"),
        ("kimi_linear", {"linear_attn_config": False}, "linear_attn_config is False"),
        ("lfm2_moe", {"layer_types": "conv"}, "layer_types is 'conv', it must be a list"),
        ("mamba", {"use_conv_bias": None}, "use_conv_bias is None, it must be true or false"),
    ],
)
def test_a_value_of_another_kind_is_named(
    name: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict(TINY_DICTS[name](**changes))


def test_null_is_false_where_that_is_the_default() -> None:
    assert not tiny_config(tie_word_embeddings=None).tie_word_embeddings


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "linear_conv_kernel_dim"])
@pytest.mark.parametrize("value", [None, 0, -1, "8", True])
def test_a_missing_or_impossible_size_is_named(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=field):
        tiny_config(**{field: value})


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Qwen9ForCausalLM.*Qwen3_5ForCausalLM"):
        tiny_config(architectures=["Qwen9ForCausalLM"])


MODEL_TYPES = {
    model_type: (found, names)
    for found in FAMILIES
    for model_type, names in found.architectures.items()
}


@pytest.mark.parametrize("name", TINY_DICTS)
def test_an_architecture_of_another_model_type_is_refused_by_name(name: str) -> None:
    tiny = TINY_DICTS[name]
    model_type = tiny()["model_type"]
    found, own = MODEL_TYPES[model_type]
    for architecture in {given for _, names in MODEL_TYPES.values() for given in names}:
        raw = tiny(architectures=[architecture])
        if architecture in own:
            config = ModelConfig.from_dict(raw)
            assert (config.architecture, model_class(config)) == (architecture, found.model_class)
            continue
        with pytest.raises(UnsupportedModelError) as error:
            ModelConfig.from_dict(raw)
        assert f"architectures is ['{architecture}']" in str(error.value)
        assert f"['{own[0]}']" in str(error.value)
        assert f"for model_type '{model_type}'" in str(error.value)


@pytest.mark.parametrize("name", TINY_DICTS)
def test_without_an_architecture_the_model_type_decides(name: str) -> None:
    tiny = TINY_DICTS[name]
    config = ModelConfig.from_dict(tiny())
    absent: tuple[object, ...] = (None, [], ...)
    for nothing in absent:
        assert ModelConfig.from_dict(tiny(architectures=nothing)) == config
    damaged: tuple[object, ...] = (tiny()["architectures"][0], {}, [7], [[]])
    for value in damaged:
        with pytest.raises(UnsupportedModelError, match="architectures is "):
            ModelConfig.from_dict(tiny(architectures=value))


def test_the_text_part_of_a_multimodal_config_is_read() -> None:
    text = TINY_DICTS["qwen3_5"]()
    raw = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {"depth": 2},
    }
    config = ModelConfig.from_dict(raw)
    assert config.hidden_size == text["hidden_size"]
    assert config.architecture == "Qwen3_5ForConditionalGeneration"
    assert not config.tie_word_embeddings


def test_a_text_part_of_another_model_type_is_refused_by_name() -> None:
    raw = {"model_type": "qwen3_5", "text_config": TINY_DICTS["qwen3_5"](model_type="qwen3_next")}
    message = r"text_config\.model_type is 'qwen3_next'; supported is 'qwen3_5_text'"
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_dict(raw)


def test_layers_follow_the_interval_where_they_are_not_listed() -> None:
    config = tiny_config(layer_types=None, full_attention_interval=2)
    assert config.linear_layers == (0, 2)
    assert config.attention_layers == (1, 3)


def test_a_saved_config_round_trips_through_json(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY_DICTS["qwen3_5"]()))
    assert ModelConfig.from_dict(json.loads(file.read_text())) == tiny_config()


def test_a_missing_a_misshapen_and_an_unexpected_tensor_are_named() -> None:
    config = tiny_config()
    build = model_class(config).from_weights
    weights = random_weights(config, 0)
    name = "model.layers.0.linear_attn.A_log"
    without = {key: tensor for key, tensor in weights.items() if key != name}
    with pytest.raises(WeightsError, match=rf"missing.*{name}"):
        build(config, without, torch.float32)
    with pytest.raises(WeightsError, match=rf"{name}.*\(5,\).*\(4,\)"):
        build(config, weights | {name: torch.zeros(5)}, torch.float32)
    with pytest.raises(WeightsError, match=r"model\.layers\.9\.mystery"):
        build(config, weights | {"model.layers.9.mystery": torch.zeros(1)}, torch.float32)


def test_multimodal_names_are_read_and_vision_tensors_left_out() -> None:
    config = tiny_config()
    weights = random_weights(config, 0)
    renamed = {
        name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.")
        else name: tensor
        for name, tensor in weights.items()
    }
    renamed["model.visual.patch_embed.weight"] = torch.zeros(3)
    model = model_class(config).from_weights(config, renamed, torch.float32)
    assert model.num_kv_layers == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("normalization_function", "layernorm"),
        ("attention_bias", True),
        ("mamba_proj_bias", True),
        ("position_embedding_type", "alibi"),
        ("time_step_limit", [0.001, 100.0]),
        ("layer_types", ["mamba", "attention", "mamba", "sliding"]),
        ("layer_types", ["mamba"] * 4),
        ("layer_types", ["attention"] * 4),
        ("layer_types", None),
        ("quantization_config", {"bits": 4}),
        ("mamba_d_conv", 1),
    ],
)
def test_granite_refuses_other_maths_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        ModelConfig.from_dict(TINY_DICTS["granite"](**{field: value}))


def test_granite_refuses_scaled_rotary_embedding_where_it_has_one() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0}
    ModelConfig.from_dict(TINY_DICTS["granite"](rope_scaling=scaled))
    with pytest.raises(UnsupportedModelError, match="rope_scaling"):
        ModelConfig.from_dict(
            TINY_DICTS["granite"](rope_scaling=scaled, position_embedding_type="rope")
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts_per_tok", 6),
        ("mamba_n_heads", 5),
        ("mamba_d_head", 8),
        ("mamba_n_groups", 4),
        ("shared_intermediate_size", 0),
        ("logits_scaling", 0),
        ("attention_multiplier", None),
        ("num_attention_heads", 3),
    ],
)
def test_granite_names_sizes_that_do_not_fit(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=field):
        ModelConfig.from_dict(TINY_DICTS["granite"](**{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conv_bias", True),
        ("block_use_swiglu", False),
        ("use_pos_enc", False),
        ("conv_dim", 64),
        ("block_norm_eps", 1e-6),
        ("conv_L_cache", 1),
        ("layer_types", ["conv", "full_attention", "conv", "sliding_attention"]),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ],
)
def test_lfm2_refuses_other_maths_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        ModelConfig.from_dict(TINY_DICTS["lfm2"](**{field: value}))


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 80),  # two thirds of 100, rounded up to a multiple of 16
        ({"block_ffn_dim_multiplier": 1.3}, 96),
        ({"block_ffn_dim_multiplier": None}, 66),
        ({"block_auto_adjust_ff_dim": False}, 100),
    ],
)
def test_lfm2_adjusts_the_width_of_its_mlp(changes: dict[str, object], width: int) -> None:
    config = ModelConfig.from_dict(TINY_DICTS["lfm2"](**changes))
    shapes = model_class(config).expected_tensors(config)
    assert shapes["model.layers.0.feed_forward.w1.weight"] == (width, 48)


@pytest.mark.parametrize("family", ["granite", "lfm2"])
def test_a_missing_a_misshapen_and_an_unexpected_tensor_are_named_in_every_family(
    family: str,
) -> None:
    config = ModelConfig.from_dict(TINY_DICTS[family]())
    build = model_class(config).from_weights
    weights = random_weights(config, 0)
    name = "model.layers.1.self_attn.k_proj.weight"
    without = {key: tensor for key, tensor in weights.items() if key != name}
    with pytest.raises(WeightsError, match=rf"missing.*{name}"):
        build(config, without, torch.float32)
    with pytest.raises(WeightsError, match=rf"{name}.*\(5,\)"):
        build(config, weights | {name: torch.zeros(5)}, torch.float32)
    with pytest.raises(WeightsError, match=r"model\.layers\.9\.mystery"):
        build(config, weights | {"model.layers.9.mystery": torch.zeros(1)}, torch.float32)
