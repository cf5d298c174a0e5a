"""Loading checkpoints, whole, sharded and damaged."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headrace.errors import ModelError, WeightsError
from headrace.weights import Shards, StoredWeights, read_config, weights_fingerprint

if TYPE_CHECKING:
    from pathlib import Path

EXPECTED = {"embed.weight": (7, 4), "layers.0.norm.weight": (4,), "layers.1.proj.weight": (3, 4)}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        name: (torch.arange(torch.Size(shape).numel()).reshape(shape) + index).to(dtype)
        for index, (name, shape) in enumerate(EXPECTED.items())
    }


def write_single(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    extra: dict[str, torch.Tensor] | None = None,
) -> None:
    save_file({**tensors(dtype), **(extra or {})}, folder / "model.safetensors")


def write_sharded(folder: Path) -> None:
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors().items()):
        file_name = f"model-{number}.safetensors"
        save_file({name: tensor}, folder / file_name)
        weight_map[name] = file_name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(folder: Path, **kwargs: object) -> dict[str, torch.Tensor]:
    return dict(StoredWeights(Shards.of_folder(folder), EXPECTED, **kwargs))  # type: ignore[arg-type]


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_single_and_sharded_folders_load_the_same(tmp_path: Path, write: object) -> None:
    write(tmp_path)  # type: ignore[operator]
    loaded = load(tmp_path)
    assert list(loaded) == list(EXPECTED)
    for name, tensor in tensors().items():
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
)
def test_any_float_dtype_on_disk_comes_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    write_single(tmp_path, dtype)
    loaded = load(tmp_path)
    for name, tensor in tensors(dtype).items():
        assert loaded[name].dtype is dtype
        assert torch.equal(loaded[name].float(), tensor.float())


def test_a_loaded_tensor_outlives_its_file(tmp_path: Path) -> None:
    write_single(tmp_path)
    loaded = load(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as stream:
        stream.truncate(10)
    assert torch.equal(loaded["embed.weight"], tensors()["embed.weight"])
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded.values())


def test_a_missing_tensor_is_named_with_a_close_one(tmp_path: Path) -> None:
    parts = tensors()
    parts["model.layers.0.norm.weight"] = parts.pop("layers.0.norm.weight")
    save_file(parts, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lacks 1 tensor: 'layers\.0\.norm\.weight'.*'model\."):
        load(tmp_path)


def test_an_unexpected_tensor_is_named_unless_ignored(tmp_path: Path) -> None:
    write_single(tmp_path, extra={"mtp.fc.weight": torch.zeros(2)})
    with pytest.raises(WeightsError, match=r"no use for: 'mtp\.fc\.weight'"):
        load(tmp_path)
    assert load(tmp_path, ignore=["mtp.*"])


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    write_single(tmp_path)
    with pytest.raises(WeightsError, match=r"'embed\.weight'.*\[7, 4\].*\[8, 4\]"):
        StoredWeights(Shards.of_folder(tmp_path), {**EXPECTED, "embed.weight": (8, 4)})


def test_integer_weights_are_refused_as_quantised(tmp_path: Path) -> None:
    write_single(tmp_path, torch.int8)
    with pytest.raises(WeightsError, match="dtype I8; weights quantised so are not supported"):
        load(tmp_path)


@pytest.mark.parametrize("missing", ["model-1.safetensors", "all"])
def test_missing_files_are_named(tmp_path: Path, missing: str) -> None:
    write_sharded(tmp_path)
    files = tmp_path.glob("*") if missing == "all" else [tmp_path / missing]
    for file in files:
        file.unlink()
    expected = r"has no \*\.safetensors" if missing == "all" else r"lacks model-1\.safetensors"
    with pytest.raises(WeightsError, match=expected):
        load(tmp_path)


def test_pickled_weights_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match="convert the checkpoint to safetensors"):
        load(tmp_path)


def test_an_index_may_not_point_outside_its_folder(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"embed.weight": "../model-0.safetensors"}}))
    with pytest.raises(WeightsError, match="not the name of a file beside it"):
        load(tmp_path)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"embed.weight": "model-1.safetensors"}}))
    with pytest.raises(WeightsError, match="does not hold it"):
        load(tmp_path)


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "a.safetensors")
    save_file(tensors(), tmp_path / "b.safetensors")
    with pytest.raises(WeightsError, match=r"both a\.safetensors and b\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 8, 40, -1])
def test_a_truncated_file_is_named(tmp_path: Path, size: int) -> None:
    write_single(tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:size])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load(tmp_path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_damaged_files_load_whole_or_raise_weights_error(tmp_path: Path, seed: int) -> None:
    write_single(tmp_path)
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 4)):
        # Half of the damage in the head, where a changed byte changes the meaning of the rest.
        place = rng.randrange(8 + 300 if rng.random() < 0.5 else len(data)) % len(data)
        action = rng.randrange(3)
        if action == 0:
            data[place] = rng.randrange(256)
        elif action == 1:
            del data[place : place + rng.randint(1, 16)]
        else:
            data[place:place] = rng.randbytes(rng.randint(1, 16))
    file.write_bytes(data)
    try:
        loaded = load(tmp_path)
    except WeightsError as error:
        message = str(error)
        assert str(tmp_path) in message
    else:
        assert {name: tuple(t.shape) for name, t in loaded.items()} == EXPECTED


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.one_of(
    st.binary(max_size=40),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["weight_map", *EXPECTED]), inner, max_size=3),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
))
def test_damaged_json_is_a_model_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    try:
        config = read_config(tmp_path)
    except ModelError as error:
        message = str(error)
        assert "config.json" in message
    else:
        assert isinstance(config, dict)
    with pytest.raises(WeightsError):
        load(tmp_path)


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_config(tmp_path)


def test_fingerprints_follow_contents_not_places(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
        write_single(folder)
    changed = tensors()
    changed["embed.weight"][3, 2] += 1
    save_file(changed, folders[2] / "model.safetensors")
    first, second, third = map(weights_fingerprint, folders)
    assert first == second != third
