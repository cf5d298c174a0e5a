"""What form a request's output must have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from headrace.errors import RequestError

BLANKS = r"[ \n\r\t]{1,32}"
"""Blanks between JSON's tokens, where there are any. Models that have lost their way may write
nothing else; a bound ends that, and leaves room for an indented text."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


def inline_schema(
    schema: dict[str, Any] | bool, *, is_compact: bool = False  # noqa: FBT001 - a schema
) -> str:
    """A JSON schema as a rule of a grammar in Lark's syntax, with bounded blanks or none."""
    known = {} if schema is True else schema
    if not isinstance(known, dict):
        return "%json false"
    # The library's own key: whatever it had, it could turn enforcing off.
    blanks = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": BLANKS}
    return f"%json {json.dumps({**known, 'x-guidance': blanks})}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeBeginning:
    """Free text that may come before the part that a grammar constrains, such as reasoning.

    Args:
        closes: Token after which the constrained part begins.
        opens: Token that begins the free text if it is the first one; None if the prompt has begun
            it already. Without it, the constrained part begins at once.
    """

    closes: int
    opens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output, spelled as vLLM spells it. Exactly one of the first five is given.

    Args:
        json: JSON schema, as a dictionary or as text.
        regex: Regular expression for the whole output, in the syntax of Rust's regex crate.
        choice: Texts of which the output is one.
        grammar: Context-free grammar, in Lark's syntax as llguidance extends it, or in GBNF (EBNF
            with `root ::= ...`).
        json_object: Any JSON object.
        disable_any_whitespace: Compact JSON, without blanks between its tokens.
        beginning: Free text that may come first.
        param: Name of the request's field that errors carry.
        has_calls: The grammar is that of calls of tools, made by the server; llguidance's alone.

    Raises:
        RequestError: None or several are given, or one is of the wrong type.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    beginning: FreeBeginning | None = None
    param: str = "structured_outputs"
    has_calls: bool = False

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}, got "
                f"{' and '.join(given) or 'none'}", param=self.param,
            )
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                self._refuse(f"{name} must be text that is not empty, got {value!r}")
        if not isinstance(self.json_object, bool | None):
            self._refuse(f"json_object must be true or false, got {self.json_object!r:.100}")
        if self.json is not None and not isinstance(self.json, str | dict | bool):
            self._refuse(f"json must be a schema, got {type(self.json).__name__}")
        if self.choice is not None:
            is_list = isinstance(self.choice, list | tuple)
            texts: tuple[Any, ...] = tuple(self.choice) if is_list else ()
            if not texts or not all(isinstance(text, str) and text for text in texts):
                self._refuse("choice must be a list of texts, none of them empty")
            object.__setattr__(self, "choice", texts)

    @property
    def kind(self) -> str:
        """Which of the five it is."""
        return self._given()[0]

    def _given(self) -> list[str]:
        # `json_object=False` asks for nothing, whereas False is a schema.
        values = {name: getattr(self, name) for name in _KINDS} | {
            "json_object": self.json_object or None
        }
        return [name for name, value in values.items() if value is not None]

    def _refuse(self, message: str) -> None:
        raise RequestError(f"{self.param}: {message}", param=self.param)
