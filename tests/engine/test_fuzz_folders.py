"""Random damage of a model folder: an error of headrace that names what is wrong, or a whole load.

Never an exception of another kind, never a hang, never a model that differs from its files.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.inspection import inspect_model
from headrace.engine.load import Checkpoint, load_model
from headrace.errors import HeadraceError
from headrace.models.config import ModelConfig
from headrace.testing import TINY_DICTS
from headrace.text import ChatTemplate, GenerationDefaults, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FUZZ = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
OK = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)

odd_values = st.one_of(
    st.none(), st.booleans(), st.text(max_size=4),
    st.sampled_from([
        0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**30, 0.5, -0.0, 1e300, float("nan"), float("inf"), [],
        {}, [1], {"a": 1}, [None], [[]], "auto", "default", [-1], [2**70], [True],
        {"rope_theta": "x"}, ["linear_attention"], ["full_attention"] * 4, {"rope_type": []},
    ]),
)
json_values = st.recursive(
    odd_values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


def refused_or(action: Callable[[], Any]) -> Any:  # noqa: ANN401
    """The action's result, or None where it was refused as it should be."""
    try:
        return action()
    except HeadraceError as error:
        message = str(error)
        assert len(message) > 20, message
        # The file that is wrong, or what the template would not take.
        assert any(word in message for word in ("json", "tensor", "template", "/")), message
        return None


def try_config(data: st.DataObject) -> None:
    """Put any value in any place of any family's config.json."""
    config = TINY_DICTS[data.draw(st.sampled_from(sorted(TINY_DICTS)))]()
    extra = ["rope_parameters", "rope_scaling", "text_config", "quantization_config"]
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from([*config, *extra]))
        if data.draw(st.booleans()):
            config[name] = data.draw(odd_values)
        else:
            config.pop(name, None)
    parsed = refused_or(lambda: ModelConfig.from_dict(json.loads(json.dumps(config))))
    if parsed is not None:
        assert parsed.num_layers >= 1
        assert parsed.vocab_size >= 1


@pytest.fixture
def folder(random_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(random_model, tmp_path / "model")


def restore(folder: Path, whole: Path) -> None:
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())


def damaged(text: bytes, data: st.DataObject) -> bytes:
    """Change, delete or insert bytes, mostly such that have a meaning in JSON."""
    raw = bytearray(text)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        what = data.draw(st.sampled_from(["change", "cut", "insert", "drop"]))
        if what == "change" and raw:
            raw[at] = data.draw(st.sampled_from(b'0123456789"{}[],:-eEtfn\\\x00\xff '))
        elif what == "cut":
            del raw[at:]
        elif what == "drop":
            del raw[at : at + data.draw(st.integers(1, 30))]
        else:
            raw[at:at] = data.draw(st.sampled_from([b"null", b"-1", b"1e999", b"{", b"]", b'"a":']))
    return bytes(raw)


def open_folder(folder: Path) -> Any:  # noqa: ANN401
    """Everything that an engine reads of a folder."""
    checkpoint = Checkpoint.of_folder(folder)
    model = load_model(checkpoint, EngineConfig(dtype="float32"), torch.device("cpu"))
    tokenizer = Tokenizer.from_folder_if_present(folder)
    template = ChatTemplate.from_folder(folder)
    defaults = GenerationDefaults.from_folder(folder)
    if tokenizer is not None:
        assert isinstance(tokenizer.decode(tokenizer.encode("abc")), str)
    if template is not None:
        # A template that fails on a plain conversation fails as a request, not as a server.
        refused_or(lambda: template.render(
            [{"role": "user", "content": "hi"}], add_generation_prompt=True
        ))
    assert defaults is not None
    return model


FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "model.safetensors",
)


def try_bytes(folder: Path, random_model: Path, data: st.DataObject) -> None:
    """Damage some bytes of any file."""
    restore(folder, random_model)
    name = data.draw(st.sampled_from(FILES))
    file = folder / name
    whole = file.read_bytes()
    if name == "model.safetensors":
        head = 8 + int.from_bytes(whole[:8], "little")
        file.write_bytes(damaged(whole[:head], data) + whole[head:])
    else:
        file.write_bytes(damaged(whole, data))
    refused_or(lambda: open_folder(folder))


def try_json(folder: Path, random_model: Path, data: st.DataObject) -> None:
    """Put any JSON in any place of the files beside the weights."""
    restore(folder, random_model)
    name = data.draw(st.sampled_from(FILES[:-1]))
    file = folder / name
    values = json.loads(file.read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        key = data.draw(st.sampled_from([
            *values, "eos_token_id", "temperature", "chat_template", "added_tokens_decoder",
            "add_bos_token", "bos_token", "max_new_tokens", "model_max_length", "model", "decoder",
            "added_tokens", "normalizer",
        ]))
        values[key] = data.draw(json_values)
    file.write_text(json.dumps(values))
    refused_or(lambda: open_folder(folder))
    refused_or(lambda: inspect_model(EngineConfig(model=str(folder))))


def try_index(folder: Path, random_model: Path, data: st.DataObject) -> None:
    """Say wrong things of the files that hold the tensors."""
    restore(folder, random_model)
    names = list(Checkpoint.of_folder(random_model).shards.tensors)
    index = folder / "model.safetensors.index.json"
    file = data.draw(st.sampled_from(["model.safetensors", "other.safetensors", "../x", "", "."]))
    weight_map: dict[str, Any] = dict.fromkeys(names, "model.safetensors")
    for _ in range(data.draw(st.integers(0, 2))):
        key = data.draw(st.sampled_from([*names, "ghost", ""]))
        if data.draw(st.booleans()):
            weight_map[key] = data.draw(st.just(file) | odd_values)
        else:
            weight_map.pop(key, None)
    text = json.dumps({"metadata": data.draw(odd_values), "weight_map": weight_map}).encode()
    index.write_bytes(damaged(text, data) if data.draw(st.booleans()) else text)
    try:
        model = refused_or(lambda: open_folder(folder))
        if model is not None:
            assert model.num_parameters > 0
    finally:
        index.unlink()


@settings(FUZZ, max_examples=80)
@given(data=st.data())
def test_any_value_in_a_config_is_read_or_refused(data: st.DataObject) -> None:
    try_config(data)


@settings(FUZZ, max_examples=16)
@given(data=st.data())
def test_a_damaged_folder_is_an_error_of_ours(
    folder: Path, random_model: Path, data: st.DataObject
) -> None:
    data.draw(st.sampled_from([try_bytes, try_json, try_index]))(folder, random_model, data)


@pytest.mark.full
@settings(FUZZ, max_examples=3000)
@given(data=st.data())
def test_any_value_in_a_config_is_read_or_refused_at_length(data: st.DataObject) -> None:
    try_config(data)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("damage", [try_bytes, try_json, try_index])
@settings(FUZZ, max_examples=400)
@given(data=st.data())
def test_a_damaged_folder_is_an_error_of_ours_at_length(
    folder: Path, random_model: Path, damage: Callable[..., None], data: st.DataObject
) -> None:
    damage(folder, random_model, data)


def test_the_undamaged_folder_opens_and_answers(folder: Path) -> None:
    assert open_folder(folder) is not None
    llm = LLM(str(folder), max_model_len=64, max_num_seqs=2)
    assert llm.generate("hi", OK)[0].outputs[0].token_ids
