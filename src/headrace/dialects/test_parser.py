from __future__ import annotations

import json
import random
import secrets
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jsonschema
import llguidance
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from headrace.dialects import (
    TOOL_PARSERS,
    Dialect,
    Start,
    Tool,
    ToolChoice,
    find_dialect,
)
from headrace.errors import ConfigError, RequestError
from headrace.grammar.compiler import library_tokenizer
from headrace.text import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

TOOLS = (
    Tool("weather", {
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]}, "exact": {"type": ["boolean", "null"]},
        },
        "required": ["city"],
    }),
    Tool("ping", {"type": "object", "properties": {}}),
    Tool("draw", {
        "type": "object", "properties": {"at": {"$ref": "#/$defs/point"}, "t": {"type": "string"}},
        "required": ["at"],
        "$defs": {"point": {
            "type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"],
            "additionalProperties": False,
        }},
    }),
    Tool("note", {
        "type": "object", "required": ["any"],
        "properties": {"any": {}, "map": {"type": "object"}, "list": {"type": "array"}},
    }),
)
FORMATS = tuple(name for name in TOOL_PARSERS if name not in ("auto", "none"))
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRom\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
    ),
    "granite": (
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rom", "days": 3}}, '
        '{"name": "ping", "arguments": {}}]'
    ),
    "lfm2": '<|tool_call_start|>[weather(city="Rom", days=3), ping()]<|tool_call_end|>',
    "nemotron": (
        '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Rom", "days": 3}}, '
        '{"name": "ping", "arguments": {}}]</TOOLCALL>'
    ),
}
EXPECTED = [("weather", {"city": "Rom", "days": 3}), ("ping", {})]

Result = tuple[str, str, list[tuple[str, Any]]]


def parse(
    dialect: Dialect, pieces: Sequence[str], *, start: Start = Start.EITHER,
    choice: ToolChoice | None = None,
) -> Result:
    """What pieces of text add up to: reasoning, content, calls."""
    parser = dialect.parser(start, choice or ToolChoice(TOOLS))
    found = [piece for text in pieces for piece in parser.feed(text)] + parser.finish()
    assert all(piece.text or piece.call for piece in found), "an empty piece"
    return (
        "".join(piece.text for piece in found if piece.kind == "reasoning"),
        "".join(piece.text for piece in found if piece.kind == "content"),
        [(piece.call.name, json.loads(piece.call.arguments)) for piece in found if piece.call],
    )


def speaking(name: str, reasoning: str = "think") -> Dialect:
    return find_dialect(None, tool_parser=name, reasoning_parser=reasoning)


@pytest.mark.scenarios
@pytest.mark.parametrize("name", FORMATS)
def test_b121_pieces_of_any_size_add_up_to_the_whole(name: str) -> None:
    text = f"<think>\nI must ask.\n</think>\n\nLet me see. {CALLS[name]}"
    tail = "" if name == "granite" else "\nSo be it."
    dialect = speaking(name)
    whole = parse(dialect, [text + tail])
    assert whole == ("I must ask.", "Let me see." + tail.strip(), EXPECTED)
    for size in range(1, 9):
        for offset in range(size):
            body = text + tail
            cuts = [0, *range(offset, len(body), size), len(body)]
            pieces = [body[a:b] for a, b in pairwise(cuts)]
            assert parse(dialect, pieces) == whole


SCRAPS = [
    "<think>", "</think>", "\n", " ", "a", "<", "<tool", "_call>", "</", "{", '"', "]", "(",
    "<function=ping>", "</function>", "</parameter>", "<parameter=x>", "é", "<TOOLCALL>",
    "</TOOLCALL>", '{"name": "ping", "arguments": {}}', "<|tool_call|>", "<|tool_call_start|>",
    "<|tool_call_end|>", "[ping()]", "[ping(a='\\d')]", '{"name": "x", "arguments": "</tool_call>',
    *CALLS.values(), "<tool_call>", "</tool_call>",
]


@given(
    st.lists(st.sampled_from(SCRAPS), max_size=9).map("".join), st.sampled_from(FORMATS),
    st.sampled_from(Start), st.sampled_from([None, 1]), st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None, derandomize=False, database=None)
def test_any_split_of_any_text_gives_the_same(
    text: str, name: str, start: Start, most: int | None, draw: random.Random
) -> None:
    dialect = speaking(name)
    choice = ToolChoice(TOOLS, is_parallel=most is None)
    whole = parse(dialect, [text], start=start, choice=choice)
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(0, 6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(dialect, pieces, start=start, choice=choice) == whole
    assert parse(dialect, list(text), start=start, choice=choice) == whole


@given(st.text(alphabet="<tolcan_ >/\n|{}k", max_size=40), st.sampled_from(FORMATS))
@settings(max_examples=80, deadline=None, database=None)
def test_text_without_calls_is_passed_on_as_it_is(text: str, name: str) -> None:
    dialect = speaking(name, reasoning="none")
    assert dialect.tools is not None
    if dialect.tools.opens in text:
        return
    assert parse(dialect, list(text)) == ("", text, [])
    parser = find_dialect(None).parser(Start.CONTENT, ToolChoice())
    assert parser.is_plain
    assert parser.feed(text) + parser.finish() == ([] if not text else parser_piece(text))


def parser_piece(text: str) -> list[Any]:
    return find_dialect(None).parser(Start.CONTENT, ToolChoice()).feed(text)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("broken", ["cut", "no json", "empty"])
def test_what_is_no_call_becomes_content(name: str, broken: str) -> None:
    dialect = speaking(name)
    assert dialect.tools is not None
    opens, closes = dialect.tools.opens, dialect.tools.closes or ""
    body = {"cut": CALLS[name][len(opens) : 30], "no json": "say ping", "empty": ""}[broken]
    text = f"Well, {opens}{body}" + ("" if broken == "cut" else closes)
    assert parse(dialect, list(text)) == ("", text, [])


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "granite"])
def test_a_mark_inside_a_string_does_not_end_a_call(name: str) -> None:
    closes = speaking(name).tools.closes  # type: ignore[union-attr]
    text = CALLS[name].replace("Rom", f"a {closes} b")
    expected = [("weather", {"city": f"a {closes} b", "days": 3}), ("ping", {})]
    assert parse(speaking(name), list(text))[2] == expected


def test_a_call_without_its_last_mark_is_one_if_it_is_complete() -> None:
    text = CALLS["hermes"].removesuffix("\n</tool_call>")
    assert parse(speaking("hermes"), [text])[2] == EXPECTED


def test_values_of_xml_follow_the_schema() -> None:
    def read(key: str, value: str) -> Any:  # noqa: ANN401
        text = (
            f"<tool_call><function=weather><parameter={key}>{value}</parameter></function>"
            "</tool_call>"
        )
        return parse(speaking("qwen3_coder"), [text])[2][0][1][key]

    assert read("city", "12") == "12"
    assert read("city", "\nline\nline \n") == "line\nline "
    assert read("days", " 12 ") == 12
    assert read("days", "soon") == "soon"
    assert read("exact", "True") is True
    assert read("exact", "null") is None
    assert read("unit", "C") == "C"
    assert read("unknown", "[1]") == "[1]"


def test_a_text_of_xml_may_hold_tags_that_end_nothing() -> None:
    tools = (Tool("f", {"properties": {
        "a": {"type": "string"}, "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "c": {"$ref": "#/$defs/c"}, "d": {"type": "array"},
    }, "$defs": {"c": {"type": "string"}}}),)

    def read(**values: str) -> Any:  # noqa: ANN401
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        text = f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>\nSo."
        _, content, calls = parse(
            speaking("qwen3_coder"), list(text), choice=ToolChoice(tools), start=Start.CONTENT
        )
        assert content == "So.", text
        return calls[0][1]

    for page in (
        "<p>\n</parameter>\n</p>\n<parameter=a></function>", "</function></tool_call>\n<p>"
    ):
        assert read(a=page, b="x") == {"a": page, "b": "x"}
    # Where text or something else may stand, it is what it may be.
    assert read(b="5", c="5") == {"b": "5", "c": "5"}
    assert read(b="null", c="null") == {"b": None, "c": "null"}
    assert read(b='"5"', c='"5') == {"b": "5", "c": '"5'}
    tail = "</parameter>\\n</function></tool_call>"
    assert read(d=f'["{tail}</parameter><parameter=x>"]', a="y")["a"] == "y"
    # What cannot be a call is given up at once.
    text = "<tool_call><function=f><parameter=a>1</parameter> junk</function></tool_call>"
    parser = speaking("qwen3_coder").parser(Start.CONTENT, ToolChoice(tools))
    assert "".join(piece.text for piece in parser.feed(text)) == text


@pytest.mark.parametrize(
    "value",
    ["6e+795", "-1e999", "-0", "1.10", "9" * 5000, '"\\/\\ud83d\\ude00"', "[" * 5000 + "]" * 5000],
    ids=["infinite", "infinite below", "minus zero", "zeros", "long", "escapes", "deep"],
)
@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_given_as_they_were_written(name: str, value: str) -> None:
    text = CALLS[name].replace("3", value)
    parser = speaking(name).parser(Start.CONTENT, ToolChoice(TOOLS))
    first, second = [*parser.feed(text), *parser.finish()]
    assert first.call is not None
    assert first.call.arguments == f'{{"city": "Rom", "days": {value}}}'
    assert second.call is not None
    assert second.call.arguments == "{}"


@pytest.mark.parametrize("value", ['"\\ud800"', '"\\ude00\\ud83d"', "NaN", "-Infinity", "01"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_no_answer_can_carry_is_content(name: str, value: str) -> None:
    text = CALLS[name].replace("3", value)
    _, content, calls = parse(speaking(name), [text])
    if name == "qwen3_coder":
        # Values of XML that are not JSON are text.
        assert calls[0][1]["days"] == value
    else:
        assert value in content
        assert all(called != "weather" for called, _ in calls)


def test_a_name_that_no_answer_can_carry_is_content() -> None:
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert parse(speaking("hermes"), [text]) == ("", text, [])


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string", "pattern": "a+"}, "pattern"),
        ({"type": "string", "minLength": 2}, "minLength"),
        ({"maxLength": 2}, "maxLength"),
        ({"type": "string", "format": "date"}, "format"),
        ({"type": ["string", "object"]}, "string and object"),
        ({"type": ["string", "number"], "minimum": 0}, "minimum"),
    ],
)
def test_what_xml_cannot_enforce_is_refused(schema: Any, said: str) -> None:  # noqa: ANN401
    parameters = {"type": "object", "properties": {"it": schema}}
    tokenizer = byte_tokenizer(("<tool_call>", "</tool_call>"))
    dialect = speaking("qwen3_coder")
    free = Tool("f", parameters)
    with pytest.raises(RequestError, match=f"'f' has .*{said} for 'it'"):
        dialect.call_grammar(ToolChoice((free,), is_required=True), tokenizer)
    strict = Tool("f", parameters, is_strict=True)
    with pytest.raises(RequestError, match=said):
        dialect.strict_grammar(ToolChoice((strict,)), tokenizer)
    # Calls that nothing enforces may have any schema, and other formats write JSON.
    dialect.call_grammar(ToolChoice((free,)), tokenizer)
    speaking("hermes").call_grammar(ToolChoice((free,), is_required=True), tokenizer)


def test_enforced_texts_of_xml_are_read_as_their_schema_has_them() -> None:
    properties: dict[str, Any] = {
        "none": {"type": ["string", "null"]}, "whole": {"type": ["string", "integer"]},
        "code": {"enum": ["5", None, 7]}, "fixed": {"const": "x"},
    }
    tools = (Tool("f", {"type": "object", "properties": properties, "required": [*properties]}),)
    dialect = speaking("qwen3_coder")
    tokenizer = byte_tokenizer(("<tool_call>", "</tool_call>"))
    size = tokenizer.vocab_size
    library = llguidance.LLTokenizer(
        library_tokenizer(tokenizer, size), n_vocab=size, eos_token=[256]
    )
    grammar = dialect.call_grammar(ToolChoice(tools, is_required=True), tokenizer)

    def read(**values: str) -> dict[str, Any] | None:
        """Arguments of a call, or None if the grammar has no such call."""
        inner = "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
        )
        text = f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
        ids = [*tokenizer.encode(text, add_special_tokens=False), 256]
        matcher = llguidance.LLMatcher(library, grammar)
        assert not matcher.is_error(), matcher.get_error()
        if matcher.validate_tokens(ids) != len(ids):
            return None
        parser = dialect.parser(Start.CONTENT, ToolChoice(tools))
        (piece,) = [*parser.feed(text), *parser.finish()]
        assert piece.call is not None
        arguments: dict[str, Any] = json.loads(piece.call.arguments)
        return arguments

    assert read(none="null", whole="5", code="5", fixed="x") == {
        "none": None, "whole": 5, "code": "5", "fixed": "x"
    }
    assert read(none="5", whole="5.5", code="null", fixed="x") == {
        "none": "5", "whole": "5.5", "code": None, "fixed": "x"
    }
    assert read(none="[]", whole="true", code="7", fixed="x") == {
        "none": "[]", "whole": "true", "code": 7, "fixed": "x"
    }
    assert read(none="", whole="", code="8", fixed="x") is None
    assert read(none="", whole="", code="5", fixed="y") is None


def test_values_of_python_calls_are_json() -> None:
    body = "[a.b(x=-1.5, y=[true, None, 'it\\'s'], z={'k': False}), c(t='\\d')]"
    text = f"<|tool_call_start|>{body}<|tool_call_end|>"
    assert parse(speaking("lfm2"), [text])[2] == [
        ("a.b", {"x": -1.5, "y": [True, None, "it's"], "z": {"k": False}}), ("c", {"t": "\\d"}),
    ]
    for bad in (
        "f(1)", "f(**x)", "f(x=y)", "f(x='', y=1e999)", "x = f()", "f(x=1j)", "[1]", "(" * 500
    ):
        text = f"<|tool_call_start|>{bad}<|tool_call_end|>"
        assert parse(speaking("lfm2"), [text]) == ("", text, [])


def test_reasoning_begins_where_the_prompt_says() -> None:
    think, deepseek = speaking("hermes"), speaking("hermes", "deepseek_r1")
    assert think.start_of("...assistant\n<think>\n") is Start.REASONING
    assert think.start_of("...assistant\n<think>\n\n</think>\n\n") is Start.CONTENT
    assert think.start_of("<think> said the user<|im_end|>assistant\n") is Start.EITHER
    assert deepseek.start_of("...assistant\n") is Start.REASONING
    assert think.start_of("...", continued="<think>so far") is Start.REASONING
    assert think.start_of("...", continued="<think>done</think>So") is Start.CONTENT
    assert find_dialect(None).start_of("<think>") is Start.CONTENT
    assert parse(think, list("why\n</think>\n\nSo"), start=Start.REASONING) == ("why", "So", [])
    # DeepSeek's models repeat the mark that the prompt has opened, or not.
    assert parse(think, list("<think>\nwhy</think>So"), start=Start.REASONING)[:2] == ("why", "So")
    assert parse(think, list("1 < 2 <think>"), start=Start.EITHER)[:2] == ("", "1 < 2 <think>")
    assert parse(think, list("cut </thi"), start=Start.REASONING)[:2] == ("cut </thi", "")


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [
        ("{{ '<tool_call>' }}<think></think>", "hermes", "think"),
        ("<tool_call><function=x></think>", "qwen3_coder", "think"),
        ("<|tool_call|>", "granite", "none"),
        ("<|tool_call_start|>", "lfm2", "none"),
        ("<TOOLCALL>", "nemotron", "none"),
        ("nothing", None, "none"),
        (None, None, "none"),
    ],
)
def test_a_dialect_is_found_in_the_template(
    source: str | None, tools: str | None, reasoning: str
) -> None:
    found = find_dialect(source)
    assert (found.tools.name if found.tools else None) == tools
    assert found.reasoning == reasoning


def test_unknown_parsers_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="tool-call-parser is 'x'; choose one of auto, none"):
        find_dialect(None, tool_parser="x")
    with pytest.raises(ConfigError, match="reasoning-parser is 'x'"):
        find_dialect(None, reasoning_parser="x")
    with pytest.raises(RequestError, match="none can be required"):
        find_dialect(None).call_grammar(ToolChoice(TOOLS), byte_tokenizer(()))


def byte_tokenizer(marks: Sequence[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [tokenizers.AddedToken(mark, special=True) for mark in ("<end>", *marks)]
    )
    return Tokenizer(backend)


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_are_written_so_that_they_are_read(name: str, has_marks: bool) -> None:  # noqa: FBT001
    """A walk through the grammar, whether the marks are tokens or letters."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    dialect = speaking(name)
    assert dialect.tools is not None
    marks = [mark for mark in (dialect.tools.opens, dialect.tools.closes) if mark and has_marks]
    tokenizer = byte_tokenizer(marks)
    size = tokenizer.vocab_size
    library = llguidance.LLTokenizer(
        library_tokenizer(tokenizer, size), n_vocab=size, eos_token=[256]
    )
    for is_parallel in (True, False):
        choice = ToolChoice(TOOLS, is_required=True, is_parallel=is_parallel)
        matcher = llguidance.LLMatcher(library, dialect.call_grammar(choice, tokenizer))
        assert not matcher.is_error(), matcher.get_error()
        text = walk(matcher, tokenizer, draw)
        _, content, calls = parse(dialect, list(text), start=Start.CONTENT)
        assert calls, text
        assert not content, text
        assert is_parallel or len(calls) == 1
        for called, arguments in calls:
            tool = next(tool for tool in TOOLS if tool.name == called)
            jsonschema.validate(arguments, {**tool.parameters, "additionalProperties": False})


def test_strict_functions_leave_text_free_and_bind_calls() -> None:
    dialect = speaking("hermes")
    tokenizer = byte_tokenizer(("<tool_call>", "</tool_call>"))
    size = tokenizer.vocab_size
    library = llguidance.LLTokenizer(
        library_tokenizer(tokenizer, size), n_vocab=size, eos_token=[256]
    )
    matcher = llguidance.LLMatcher(
        library, dialect.strict_grammar(ToolChoice(TOOLS), tokenizer)
    )
    assert not matcher.is_error(), matcher.get_error()

    def fits(text: str) -> bool:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.validate_tokens([*ids, 256]) == len(ids) + 1)

    good = '{"name": "weather", "arguments": {"city":"Rom"}}'
    for text in ("", "Hi é\n<tool>", f"<tool_call>\n{good}\n</tool_call>",
                 f"So: <tool_call>\n{good}\n</tool_call>\n<tool_call>\n{good}\n</tool_call>"):
        assert fits(text), text
    for text in ("<tool_call>", "<tool_call>\n{}\n</tool_call>", "</tool_call>",
                 f"<tool_call>\n{good.replace('city', 'town')}\n</tool_call>"):
        assert not fits(text), text
    with pytest.raises(RequestError, match="no token of this model"):
        dialect.strict_grammar(ToolChoice(TOOLS), byte_tokenizer(()))


def walk(matcher: Any, tokenizer: Tokenizer, draw: random.Random) -> str:  # noqa: ANN401
    """A random output of a grammar; what ends strings and lists is preferred."""
    ids: list[int] = []
    closing = "\n<\"}])/>="
    while not matcher.is_stopped():
        assert len(ids) < 3000, tokenizer.decode(ids, skip_special_tokens=False)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        liked = [t for t in allowed if t >= 256 or tokenizer.decode_token(t) in closing]
        if len(ids) > 60 and matcher.is_accepting():
            break
        # Free text ends with tags, every letter of which is one of many at that place.
        tail = tokenizer.decode(ids[-30:], skip_special_tokens=False)
        ends = draw.sample(["\n</parameter>\n</function>", "\n</parameter>\n<parameter="], 2)
        wanted = next((
            t for n in range(27, -1, -1) for end in ends if n < len(end) and tail.endswith(end[:n])
            for t in allowed if tokenizer.decode_token(t) == end[n]
        ), None)
        is_long = len(ids) > 300
        if len(allowed) > 100 and wanted is not None and (is_long or draw.random() < 0.95):
            token = wanted
        else:
            token = draw.choice(liked if liked and (is_long or draw.random() < 0.5) else allowed)
        if token == 256:
            break
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    return tokenizer.decode(ids, skip_special_tokens=False)
