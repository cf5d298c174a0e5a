"""Bad input: an error that names value, limit and remedy; the next request is served; no leak."""

from __future__ import annotations

import json
import logging
import math
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conformance import MAX_LEN, VOCAB, assert_balanced, make_engine, small_model
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.load import load_parts
from headrace.errors import (
    ConfigError,
    EngineDeadError,
    ModelError,
    QueueFullError,
    RequestError,
    UnsupportedModelError,
    WeightsError,
)
from headrace.testing import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

OK = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(engine=make_engine(small_model(3)))


def assert_still_serves(llm: LLM) -> None:
    output = llm.generate([1, 2, 3], OK)[0]
    assert len(output.outputs[0].token_ids) == 3
    assert not llm.engine.has_work()
    assert not llm.engine._requests
    assert not llm.engine._owner
    assert not llm._waiting
    llm.engine.scheduler.check()
    assert llm.stats()["kv_blocks"]["used"] == 0
    assert llm.stats()["state_blocks"][0]["used"] == 0


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ([], "prompt is empty; give it at least one token"),
    "as long as the context": ([5] * MAX_LEN, f"prompt has {MAX_LEN} tokens but max_model_len is"),
    "huge": ([5] * 10_000, r"10000 tokens but max_model_len is 96.*shorten the prompt or raise"),
    "id too large": ([1, VOCAB], f"token id {VOCAB} but the vocabulary has ids 0..{VOCAB - 1}"),
    "id negative": ([1, -1], "token id -1 but the vocabulary has ids"),
    "id beyond 64 bits": ([2**70], "must be integers"),
    "floats": ([1.5, 2.0], "must be integers"),
    "words": ([1, "two"], "must be integers"),
    "nested": ([[1, 2], 3], "must be integers"),
    "booleans": ([True, False], "must be integers"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_the_next_request_is_served(llm: LLM, name: str) -> None:
    prompt, message = BAD_PROMPTS[name]
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate([prompt], OK)
    assert caught.value.param == "prompt"
    assert_still_serves(llm)


def test_one_bad_prompt_among_good_ones_starts_none_of_them(llm: LLM) -> None:
    steps = llm.stats()["steps"]
    with pytest.raises(RequestError, match="empty"):
        llm.generate([[1, 2], [], [3]], OK)
    assert llm.stats()["steps"] == steps
    assert_still_serves(llm)


BAD_PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature nan": ({"temperature": math.nan}, "temperature must be finite, got nan"),
    "temperature inf": ({"temperature": math.inf}, "temperature must be finite, got inf"),
    "temperature negative": ({"temperature": -0.1}, r"temperature must be in \[0, 100\], got -0.1"),
    "temperature text": ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    "top_p zero": ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0; 1 keeps every token"),
    "top_p nan": ({"top_p": math.nan}, "top_p must be finite"),
    "top_k": ({"top_k": -2}, "top_k must be at least -1, got -2"),
    "min_p": ({"min_p": 1.5}, r"min_p must be in \[0, 1\], got 1.5"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    "max_tokens negative": ({"max_tokens": -1}, "max_tokens must be at least 1, got -1"),
    "max_tokens fraction": ({"max_tokens": 1.5}, "max_tokens must be an integer, got 1.5"),
    "min_tokens": ({"min_tokens": -1}, "min_tokens must be at least 0"),
    "min above max": ({"min_tokens": 9, "max_tokens": 3}, "lower min_tokens or raise max_tokens"),
    "n": ({"n": 0}, "n must be .*got 0"),
    "seed": ({"seed": 2**64}, f"seed must fit in 64 bits, got {2**64}; use 0..{2**64 - 1}"),
    "logprobs": ({"logprobs": 99}, r"logprobs must be -1 \(all\) or 0..20, got 99"),
    "presence": ({"presence_penalty": 3.0}, r"presence_penalty must be in \[-2, 2\], got 3"),
    "frequency nan": ({"frequency_penalty": math.nan}, "frequency_penalty must be finite"),
    "repetition": (
        {"repetition_penalty": 0.0}, r"repetition_penalty must be in \[0.01, 100\], got 0; 1 is no"
    ),
    "repetition tiny": ({"repetition_penalty": 1e-45}, "repetition_penalty must .* got 1e-45"),
    "repetition huge": ({"repetition_penalty": 1e39}, r"repetition_penalty must .* got 1e\+39"),
    "stop empty": ({"stop": [""]}, "stop strings must be non-empty text"),
    "stop ids": ({"stop_token_ids": [-1]}, "ids are not negative"),
    "stop ids many": ({"stop_token_ids": range(257)}, "has 257 ids but at most 256 are allowed"),
    "stop long": ({"stop": "x" * 4097}, "a string of 4097 characters but at most 4096"),
    "bad words many": ({"bad_words": ["x"] * 1025}, "has 1025 strings but at most 1024"),
    "bad words long": ({"bad_words": ["x" * 4097]}, "a string of 4097 characters but at most 4096"),
    "stop number": ({"stop": 5}, "stop must be text or a list of texts, got 5"),
    "bad words set": ({"bad_words": {"a"}}, "bad_words must be text or a list of texts"),
    "switch": ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
    "kind": ({"output_kind": 5}, "output_kind must be one of OutputKind, got 5"),
    "salt": ({"cache_salt": 5}, "cache_salt must be text, got 5"),
    "salt half": ({"cache_salt": "\ud800"}, "cache_salt must be text, got"),
    "pin half": ({"cache_pin": "a\ud800"}, "cache_pin must be a name of 1..128 characters"),
    "shown": ({"shown_token_ids": 5}, "shown_token_ids must be a list of token ids, got 5"),
    "allowed negative": ({"allowed_token_ids": [5, -7]}, "allowed_token_ids has -7; ids are not"),
    "allowed text": ({"allowed_token_ids": [5, "7"]}, "must be an integer, got '7'"),
    "allowed lists": ({"allowed_token_ids": [[5]]}, "must be a list of token ids, got"),
    "allowed true": ({"allowed_token_ids": [True]}, "must be an integer, got True"),
    "bias": ({"logit_bias": {5: 101.0}}, r"logit_bias must be in \[-100, 100\], got 101"),
    "bias nan": ({"logit_bias": {5: math.nan}}, "logit_bias must be finite"),
    "bias text": ({"logit_bias": {5: "1"}}, "logit_bias must be a number"),
}


@pytest.mark.parametrize("name", BAD_PARAMETERS)
def test_a_bad_parameter_names_itself_its_value_and_its_limit(name: str) -> None:
    options, message = BAD_PARAMETERS[name]
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**options)
    assert caught.value.param in options


def test_token_ids_count_once_and_are_bounded() -> None:
    params = SamplingParams(allowed_token_ids=[7, 5, 7] * 1000, stop_token_ids=[3] * 1000)
    assert params.allowed_token_ids == (7, 5)
    assert params.stop_token_ids == (3,)
    with pytest.raises(RequestError, match="has 262145 ids but at most 262144 are allowed"):
        SamplingParams(allowed_token_ids=range((1 << 18) + 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": [VOCAB]}, f"stop_token_ids has {VOCAB} but the vocabulary has ids"),
        ({"allowed_token_ids": [VOCAB + 1]}, f"allowed_token_ids has {VOCAB + 1} but"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias has {VOCAB} but the vocabulary"),
        ({"stop": ["x"]}, "stop strings need a tokenizer and this model has none"),
        ({"bad_words": ["x"]}, "bad_words strings need a tokenizer"),
    ],
)
def test_parameters_that_this_model_cannot_honour_are_refused(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([1, 2], SamplingParams(**options))
    assert_still_serves(llm)


def test_a_text_prompt_without_a_tokenizer_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        llm.generate("hello", OK)
    assert_still_serves(llm)


def test_a_chat_without_a_template_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="has no chat template; use generate"):
        llm.chat([{"role": "user", "content": "hello"}], OK)
    assert_still_serves(llm)


def test_lists_of_unequal_length_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts but 1 sampling_params"):
        llm.generate([[1], [2]], [OK])
    assert_still_serves(llm)


def test_a_prompt_one_below_the_context_is_answered_with_one_token(llm: LLM) -> None:
    output = llm.generate([5] * (MAX_LEN - 1), SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"
    assert_still_serves(llm)


def test_a_full_queue_refuses_and_recovers() -> None:
    engine = make_engine(small_model(3), max_waiting=2)
    llm = LLM(engine=engine)
    with pytest.raises(RequestError, match="n is 3 but at most 2 sequences may wait; lower n"):
        engine.check_room(3)
    engine.add_request("a", [1], OK)
    with pytest.raises(QueueFullError, match=r"1 sequences wait .* 2, and this request has 2"):
        engine.check_room(2)
    engine.check_room(1)
    engine.add_request("b", [1], OK)
    with pytest.raises(QueueFullError, match="2 sequences wait and the limit is 2; try again"):
        engine.check_room(1)
    with pytest.raises(RequestError, match="request id 'a' is in use; choose another"):
        engine.add_request("a", [1], OK)
    while engine.has_work():
        engine.step()
    assert_still_serves(llm)
    assert_balanced(engine)


def test_a_batch_of_ones_own_may_be_longer_than_a_servers_queue() -> None:
    engine = make_engine(small_model(3), max_waiting=2)
    outputs = LLM(engine=engine).generate([[1]] * 9, OK)
    assert [output.finished for output in outputs] == [True] * 9
    assert_balanced(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, "unknown engine option 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"prefix_caching": "none"}, "unknown engine option 'prefix_caching'; did you mean"),
    ],
)
def test_an_unknown_option_is_an_error_with_the_closest_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("anything", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 5}, "model is 5 but must be text"),
        ({"max_num_seqs": "8"}, "max_num_seqs is '8' but must be an integer"),
        ({"max_num_seqs": 2.5}, "max_num_seqs is 2.5 but must be an integer"),
        ({"max_num_seqs": True}, "max_num_seqs is True but must be an integer"),
        ({"num_kv_blocks": 1e3}, "num_kv_blocks is 1000.0 but must be an integer or None"),
        ({"num_kv_blocks": -5}, "num_kv_blocks is -5 but must be at least 1"),
        ({"max_waiting": 0}, "max_waiting is 0 but must be at least 1"),
        ({"scan_grid": 0}, "scan_grid is 0 but must be at least 1"),
        ({"dtype": "float16"}, "dtype is 'float16'; choose auto, float32 or bfloat16"),
        ({"prefix_cache": True}, "prefix_cache is True; choose none or align"),
        ({"device": None}, "device is None; choose auto, cpu or cuda"),
        ({"deterministic": "yes"}, "deterministic is 'yes' but must be True or False or None"),
        ({"async_scheduling": 1}, "async_scheduling is 1 but must be True or False"),
        ({"speculative": None}, "speculative is None but must be text"),
        ({"max_pinned_share": "a"}, "max_pinned_share is 'a' but must be a number"),
        ({"config": 5}, "config is int but must be an EngineConfig"),
        ({"config": EngineConfig(), "seed": 1}, "seed and config are both given; put all into"),
    ],
)
def test_a_setting_of_a_wrong_type_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


def test_a_folder_may_be_a_path(tmp_path: Path) -> None:
    assert EngineConfig(model=tmp_path).model == str(tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_block_size": 24}, "state_block_size is 24 but must be a multiple of 16"),
        ({"block_size": 5}, "block_size is 5 but must divide"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0 but must be at least 1"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens is 8 but a chunk"),
        ({"max_model_len": 1}, "max_model_len is 1 but must be at least 2"),
        ({"checkpoint_retention": "every:0"}, "checkpoint_retention is 'every:0'; choose latest"),
        ({"speculative": "magic:3"}, "speculative is 'magic:3'; choose auto, none"),
        ({"speculative": "ngram:99"}, r"speculative is 'ngram:99'; K must be in 1\.\."),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3"),
        ({"num_kv_blocks": 3}, r"max_model_len 96 needs 7 KV blocks but the pool has 2; lower max_"
         "model_len to 16, or raise num_kv_blocks to 8"),
        ({"num_kv_blocks": 1}, r"KV blocks but the pool has 0; raise num_kv_blocks to 8 or more"),
        ({"num_state_blocks": 2}, "num_state_blocks is 2 but one sequence needs"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization is 1.5 but must be in \(0, 1\]"),
    ],
)
def test_a_setting_that_cannot_be_honoured_says_which_would_be(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(small_model(3), **options)


# Model folders -----------------------------------------------------------------------------------


@pytest.fixture
def folder(random_model: Path, tmp_path: Path) -> Path:
    """A model folder of one's own, to damage."""
    return shutil.copytree(random_model, tmp_path / "model")


def edit_config(folder: Path, **changes: Any) -> None:  # noqa: ANN401
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_undamaged_folder_is_served(folder: Path) -> None:
    llm = LLM(str(folder), max_model_len=64)
    assert llm.generate("hi", OK)[0].outputs[0].token_ids


def test_an_unknown_architecture_is_named(folder: Path) -> None:
    edit_config(folder, architectures=["WhatForCausalLM"], model_type="what")
    with pytest.raises(UnsupportedModelError, match=r"WhatForCausalLM|what"):
        LLM(str(folder))


def test_a_missing_tensor_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "q_proj" in name)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
        LLM(str(folder))


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name] = torch.zeros(3, 5)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"\[3, 5\]"):
        LLM(str(folder))


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        LLM(str(folder))


def test_a_folder_without_weights_is_an_error(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError):
        LLM(str(folder))


def test_a_broken_config_is_an_error(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        LLM(str(folder))


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ModelError), match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_a_model_without_a_tokenizer_serves_token_ids(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    llm = LLM(str(folder), max_model_len=64)
    output = llm.generate([1, 2, 3], OK)[0].outputs[0]
    assert len(output.token_ids) == 3
    assert output.text == ""
    with pytest.raises(ConfigError, match="has no tokenizer"):
        llm.generate("text", OK)


def test_prompts_or_parameters_of_a_wrong_type_are_refused_by_name(llm: LLM) -> None:
    wrong: Any = {"max_tokens": 3}
    with pytest.raises(RequestError, match="sampling_params has dict but must be SamplingParams"):
        llm.generate([1, 2, 3], wrong)
    with pytest.raises(RequestError, match="prompts is NoneType but must be text, token ids"):
        llm.generate(None, OK)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="the prompt is of type dict; give text or a list of"):
        llm.generate([{"prompt_token_ids": [1]}], OK)  # type: ignore[list-item]
    for messages in (None, "hello", {"role": "user", "content": "hello"}):
        with pytest.raises(RequestError, match=r"messages is .* but must be a list of messages"):
            llm.chat(messages, OK)  # type: ignore[arg-type]
    assert_still_serves(llm)


def test_more_sequences_than_memory_holds_name_the_setting_to_lower() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs 99999999999.*lower max_num_seqs"):
        LLM("nano", max_num_seqs=99_999_999_999)


def test_after_shutdown_nothing_is_answered() -> None:
    llm = LLM(engine=make_engine(small_model(3)))
    with llm:
        assert llm.generate([1, 2, 3], OK)
    for ask in (llm.generate, lambda prompt, params: next(llm.stream(prompt, params))):
        with pytest.raises(EngineDeadError, match=r"was shut down .* make a new one"):
            ask([1, 2, 3], OK)
    assert_balanced(llm.engine)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": 4097}, "max_model_len is 4097 but the model was made for 4096 tokens"),
        ({"num_kv_blocks": 20}, "max_model_len is 288, as memory has no room for one sequence of"),
        ({"max_model_len": 4096}, None),
        ({}, None),
    ],
    ids=str,
)
def test_a_length_that_is_not_the_models_own_is_told(
    options: dict[str, Any], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: dict[str, Any] = {"num_kv_blocks": 300, "speculative": "none", "max_num_seqs": 1}
    with caplog.at_level(logging.WARNING, logger="headrace"):
        load_parts(EngineConfig(**(sizes | options)), model=tiny_model())
    told = [record.message for record in caplog.records if "max_model_len" in record.message]
    assert (said is None and not told) or (len(told) == 1 and told[0].startswith(str(said)))


def test_an_unknown_backend_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="rt_backend is 'foo'; choose auto or one of cpu"):
        LLM("nano", rt_backend="foo")
