"""Reading tokenizers from model folders."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError, RequestError
from headrace.text import Tokenizer
from headrace.text.conftest import byte_level_backend

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, *, adds_bos: bool = False, **config: object) -> None:
    byte_level_backend(adds_bos=adds_bos).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_special_tokens_are_read_as_text_or_as_objects(tmp_path: Path) -> None:
    write(tmp_path, eos_token={"content": "<|im_end|>"}, bos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 3)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert tokenizer.special_ids == {0, 1, 2, 3}


@pytest.mark.scenarios("B109")
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("text", ["the lamp", "<s>the lamp"])
def test_bos_is_never_doubled(
    tmp_path: Path, text: str, config: dict[str, object], *, adds_bos: bool
) -> None:
    write(tmp_path, adds_bos=adds_bos, bos_token="<s>", **config)
    tokenizer = Tokenizer.from_folder(tmp_path)
    plain = tokenizer.encode(text, add_special_tokens=False)
    wants_bos = config.get("add_bos_token", adds_bos) or text.startswith("<s>")
    expected = [0, *[token for token in plain if token != 0]] if wants_bos else plain
    assert tokenizer.encode(text) == expected
    assert plain.count(0) == text.count("<s>")


@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_survives_the_round_trip(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    assert byte_level.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()
    assert len(ids) >= byte_level.min_tokens_of(len(text.encode()))


def test_tokens_of_the_config_alone_are_added(tmp_path: Path) -> None:
    write(tmp_path)
    size = Tokenizer.from_folder(tmp_path).vocab_size
    write(tmp_path, added_tokens_decoder={str(size): {"content": "<|extra|>", "special": True}})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a<|extra|>")[1:] == [size]
    write(tmp_path, added_tokens_decoder={str(size + 5): {"content": "<|extra|>"}})
    with pytest.raises(ModelError, match="from one revision"):
        Tokenizer.from_folder(tmp_path)


def test_added_tokens_may_be_text_and_have_ids_or_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    size = Tokenizer.from_folder(tmp_path).vocab_size
    write(tmp_path, added_tokens_decoder={str(size): "<|extra|>"})
    assert Tokenizer.from_folder(tmp_path).encode("a<|extra|>")[1:] == [size]
    for key in ("", "x", "-1", "1.0", "9" * 5000):
        write(tmp_path, added_tokens_decoder={key: {"content": "<|extra|>"}})
        with pytest.raises(ModelError, match=r"has the key .*, which is no token id"):
            Tokenizer.from_folder(tmp_path)


def test_a_folder_without_tokenizer_is_an_error_only_where_text_is_needed(tmp_path: Path) -> None:
    assert Tokenizer.from_folder_if_present(tmp_path) is None
    with pytest.raises(ModelError, match=r"no tokenizer\.json; pass token ids"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b'{"model": 3}'])
def test_a_damaged_tokenizer_names_its_file(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(damage)
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder_if_present(tmp_path)


def test_other_threads_run_while_a_long_text_is_tokenised(byte_level: Tokenizer) -> None:
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    byte_level.encode("the lamp post " * 40_000)
    end = time.monotonic()
    done.set()
    thread.join()
    # Holding the lock would leave room for none or one.
    assert sum(begin < at < end for at in ticks) > 5


def test_ids_beyond_the_vocabulary_have_no_text(byte_level: Tokenizer) -> None:
    assert byte_level.decode_token(9999) == ""
    assert byte_level.decode_token(3) == "<|im_end|>"
    assert byte_level.decode([9999]) == ""


def test_what_is_no_character_is_refused_by_its_place() -> None:
    tokenizer = Tokenizer(byte_level_backend())
    with pytest.raises(RequestError, match=r"the text has U\+DCE9 at 3, half of a surrogate pair"):
        tokenizer.encode("caf\udce9 au lait")
