from __future__ import annotations

import json
import random
import secrets
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dialects.json_scan import NotJsonError, end_of_value, items, members, value_in

SCRAPS = [
    "{", "}", "[", "]", ",", ":", '"', '"a"', '"\\', "\\u00e9", "\\ud83d\\ude00", "1", "-", ".",
    "0", "e+9", "true", "null", " ", "\n", "\x00", "\u2028", "é",
]


def refuse(name: str) -> NoReturn:
    raise ValueError(name)


def read(text: str) -> Any:  # noqa: ANN401 - a JSON value
    """The standard library's reading, or ValueError."""
    return json.loads(text, parse_constant=refuse)


def some_value(draw: random.Random, depth: int) -> Any:  # noqa: ANN401
    kind = draw.choice(["dict", "list", "text", "text", "number", "word"][2 * (depth == 0) :])
    if kind == "dict":
        return {some_text(draw): some_value(draw, depth - 1) for _ in range(draw.randrange(4))}
    if kind == "list":
        return [some_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == "text":
        return some_text(draw)
    if kind == "number":
        return draw.choice([draw.randrange(-(10**20), 10**20), draw.gauss(0, 1e9), 0, 1e-300])
    return draw.choice([True, False, None])


def some_text(draw: random.Random) -> str:
    return "".join(draw.choices('a{}[],:"\\\n\x00é\u2028\U0001f600', k=draw.randrange(5)))


def test_what_is_written_is_found_again() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(300):
        value = some_value(draw, 3)
        text = json.dumps(value, indent=draw.choice([None, 1]), ensure_ascii=draw.random() < 0.5)
        blanks = draw.choice(["", " ", "\n\t"])
        assert value_in(blanks + text + blanks) == text
        assert end_of_value(text + ", x", 0) == len(text)
        if isinstance(value, dict):
            assert {name: read(part) for name, part in members(text).items()} == value
        if isinstance(value, list):
            assert [read(part) for part in items(text)] == value


@given(st.lists(st.sampled_from(SCRAPS), max_size=8).map("".join))
@settings(max_examples=100, deadline=None, database=None)
def test_the_scanner_takes_what_the_standard_parser_takes(text: str) -> None:
    try:
        expected = read(text)
    except ValueError:
        with pytest.raises(NotJsonError):
            value_in(text)
    else:
        assert read(value_in(text)) == expected


@pytest.mark.parametrize(
    ("text", "is_cut"),
    [
        ('{"a": "b', True), ('{"a', True), ('"\\n', True), ("", False), ('{"a": 1 "b', False),
        ('{"a" "b', False), ('"\\x', False), ('"\x00', False), ("[1", False), ('1 "a', False),
    ],
)
def test_a_string_without_an_end_is_cut(text: str, is_cut: bool) -> None:  # noqa: FBT001
    with pytest.raises(NotJsonError) as caught:
        value_in(text)
    assert caught.value.is_cut == is_cut


def test_of_equal_names_the_last_counts() -> None:
    assert members('{"a": 1, "\\u0061" : [2] }') == {"a": "[2]"}
