from __future__ import annotations

import json
import random
import secrets
from typing import TYPE_CHECKING, Any

import jsonschema
import llguidance
import pytest

from headrace.dialects import Dialect, Start, Tool, ToolChoice
from headrace.dialects.test_parser import byte_tokenizer, speaking, walk
from headrace.errors import RequestError
from headrace.grammar.compiler import library_tokenizer

if TYPE_CHECKING:
    from headrace.text import Tokenizer

LISTS = ("qwen3_coder", "lfm2")
"""Formats that write parameters one by one."""
STRING = {"type": "string"}
INTEGER = {"type": "integer"}


def library_of(tokenizer: Tokenizer) -> Any:  # noqa: ANN401
    size = tokenizer.vocab_size
    return llguidance.LLTokenizer(
        library_tokenizer(tokenizer, size), n_vocab=size, eos_token=[256]
    )


TOKENIZER = byte_tokenizer(())
LIBRARY = library_of(TOKENIZER)


def required(name: str, parameters: dict[str, Any]) -> tuple[Dialect, ToolChoice, Any]:
    """A format, a required function, and a matcher of its calls."""
    dialect = speaking(name, "none")
    choice = ToolChoice((Tool("f", parameters),), is_required=True, is_parallel=False)
    matcher = llguidance.LLMatcher(LIBRARY, dialect.call_grammar(choice, TOKENIZER), log_level=0)
    if matcher.is_error():
        raise RequestError(matcher.get_error())
    return dialect, choice, matcher


def written(name: str, arguments: dict[str, Any]) -> str:
    """A call as the format has it, texts of XML without quotes."""
    if name == "lfm2":
        inner = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items())
        return f"<|tool_call_start|>[f({inner})]<|tool_call_end|>"
    if name == "qwen3_coder":
        inner = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
            "</parameter>\n" for key, value in arguments.items()
        )
        return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    body = json.dumps({"name": "f", "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def fits(name: str, parameters: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether a format's grammar has a call; it is then read back as it was."""
    dialect, choice, matcher = required(name, parameters)
    text = written(name, arguments)
    ids = [*TOKENIZER.encode(text, add_special_tokens=False), 256]
    if matcher.validate_tokens(ids) != len(ids):
        return False
    parser = dialect.parser(Start.CONTENT, choice)
    (piece,) = [*parser.feed(text), *parser.finish()]
    assert piece.call is not None
    assert json.loads(piece.call.arguments) == arguments
    return True


AB = {"a": STRING, "b": INTEGER}
CASES: list[tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = [
    (  # Names that are no identifiers.
        {"properties": {"my-key": STRING, "from": STRING, "b c": INTEGER, "é.1": STRING}},
        [{"my-key": "x", "from": "y", "b c": 1, "é.1": ""}], [],
    ),
    (  # A name that begins with another, and texts that look like what is around them.
        {"properties": {"a": STRING, "ab": STRING}},
        [{"a": "x\n</parameter>\ny", "ab": "</function>\n</tool_call>"},
         {"a": "<parameter=ab>", "ab": "</parameter>"}, {"ab": "\n\n"}], [],
    ),
    ({"properties": AB, "minProperties": 1}, [{"a": ""}, {"b": 1}, {"a": "", "b": 1}], [{}]),
    ({"properties": AB, "maxProperties": 1}, [{}, {"a": ""}, {"b": 1}], [{"a": "", "b": 1}]),
    (
        {"properties": AB, "required": ["b"], "additionalProperties": INTEGER},
        [{"b": 1}, {"a": "", "b": 1, "ab": 2, "c": 3}],
        [{"a": "", "b": 1, "c": "x"}, {"b": 1, "c": 1.5}, {"c": 3}],
    ),
    (
        {"additionalProperties": STRING, "minProperties": 1},
        [{"c": "x"}, {"c": "x", "d": "y"}], [{}],
    ),
    (
        {"properties": {"x-a": INTEGER}, "additionalProperties": {"type": "boolean"},
         "patternProperties": {"^x-": {"type": "integer", "minimum": 3}}},
        [{"x-a": 3}, {"c": True}], [{"x-a": 2}, {"x-b": True}, {"c": 3}],
    ),
    (
        {"patternProperties": {"^(x|y)_[0-9]$": INTEGER, "/z": INTEGER}},
        [{"x_1": 1, "y_2": 2}, {"a/zb": 1}], [{"x_12": 1}, {"ax_1": 1}, {"z": 1}],
    ),
    (
        {"properties": AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": ""}, {"b": 1}, {"a": "", "b": 1}], [{}],
    ),
    (
        {"anyOf": [
            {"properties": {"kind": {"const": "x"}, "a": STRING}, "required": ["kind", "a"]},
            {"properties": {"kind": {"const": "y"}, "b": INTEGER}, "required": ["kind"]},
        ], "properties": {"kind": STRING}},
        [{"kind": "x", "a": "1"}, {"kind": "y"}, {"kind": "y", "b": 1}],
        [{"kind": "x"}, {"kind": "y", "a": "1"}, {"kind": "z"}],
    ),
    (
        {"allOf": [{"properties": {"a": STRING}, "required": ["a"]},
                   {"properties": {"b": INTEGER}}, {"properties": {"b": {"maximum": 5}}}]},
        [{"a": "", "b": 5}, {"a": ""}], [{"b": 5}, {"a": "", "b": 6}],
    ),
    (
        {"$ref": "#/$defs/n~1d", "$defs": {"n/d": {
            "properties": {"a": STRING, "next": {"$ref": "#/$defs/n~1d"}}, "required": ["a"],
        }}},
        [{"a": ""}, {"a": "", "next": {"a": ""}}], [{}, {"a": "", "next": {}}],
    ),
    (  # References to the whole and to places in it.
        {"properties": {"more": {"type": "array", "items": {"$ref": "#"}}, "n": INTEGER,
                        "m": {"$ref": "#/properties/n"}}, "required": ["n"]},
        [{"more": [{"n": 1}], "n": 1, "m": 1}], [{"more": [{}], "n": 1}, {"n": 1, "m": "x"}],
    ),
    ({"properties": {"a": False, "b": INTEGER}}, [{"b": 1}], [{"a": 1}]),
    ({"properties": AB, "oneOf": [{"required": ["a"]}]}, [{"a": ""}], [{"b": 1}]),
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_parameters_fit_the_whole_schema(name: str, case: int) -> None:
    parameters, good, bad = CASES[case]
    for arguments in good:
        jsonschema.validate(arguments, parameters)
        assert fits(name, parameters, arguments), arguments
    for arguments in bad:
        assert not fits(name, parameters, arguments), arguments


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"not": {"required": ["a"]}}, "not, which .*; leave it out, or use tool_choice auto"),
        ({"if": {}, "then": False}, "if, which"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"enum": [{}]}, "enum"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf, .*write it as anyOf"),
        ({"anyOf": [{"required": ["a"], "not": {}}]}, "not, which"),
        ({"required": ["c"]}, "required 'c', which properties do not list.*list it there"),
        ({"minProperties": 4}, "a schema that no call fits"),
        ({"$ref": "#"}, "without an end"),
        ({"$ref": "#/$defs/none"}, "'#/\\$defs/none', where there is nothing"),
        ({"$ref": "http://elsewhere"}, "no place within the parameters"),
        ({"allOf": [{"type": "string"}]}, "a schema that no call fits"),
        ({"patternProperties": {"^a|b$": {}}}, "anchors are not around all of it"),
        ({"patternProperties": {"a(?=b)": {}}}, "no regular expression here"),
        ({"allOf": [{"patternProperties": {"a": {}}}] * 2}, "patternProperties in several parts"),
        ({"anyOf": [{"required": [str(i)]} for i in range(100)]}, "over 64 combinations"),
        ({"minProperties": "1"}, "minProperties '1'"),
        # Much work out of little text.
        (
            {"$ref": "#/$defs/0", "$defs": {"30": False} | {
                str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(30)
            }},
            "without an end",
        ),
    ],
)
@pytest.mark.parametrize("name", LISTS)
def test_what_lists_cannot_be_held_to_is_refused(
    name: str, parameters: dict[str, Any], said: str
) -> None:
    whole = {"properties": {"a": STRING, "b": STRING, "d": STRING}, **parameters}
    with pytest.raises(RequestError, match=f"'f' has .*{said}") as refused:
        required(name, whole)
    assert refused.value.param == "tools"
    # A function that need not fit its schema can still be called.
    free = ToolChoice((Tool("f", whole),))
    grammar = speaking(name).call_grammar(free, TOKENIZER)
    assert not llguidance.LLMatcher(LIBRARY, grammar, log_level=0).is_error()


@pytest.mark.parametrize(
    "part", [{"enum": 5}, {"type": {}}, {"anyOf": 5}, {"$ref": 5}, {"anyOf": [5]}]
)
@pytest.mark.parametrize("name", LISTS)
def test_a_malformed_schema_is_refused_and_calls_of_it_are_read(
    name: str, part: dict[str, Any]
) -> None:
    parameters = {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": part}}
    with pytest.raises(RequestError):
        required(name, parameters)
    parser = speaking(name, "none").parser(Start.CONTENT, ToolChoice((Tool("f", parameters),)))
    (piece,) = [*parser.feed(written(name, {"a": "x"})), *parser.finish()]
    assert piece.call is not None
    assert json.loads(piece.call.arguments) == {"a": "x"}


@pytest.mark.parametrize(
    ("name", "key"),
    [("lfm2", "a=b"), ("lfm2", "a,b"), ("lfm2", "f()"), ("lfm2", " a"), ("lfm2", ""),
     ("lfm2", "it's"), ("qwen3_coder", "a>b"), ("qwen3_coder", "a\nb"), ("qwen3_coder", "a "),
     ("qwen3_coder", "")],
)
def test_names_that_a_format_cannot_write_are_refused(name: str, key: str) -> None:
    parameters = {"properties": {key: STRING, "ok": STRING}, "required": [key]}
    with pytest.raises(RequestError, match=r"has the parameter name .*; give it another name, or"):
        required(name, parameters)
    # Without enforcing, the name is never written.
    grammar = speaking(name).call_grammar(ToolChoice((Tool("f", parameters),)), TOKENIZER)
    matcher = llguidance.LLMatcher(LIBRARY, grammar, log_level=0)
    ids = TOKENIZER.encode(written(name, {"ok": "x"}), add_special_tokens=False)
    assert matcher.validate_tokens(ids) == len(ids)


def test_a_text_that_is_written_in_two_ways_is_refused() -> None:
    parameters = {"anyOf": [{"properties": {"a": STRING}}, {"properties": {"a": INTEGER}}]}
    with pytest.raises(RequestError, match=r"both texts and other values.* for 'a'"):
        required("qwen3_coder", parameters)
    assert fits("lfm2", parameters, {"a": "1"})
    assert fits("lfm2", parameters, {"a": 1})


def test_json_formats_find_parameters_that_are_listed_elsewhere() -> None:
    for parameters, good, bad in CASES:
        if parameters.keys() & {"$ref", "allOf", "anyOf"}:
            for arguments in good:
                assert fits("hermes", parameters, arguments), (parameters, arguments)
            for arguments in bad:
                if not set(arguments) - {"a", "b", "kind", "next"}:
                    is_fit = fits("hermes", parameters, arguments)
                    assert is_fit == is_valid(arguments, parameters), (parameters, arguments)


def is_valid(arguments: dict[str, Any], parameters: dict[str, Any]) -> bool:
    return bool(jsonschema.Draft202012Validator(parameters).is_valid(arguments))


NAMES = ["a", "ab", "b c", "x-1", "from", "é"]
VALUES: list[Any] = [
    STRING, INTEGER, {"enum": ["u", "v w"]}, {"enum": ["5", 5, None]}, {"const": "k"},
    {"type": ["boolean", "null"]}, {"type": ["string", "integer"]}, {"$ref": "#/$defs/word"},
    {"anyOf": [STRING, {"type": "null"}]}, {"type": "array", "items": STRING, "maxItems": 2},
    {"$ref": "#/$defs/point"}, {"type": "object", "maxProperties": 1}, True, {"type": "number"},
]
DEFINITIONS = {
    "word": {"type": "string", "enum": ["red", "</parameter>"]},
    "point": {"type": "object", "properties": {"x": INTEGER}, "required": ["x"],
              "additionalProperties": False},
}


def some_object(draw: random.Random, depth: int = 1) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randrange(4))
    made: dict[str, Any] = {"properties": {name: draw.choice(VALUES) for name in names}}
    if draw.random() < 0.6:
        made["required"] = draw.sample(NAMES if draw.random() < 0.2 else names, min(len(names), 2))
    if draw.random() < 0.3:
        made["additionalProperties"] = draw.choice([False, True, *VALUES])
    if draw.random() < 0.2:
        made["patternProperties"] = {
            pattern: draw.choice(VALUES) for pattern in draw.sample(["^x-", "^b", "^[0-9]$"], 1)
        }
    if draw.random() < 0.2:
        made["minProperties"] = draw.randrange(4)
    if draw.random() < 0.2:
        made["maxProperties"] = draw.randrange(4)
    if depth and draw.random() < 0.4:
        made[draw.choice(["anyOf", "allOf"])] = [
            some_object(draw, depth - 1) for _ in range(draw.randrange(1, 3))
        ]
    return made


@pytest.mark.parametrize("name", LISTS)
def test_calls_of_any_schema_fit_it_or_it_is_refused(name: str) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    num_written = 0
    while num_written < 6:
        parameters = {**some_object(draw), "$defs": DEFINITIONS}
        try:
            dialect, choice, matcher = required(name, parameters)
        except RequestError:
            continue
        text = walk(matcher, TOKENIZER, draw)
        parser = dialect.parser(Start.CONTENT, choice)
        (piece,) = [*parser.feed(text), *parser.finish()]
        assert piece.call is not None, (parameters, text)
        jsonschema.validate(json.loads(piece.call.arguments), parameters)
        num_written += 1
