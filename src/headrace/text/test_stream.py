"""Texts of growing sequences: no grouping of tokens may change them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text import StopMatch, TextStream, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXTS = st.text(
    st.sampled_from("abclmpost \n:Human你好é😀\u0301"), max_size=24
) | st.text(max_size=12)
GROUPS = st.lists(st.integers(1, 9), min_size=1, max_size=8)
STOPS = st.lists(
    st.sampled_from(["lamp post", "\nHuman:", "ab", "abc", "b", "好", "😀a", "aa", "aab"]),
    min_size=1, max_size=4, unique=True,
)


def groups_of(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    groups, place, number = [], 0, 0
    while place < len(ids):
        size = sizes[number % len(sizes)]
        groups.append(list(ids[place : place + size]))
        place += size
        number += 1
    return groups


def run(stream: TextStream, groups: list[list[int]]) -> tuple[list[str], int, str | None]:
    """Return the deltas, the tokens kept and the stop string."""
    deltas, kept = [], 0
    for group in groups:
        match = stream.append(group)
        if match is not None:
            deltas.append(stream.take_delta(final=True))
            return deltas, kept + match.num_tokens, match.stop
        kept += len(group)
        deltas.append(stream.take_delta(final=False))
    deltas.append(stream.take_delta(final=True))
    return deltas, kept, None


def common_prefix(first: str, second: str) -> int:
    size = 0
    while size < min(len(first), len(second)) and first[size] == second[size]:
        size += 1
    return size


@pytest.mark.scenarios("B107")
@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, 370), max_size=20), sizes=GROUPS, skip=st.booleans())
def test_deltas_add_up_to_the_decode_of_any_bytes(
    byte_level: Tokenizer, ids: list[int], sizes: list[int], *, skip: bool
) -> None:
    stream = TextStream(byte_level, skip_special_tokens=skip)
    deltas, _, _ = run(stream, groups_of(ids, sizes))
    assert "".join(deltas) == byte_level.decode(ids, skip_special_tokens=skip)


@pytest.mark.scenarios("B107")
@settings(deadline=None, max_examples=300)
@given(
    prompt=st.lists(st.integers(4, 259), max_size=12),
    ids=st.lists(st.integers(4, 259), max_size=8),
    sizes=GROUPS,
)
def test_a_prompt_that_ends_inside_a_character_is_context(
    byte_level: Tokenizer, prompt: list[int], ids: list[int], sizes: list[int]
) -> None:
    stream = TextStream(byte_level, prompt_token_ids=prompt)
    deltas, _, _ = run(stream, groups_of(ids, sizes))
    before, after = byte_level.decode(prompt), byte_level.decode(prompt + ids)
    assert "".join(deltas) == after[common_prefix(before, after) :]


@pytest.mark.scenarios("B107")
@settings(deadline=None, max_examples=300)
@given(text=TEXTS, cut=st.integers(0, 30), sizes=GROUPS)
def test_byte_tokens_beside_words_add_up_to_the_text(
    byte_fallback: Tokenizer, text: str, cut: int, sizes: list[int]
) -> None:
    ids = byte_fallback.encode("s" + text.replace(" ", "▁"), add_special_tokens=False)
    prompt, output = ids[: cut + 1], ids[cut + 1 :]
    stream = TextStream(byte_fallback, prompt_token_ids=prompt)
    deltas, _, _ = run(stream, groups_of(output, sizes))
    whole = byte_fallback.decode(ids)[1:].encode()
    before = b"".join(map(byte_fallback.token_bytes, prompt))[1:]
    # A character that the prompt began is delivered whole.
    assert "".join(deltas) == whole[len(before.decode(errors="ignore").encode()) :].decode() or (
        not output and not "".join(deltas)
    )


@settings(deadline=None, max_examples=200)
@given(
    prompt=st.lists(st.integers(0, 11), max_size=12),
    ids=st.lists(st.integers(0, 11), max_size=12),
    sizes=GROUPS,
)
def test_deltas_add_up_where_tokens_depend_on_their_neighbours(
    word_piece: Tokenizer, prompt: list[int], ids: list[int], sizes: list[int]
) -> None:
    stream = TextStream(word_piece, prompt_token_ids=prompt)
    deltas, _, _ = run(stream, groups_of(ids, sizes))
    before, after = word_piece.decode(prompt), word_piece.decode(prompt + ids)
    assert before + "".join(deltas) == after


@pytest.mark.scenarios("B105")
@settings(deadline=None, max_examples=400)
@given(
    text=TEXTS, stops=STOPS, sizes=GROUPS, include=st.booleans(), min_tokens=st.integers(0, 3)
)
def test_stops_do_not_depend_on_the_grouping(
    byte_level: Tokenizer, text: str, stops: list[str], sizes: list[int], *, include: bool,
    min_tokens: int,
) -> None:
    ids = byte_level.encode(text)

    def outcome(groups: list[list[int]]) -> tuple[str, int, str | None]:
        stream = TextStream(
            byte_level, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
        )
        deltas, kept, stop = run(stream, groups)
        return "".join(deltas), kept, stop

    alone = outcome([[token] for token in ids])
    assert outcome(groups_of(ids, sizes)) == alone
    assert outcome([ids] if ids else []) == alone
    if min_tokens == 0:
        assert alone == expected_outcome(byte_level, ids, stops, include=include)


def expected_outcome(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], *, include: bool
) -> tuple[str, int, str | None]:
    """The definition, character by character and token by token."""
    whole = tokenizer.decode(ids)
    for end in range(1, len(whole) + 1):
        done = [stop for stop in stops if whole[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            kept = next(
                size for size in range(1, len(ids) + 1)
                if len(settled(tokenizer, ids[:size])) >= end
            )
            return whole[: end if include else end - len(stop)], kept, stop
    return whole, len(ids), None


def settled(tokenizer: Tokenizer, ids: list[int]) -> str:
    data = b"".join(tokenizer.token_bytes(token) for token in ids)
    for cut in range(4):
        try:
            return data[: len(data) - cut].decode()
        except UnicodeDecodeError:
            continue
    raise AssertionError(data)


@pytest.mark.scenarios("B106")
@settings(deadline=None, max_examples=200)
@given(text=TEXTS, stops=STOPS, sizes=GROUPS)
def test_no_part_of_a_stop_string_is_sent_before_it_is_complete(
    byte_level: Tokenizer, text: str, stops: list[str], sizes: list[int]
) -> None:
    stream = TextStream(byte_level, stop=stops)
    deltas, _, stop = run(stream, groups_of(byte_level.encode(text), sizes))
    whole = "".join(deltas)
    assert text.startswith(whole)
    if stop is not None:
        assert text[len(whole) :].startswith(stop)
    else:
        assert whole == text


@pytest.mark.scenarios("B105")
@pytest.mark.parametrize(("include", "text"), [(False, "by the "), (True, "by the lamp post")])
def test_tokens_after_the_stop_in_one_run_are_not_kept(
    byte_level: Tokenizer, text: str, *, include: bool
) -> None:
    head = byte_level.encode("by the lamp post")
    stream = TextStream(byte_level, stop=["lamp post"], include_stop_str_in_output=include)
    match = stream.append([*head, *byte_level.encode(" and more lamp post")])
    assert match == StopMatch(len(head), "lamp post")
    assert stream.take_delta(final=True) == text
    assert stream.take_delta(final=True) == ""


@pytest.mark.scenarios("B106")
def test_held_text_is_delivered_when_no_stop_comes(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, stop=["lamp post"])
    assert stream.append(byte_level.encode("the lamp po")) is None
    assert stream.take_delta(final=False) == "the "
    assert stream.take_delta(final=True) == "lamp po"


def test_an_unfinished_character_leaves_the_ones_before_it_whole(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("a你好", add_special_tokens=False)
    stream = TextStream(byte_fallback)
    deltas, _, _ = run(stream, [[token] for token in ids[:-1]])
    assert "".join(deltas) == "a你\ufffd"


@pytest.mark.scenarios("B107")
def test_an_unfinished_character_is_a_replacement_character_at_the_end(
    byte_level: Tokenizer,
) -> None:
    ids = byte_level.encode("a\U0001f9ff")[:-1]
    stream = TextStream(byte_level)
    stream.append(ids)
    assert stream.take_delta(final=False) == "a"
    assert stream.take_delta(final=True) == "\ufffd"
