"""Every key of a config.json is used, refused, known to change nothing, or named."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.config import ModelConfig
from headrace.models.config_keys import HARMLESS_VALUES, WITHOUT_EFFECT, ConfigObject
from headrace.models.registry import family
from headrace.testing import TINY_DICTS

LAYERS = ["linear_attention", "full_attention"] * 2
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
ROPE = {"rope_type": "default", "rope_theta": 77.0}
BASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in TINY_DICTS} | {
    "bamba_listed": ("bamba", {"attn_layer_indices": ..., "layers_block_type": LAYERS}),
    "falcon_h1_expanded": ("falcon_h1", {"mamba_d_ssm": None, "mamba_d_head": "auto"}),
    "granite_dense": ("granite", {"num_local_experts": 0}),
    "granite_rope": ("granite", {"position_embedding_type": "rope", "rope_theta": 10000.0}),
    "jamba_dense": ("jamba", {"num_experts": 1, "num_experts_per_tok": 1}),
    "kimi_linear_in_groups": ("kimi_linear", {"num_expert_group": 3}),
    "kimi_linear_listed": (
        "kimi_linear",
        {
            "linear_attn_config": ...,
            "layer_types": LAYERS,
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            "first_k_dense_replace": ...,
        },
    ),
    "lfm2_listed": (
        "lfm2",
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_ff_dim": ...,
            "intermediate_size": 100,
        },
    ),
    "lfm2_plain": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm2_moe_unlisted": ("lfm2_moe", {"layer_types": ..., "full_attn_idxs": [1]}),
    "mamba_expanded": ("mamba", {"intermediate_size": ...}),
    "mamba2_torch_dtype": ("mamba2", {"torch_dtype": "bfloat16"}),
    "minimax_own": (
        "minimax",
        {
            "architectures": ["MiniMaxText01ForCausalLM"],
            "model_type": "minimax_text_01",
            "postnorm": True,
            "rotary_dim": 8,
            "layer_types": ...,
            "attn_type_list": [0, 1, 0, 1],
        },
    ),
    "minimax_rope_parameters": ("minimax", {"rope_parameters": ROPE}),
    "nemotron_h_dense": ("nemotron_h", {"hybrid_override_pattern": "MM*-M"}),
    "nemotron_h_without_mtp": (
        "nemotron_h",
        {"hybrid_override_pattern": "ME*EM", "num_nextn_predict_layers": 0},
    ),
    "nemotron_h_listed": (
        "nemotron_h",
        {
            "hybrid_override_pattern": ...,
            "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
            "mtp_hybrid_override_pattern": ...,
            "mtp_layers_block_type": ["attention", "moe"],
        },
    ),
    "olmo_hybrid_rope": ("olmo_hybrid", {"rope_parameters": ROPE}),
    "olmo_hybrid_rope_theta": ("olmo_hybrid", {"rope_parameters": ..., "rope_theta": 77.0}),
    "qwen3_5_unlisted": (
        "qwen3_5",
        {
            "layer_types": ...,
            "full_attention_interval": 2,
            "mtp_num_hidden_layers": ...,
            "num_nextn_predict_layers": 1,
            "rope_parameters": ...,
            "partial_rotary_factor": 0.5,
            "rope_theta": 77.0,
        },
    ),
    "qwen3_5_rope_scaling": ("qwen3_5", {"rope_parameters": ..., "rope_scaling": ROPE}),
    "qwen3_5_fp8": ("qwen3_5", {"quantization_config": FP8}),
    "zamba2_without_rope": ("zamba2", {"use_mem_rope": False}),
}  # fmt: skip
"""Small configs, `...` for what one lacks: together they make every key count that is asked for."""

OTHER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attn_layer_indices": [2],
    "attn_layer_period": 2,
    "attn_type_list": [0, 1, 1, 0],
    "compression_config": {"quant_method": "other"},
    "full_attention": ROPE,
    "full_attn_idxs": [2],
    "full_attn_layers": [1, 2],
    "head_dim": 32,
    "hybrid_override_pattern": "M*E-M",
    "kda_layers": [1, 2],
    "layer_types": [*LAYERS[1:], LAYERS[0]],
    "layers_block_type": ["mamba", "attention", "attention", "attention"],
    "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3, 4], "num_heads": 5},
    "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
    "moe_router_activation_func": "softmax",
    "mtp_hybrid_override_pattern": "*-",
    "mtp_layers_block_type": ["attention", "mlp"],
    "num_heads": 5,
    "num_shared_experts": 2,
    "per_layer_config": {"0": {"hidden_act": "gelu"}},
    "quantization_config": {"quant_method": "other"},
    "rope_parameters": {"rope_type": "yarn"},
    "rope_scaling": {"rope_type": "yarn"},
    "rope_theta": 5.0,
    "rope_type": "yarn",
    "shared_intermediate_size": 24,
    "ssm_cfg": {"layer": "Mamba2"},
    "time_step_limit": [0.01, 1.0],
    "topk_method": "greedy",
    "type": "yarn",
}
"""Other values of keys that the small configs do not have, or that are no numbers."""

NAMED_AS = {
    "attention_head_dim": {"head_dim"},
    "head_dim": {"attn_rotary_emb"},
    "hidden_size": {"attn_rotary_emb", "block_dim", "head_dim"},
    "layer_types": {"layers_block_type"},
    "tie_embedding": {"tie_word_embeddings"},
    "num_attention_heads": {"head_dim", "num_heads", "num_key_value_heads"},
}
"""Keys that an error may name in the place of one: other names, and what must agree with it."""


NO_BOOLEANS: tuple[object, ...] = ("false", "", 0, 1, 0.0, [], {})


def base(name: str) -> dict[str, Any]:
    """Return a config of `BASES`."""
    tiny, changes = BASES[name]
    return TINY_DICTS[tiny](**changes)


def multimodal(**changes: object) -> dict[str, Any]:
    """Return a small Qwen3.5 that could see."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": TINY_DICTS["qwen3_5"](),
        "tie_word_embeddings": False,
        "vision_config": {"depth": 2, "hidden_act": "gelu"},
        "image_token_id": 7,
    } | changes


def asked(raw: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return the paths that a family asks for and that count, and those that others overrule."""
    read = ConfigObject(raw)
    family(read).parse(read)
    return read.notes.asked - read.notes.left_out, read.notes.left_out


def changed(raw: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the same with another value of a key."""
    raw = copy.deepcopy(raw)
    *outer, key = path.split(".")
    place = raw
    for part in outer:
        place = place[part]
    old = place.get(key)
    if isinstance(old, bool):
        place[key] = not old
    elif key in OTHER:
        place[key] = OTHER[key]
    elif isinstance(old, list):
        place[key] = old[1:] + old[:1]
    elif isinstance(old, int | float):
        place[key] = 2 * old or 1
    else:
        place[key] = "other" if isinstance(old, str) else 7
    return raw


def outcome(raw: dict[str, Any]) -> ModelConfig | ModelError:
    try:
        return ModelConfig.from_dict(raw)
    except ModelError as error:
        return error


@pytest.mark.parametrize("name", BASES)
def test_a_key_that_is_asked_for_changes_the_model_or_is_refused(name: str) -> None:
    raw = base(name)
    config = ModelConfig.from_dict(raw)
    counting, _ = asked(raw)
    for path in sorted(counting - config.WITHOUT_EFFECT - WITHOUT_EFFECT):
        other = outcome(changed(raw, path))
        if isinstance(other, UnsupportedModelError):
            key = path.rpartition(".")[2]
            names = {key} | NAMED_AS.get(key, set())
            assert any(name in str(other) for name in names), f"{path}: {other}"
        elif isinstance(other, ModelError):
            assert "wrong type" not in str(other), f"{path}: {other}"
        else:
            assert other != config, path


def replaced(raw: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return the same with this value of a key."""
    raw = copy.deepcopy(raw)
    *outer, key = path.split(".")
    place = raw
    for part in outer:
        place = place[part]
    place[key] = value
    return raw


@pytest.mark.parametrize("name", BASES)
def test_what_may_be_true_or_false_may_be_nothing_like_it(name: str) -> None:
    raw = base(name)
    config = ModelConfig.from_dict(raw)
    counting, _ = asked(raw)
    found = set()
    for path in sorted(counting - config.WITHOUT_EFFECT - WITHOUT_EFFECT):
        outcomes = [outcome(replaced(raw, path, value)) for value in (False, True)]
        if all(isinstance(other, ModelError) for other in outcomes):
            continue
        found.add(path)
        for value in NO_BOOLEANS:
            other = outcome(replaced(raw, path, value))
            assert isinstance(other, ModelError), f"{path} may be {value!r}"
            names = {path} | NAMED_AS.get(path, set())
            assert any(f"{name} is {value!r}" in str(other) for name in names), other
    assert found, "no key of this family was found to be a boolean"


def test_a_key_that_others_overrule_counts_without_them() -> None:
    counting: dict[type, set[str]] = defaultdict(set)
    overruled: dict[type, set[str]] = defaultdict(set)
    for name in BASES:
        raw = base(name)
        for found, paths in zip((counting, overruled), asked(raw), strict=True):
            found[type(ModelConfig.from_dict(raw))] |= paths
    assert any(overruled.values())
    for config_class, paths in overruled.items():
        assert paths <= counting[config_class], config_class


@pytest.mark.parametrize("name", BASES)
def test_a_key_without_effect_changes_nothing(name: str) -> None:
    raw = base(name)
    config = ModelConfig.from_dict(raw)
    counting, _ = asked(raw)
    for path in config.WITHOUT_EFFECT | (WITHOUT_EFFECT - counting):
        if isinstance(raw.get(path.partition(".")[0]), dict) or "." not in path:
            other = ModelConfig.from_dict(changed(raw, path))
            assert (other, other.ignored_keys) == (config, ()), path


@pytest.mark.parametrize("name", BASES)
def test_a_key_that_nobody_knows_is_named_wherever_it_stands(name: str) -> None:
    raw = base(name)
    assert ModelConfig.from_dict(raw).ignored_keys == ()
    counting, _ = asked(raw)
    raw["mystery"] = None
    expected = ["mystery"]
    for key, value in raw.items():
        if isinstance(value, dict) and key in counting and key != "ssm_cfg":
            raw[key] = value | {"mystery": {"x": 1}}
            expected.append(f"{key}.mystery")
    assert sorted(ModelConfig.from_dict(raw).ignored_keys) == sorted(expected)


def test_keys_that_nobody_knows_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    odd = {f"odd_{i:02}": i for i in range(25)}
    ModelConfig.from_dict(TINY_DICTS["lfm2"](unsloth_version="2026.1", **odd))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "'unsloth_version', 'odd_00'" in record.message
    assert "'odd_18' and 6 more" in record.message
    caplog.clear()
    ModelConfig.from_dict(TINY_DICTS["lfm2"]())
    assert not caplog.records


@pytest.mark.parametrize("key", HARMLESS_VALUES)
def test_older_defaults_of_generation_are_known_and_other_values_are_not(key: str) -> None:
    tiny, value = TINY_DICTS["mamba2"], HARMLESS_VALUES[key]
    assert ModelConfig.from_dict(tiny(**{key: value})).ignored_keys == ()
    other = changed({key: value}, key)[key]
    assert ModelConfig.from_dict(tiny(**{key: other})).ignored_keys == (key,)


def test_a_multimodal_file_is_read_whole() -> None:
    raw = multimodal()
    assert ModelConfig.from_dict(raw).ignored_keys == ()
    raw["text_config"]["rope_parameters"] |= {"mrope_section": [1, 1, 1], "mystery": 1}
    raw["text_config"] |= {"use_cache": True, "mystery": 1, "num_beams": 1, "do_sample": True}
    raw |= {"mystery": 1, "eos_token_id": 3}
    assert ModelConfig.from_dict(raw).ignored_keys == (
        "text_config.rope_parameters.mystery",
        "text_config.mystery",
        "text_config.do_sample",
        "mystery",
    )


def test_a_multimodal_file_says_outside_what_it_does_not_say_inside() -> None:
    raw = multimodal(tie_word_embeddings=True, dtype="bfloat16", eos_token_id=[3, 4])
    for key in ("tie_word_embeddings", "dtype", "eos_token_id"):
        del raw["text_config"][key]
    config = ModelConfig.from_dict(raw)
    assert config.tie_word_embeddings
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (3, 4)
    assert config.ignored_keys == ()
    inside = ModelConfig.from_dict(multimodal(eos_token_id=3))
    assert inside.eos_token_ids == (1,)


def test_a_multimodal_file_that_ties_its_head_and_does_not_is_refused() -> None:
    message = "tie_word_embeddings is True but text_config.tie_word_embeddings is False"
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict(multimodal(tie_word_embeddings=True))


@pytest.mark.parametrize("name", ["granite_rope", "lfm2", "lfm2_moe", "falcon_h1", "zamba2"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_heads_that_are_rotated_in_part_are_refused_where_the_reference_rotates_whole_ones(
    name: str, *, is_inside: bool
) -> None:
    raw = base(name)
    factor = {"partial_rotary_factor": 0.5}
    raw |= {"rope_parameters": {"rope_theta": 5.0, **factor}} if is_inside else factor
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor is 0\.5"):
        ModelConfig.from_dict(raw)


def test_bamba_takes_another_share_of_rotated_dimensions_from_one_place_alone() -> None:
    tiny = TINY_DICTS["bamba"]
    rotated = {"attn_rotary_emb": None, "head_dim": 16}
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor is 0\.25"):
        ModelConfig.from_dict(tiny(partial_rotary_factor=0.25, **rotated))
    inside = {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.25}
    config = ModelConfig.from_dict(tiny(rope_parameters=inside, **rotated))
    assert config.rotary_dim == 4


def test_the_older_name_of_the_rotary_parameters_holds_the_base_too() -> None:
    older = {"type": "default", "rope_theta": 5.0}
    tiny = TINY_DICTS["minimax"]
    config = ModelConfig.from_dict(tiny(rope_scaling=older, rope_theta=7.0))
    assert (config.rope_theta, config.ignored_keys) == (5.0, ())
    both = {"rope_scaling": older, "rope_parameters": dict(older)}
    assert ModelConfig.from_dict(tiny(**both)) == config
    with pytest.raises(ModelError, match="two names of one setting"):
        ModelConfig.from_dict(tiny(rope_scaling=older, rope_parameters={"rope_theta": 7.0}))


@pytest.mark.parametrize(
    ("rope_parameters", "rope_theta", "rotary_dim"),
    [
        ({"rope_type": "default", "rope_theta": None}, ..., 0),
        ({"rope_type": "default", "rope_theta": None}, 5.0, 0),
        ({"rope_type": "default"}, 5.0, 12),
        ({"rope_type": "default", "rope_theta": 5.0}, None, 12),
        ({"rope_type": "default"}, ..., None),
        ({}, None, None),
    ],
)
def test_olmo_hybrid_rotates_where_the_base_of_its_frequencies_is_no_null(
    rope_parameters: dict[str, Any], rope_theta: object, rotary_dim: int | None
) -> None:
    raw = TINY_DICTS["olmo_hybrid"](rope_parameters=rope_parameters)
    if rope_theta is not ...:
        raw["rope_theta"] = rope_theta
    if rotary_dim is None:
        with pytest.raises(UnsupportedModelError, match="rope_parameters"):
            ModelConfig.from_dict(raw)
        return
    config = ModelConfig.from_dict(raw)
    assert (config.rotary_dim, config.ignored_keys) == (rotary_dim, ())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("granite", {"layers_block_type": ["attention", "mamba"] * 2}),
        ("jamba", {"num_local_experts": 7}),
        ("minimax", {"num_experts": 7}),
        ("minimax", {"layernorm_mlp_beta": 7.0}),
        ("minimax", {"attn_type_list": [1, 0, 1, 0]}),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp", "attention"]}),
        ("kimi_linear", {"num_local_experts": 7}),
        ("lfm2", {"theta": 7.0}),
        ("lfm2", {"tie_embedding": False, "tie_word_embeddings": True}),
        ("bamba", {"layers_block_type": ["attention", "mamba"] * 2}),
    ],
)
def test_two_names_of_a_setting_that_differ_are_an_error(
    name: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=next(iter(changes))):
        ModelConfig.from_dict(TINY_DICTS[name](**changes))


def test_the_other_name_of_a_setting_counts_by_itself() -> None:
    raw = TINY_DICTS["jamba"]()
    raw["num_local_experts"] = raw.pop("num_experts")
    config = ModelConfig.from_dict(raw)
    assert config == ModelConfig.from_dict(TINY_DICTS["jamba"]())
    assert config.ignored_keys == ()
