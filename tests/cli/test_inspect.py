"""`headrace inspect` on a model small enough to count by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from headrace.cli.inspect import readable_bytes
from headrace.cli.main import EXIT_FAILURE, EXIT_WRONG_USE, run_command

if TYPE_CHECKING:
    from pathlib import Path

TINY = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 2048,
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": True,
}
FALCON_MAMBA = {
    "architectures": ["FalconMambaForCausalLM"],
    "model_type": "falcon_mamba",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "state_size": 12,
}
KEYS = {
    "model", "architecture", "layers", "state_groups", "kv_bytes_per_token",
    "state_bytes_per_sequence", "min_cacheable_prefix_tokens", "fits", "mtp_layers", "parameters",
    "ignored_config_keys",
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def inspected(capsys: pytest.CaptureFixture[str], *tokens: str) -> dict[str, Any]:
    assert run_command(["inspect", "--device=cpu", "--json", *tokens], environ={}) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def test_figures_are_those_counted_by_hand(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = inspected(capsys, tiny, "--state-scheme=columns")

    assert values.keys() >= KEYS
    assert values["layers"][2] == {"index": 2, "kind": "full_attention"}
    # Keys and values of one attention layer and the MTP layer, 2 heads of 8, four bytes each.
    assert values["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    (group,) = values["state_groups"]
    assert group["layers"] == [0, 1, 3]
    channels, drafts = 2 * (2 * 8) + 4 * 16, 1
    assert group["shapes"]["window"] == [4 - 1 + drafts, channels]
    assert group["bytes_per_block"] == 3 * 4 * ((3 + drafts) * channels + 4 * 16 * 8)
    assert values["state_bytes_per_sequence"] % group["bytes_per_block"] == 0
    assert values["min_cacheable_prefix_tokens"] == 64
    assert values["mtp_layers"] == 1


def test_without_attention_state_alone_says_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FALCON_MAMBA))
    arguments = (str(tmp_path), "--num-state-blocks=7", "--state-scheme=columns")
    values = inspected(capsys, *arguments)

    assert values["kv_bytes_per_token"] == 0
    assert {layer["kind"] for layer in values["layers"]} == {"mamba1"}
    # 96 channels: three inputs of the window and a state of 12, each in float32, in two layers.
    assert values["state_groups"][0]["bytes_per_block"] == 2 * 4 * 96 * (3 + 12)
    assert values["fits"][-1]["context_tokens"] == values["max_model_len"] == 8192
    # A sequence owns three at most, and one of the seven is nobody's.
    assert {fit["sequences"] for fit in values["fits"]} == {6 // 3}
    assert run_command(["inspect", "--device=cpu", *arguments], environ={}) == 0
    assert "KV per token" not in capsys.readouterr().out


def test_without_attention_states_get_all_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = FALCON_MAMBA | {"intermediate_size": 8192, "state_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    values = inspected(capsys, str(tmp_path), "--max-num-seqs=200", "--state-scheme=columns")

    (group,) = values["state_groups"]
    # 2 GiB on a CPU, less the blocks of token ids: one is nobody's, 513 a sequence, 128 bytes each.
    blocks = (2 * 2**30 - (1 + 200 * 513) * 128) // group["bytes_per_block"]
    assert values["fits"][-1]["sequences"] == (blocks - 1) // 3 > 10


def test_longer_contexts_never_fit_more_often(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fits = inspected(capsys, "--model", tiny)["fits"]

    assert [fit["context_tokens"] for fit in fits] == [1024, 2048]
    assert fits[0]["sequences"] >= fits[1]["sequences"] >= 1


def test_without_prefix_cache_no_prefix_is_cacheable(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = inspected(capsys, tiny, "--no-enable-prefix-caching")

    assert values["min_cacheable_prefix_tokens"] is None


def test_table_names_the_figures(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["inspect", tiny, "--device=cpu"], environ={}) == 0

    text = capsys.readouterr().out
    assert "3 linear_attention, 1 full_attention, MTP head" in text
    assert "64 tokens" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"attention_bias": True}, "attention_bias is True"),
    ],
)
def test_model_that_cannot_run_is_a_failure_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | changes))

    assert run_command(["inspect", str(tmp_path)], environ={}) == EXIT_FAILURE
    assert message in capsys.readouterr().err


def test_every_family_is_described_from_its_config_alone(tmp_path: Path) -> None:
    from headrace.config import EngineConfig  # noqa: PLC0415 - with what imports torch
    from headrace.engine.inspection import inspect_model  # noqa: PLC0415
    from headrace.testing import TINY_DICTS, tiny_family  # noqa: PLC0415

    file = tmp_path / "config.json"
    for family, tiny_dict in TINY_DICTS.items():
        file.write_text(json.dumps(tiny_dict()))
        found = inspect_model(EngineConfig(model=str(file), device="cpu", max_model_len=128))
        assert found.parameters == tiny_family(family).num_parameters > 0, family
        assert found.state_bytes_per_sequence > 0, family
        assert found.fits[-1].sequences > 0, family
        if family == "kimi_linear":
            # A latent of 20 and a shared part of 8 in each of two attention layers.
            assert found.kv_bytes_per_token == 2 * (20 + 8) * 4


def test_keys_that_are_not_understood_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"unsloth_version": "1", "[red]": 2, "rope_parameters": {"rope_theta": 5.0, "waves": 3}}
    (tmp_path / "config.json").write_text(json.dumps(TINY | odd))
    listed = ["unsloth_version", "[red]", "rope_parameters.waves"]

    assert inspected(capsys, str(tmp_path))["ignored_config_keys"] == listed
    assert run_command(["inspect", str(tmp_path), "--device=cpu"], environ={}) == 0
    assert "not understood" in (text := capsys.readouterr().out)
    assert all(key in text for key in listed)


@pytest.mark.parametrize("model", ["demo", "nano"])
def test_all_of_a_shipped_config_is_understood(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspected(capsys, model)["ignored_config_keys"] == []
    assert run_command(["inspect", model, "--device=cpu"], environ={}) == 0
    assert "not understood" not in capsys.readouterr().out


def test_two_models_are_wrong_use(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["inspect", tiny, "--model", "other"], environ={}) == EXIT_WRONG_USE
    assert "two models are named" in capsys.readouterr().err


def test_bytes_are_readable() -> None:
    assert [readable_bytes(n) for n in (7, 2048, 5 * 2**20, 3 * 2**30)] == [
        "7 bytes", "2.0 KiB", "5.0 MiB", "3.0 GiB",
    ]  # fmt: skip
