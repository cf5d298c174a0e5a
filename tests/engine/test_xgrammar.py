"""Structured output on xgrammar: what is accepted is enforced, the rest is refused by name."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import secrets
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from plain_sampling import ascii_tokenizer, choose

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.llm import LLM
from headrace.engine.load import load_parts
from headrace.errors import ConfigError, RequestError
from headrace.grammar import Grammars, GrammarState, fill_masks, xgrammar_backend
from headrace.models.reference_loop import run_reference
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import FreeBeginning, StructuredOutputsParams
from headrace.testing import tiny_model

if TYPE_CHECKING:
    import torch

    from headrace.text import Tokenizer

V = 280
EOS = 1
CLOSE = 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return ascii_tokenizer(V, num_reserved=4)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, V, (EOS,), backend="xgrammar")


def fresh() -> random.Random:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


def masks(state: GrammarState, drafts: list[int]) -> np.ndarray:
    bits = fill_masks([(state, drafts)], V)
    return np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").astype(bool)


CLOSED = {"additionalProperties": False}
HOLDS: list[dict[str, Any] | bool] = [
    True,
    {"title": "T", "description": "of any kind"},
    {"type": "string"},
    {"type": "number", "default": 1},
    {"type": "integer", "minimum": -7, "maximum": 1205},
    {"type": "integer", "minimum": 12},
    {"type": ["boolean", "null", "integer"]},
    {"enum": ["a\"b\\", "é\n", "<x>", 1.5, -2, True, None]},
    {"enum": ["red", "redder"], "type": "string"},
    {"const": "é 😀"},
    {"type": "array"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}},
    {"type": "object"},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"type": "object", **CLOSED},
    {
        "type": "object", "required": ["a", "x \"y"], "properties": {
            "a": {"type": "integer"}, "é": {"type": "boolean"}, "x \"y": {"enum": [1, "z"]},
        },
    },
    {
        "type": "object", "properties": {"p": {"type": "object", "properties": {
            "q": {"type": "array", "items": {"const": 3}, "minItems": 1},
        }, "required": ["q"], **CLOSED}}, **CLOSED,
    },
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
               {"anyOf": [{"enum": ["n"]}, {"type": "integer", "maximum": -3}]}]},
    {
        "$defs": {"node": {"type": "object", "properties": {
            "v": {"type": "integer"},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        }, "required": ["v", "next"], **CLOSED}},
        "$ref": "#/$defs/node", "description": "a list",
    },
    {"definitions": {"d": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
     "anyOf": [{"$ref": "#/definitions/d"}, {"const": 0}]},
]  # fmt: skip


def walk(state: GrammarState, draw: random.Random, most: int = 200) -> list[int] | None:
    """An output at random under the masks, or None if it has no end soon.

    Closing brackets, quotes and the end are taken as soon as possible at times, so that most end.
    """
    output: list[int] = []
    while len(output) < most:
        (allowed,) = (np.flatnonzero(line) for line in masks(state, []))
        assert allowed.size, bytes(output)
        assert set(allowed) <= {EOS, *range(4, V)}
        ends = [token for token in (EOS, *b'"}]') if token in allowed]
        choices = ends if ends and draw.random() < 0.25 else allowed.tolist()
        token = int(draw.choice(choices))
        if token == EOS:
            return output
        output.append(token)
        if state.advance(token):
            # Half a character that this vocabulary cannot complete is no output.
            return output if state.error is None else None
    return None


@pytest.fixture(scope="module")
def bytes_of(tokenizer: Tokenizer) -> list[bytes]:
    return [tokenizer.token_bytes(token) for token in range(V)]


@pytest.mark.parametrize("is_compact", [False, True])
def test_what_fits_the_masks_fits_the_schema(
    grammars: Grammars, bytes_of: list[bytes], is_compact: bool  # noqa: FBT001
) -> None:
    draw = fresh()
    for schema in HOLDS:
        grammar = grammars.compile(
            StructuredOutputsParams(json=schema, disable_any_whitespace=is_compact)
        )
        num_complete = 0
        for _ in range(8):
            output = walk(grammar.start(), draw)
            if output is None:
                continue
            num_complete += 1
            text = b"".join(bytes_of[token] for token in output).decode(errors="replace")
            value = json.loads(text)
            jsonschema.validate(value, schema)
            if is_compact:
                assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text)), text
        assert num_complete or schema in (True, HOLDS[1]), schema


def test_any_object_and_choices_hold(grammars: Grammars, bytes_of: list[bytes]) -> None:
    draw = fresh()
    texts = ["yes", "yes, sir", "\"\\", "tab\t", "é 😀", "\x01"]
    choice = grammars.compile(StructuredOutputsParams(choice=texts))
    found = {
        b"".join(bytes_of[token] for token in output).decode()
        for _ in range(60) if (output := walk(choice.start(), draw)) is not None
    }
    assert found <= set(texts)
    assert len(found) > 2
    any_object = grammars.compile(StructuredOutputsParams(json_object=True))
    outputs = [walk(any_object.start(), draw) for _ in range(20)]
    values = [
        json.loads(b"".join(bytes_of[token] for token in output).decode(errors="replace"))
        for output in outputs if output is not None
    ]
    assert values
    assert all(isinstance(value, dict) for value in values)


@pytest.mark.parametrize("beginning", [None, FreeBeginning(closes=CLOSE)])
def test_masks_after_drafts_are_those_after_the_same_tokens(
    grammars: Grammars, beginning: FreeBeginning | None, capfd: pytest.CaptureFixture[str]
) -> None:
    draw = fresh()
    schema = {"type": "object", "properties": {
        "a": {"enum": [1, 22, "x"]}, "b": {"type": "boolean"}}, "required": ["a"]}
    grammar = grammars.compile(StructuredOutputsParams(
        json=schema, disable_any_whitespace=True, beginning=beginning
    ))
    for _ in range(12):
        output = walk(grammar.start(), draw) if beginning is None else None
        if beginning is not None:
            free = grammar.start()
            output = [*draw.choices(range(4, V), k=draw.randrange(3)), CLOSE]
            for token in output:
                assert not free.advance(token)
            output += walk(free, draw) or []
        assert output is not None
        state, plain = grammar.start(), grammar.start()
        lines = [masks(plain, [])[0]]
        for token in output:
            plain.advance(token)
            lines.append(masks(plain, [])[0])
        place = 0
        while place < len(output):
            drafts = output[place : place + draw.randrange(6)]
            wrong = [*drafts, 2, 70, 70]
            if beginning is None or CLOSE in output[: place + len(drafts)]:
                assert state.num_usable(wrong) == len(drafts)
            twin = state.copy()
            for one in (state, twin, state):
                np.testing.assert_array_equal(
                    masks(one, drafts), lines[place : place + len(drafts) + 1]
                )
            # Drafts that lead past the end, and the end itself, leave no trace either.
            masks(state, [*output[place:], EOS])
            for token in output[place : place + 2]:
                done = state.advance(token)
                place += 1
                assert done == (place == len(output))
        np.testing.assert_array_equal(masks(state, [])[0], lines[-1])
        assert state.num_usable([EOS, 70]) <= 1
    # The library's complaints about drafts would fill a server's log.
    assert not capfd.readouterr().err


@pytest.mark.parametrize("speculative", ["scripted:3", "mtp:2", "none"])
def test_the_engine_gives_the_tokens_that_the_plain_loop_gives(
    tokenizer: Tokenizer, grammars: Grammars, speculative: str
) -> None:
    draw = fresh()
    model = tiny_model(seed=draw.randrange(2**31), vocab_size=V)
    wanted = StructuredOutputsParams(json=HOLDS[16], disable_any_whitespace=True)
    prompt = draw.choices(range(4, V), k=9)
    params = SamplingParams(
        max_tokens=32, temperature=1.5, seed=draw.randrange(2**40), structured_outputs=wanted
    )
    state, tokens, done = grammars.compile(wanted).start(), [], False

    def pick(logits: torch.Tensor, position: int) -> int:
        nonlocal done
        if done:
            return 0
        values = logits.numpy().copy()
        values[~masks(state, [])[0][:V]] = -np.inf
        token = choose(params, values, position)
        tokens.append(token)
        done = token == EOS or state.advance(token)
        return token

    with np.errstate(divide="ignore"):
        run_reference(model, prompt, 32, choose=pick)
    config = EngineConfig(
        model="tiny", max_num_seqs=4, max_model_len=100, max_num_batched_tokens=64,
        check_invariants=True, speculative=speculative, grammar_backend="xgrammar",
    )
    parts = load_parts(config, model=model)
    target = Engine(config, parts=dataclasses.replace(parts, tokenizer=tokenizer))
    if speculative.startswith("scripted"):
        truth = np.array(prompt + tokens + [EOS, 70, 80], dtype=np.int64)
        keep = np.array([draw.randrange(-1, 4) for _ in range(len(truth) + 4)], dtype=np.int64)
        target.worker.scripts[1] = (truth, keep)
    output = LLM(engine=target).generate([prompt], [params])[0].outputs[0]
    assert output.token_ids == tokens
    assert output.finish_reason == ("stop" if done else "length")
    with pytest.raises(RequestError, match="regex is not enforced by xgrammar; use --grammar"):
        target.add_request("r", [5], SamplingParams(
            structured_outputs=StructuredOutputsParams(regex="a")
        ))
    assert target.config.grammar_backend == "xgrammar"


S = {"type": "string"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": {**S, "not": {}}}, "not beside type string is not enforced"),
    ({"json": {"not": {"type": "null"}}}, "not without a type"),
    ({"json": {"if": {}, "then": {}}}, "if without a type"),
    ({"json": {"oneOf": [S]}}, "oneOf"),
    ({"json": {"allOf": [S, S]}}, "allOf"),
    ({"json": {"type": "array", "contains": S}}, "contains"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"type": "array", "prefixItems": [S]}}, "prefixItems"),
    ({"json": {"type": "array", "items": {**S, "pattern": "^a$"}}}, "pattern beside type string"),
    ({"json": {**S, "maxLength": 3}}, "maxLength"),
    ({"json": {**S, "format": "date"}}, "format"),
    ({"json": {"type": "number", "minimum": 3}}, "minimum beside type number"),
    ({"json": {"type": "integer", "multipleOf": 3}}, "multipleOf"),
    ({"json": {"type": "integer", "minimum": 0.5}}, "minimum is 0.5"),
    ({"json": {"type": "integer", "maximum": 2**60}}, "maximum is 1152921504606846976"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 4}}, "nothing fits it"),
    ({"json": {"maxLength": 3, "anyOf": [S]}}, "maxLength beside anyOf"),
    ({"json": {"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a", "maximum": 3}},
     r"maximum beside \$ref"),
    ({"json": {"enum": ["a", 1], "type": "string"}}, "enum has 1 beside type 'string'"),
    ({"json": {"enum": [[1]]}}, "enum of arrays or objects"),
    ({"json": {"enum": []}}, "enum must be a list that is not empty"),
    ({"json": {"const": 2**60}}, r"held to numbers up to 2\*\*53"),
    ({"json": {"type": ["string", "null"], "maxLength": 3}}, "maxLength beside type as a list"),
    ({"json": {"type": "text"}}, "type is 'text'; known are string"),
    ({"json": {"type": []}}, r"type is \[\]"),
    ({"json": {"type": ["text"]}}, "type is 'text'"),
    ({"json": {"properties": {}}}, "properties without a type"),
    ({"json": {"type": "object", "properties": {"a": S}, "additionalProperties": True}},
     "additionalProperties beside properties"),
    ({"json": {"type": "object", "required": ["a"]}}, "required has 'a'"),
    ({"json": {"type": "object", "patternProperties": {"a": S}}}, "patternProperties"),
    ({"json": {"type": "object", "properties": {"a": False}}}, "the schema false"),
    ({"json": {"$ref": "#/$defs/a"}}, "neither '#' nor a definition that is there"),
    ({"json": {"$ref": []}}, "neither '#' nor a definition"),
    ({"json": {"$ref": "#"}}, "Circular"),
    ({"json": {"anyOf": [{"$ref": "#"}]}}, "cannot be used"),
    ({"json": {"type": "array", "items": 3}}, "a schema is an object, got int"),
    ({"json": json.loads('{"type":"array","items":' * 70 + "{}" + "}" * 70)}, "more than 64 deep"),
    ({"json": {"enum": ["x" * 40_000]}}, "40014 characters but at most 32768"),
    ({"json": "{"}, "the JSON schema cannot be used"),
    ({"choice": ["\ud800"]}, "the choice cannot be used"),
    ({"regex": "a"}, "regex is not enforced by xgrammar"),
    ({"grammar": 'root ::= "a"'}, "grammar is not enforced by xgrammar"),
]


@pytest.mark.parametrize(("wanted", "said"), REFUSED)
def test_what_is_not_known_to_hold_is_refused_by_name(
    grammars: Grammars, wanted: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        grammars.compile(StructuredOutputsParams(**wanted))
    assert refused.value.param == "structured_outputs"
    if "not enforced" in said or "beside" in said:
        assert "use --grammar-backend llguidance" in str(refused.value)


def test_calls_of_tools_run_on_llguidance(grammars: Grammars, bytes_of: list[bytes]) -> None:
    calls = StructuredOutputsParams(grammar='start: "ab"', has_calls=True)
    output = walk(grammars.compile(calls).start(), fresh())
    assert output is not None
    assert b"".join(bytes_of[token] for token in output) == b"ab"


def test_a_missing_or_other_package_is_said_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="tiny", grammar_backend="xgrammar")

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    model = tiny_model(seed=1, vocab_size=V)
    monkeypatch.setattr(xgrammar_backend, "version", missing)
    with pytest.raises(ConfigError, match=r"not installed; pip install 'headrace\[xgrammar\]'"):
        load_parts(config, model=model)
    monkeypatch.setattr(xgrammar_backend, "version", lambda _: "0.2.7")
    with pytest.raises(ConfigError, match=r"0\.2\.7 is installed.* known of 0\.2\.9 alone"):
        load_parts(config, model=model)


def test_the_extra_pins_the_version_that_was_tried() -> None:
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert extras["xgrammar"] == [f"xgrammar=={xgrammar_backend.VERSION}"]
