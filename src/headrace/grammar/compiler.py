"""Compiling grammars: once for each form of output, off the hot path, within bounds.

The library bounds the work by fuel rather than by time, so what is refused does not depend on the
machine: the limits below stop a hostile schema within about a second of one thread.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace.errors import ConfigError, RequestError
from headrace.grammar.state import MatcherState, num_mask_words
from headrace.grammar.xgrammar_backend import XgrammarCompiler, XgrammarMatcher, XgrammarState
from headrace.structured_outputs import BLANKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.structured_outputs import StructuredOutputsParams
    from headrace.text import Tokenizer

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_CHOICES = 4096
MAX_CACHED = 128
_START_FUEL = 1_000_000
_STEP_FUEL = 200_000
_STEP_ITEMS = 50_000
_MAX_LEXER_STATES = 50_000
_MAX_GRAMMAR_SIZE = 100_000
_MAX_MESSAGE_CHARS = 400

_MAX_EXACT = 2**53
"""Up to here every integer is a float."""


class CompiledGrammar:
    """A form of output, ready for any number of sequences.

    Args:
        matcher: A matcher at its beginning; it is copied, never advanced.
        params: What it was compiled from.
        stops, free: See `MatcherState`.
    """

    def __init__(
        self, matcher: Any, params: StructuredOutputsParams, *,  # noqa: ANN401
        stops: np.ndarray, free: np.ndarray,
    ) -> None:
        self._matcher = matcher
        self._state = XgrammarState if isinstance(matcher, XgrammarMatcher) else MatcherState
        self._params = params
        self._stops = stops
        self._free = free

    def start(self) -> MatcherState:
        """State of a new sequence."""
        return self._state(
            self._matcher.deep_copy(), stops=self._stops, free=self._free,
            beginning=self._params.beginning,
        )


class Grammars:
    """Compiles forms of output for one model. Any thread may use it.

    Args:
        tokenizer: The model's.
        vocab_size: The model's, which may be padded.
        stop_token_ids: What ends its sequences.
        backend: The library; with xgrammar, calls of tools run on llguidance all the same.

    Raises:
        ConfigError: xgrammar is not installed, or has no use for such a tokenizer.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int],
        *, backend: Literal["auto", "llguidance", "xgrammar"] = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = tuple(stop_token_ids)
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str, bool], Any] = OrderedDict()
        self._library_tokenizer: Any = None
        self._stops = np.zeros(num_mask_words(vocab_size), dtype=np.int32)
        self._free = np.zeros(0, dtype=np.int32)
        self._xgrammar = self._load_xgrammar() if backend == "xgrammar" else None
        self.num_compiled = 0

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile a form of output, or take it from the cache.

        Raises:
            RequestError: The schema, expression or grammar is wrong, too large, or uses what
                cannot be enforced; the message names the fault.
        """
        key = (params.kind, _source(params), params.disable_any_whitespace)
        with self._lock:
            matcher = self._cache.get(key)
            if matcher is not None:
                self._cache.move_to_end(key)
        if matcher is None:
            matcher = self._make_matcher(params)
            with self._lock:
                self.num_compiled += 1
                self._cache[key] = matcher
                while len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
        return CompiledGrammar(matcher, params, stops=self._stops, free=self._free)

    def _make_matcher(self, params: StructuredOutputsParams) -> Any:  # noqa: ANN401
        if self._xgrammar is not None and not params.has_calls:
            text = _source(params)
            try:
                return self._xgrammar.compile(params, text)
            except (ValueError, RecursionError) as error:
                raise _refusal(params, str(error)) from error
        import llguidance  # noqa: PLC0415 - only where a request has a grammar

        self._load()
        try:
            grammar = _grammar(params)
        except ValueError as error:
            raise _refusal(params, str(error)) from error
        matcher = llguidance.LLMatcher(
            self._library_tokenizer, grammar, log_level=0,
            limits=llguidance.LLParserLimits(
                initial_lexer_fuel=_START_FUEL, step_lexer_fuel=_STEP_FUEL,
                step_max_items=_STEP_ITEMS, max_lexer_states=_MAX_LEXER_STATES,
                max_grammar_size=_MAX_GRAMMAR_SIZE, verbose_errors=False,
            ),
        )
        if matcher.is_error():
            raise _refusal(params, matcher.get_error())
        # The first mask is where most of the work is: a grammar that is too complex fails here.
        matcher.compute_bitmask()
        if matcher.is_error():
            # The library's word for a beginning without any way on.
            is_empty = matcher.get_error().startswith("NoExtensionBias")
            raise _refusal(params, "nothing fits it" if is_empty else matcher.get_error())
        return matcher

    def _load_xgrammar(self) -> XgrammarCompiler:
        if not self._tokenizer.has_fixed_bytes:
            raise ConfigError(
                "grammar_backend is xgrammar, but what this model's tokens mean depends on their "
                "neighbours; use --grammar-backend llguidance"
            )
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size)
        for token in vocabulary.special_token_ids:
            vocabulary.tokens[token] = b""
        stops = self._stop_ids or (vocabulary.eos_token_id,)
        tokens = np.zeros(self._vocab_size, dtype=bool)
        tokens[list(stops)] = True
        self._stops[:] = _pack(tokens)
        self._free = _pack(~tokens)
        written = _pack(np.array([bool(text) for text in vocabulary.tokens]) & ~tokens)
        return XgrammarCompiler(vocabulary.tokens, stops, stops=self._stops, written=written)

    def _load(self) -> None:
        """Hand the vocabulary to the library, once."""
        with self._lock:
            if self._library_tokenizer is not None:
                return
            import llguidance  # noqa: PLC0415

            stops = list(self._stop_ids) or None
            try:
                loaded = llguidance.LLTokenizer(
                    library_tokenizer(self._tokenizer, self._vocab_size),
                    n_vocab=self._vocab_size, eos_token=stops,
                )
            except Exception as error:  # the library raises what its parts raise
                raise RequestError(
                    f"structured output does not work with this model's tokenizer: {error}; "
                    "leave it out, or serve the model with its own tokenizer",
                    param="structured_outputs",
                ) from error
            tokens = np.zeros(self._vocab_size, dtype=bool)
            tokens[list(loaded.eos_tokens)] = True
            self._stops[:] = _pack(tokens)
            self._free = _pack(~tokens)
            self._library_tokenizer = loaded


class _Vocabulary:
    """A tokenizer in the form that the library takes.

    Text that a grammar forces is tokenised to find the model's own way of writing it. Marks such as
    `<tool_call>` must then come out as ordinary tokens: as marks they stand for themselves in a
    grammar, not for their letters, and the library would allow a token that it then refuses.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        added = tokenizer.added_tokens
        self._tokenizer = tokenizer
        self._marks = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))
        # Ids beyond the tokenizer's are the padding of the model's vocabulary: no bytes.
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(
            tokenizer.special_ids.union(
                token for text, token in added.items() if is_mark(text)
            )
        )
        self.bos_token_id = tokenizer.bos_token_id
        # The library wants one; `eos_token` overrules it where the model names its own.
        self.eos_token_id = tokenizer.eos_token_id or 0

    def __call__(self, data: bytes | str) -> list[int]:
        text = data if isinstance(data, str) else data.decode()
        ids: list[int] = []
        start = 0
        for match in self._marks.finditer(text) if self._marks.pattern else ():
            ids += self._encode(text[start : match.start() + 1])
            start = match.start() + 1
        return ids + self._encode(text[start:])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def is_mark(text: str) -> bool:
    """Whether an added token is a mark, which only a grammar that names it allows."""
    return text.startswith("<") and text.endswith(">")


def library_tokenizer(
    tokenizer: Tokenizer, vocab_size: int
) -> Any:  # noqa: ANN401 - what LLTokenizer takes
    """The library's view of a tokenizer.

    Raises:
        ValueError: The model lacks some of its tokens, or the library would.
    """
    if tokenizer.max_token_id >= vocab_size:
        raise ValueError(
            f"it has the token id {tokenizer.max_token_id} but the model's are below {vocab_size}"
        )
    import llguidance  # noqa: PLC0415

    if not tokenizer.has_fixed_bytes:
        # What its tokens mean depends on their neighbours: the library has rules for some of these.
        if tokenizer.max_token_id >= tokenizer.vocab_size:
            # It reads as many ids as there are tokens, and would forbid the rest without a word.
            raise ValueError(
                f"it has {tokenizer.vocab_size} tokens but ids up to {tokenizer.max_token_id}, and "
                "of such a vocabulary the grammar library knows no id from the number of tokens on"
            )
        return tokenizer.to_json()
    return llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))


def _pack(allowed: np.ndarray) -> np.ndarray:
    """Bits of [V] booleans, [W] i32."""
    padded = np.zeros(num_mask_words(len(allowed)) * 32, dtype=bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)


def _source(params: StructuredOutputsParams) -> str:
    """What is compiled, as text.

    Raises:
        RequestError: It is too large, or no JSON.
    """
    value = getattr(params, params.kind)
    if params.kind == "choice" and len(value) > MAX_CHOICES:
        raise _refusal(params, f"it has {len(value)} texts but at most {MAX_CHOICES} are allowed")
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(params, f"it is no JSON: {error}") from error
    if len(text) > MAX_GRAMMAR_CHARS:
        raise _refusal(
            params,
            f"it has {len(text)} characters but at most {MAX_GRAMMAR_CHARS} are allowed",
        )
    return text


def _grammar(params: StructuredOutputsParams) -> str:
    """The library's form of a grammar.

    Raises:
        ValueError: It is malformed.
    """
    import llguidance  # noqa: PLC0415

    text, make = _source(params), llguidance.LLMatcher
    match params.kind:
        case "json" | "json_object":
            schema = text if params.kind == "json" else '{"type": "object"}'
            schema = _parsed(schema)
            # `lenient` would let through what cannot be enforced.
            if params.disable_any_whitespace:
                return make.grammar_from_json_schema(
                    schema, overrides={"whitespace_flexible": False, "lenient": False}
                )
            return make.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": BLANKS, "lenient": False}
            )
        case "regex":
            return make.grammar_from_regex(text)
        case "choice":
            return llguidance.grammar_from("choice", text)
    if "::=" in text:
        return llguidance.grammar_from("gbnf", text)
    return make.grammar_from_lark(text)


def _parsed(schema: str) -> str:
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from error
    # `true` is the schema of anything, and `false` that of nothing.
    if not isinstance(value, dict | bool):
        kind = type(value).__name__
        raise ValueError(f"a schema is an object, got {kind}")  # noqa: TRY004 - as for the rest
    if value is False:
        raise ValueError("it allows nothing")
    _check_numbers(value)
    return json.dumps({} if value is True else value)


def _check_numbers(schema: object) -> None:
    """Refuse numbers that an answer must be but that the library would round."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left.extend(part)
        elif isinstance(part, dict):
            left.extend(part.values())
            listed = part.get("enum")
            for value in (part.get("const"), *(listed if isinstance(listed, list) else ())):
                if type(value) is int and abs(value) > _MAX_EXACT:
                    raise ValueError(
                        f"it lists the number {value}, which would be rounded; use numbers up to "
                        "2**53, or text"
                    )


def _refusal(params: StructuredOutputsParams, fault: str) -> RequestError:
    what = {"json": "the JSON schema", "json_object": "json_object", "regex": "the regex",
            "choice": "the choice", "grammar": "the grammar"}[params.kind]
    fault = " ".join(fault.split())
    if len(fault) > _MAX_MESSAGE_CHARS:
        fault = fault[:_MAX_MESSAGE_CHARS] + " ..."
    return RequestError(f"{what} cannot be used: {fault}", param=params.param)
