"""How one request wants its tokens chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError
from headrace.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_STOP_STRINGS = 16
MAX_STRING_CHARS = 4096
MAX_BAD_WORDS = 1024
# Each running row has so many places for them.
MAX_STOP_TOKEN_IDS = 256
MAX_TOKEN_IDS = MAX_BIASES = 1 << 18
MAX_COMPLETIONS = 128
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_CHECKPOINTS = 64
MAX_PIN_NAME = 128
_SEED_STEP = 0x9E3779B97F4A7C15


class OutputKind(Enum):
    """What each yielded output holds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r}", param=name)
    if not math.isfinite(value):
        raise RequestError(
            f"{name} must be finite, got {value!r}; give a number or leave it out", param=name
        )
    return float(value)


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, spelled as vLLM and OpenAI spell them.

    Args:
        n: Completions per prompt, at least 1.
        temperature: 0 is greedy; otherwise above 0, at most 100.
        top_p: Nucleus mass in (0, 1].
        top_k: Keep the k most likely tokens; 0 or -1 keeps all.
        min_p: Drop tokens less likely than min_p times the likeliest, in [0, 1].
        seed: Key of the noise, with the token's position; None draws one for the request. With
            n > 1 it is that of completion 0, the others have `completion_seed`.
        stop: Strings that end the text, at most 16; not part of the output unless
            include_stop_str_in_output.
        stop_token_ids: Token ids that end the sequence, beside the model's own; at most 256.
        max_tokens: Most tokens to generate; None means up to the model's context.
        min_tokens: Tokens to generate before a stop; the model's end of sequence and
            stop_token_ids are not sampled before.
        ignore_eos: Go on after the model's end-of-sequence token.
        logprobs: Log-probabilities of the k likeliest tokens per position; -1 means all. They are
            the model's own: before temperature, penalties, bias and masks, so always finite.
        prompt_logprobs: The same for the prompt's tokens, the first of which has none. The prompt
            is computed without the prefix cache.
        presence_penalty: In [-2, 2], subtracted once from each generated token's logit.
        frequency_penalty: In [-2, 2], subtracted per occurrence.
        repetition_penalty: In [0.01, 100]; divides (multiplies) positive (negative) logits of seen
            tokens.
        logit_bias: Added to the logits before penalties, token id to bias in [-100, 100].
        allowed_token_ids: If given, only these may be sampled.
        bad_words: At most 1024 strings that may not be generated, as tokenised with and without a
            space before; a string that began in the prompt is not seen.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop_str_in_output: Keep the stop string in the text.
        output_kind: What each yielded output holds.
        cache_salt: Prefix-cache entries are shared only between equal salts.
        cache_checkpoint: Numbers of prompt tokens after which the state is kept for later prompts
            that begin alike, each floored to a multiple of the state block; below one block there
            is nothing to keep. A mark inside a hit leaves nothing new.
        cache_pin: A name under which the prompt's checkpoints (the marked ones, else those at its
            end) and the KV before them are spared from eviction until the name is released.
        structured_outputs: The form that the output must have. It ends where the form is complete,
            also before min_tokens and with ignore_eos.
        shown_token_ids: Special tokens whose text is kept although skip_special_tokens is set:
            marks that a parser of the text needs.

    Raises:
        RequestError: A value is outside its range; `param` names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: str | tuple[str, ...] | list[str] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    cache_salt: str | None = None
    cache_checkpoint: int | tuple[int, ...] | list[int] = ()
    cache_pin: str | None = None
    structured_outputs: StructuredOutputsParams | None = None
    shown_token_ids: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "stop", _texts("stop", self.stop))
        put(self, "stop_token_ids", _distinct("stop_token_ids", self.stop_token_ids or ()))
        put(self, "bad_words", _texts("bad_words", self.bad_words))
        put(self, "shown_token_ids", _distinct("shown_token_ids", self.shown_token_ids or ()))
        if self.allowed_token_ids is not None:
            allowed = _distinct("allowed_token_ids", self.allowed_token_ids)
            put(self, "allowed_token_ids", allowed)
        marks = self.cache_checkpoint
        marks = tuple(marks) if isinstance(marks, list | tuple) else (marks,)
        put(self, "cache_checkpoint", marks)
        self._check()

    def _check(self) -> None:
        self._check_shares()
        self._check_counts()
        self._check_strings()
        self._check_ids()
        self._check_cache()
        self._check_structure()
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(f"{name} must be True or False, got {value!r:.200}", param=name)
        kind: object = self.output_kind
        if not isinstance(kind, OutputKind):
            raise RequestError(
                f"output_kind must be one of OutputKind, got {kind!r:.200}", param="output_kind"
            )

    def _check_shares(self) -> None:
        _in_range("temperature", _finite("temperature", self.temperature), 0.0, 100.0)
        top_p = _finite("top_p", self.top_p)
        if not 0.0 < top_p <= 1.0:
            raise RequestError(
                f"top_p must be in (0, 1], got {top_p:g}; 1 keeps every token", param="top_p"
            )
        _in_range("min_p", _finite("min_p", self.min_p), 0.0, 1.0)
        for name in ("presence_penalty", "frequency_penalty"):
            _in_range(name, _finite(name, getattr(self, name)), -2.0, 2.0)
        # Beyond these logits would overflow, and the largest of infinities is any token.
        repetition = _finite("repetition_penalty", self.repetition_penalty)
        if not MIN_REPETITION_PENALTY <= repetition <= MAX_REPETITION_PENALTY:
            raise RequestError(
                f"repetition_penalty must be in [{MIN_REPETITION_PENALTY:g}, "
                f"{MAX_REPETITION_PENALTY:g}], got {repetition:g}; 1 is no penalty",
                param="repetition_penalty",
            )

    def _check_counts(self) -> None:
        if not 1 <= _integer("n", self.n) <= MAX_COMPLETIONS:
            raise RequestError(
                f"n must be in 1..{MAX_COMPLETIONS}, got {self.n}; send several requests for more",
                param="n",
            )
        _at_least("top_k", self.top_k, -1)
        _at_least("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _at_least("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}; lower "
                    "min_tokens or raise max_tokens",
                    param="min_tokens",
                )
        if self.seed is not None and not -(2**63) <= _integer("seed", self.seed) < 2**64:
            raise RequestError(
                f"seed must fit in 64 bits, got {self.seed}; use 0..{2**64 - 1}", param="seed"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not -1 <= _integer(name, value) <= MAX_LOGPROBS:
                raise RequestError(
                    f"{name} must be -1 (all) or 0..{MAX_LOGPROBS}, got {value}", param=name
                )

    def _check_strings(self) -> None:
        for name, limit in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            texts = getattr(self, name)
            if len(texts) > limit:
                raise RequestError(
                    f"{name} has {len(texts)} strings but at most {limit} are allowed", param=name
                )
            for text in texts:
                if not isinstance(text, str) or not text:
                    raise RequestError(
                        f"{name} strings must be non-empty text, got {text!r}", param=name
                    )
                if len(text) > MAX_STRING_CHARS:
                    raise RequestError(
                        f"{name} has a string of {len(text)} characters but at most "
                        f"{MAX_STRING_CHARS} are allowed", param=name,
                    )

    def _check_structure(self) -> None:
        wanted = self.structured_outputs
        if wanted is None:
            return
        if not isinstance(wanted, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs has {type(wanted).__name__} but must be "
                "StructuredOutputsParams; write StructuredOutputsParams(json=...)",
                param="structured_outputs",
            )
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(self, name):
                raise RequestError(
                    f"structured_outputs with {name} could leave no token to choose; leave {name} "
                    "out and put it into the schema or grammar", param=name,
                )

    def _check_ids(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty, so no token could be sampled; leave it "
                               "out to allow all", param="allowed_token_ids")
        if self.logit_bias is not None and not isinstance(self.logit_bias, dict):
            raise RequestError(f"logit_bias must map token ids to biases, got {self.logit_bias!r}",
                               param="logit_bias")
        for name, limit in (
            ("stop_token_ids", MAX_STOP_TOKEN_IDS), ("allowed_token_ids", MAX_TOKEN_IDS),
            ("logit_bias", MAX_BIASES),
        ):
            ids = getattr(self, name) or ()
            if len(ids) > limit:
                raise RequestError(
                    f"{name} has {len(ids)} ids but at most {limit} are allowed", param=name
                )
            # All at once: allow lists may have as many ids as a vocabulary has tokens.
            if set(map(type, ids)) <= {int} and min(ids, default=0) >= 0:
                continue
            for token in ids:
                if _integer(name, token) < 0:
                    raise RequestError(f"{name} has {token}; ids are not negative", param=name)
        biases = (self.logit_bias or {}).values()
        if set(map(type, biases)) <= {int, float} and all(map(_is_bias, biases)):
            return
        for bias in biases:
            _in_range("logit_bias", _finite("logit_bias", bias), -MAX_BIAS, MAX_BIAS)

    def _check_cache(self) -> None:
        marks = self.cache_checkpoint
        assert isinstance(marks, tuple)
        if len(marks) > MAX_CHECKPOINTS:
            raise RequestError(
                f"cache_checkpoint has {len(marks)} positions but at most {MAX_CHECKPOINTS} are "
                "allowed", param="cache_checkpoint",
            )
        for mark in marks:
            _at_least("cache_checkpoint", mark, 1)
        salt: object = self.cache_salt
        if salt is not None and not _is_text(salt):
            raise RequestError(f"cache_salt must be text, got {salt!r:.200}", param="cache_salt")
        pin: object = self.cache_pin
        if pin is not None and not (_is_text(pin) and 1 <= len(str(pin)) <= MAX_PIN_NAME):
            raise RequestError(
                f"cache_pin must be a name of 1..{MAX_PIN_NAME} characters, got {pin!r:.200}",
                param="cache_pin",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


def check_kind(params: object) -> None:
    """Refuse what is given in the place of sampling parameters.

    Raises:
        RequestError: It is something else.
    """
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"sampling_params has {type(params).__name__} but must be SamplingParams; write "
            "SamplingParams(max_tokens=...)", param="sampling_params",
        )


def completion_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of a request: alone, with this seed, it is the same bits."""
    return (seed + index * _SEED_STEP) % 2**64


def _distinct(name: str, ids: Iterable[int]) -> tuple[int, ...]:
    """Each id once, in the order in which they were given.

    Raises:
        RequestError: They are no ids.
    """
    try:
        return tuple(dict.fromkeys(ids))
    except TypeError:
        raise RequestError(
            f"{name} must be a list of token ids, got {ids!r:.200}", param=name
        ) from None


def _texts(name: str, given: object) -> tuple[str, ...]:
    """One text or several as a tuple; what the members are is checked later.

    Raises:
        RequestError: They are neither.
    """
    if isinstance(given, str):
        return (given,)
    if given is None or isinstance(given, list | tuple):
        return tuple(given or ())
    raise RequestError(f"{name} must be text or a list of texts, got {given!r:.200}", param=name)


def _is_text(value: object) -> bool:
    """Whether a value is text that has bytes: half of a surrogate pair has none."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _is_bias(value: float) -> bool:
    return -MAX_BIAS <= value <= MAX_BIAS  # Not a number is not.


def _at_least(name: str, value: object, low: int) -> None:
    if _integer(name, value) < low:
        raise RequestError(
            f"{name} must be at least {low}, got {value}; raise it or leave it out", param=name
        )


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise RequestError(
            f"{name} must be in [{low:g}, {high:g}], got {value:g}; bring it into that range or "
            "leave it out",
            param=name,
        )
