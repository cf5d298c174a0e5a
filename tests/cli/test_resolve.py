"""From a model's name to its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headrace.errors import ConfigError, ModelError
from headrace.weights import resolve
from headrace.weights.resolve import resolve_model, shipped_name

if TYPE_CHECKING:
    from pathlib import Path


def folder_with_config(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = folder_with_config(tmp_path / "model")

    assert resolve_model(str(folder)) == folder
    assert shipped_name(folder) is None


def test_demo_is_the_largest_model_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "ASSETS", tmp_path)
    nano = folder_with_config(tmp_path / "nano")
    before = resolve_model("demo")
    demo = folder_with_config(tmp_path / "demo")

    assert (before, resolve_model("demo"), resolve_model("nano")) == (nano, demo, nano)
    assert shipped_name(nano) == "nano"


def test_missing_shipped_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "ASSETS", tmp_path)

    with pytest.raises(ModelError, match="'nano' is missing from this installation"):
        resolve_model("nano")


def test_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json; name a folder"):
        resolve_model(str(tmp_path))


def test_the_closest_name_is_offered(tmp_path: Path) -> None:
    folder_with_config(tmp_path / "qwen-small")

    with pytest.raises(ConfigError, match="did you mean 'nano'"):
        resolve_model("nanoo")
    with pytest.raises(ConfigError, match=r"did you mean '.*qwen-small'"):
        resolve_model(str(tmp_path / "qwen-smal"))


def test_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")

    with pytest.raises(ConfigError, match="is a file; name the folder"):
        resolve_model(str(tmp_path / "a.safetensors"))


@pytest.mark.parametrize("name", ["nanoo", "/no/such/folder", "./a/b", "", "a b/c"])
def test_name_that_is_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is no folder, no hub id"):
        resolve_model(name)


def test_unreachable_hub_is_a_model_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(ModelError, match="or name a folder"):
        resolve_model("headrace-tests/no-such-model")
