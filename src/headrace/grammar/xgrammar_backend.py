"""Forms of output on xgrammar, an optional package: what it is known to enforce, nothing else.

The library drops what it does not know of a schema without a word (decision 0014). So a schema is
rebuilt from the keywords and combinations of which tests show that they hold; anything else is
refused by name. That was tried with one version of the library, and no other one is used.
"""

from __future__ import annotations

import json
import threading
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import ConfigError
from headrace.grammar.state import MatcherJob, MatcherState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headrace.structured_outputs import StructuredOutputsParams

VERSION = "0.2.9"
"""The version that the lists below were tried with."""
MAX_SCHEMA_CHARS = 32 * 1024
"""The library has no bound on its work: a schema of this size takes it about a second."""
MAX_DEPTH = 64
MAX_ITEMS = 1_000_000
_MAX_EXACT = 2**53
"""The library rounds some larger numbers to doubles."""
_MAX_BLANKS = 32
_REMEDY = "use --grammar-backend llguidance"
_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$schema", "$comment",
})
_BESIDE_TYPE = {
    "string": frozenset[str](), "number": frozenset[str](), "boolean": frozenset[str](),
    "null": frozenset[str](),
    "integer": frozenset({"minimum", "maximum"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""Keywords that hold beside a type."""
_BOUNDS = (
    ("minimum", "maximum", -_MAX_EXACT, _MAX_EXACT), ("minItems", "maxItems", 0, MAX_ITEMS),
)
"""Bounds that come in pairs, and their own."""
_DEFS = ("$defs", "definitions")


def check_installed() -> None:
    """Make sure that the package is there, in the version whose faults are known.

    Raises:
        ConfigError: It is not.
    """
    try:
        found = version("xgrammar")
    except PackageNotFoundError as error:
        raise ConfigError(
            "grammar_backend is xgrammar, which is not installed; pip install 'headrace[xgrammar]'"
        ) from error
    if found != VERSION:
        raise ConfigError(
            f"grammar_backend is xgrammar and {found} is installed, but what it enforces is known "
            f"of {VERSION} alone; pip install 'headrace[xgrammar]'"
        )


class XgrammarCompiler:
    """Compiles forms of output for one vocabulary. Any thread may use it.

    Args:
        tokens: Bytes of each token; what has none is never allowed, [V].
        stop_token_ids: What ends sequences.
        stops, written: These, and all others that have bytes, [W] i32.

    Raises:
        ConfigError: The package is not installed.
    """

    def __init__(
        self, tokens: Sequence[bytes], stop_token_ids: Sequence[int],
        *, stops: np.ndarray, written: np.ndarray,
    ) -> None:
        check_installed()
        # Imported here: it is optional, and brings transformers along.
        import xgrammar  # noqa: PLC0415

        self._library = xgrammar
        self._stops, self._written = stops, written
        # One thread, so that the engine's steps keep theirs; our own cache is bounded.
        self._compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo(
                list(tokens), xgrammar.VocabType.RAW, vocab_size=len(tokens),
                stop_token_ids=list(stop_token_ids),
            ),
            max_threads=1, cache_enabled=False,
        )
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams, text: str) -> XgrammarMatcher:
        """Compile a form of output.

        Args:
            params: The form.
            text: Its source: a schema or a list of texts in JSON.

        Raises:
            ValueError: It is malformed, too large, or not among what is known to hold.
        """
        if params.kind not in ("json", "json_object", "choice"):
            raise ValueError(f"{params.kind} is not enforced by xgrammar; {_REMEDY}")
        if len(text) > MAX_SCHEMA_CHARS:
            raise ValueError(
                f"it has {len(text)} characters but at most {MAX_SCHEMA_CHARS} are allowed with "
                f"xgrammar, whose work has no bound; {_REMEDY}"
            )
        try:
            with self._lock:
                matcher = self._library.GrammarMatcher(self._compiled(params, text))
        except RuntimeError as error:  # of which the library's own errors are
            raise ValueError(str(error)) from error
        made = XgrammarMatcher(matcher, stops=self._stops, written=self._written)
        if made.is_stopped() and not made.is_accepting():
            raise ValueError("nothing fits it")
        return made

    def _compiled(self, params: StructuredOutputsParams, text: str) -> Any:  # noqa: ANN401
        if params.kind == "choice":
            # Texts of the library's grammars are escaped as in JSON, but for pairs of surrogates.
            texts = [json.dumps(one, ensure_ascii=False) for one in json.loads(text)]
            return self._compiler.compile_grammar(f"root ::= {' | '.join(texts)}")
        schema = {"type": "object"} if params.kind == "json_object" else json.loads(text)
        blanks: dict[str, Any] = {"max_whitespace_cnt": _MAX_BLANKS}
        if params.disable_any_whitespace:
            blanks = {"any_whitespace": False, "separators": (",", ":")}
        return self._compiler.compile_json_schema(
            json.dumps(enforced(schema)), strict_mode=False, **blanks
        )


class XgrammarMatcher:
    """The library's matcher with the methods of llguidance's that `MatcherState` calls.

    Args:
        matcher: A GrammarMatcher of its own.
        stops, written: Ends of sequences, and all other tokens with bytes, [W] i32.
    """

    def __init__(
        self, matcher: Any, *, stops: np.ndarray, written: np.ndarray  # noqa: ANN401
    ) -> None:
        self._matcher = matcher
        self._stops, self._written = stops, written
        self._next: np.ndarray | None = None

    def consume_token(self, token: int) -> bool:
        """Take a token in; False if the grammar does not allow it."""
        self._next = None
        return self._accepts(token)

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """How many leading tokens the grammar allows."""
        count = 0
        while count < len(tokens) and self._accepts(tokens[count]):
            count += 1
        self._matcher.rollback(count)
        return count

    def is_stopped(self) -> bool:
        """Whether nothing but an end can follow."""
        return bool(self._matcher.is_terminated() or not (self._mask() & self._written).any())

    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return bool(self._matcher.is_terminated() or self._matcher.is_completed())

    def is_error(self) -> bool:
        """No work is given up: there is no bound on it."""
        return False

    def get_error(self) -> str:
        """See `is_error`."""
        return ""

    def fill(self, bits: np.ndarray, line: int, drafts: Sequence[int]) -> None:
        """Masks after 0, 1, ... of the drafts; lines after an end stay as they are."""
        num_taken = 0
        for place in range(len(drafts) + 1):
            if self._matcher.is_terminated():
                break
            bits[line + place] = self._mask() if place == 0 else self._filled()
            if place == len(drafts) or not self._accepts(drafts[place]):
                break
            num_taken += 1
        self._matcher.rollback(num_taken)

    def deep_copy(self) -> XgrammarMatcher:
        """A matcher of its own at the same place."""
        return XgrammarMatcher(self._matcher.fork(), stops=self._stops, written=self._written)

    def _accepts(self, token: int) -> bool:
        # Of these two the library complains on stderr, and drafters propose any token.
        if self._matcher.is_terminated() or not self._has_bytes(token):
            return False
        return bool(self._matcher.accept_token(token))

    def _has_bytes(self, token: int) -> bool:
        word, bit = divmod(token, 32)
        return bool((int(self._stops[word]) | int(self._written[word])) >> bit & 1)

    def _mask(self) -> np.ndarray:
        """The mask of the next token, [W] i32, kept until a token is consumed."""
        if self._next is None:
            self._next = self._filled()
        return self._next

    def _filled(self) -> np.ndarray:
        line = np.zeros((1, len(self._stops)), dtype=np.int32)
        self._matcher.fill_next_token_bitmask(line, 0)
        # At times the library sets bits of the last word that are beyond the vocabulary.
        return line[0] & (self._stops | self._written)


class XgrammarState(MatcherState):
    """A state on xgrammar's matcher, which fills in its masks one after the other."""

    def prepare(self, bits: np.ndarray, line: int, drafts: Sequence[int]) -> list[MatcherJob]:
        """See `GrammarState`; no work is left."""
        for matcher, first, rest in super().prepare(bits, line, drafts):
            matcher.fill(bits, first, rest)
        return []


def enforced(schema: object) -> dict[str, Any]:
    """A schema rebuilt from what is known to hold, without annotations.

    An object with listed properties gets no others, which is stricter than JSON Schema: beside
    them a listed name could be spelled with escapes and hold anything.

    Raises:
        ValueError: It has another keyword or combination; the message names it.
    """
    return _Rebuilt(schema).root


class _Rebuilt:
    """One schema on its way through; definitions are rebuilt as far as something refers to them."""

    def __init__(self, schema: object) -> None:
        self._defs: dict[str, Any] = {}
        if isinstance(schema, dict):
            for place in _DEFS:
                found = schema.get(place, {})
                if not isinstance(found, dict):
                    raise ValueError(f"{place} must be an object")  # noqa: TRY004 - as the rest
                self._defs |= {f"#/{place}/{name}": value for name, value in found.items()}
            schema = {key: value for key, value in schema.items() if key not in _DEFS}
        self._wanted: list[str] = []
        self.root = self._part(schema, 0)
        done: dict[str, Any] = {}
        while self._wanted:
            name = self._wanted.pop()
            if name not in done:
                done[name] = self._part(self._defs[name], 0)
        for name, value in done.items():
            _, place, key = name.split("/", 2)
            self.root.setdefault(place, {})[key] = value

    def _part(self, schema: object, depth: int) -> dict[str, Any]:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep; {_REMEDY}")
        if schema is False:
            raise ValueError(f"the schema false is not enforced by xgrammar; {_REMEDY}")
        if schema is not True and not isinstance(schema, dict):
            raise ValueError(f"a schema is an object, got {type(schema).__name__}")
        given = {} if schema is True else {
            key: value for key, value in schema.items() if key not in _ANNOTATIONS
        }
        if not given:
            return {}
        if "$ref" in given:
            _alone("$ref", given)
            return self._ref(given["$ref"])
        if "anyOf" in given:
            _alone("anyOf", given)
            parts = given["anyOf"]
            if not isinstance(parts, list) or not parts:
                raise ValueError("anyOf must be a list that is not empty")
            return {"anyOf": [self._part(part, depth + 1) for part in parts]}
        for key in ("enum", "const"):
            if key in given:
                _alone(key, given, "type")
                return _values(key, given)
        return self._typed(given, depth)

    def _ref(self, name: object) -> dict[str, Any]:
        if not isinstance(name, str) or (name != "#" and name not in self._defs):
            raise ValueError(
                f"$ref {name!r:.100} is neither '#' nor a definition that is there; {_REMEDY}"
            )
        if name != "#":
            # Escapes of JSON pointers are the library's business, and not known to hold.
            if any(sign in name.split("/", 2)[2] for sign in "/~%"):
                raise ValueError(f"$ref {name!r:.100} has '/', '~' or '%' in it; {_REMEDY}")
            self._wanted.append(name)
        return {"$ref": name}

    def _typed(self, given: dict[str, Any], depth: int) -> dict[str, Any]:
        kind = given.get("type")
        if isinstance(kind, list) and kind:
            _alone("type as a list", given, "type")
            return {"anyOf": [self._typed({"type": one}, depth + 1) for one in kind]}
        if "type" in given and (not isinstance(kind, str) or kind not in _BESIDE_TYPE):
            raise ValueError(f"type is {kind!r:.100}; known are {', '.join(_BESIDE_TYPE)}")
        where = f"beside type {kind}" if kind else "without a type"
        for key in given:
            if key not in ("type", *_BESIDE_TYPE.get(kind or "", ())):
                raise ValueError(f"{key} {where} is not enforced by xgrammar; {_REMEDY}")
        if kind == "object":
            return self._object(given, depth)
        _check_bounds(given)
        if "items" in given:
            return {**given, "items": self._part(given["items"], depth + 1)}
        return given

    def _object(self, given: dict[str, Any], depth: int) -> dict[str, Any]:
        listed = given.get("properties", {})
        required = given.get("required", [])
        if not isinstance(listed, dict) or not isinstance(required, list):
            raise ValueError("properties must be an object, and required a list")  # noqa: TRY004
        for name in required:
            if not isinstance(name, str) or name not in listed:
                raise ValueError(
                    f"required has {name!r:.100}, which is not in properties; that is not enforced "
                    f"by xgrammar; {_REMEDY}"
                )
        others = given.get("additionalProperties", not listed)
        if listed and others is not False:
            raise ValueError(
                "additionalProperties beside properties, other than false, is not enforced by "
                f"xgrammar; {_REMEDY}"
            )
        if not listed:
            if others is not False:
                others = self._part(others, depth + 1) or True
            return {"type": "object", "additionalProperties": others}
        return {
            "type": "object", "additionalProperties": False, "required": required,
            "properties": {name: self._part(part, depth + 1) for name, part in listed.items()},
        }


def _alone(key: str, given: Iterable[str], *allowed: str) -> None:
    for other in given:
        if other not in (key, *allowed):
            raise ValueError(f"{other} beside {key} is not enforced by xgrammar; {_REMEDY}")


def _values(key: str, given: dict[str, Any]) -> dict[str, Any]:
    """`enum` or `const` of plain values, all of the type beside it."""
    values = [given["const"]] if key == "const" else given["enum"]
    if not isinstance(values, list) or not values:
        raise ValueError("enum must be a list that is not empty")
    for value in values:
        if isinstance(value, dict | list):
            raise ValueError(  # noqa: TRY004 - as for the rest
                f"{key} of arrays or objects is not enforced by xgrammar; {_REMEDY}"
            )
        if isinstance(value, int | float) and not abs(value) <= _MAX_EXACT:
            raise ValueError(
                f"{key} has {value}, but xgrammar is held to numbers up to 2**53; {_REMEDY}"
            )
        if "type" in given and given["type"] not in _types(value):
            raise ValueError(
                f"{key} has {value!r:.100} beside type {given['type']!r:.100}, which is not "
                f"enforced by xgrammar; {_REMEDY}"
            )
    return {"enum": values}


def _types(value: object) -> tuple[str, ...]:
    """The types that a plain value has."""
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, str):
        return ("string",)
    return ("integer", "number") if isinstance(value, int) else ("number",)


def _check_bounds(given: dict[str, Any]) -> None:
    for low, high, *limits in _BOUNDS:
        for key in (low, high):
            if key in given:
                _whole(key, given[key], *limits)
        if low in given and high in given and given[low] > given[high]:
            raise ValueError(f"{low} is {given[low]} and {high} {given[high]}: nothing fits it")


def _whole(key: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(
            f"{key} is {value!r:.100}, but xgrammar is held to whole numbers from {least} to "
            f"{most}; {_REMEDY}"
        )
