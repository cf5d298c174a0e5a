"""Where values of JSON end, without making them: arguments are handed on as the model wrote them.

A parser makes numbers, and loses what its numbers cannot hold; it recurses, and gives up on what is
deep. This one follows RFC 8259 to the letter, and takes no halves of surrogate pairs, which are no
characters and which no answer in UTF-8 could carry.
"""

from __future__ import annotations

import json
import re

_BLANKS = re.compile(r"[ \t\n\r]*+")
_LETTERS = r'[^"\\\x00-\x1f\ud800-\udfff]*+'
_ESCAPE = (
    r'\\(?:["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_OPEN_STRING = re.compile(rf'"{_LETTERS}(?:{_ESCAPE}{_LETTERS})*+')
_SCALAR = re.compile(
    rf'{_OPEN_STRING.pattern}"'
    r"|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null"
)
_KINDS = (
    ("string", re.compile('"')), ("object", re.compile("{")), ("array", re.compile(r"\[")),
    ("boolean", re.compile("[tf]")), ("null", re.compile("n")),
    ("integer", re.compile(r"-?[0-9]+\Z")), ("number", re.compile("[-0-9]")),
)
"""How a value of each kind looks; the first one that fits."""
_CLOSERS = {"{": "}", "[": "]"}
_MARKS = frozenset({"comma", "colon", "end"})


class NotJsonError(ValueError):
    """Text is no JSON.

    Attributes:
        is_cut: It ends inside a string, so more text may make it one.
    """

    def __init__(self, text: str, at: int, *, wanted: str) -> None:
        super().__init__(f"no {wanted} at character {at}")
        string = None if wanted in _MARKS else _OPEN_STRING.match(text, at)
        self.is_cut = string is not None and string.end() == len(text)


def skip_blanks(text: str, at: int) -> int:
    """The place of the first character from `at` on that is no blank of JSON."""
    blanks = _BLANKS.match(text, at)
    assert blanks is not None
    return blanks.end()


def end_of_value(text: str, at: int) -> int:
    """The place behind the value that begins at `at`, blanks before it aside.

    Raises:
        NotJsonError: There is no value.
    """
    closers: list[str] = []
    while True:
        at = skip_blanks(text, at)
        closer = _CLOSERS.get(text[at : at + 1])
        if closer is None:
            scalar = _SCALAR.match(text, at)
            if scalar is None:
                raise NotJsonError(text, at, wanted="value")
            at = scalar.end()
        else:
            inside = skip_blanks(text, at + 1)
            if not text.startswith(closer, inside):
                closers.append(closer)
                at = _behind_key(text, inside) if closer == "}" else inside
                continue
            at = inside + 1
        # A value has ended, and with it those that it is the last of.
        while closers:
            at = skip_blanks(text, at)
            if text.startswith(closers[-1], at):
                closers.pop()
                at += 1
                continue
            if not text.startswith(",", at):
                raise NotJsonError(text, at, wanted="comma")
            at = skip_blanks(text, at + 1)
            if closers[-1] == "}":
                at = _behind_key(text, at)
            break
        else:
            return at


def value_in(text: str) -> str:
    """The value that a text consists of, without the blanks around it.

    Raises:
        NotJsonError: It consists of something else.
    """
    start = skip_blanks(text, 0)
    end = end_of_value(text, start)
    if skip_blanks(text, end) != len(text):
        raise NotJsonError(text, end, wanted="end")
    return text[start:end]


def kind_of(value: str) -> str:
    """The kind of a value, as `value_in` gives it, in the words of JSON schemas."""
    return next(kind for kind, looks in _KINDS if looks.match(value))


def members(value: str) -> dict[str, str]:
    """Names and values of an object, as `value_in` gives it; of equal names the last counts."""
    found: dict[str, str] = {}
    at = skip_blanks(value, 1)
    while not value.startswith("}", at):
        start = _behind_key(value, at)
        end = end_of_value(value, start)
        name: str = json.loads(value[at : value.rindex(":", at, start)])
        found[name] = value[start:end]
        at = _behind_comma(value, end)
    return found


def items(value: str) -> list[str]:
    """Values of a list, as `value_in` gives it."""
    found = []
    at = skip_blanks(value, 1)
    while not value.startswith("]", at):
        end = end_of_value(value, at)
        found.append(value[at:end])
        at = _behind_comma(value, end)
    return found


def _behind_comma(text: str, at: int) -> int:
    at = skip_blanks(text, at)
    return skip_blanks(text, at + 1) if text.startswith(",", at) else at


def _behind_key(text: str, at: int) -> int:
    """The place of a member's value."""
    name = _SCALAR.match(text, at)
    if name is None or not text.startswith('"', at):
        raise NotJsonError(text, at, wanted="name")
    at = skip_blanks(text, name.end())
    if not text.startswith(":", at):
        raise NotJsonError(text, at, wanted="colon")
    return skip_blanks(text, at + 1)
