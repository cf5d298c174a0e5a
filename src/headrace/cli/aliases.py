"""Other engines' names for our flags, for fingers and scripts that know them.

The command line is translated before it is parsed, so the rest of the program knows one name per
setting. Names that mean the same here and there (--max-model-len, --dtype, …) are not listed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SAME_VALUE = {
    # vLLM
    "--mamba-cache-mode": "--prefix-cache",
    "--mamba-block-size": "--state-block-size",
    "--mamba-ssm-cache-dtype": "--state-dtype",
    "--max-num-queued-reqs": "--max-waiting",
    "--uvicorn-log-level": "--log-level",
    "-tp": "--tensor-parallel-size",
    # SGLang
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--tp-size": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--random-seed": "--seed",
    # llama.cpp
    "--ctx-size": "--max-model-len",
}
"""Names whose value is taken over as it stands."""

SWITCHES = {
    "--enable-prefix-caching": ("--prefix-cache", "align"),
    "--no-enable-prefix-caching": ("--prefix-cache", "none"),
    "--disable-radix-cache": ("--prefix-cache", "none"),
    "--disable-overlap-schedule": ("--no-async-scheduling", None),
    "--enable-deterministic-inference": ("--deterministic", None),
    "--enforce-eager": ("--graphs", "off"),
    "--disable-cuda-graph": ("--graphs", "off"),
}
"""Switches without a value, and the flag with value that they stand for."""

WITHOUT_EFFECT = {
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--trust-remote-code": "no code is ever loaded from a model folder",
    "--enable-auto-tool-choice": "tools are offered whenever a request names them",
}
"""Switches that say what holds anyway; accepted with a warning."""

STRUCTURED = "--structured-outputs-config"
GRAMMAR_BACKENDS = ("--guided-decoding-backend", STRUCTURED)
"""Names that choose a library of grammars, the last in JSON or dotted."""

_BACKENDS = {
    "auto": "auto", "llguidance": "llguidance", "guidance": "llguidance", "xgrammar": "xgrammar",
}
"""What --grammar-backend calls the libraries that other engines name."""

LOOKUP = ("prompt_lookup_max", "prompt_lookup_min")
"""Keys of a speculative config that bound the n-grams looked up; accepted with a warning."""

SPECULATIVE = "--speculative-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A command line in our own names.

    Args:
        tokens: The arguments.
        notes: One sentence per name that was translated or has no effect.
    """

    tokens: tuple[str, ...]
    notes: tuple[str, ...]


def translate(tokens: Sequence[str]) -> Translation:
    """Put other engines' names into ours; what is not known is left as it stands.

    Raises:
        ConfigError: --speculative-config does not hold what we can do, or a switch has a value.
    """
    out: list[str] = []
    notes: list[str] = []
    speculative: dict[str, object] = {}
    rest = list(tokens)
    while rest:
        word = rest.pop(0)
        if word == "--":
            out += [word, *rest]
            break
        name, has_value, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in SAME_VALUE:
            native = SAME_VALUE[name]
            notes.append(f"{name} is {native} here")
            out.append(f"{native}={value}" if has_value else native)
        elif has_value and name in {*SWITCHES, *WITHOUT_EFFECT}:
            raise ConfigError(
                f"{name} is a switch and takes no value, got {value!r}; write {name} alone, or "
                "leave it out"
            )
        elif name in SWITCHES:
            native, fixed = SWITCHES[name]
            spelled = native if fixed is None else f"{native}={fixed}"
            notes.append(f"{name} is {spelled} here")
            out.append(spelled)
        elif name in WITHOUT_EFFECT:
            notes.append(f"{name} has no effect: {WITHOUT_EFFECT[name]}")
        elif name.partition(".")[0] in GRAMMAR_BACKENDS:
            flags, said = _grammar(name, value if has_value else _next(name, rest))
            out += flags
            notes += said
        elif name.partition(".")[0] == SPECULATIVE:
            speculative |= _settings(name, value if has_value else _next(name, rest))
        else:
            out.append(word)
    if speculative:
        native = f"--speculative={speculative_value(speculative)}"
        notes.append(f"{SPECULATIVE} is {native} here")
        notes += [
            f"{key} of {SPECULATIVE} has no effect: n-grams of 3, 2 and 1 tokens are looked up"
            for key in LOOKUP if key in speculative
        ]
        out.append(native)
    return Translation(tokens=tuple(out), notes=tuple(notes))


def speculative_value(config: dict[str, object]) -> str:
    """Give the value of `speculative` that a vLLM speculative config stands for.

    Args:
        config: Keys `method`, `num_speculative_tokens`, and `model` for a draft model.

    Raises:
        ConfigError: The method is unknown or the number of tokens is missing.
    """
    known = ("method", "num_speculative_tokens", "model", *LOOKUP)
    for key in config:
        if key not in known:
            raise ConfigError(
                f"speculative config has {key!r}, which headrace does not know; "
                f"known keys: {', '.join(known[:3])}"
            )
    tokens = str(config.get("num_speculative_tokens", ""))
    if not tokens.isdecimal() or int(tokens) < 1:
        raise ConfigError(
            "speculative config needs num_speculative_tokens, a whole number of at least 1; "
            f"got {tokens or 'none'}"
        )
    method = str(config.get("method") or ("draft_model" if "model" in config else "mtp"))
    forms: dict[str, Callable[[], str]] = {
        "ngram": lambda: f"ngram:{tokens}",
        "draft_model": lambda: f"draft:{config.get('model')}:{tokens}",
    }
    if method in forms:
        return forms[method]()
    # vLLM names the MTP method after the model family: qwen3_next_mtp, deepseek_mtp, …
    if method == "mtp" or method.endswith("_mtp"):
        return f"mtp:{tokens}"
    raise ConfigError(
        f"speculative method {method!r} is not supported; use mtp, ngram or draft_model"
    )


def _next(name: str, rest: list[str]) -> str:
    if not rest:
        raise ConfigError(f"{name} needs a value")
    return rest.pop(0)


def _settings(name: str, value: str) -> dict[str, object]:
    """What a setting in JSON says, or one of its keys behind a dot."""
    # A name with underscores below the dot was changed; JSON keys have underscores.
    name, _, key = name.partition(".")
    return {key.replace("-", "_"): value} if key else _object(name, value)


def _object(name: str, text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} must be a JSON object, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, got {text!r}")
    return value


def _grammar(name: str, value: str) -> tuple[list[str], list[str]]:
    """Our flags for settings of grammars, and what to say about them.

    Raises:
        ConfigError: There is no such setting, or no such library.
    """
    is_structured = name.partition(".")[0] == STRUCTURED
    settings = _settings(name, value) if is_structured else {"backend": value}
    flags, notes = [], []
    for part, chosen in settings.items():
        if part == "disable_fallback":
            notes.append(f"{part} of {name} has no effect: nothing ever falls back")
        elif part != "backend":
            raise ConfigError(
                f"{name} has {part!r}, which is no setting of the server here; leave it out, and "
                "send what it is for with the requests, in structured_outputs"
            )
        elif not isinstance(chosen, str) or chosen not in _BACKENDS:
            raise ConfigError(
                f"{name} is {chosen!r}, but grammars run on llguidance or xgrammar; choose one, or "
                "leave it out"
            )
        else:
            native = f"--grammar-backend={_BACKENDS[chosen]}"
            notes.append(f"{name} is {native} here")
            flags.append(native)
    return flags, notes
