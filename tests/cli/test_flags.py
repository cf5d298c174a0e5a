"""Flags, files and variables: who wins, and what wrong ones answer."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from headrace.cli.flags import documented_args
from headrace.cli.main import EXIT_WRONG_USE, known_settings, run_command
from headrace.config import EngineConfig

if TYPE_CHECKING:
    from pathlib import Path


def shown(capsys: pytest.CaptureFixture[str], *tokens: str, **environ: str) -> dict[str, Any]:
    """Run `config show --json` and return setting to {value, source}."""
    assert run_command(["config", "show", "--json", *tokens], environ=environ) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def refused(capsys: pytest.CaptureFixture[str], *tokens: str, **environ: str) -> str:
    """Run a command line that is wrong use and return what it says."""
    assert run_command(tokens, environ=environ) == EXIT_WRONG_USE
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_every_engine_setting_is_a_flag_with_help() -> None:
    settings, texts = known_settings(), documented_args(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        assert field.name in settings
        assert texts.get(field.name), f"{field.name} has no help"


def test_defaults_are_those_of_the_engine_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = shown(capsys)

    assert {name: row["value"] for name, row in values.items()} == dataclasses.asdict(
        EngineConfig()
    )
    assert {row["source"] for row in values.values()} == {"default"}


def test_flag_beats_variable_beats_file_beats_default(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max-num-seqs: 3\nmax_num_batched_tokens: 300\nblock-size: 32\n")

    values = shown(
        capsys,
        "--config", str(file), "--max-num-seqs", "1",
        HEADRACE_MAX_NUM_SEQS="2", HEADRACE_MAX_NUM_BATCHED_TOKENS="200",
    )  # fmt: skip

    assert values["max_num_seqs"] == {"value": 1, "source": "command line"}
    assert values["max_num_batched_tokens"] == {
        "value": 200, "source": "HEADRACE_MAX_NUM_BATCHED_TOKENS",
    }  # fmt: skip
    assert values["block_size"] == {"value": 32, "source": str(file)}
    assert values["seed"] == {"value": 0, "source": "default"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "async-scheduling: false\nmax_model_len: 64\n"),
        ("a.json", '{"async-scheduling": false, "max_model_len": 64}'),
        ("a.toml", "async-scheduling = false\nmax_model_len = 64\n"),
    ],
)
def test_config_file_may_be_yaml_json_or_toml(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)

    values = shown(capsys, "--config", str(tmp_path / name))

    assert values["async_scheduling"]["value"] is False
    assert values["max_model_len"]["value"] == 64


def test_config_file_can_be_named_by_a_variable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text("seed: 5")

    values = shown(capsys, HEADRACE_CONFIG=str(tmp_path / "a.yaml"))

    assert values["seed"]["value"] == 5


def test_unknown_flag_names_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean --max-num-seqs?" in refused(capsys, "run", "hi", "--max-num-sequs", "4")


def test_unknown_command_names_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    assert 'Did you mean "run"?' in refused(capsys, "rin")


def test_unknown_key_in_a_file_names_the_closest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("max-num-sequences: 4")

    message = refused(capsys, "config", "show", "--config", str(file))

    assert f"{file}: 'max-num-sequences' is not a setting; did you mean max_num_seqs?" in message


def test_key_of_another_command_is_passed_over(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text("temperature: 0.5\nseed: 9")

    assert shown(capsys, "--config", str(tmp_path / "a.yaml"))["seed"]["value"] == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must map settings to values, found list"),
        ("a: [", "is malformed"),
        ("seed: {a: 1}", "seed must be text, a number, true or false, found dict"),
        ("dtype: float16", 'Invalid value "float16" for --dtype from'),
    ],
)
def test_malformed_config_file_is_refused_with_its_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)

    said = refused(capsys, "config", "show", "--config", str(file))

    assert message in said
    assert str(file) in said


def test_missing_config_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read" in refused(capsys, "config", "show", "--config", "/no/such/file")


def test_wrong_variable_is_refused_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "config", "show", HEADRACE_DTYPE="float16")

    assert 'Invalid value "float16" for --dtype from HEADRACE_DTYPE' in message


def test_unknown_variable_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "show"], environ={"HEADRACE_DTYP": "float32"}) == 0

    assert "HEADRACE_DTYP is not a setting; did you mean HEADRACE_DTYPE?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "name", "value"),
    [
        (["--enable-prefix-caching"], "prefix_cache", "align"),
        (["--no-enable-prefix-caching"], "prefix_cache", "none"),
        (["--mamba-cache-mode", "none"], "prefix_cache", "none"),
        (["--mamba-block-size=128"], "state_block_size", 128),
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["--context-length", "99"], "max_model_len", 99),
        (["--max_num_seqs", "7"], "max_num_seqs", 7),
        (["--disable-overlap-schedule"], "async_scheduling", False),
        (
            ["--speculative-config", '{"method":"mtp","num_speculative_tokens":2}'],
            "speculative", "mtp:2",
        ),
        (
            ["--speculative-config.method", "ngram",
             "--speculative-config.num_speculative_tokens=3"],
            "speculative", "ngram:3",
        ),
        (
            ["--speculative-config", '{"model":"tiny","num_speculative_tokens":4}'],
            "speculative", "draft:tiny:4",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)  # fmt: skip
def test_other_engines_names_are_understood(
    capsys: pytest.CaptureFixture[str], tokens: list[str], name: str, value: object
) -> None:
    assert shown(capsys, *tokens)[name]["value"] == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mtp", "must be a JSON object"),
        ('{"method":"medusa","num_speculative_tokens":2}', "'medusa' is not supported"),
        ('{"method":"mtp"}', "needs num_speculative_tokens"),
        ('{"method":"mtp","num_speculative_tokens":2,"x":1}', "has 'x'"),
    ],
)
def test_speculative_config_that_cannot_be_honoured_is_refused(
    capsys: pytest.CaptureFixture[str], value: str, message: str
) -> None:
    assert message in refused(capsys, "config", "show", "--speculative-config", value)


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--guided-decoding-backend", "auto", "is --grammar-backend=auto here"),
        ("--guided-decoding-backend", "xgrammar", "is --grammar-backend=xgrammar here"),
        ("--structured-outputs-config", '{"backend":"guidance","disable_fallback":true}',
         "nothing ever falls back"),
        ("--structured-outputs-config.backend", "guidance", "is --grammar-backend=llguidance here"),
    ],
)
def test_a_backend_of_grammars_can_be_named_as_elsewhere(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, said: str
) -> None:
    assert run_command(["config", "show", flag, value], environ={}) == 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--grammar-backend", "outlines", "outlines"),
        ("--guided-decoding-backend", "outlines", "grammars run on llguidance or xgrammar"),
        ("--structured-outputs-config", '{"backend":"outlines"}', "'outlines'"),
        ("--structured-outputs-config.disable-any-whitespace", "true", "in structured_outputs"),
        ("--structured-outputs-config", "xgrammar", "must be a JSON object"),
    ],
)
def test_another_backend_of_grammars_is_refused(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, said: str
) -> None:
    assert said in refused(capsys, "config", "show", flag, value)


@pytest.mark.parametrize(
    "switch", ["--enable-prefix-caching=false", "--disable_radix_cache=0", "--enforce-eager=true"]
)
def test_a_switch_takes_no_value(capsys: pytest.CaptureFixture[str], switch: str) -> None:
    message = refused(capsys, "config", "show", switch)

    assert "is a switch and takes no value" in message


def test_bounds_of_looked_up_ngrams_are_told_to_have_no_effect(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = '{"method":"ngram","num_speculative_tokens":2,"prompt_lookup_max":4}'
    assert run_command(["config", "show", "--speculative-config", config], environ={}) == 0

    assert "prompt_lookup_max of --speculative-config has no effect" in capsys.readouterr().err


def test_translation_is_told_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["config", "show", "--mamba-cache-mode=none"], environ={}) == 0

    assert "--mamba-cache-mode is --prefix-cache here" in capsys.readouterr().err


def test_nothing_after_two_dashes_is_translated(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "run", "--", "--tp", "--more")

    assert "--more" in message
