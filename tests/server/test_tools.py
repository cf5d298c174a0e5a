"""Tools, reasoning and forms of output, through the official client."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.server.conftest import FakeEngine, Running, Start

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
            "required": ["city"],
        },
    },
}
PING: dict[str, Any] = {"type": "function", "function": {"name": "ping"}}
ASK: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
REPLY = f"<think>\nhello\n</think>\n\nthe house {CALL}\n{CALL.replace('Rome', 'Oslo')}"


@pytest.fixture(scope="module")
def speaker(start_server: Start) -> Iterator[Running]:
    """A server whose pretended engine speaks with tools and reasoning."""
    with start_server(settings=ServerSettings(
        log_level="warning", tool_call_parser="hermes", reasoning_parser="think"
    )) as server:
        yield server


@pytest.fixture
def fake(speaker: Running) -> FakeEngine:
    speaker.engine.__init__()
    speaker.engine.max_model_len = 600
    speaker.engine.reply = REPLY
    engine: FakeEngine = speaker.engine
    return engine


@pytest.fixture
def client(speaker: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{speaker.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def added_up(stream: Any) -> tuple[dict[str, str], dict[int, dict[str, str]], list[str | None]]:  # noqa: ANN401
    """Texts by field, calls by index, finish reasons of a stream."""
    texts = {"reasoning_content": "", "content": ""}
    calls: dict[int, dict[str, str]] = {}
    reasons = []
    for chunk in stream:
        (choice,) = chunk.choices
        assert choice.delta.content is not None
        texts["content"] += choice.delta.content
        texts["reasoning_content"] += getattr(choice.delta, "reasoning_content", "")
        for call in choice.delta.tool_calls or []:
            if call.index not in calls:
                assert call.id
                assert call.type == "function"
                calls[call.index] = {"name": call.function.name, "arguments": ""}
            calls[call.index]["arguments"] += call.function.arguments
        reasons.append(choice.finish_reason)
    return texts, calls, reasons


@pytest.mark.usefixtures("fake")
def test_a_reply_with_reasoning_and_calls_is_taken_apart(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, tools=[WEATHER, PING])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "the house"
    assert choice.message.reasoning_content == "hello"  # type: ignore[attr-defined]
    calls = choice.message.tool_calls
    assert calls is not None
    told = [(c.type, c.function.name, json.loads(c.function.arguments)) for c in calls]  # type: ignore[union-attr]
    assert told == [("function", "weather", {"city": city}) for city in ("Rome", "Oslo")]
    assert len({call.id for call in calls}) == 2

    texts, streamed, reasons = added_up(
        client.chat.completions.create(**ASK, tools=[WEATHER, PING], stream=True)
    )
    assert texts == {"reasoning_content": "hello", "content": "the house"}
    assert [(c["name"], json.loads(c["arguments"])) for _, c in sorted(streamed.items())] == [
        (name, arguments) for _, name, arguments in told
    ]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


def test_without_tools_a_call_is_text(fake: FakeEngine, client: openai.OpenAI) -> None:
    for asked in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer = client.chat.completions.create(**ASK, **asked)
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].message.content == REPLY.partition("</think>\n\n")[2]
        assert answer.choices[0].finish_reason == "stop"
    fake.reply = "no reasoning, <tool_call> not json </tool_call> there"
    answer = client.chat.completions.create(**ASK, tools=[WEATHER])
    assert answer.choices[0].message.content == fake.reply
    assert answer.choices[0].message.tool_calls is None


def test_one_call_is_all_where_several_are_not_wanted(
    fake: FakeEngine, client: openai.OpenAI
) -> None:
    answer = client.chat.completions.create(**ASK, tools=[WEATHER], parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls or ()) == 1
    structure = fake.seen[-1][1].structured_outputs
    assert structure is None
    client.chat.completions.create(**ASK, tools=[WEATHER], tool_choice="required")
    structure = fake.seen[-1][1].structured_outputs
    assert structure is not None
    assert structure.grammar is not None


def test_n_choices_have_parsers_of_their_own_and_logprobs_stay(
    fake: FakeEngine, client: openai.OpenAI, speaker: Running
) -> None:
    body = {**ASK, "tools": [WEATHER], "n": 2, "logprobs": True}
    events = speaker.stream("/v1/chat/completions", body)
    contents, entries = ["", ""], [0, 0]
    for event in events:
        choice = event["choices"][0]
        contents[choice["index"]] += choice["delta"]["content"]
        entries[choice["index"]] += len((choice["logprobs"] or {"content": []})["content"])
    assert contents == ["the house"] * 2
    assert fake.tokenizer is not None
    assert entries == [len(fake.tokenizer.encode(REPLY, add_special_tokens=False))] * 2
    answer = client.chat.completions.create(**ASK, tools=[WEATHER], n=2)
    assert [len(choice.message.tool_calls or ()) for choice in answer.choices] == [2, 2]


@pytest.mark.parametrize("field", ["reasoning", "both"])
def test_the_field_of_reasoning_can_be_chosen(serve: Start, field: str) -> None:
    with serve(settings=ServerSettings(
        log_level="warning", reasoning_parser="think", reasoning_field=field
    )) as server:
        server.engine.reply = "<think>hello</think>there"
        message = server.post("/v1/chat/completions", {"messages": ASK["messages"]}).json()[
            "choices"
        ][0]["message"]
        expected = {"reasoning": "hello"}
        if field == "both":
            expected["reasoning_content"] = "hello"
        assert {k: v for k, v in message.items() if k.startswith("reasoning")} == expected


def test_a_message_is_continued_where_it_ends(serving: Running) -> None:
    messages = [*ASK["messages"], {"role": "assistant", "content": "The lamp "}]
    body = {"messages": messages, "continue_final_message": True}
    assert serving.post("/v1/chat/completions", body).status_code == 200
    prompt, _ = serving.engine.seen[-1]
    text = serving.engine.tokenizer.decode(prompt, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nThe lamp ")
    ids = serving.post("/tokenize", body).json()["tokens"]
    assert ids == prompt


# With an engine that follows grammars ----------------------------------------------------------


@pytest.fixture(scope="module")
def real(random_model: Path, start_server: Start) -> Iterator[Running]:
    engine = AsyncLLM(EngineConfig(
        model=str(random_model), served_model_name="tiny", max_num_seqs=16, num_kv_blocks=200,
        num_state_blocks=64, check_invariants=True, speculative="mtp:2",
    ))
    settings = ServerSettings(log_level="warning", tool_call_parser="hermes")
    with start_server(engine, settings) as server:
        yield server


@pytest.fixture
def real_client(real: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="x", max_retries=0) as made:
        yield made


class Thing(pydantic.BaseModel):
    """What the client's own `parse` asks for."""

    colour: Literal["red", "blue"]
    size: bool


@pytest.fixture(scope="module")
def tiny(real: Running) -> dict[str, Any]:
    """A request whose output has few blanks, which a model without training likes as any letter."""
    blanks = real.post("/tokenize", {"prompt": " \n\r\t"}).json()["tokens"]
    return {
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 1,
        "logit_bias": {str(token): -100 for token in blanks},
    }


def test_required_and_named_calls_are_made_whatever_the_model_likes(
    real_client: openai.OpenAI, tiny: dict[str, Any]
) -> None:
    schema = WEATHER["function"]["parameters"]  # type: ignore[index]
    asked = {**tiny, "tools": [PING, WEATHER], "parallel_tool_calls": False}
    (choice,) = real_client.chat.completions.create(**asked, tool_choice="required").choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    made = {"name": call.function.name, "arguments": call.function.arguments}
    assert made["name"] in ("ping", "weather")
    named: Any = {"type": "function", "function": {"name": "weather"}}
    _, streamed, reasons = added_up(
        real_client.chat.completions.create(**asked, tool_choice=named, stream=True)
    )
    assert reasons[-1] == "tool_calls"
    assert streamed.keys() == {0}
    assert streamed[0]["name"] == "weather"
    for one in (made, streamed[0]):
        if one["name"] == "weather":
            jsonschema.validate(json.loads(one["arguments"]), schema)


def test_response_formats_are_kept(
    real: Running, real_client: openai.OpenAI, tiny: dict[str, Any]
) -> None:
    schema = {
        "type": "object", "additionalProperties": False, "required": ["colour", "size"],
        "properties": {"colour": {"enum": ["red", "blue"]}, "size": {"type": "boolean"}},
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    answer = real_client.chat.completions.create(**tiny, response_format=form, seed=1)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)
    parsed = real_client.chat.completions.parse(**tiny, response_format=Thing, seed=2)
    assert isinstance(parsed.choices[0].message.parsed, Thing)
    reply = real.post("/v1/completions", {
        "prompt": "a", "max_tokens": 20, "response_format": {"type": "json_object"},
        "temperature": 2, "seed": 1,
    }).json()
    assert reply["choices"][0]["text"].lstrip().startswith("{")
    # With tools the model may do either.
    either = real_client.chat.completions.create(**tiny, tools=[PING], response_format=form, seed=2)
    message = either.choices[0].message
    assert message.tool_calls or (message.content or "").lstrip()[:1] in "{"


@pytest.mark.parametrize(
    ("path", "part", "looks"),
    [
        ("/v1/chat/completions", {"regex": "[ab]{2}X"}, "[ab]{2}X"),
        ("/v1/completions", {"choice": ["yes", "no"]}, "yes|no"),
        ("/v1/chat/completions", {"grammar": 'start: "a" B\nB: /[0-9]/'}, "a[0-9]"),
        ("/v1/completions", {"json": {"enum": [[1]]}, "disable_any_whitespace": True}, r"\[1\]"),
    ],
)
def test_outputs_have_the_form_that_was_asked_for(
    real: Running, tiny: dict[str, Any], path: str, part: dict[str, Any], looks: str
) -> None:
    body = dict(tiny) if "chat" in path else {"prompt": "a", "logit_bias": tiny["logit_bias"]}
    reply = real.post(path, {**body, "structured_outputs": part}).json()
    (choice,) = reply["choices"]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert re.fullmatch(looks, text), reply


SCHEMA = {"enum": [1, 2]}


@pytest.mark.parametrize(
    ("asked", "part", "value"),
    [
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, "json", SCHEMA),
        ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, "json_object",
         True),
        ({"guided_json": SCHEMA}, "json", SCHEMA),
        ({"guided_regex": "a"}, "regex", "a"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"regex": "a"}, "regex", "a"),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"json_schema": json.dumps(SCHEMA)}, "json", SCHEMA),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json", SCHEMA),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json", SCHEMA),
        ({"response_format": {"type": "text"}, "regex": "a"}, "regex", "a"),
    ],
)
def test_names_of_other_servers_are_understood(
    fake: FakeEngine, speaker: Running, asked: dict[str, Any], part: str, value: object
) -> None:
    for path, body in (("chat/completions", ASK), ("completions", {"prompt": "a"})):
        assert speaker.post(f"/v1/{path}", {**body, **asked}).status_code == 200
        wanted = fake.seen[-1][1].structured_outputs
        assert wanted is not None
        assert (wanted.kind, getattr(wanted, part)) == (part, value)
        assert wanted.param == next(name for name in reversed(asked))


def test_grammars_of_calls_are_told_from_those_that_clients_send(
    fake: FakeEngine, speaker: Running
) -> None:
    """A server on xgrammar runs the former on llguidance, and refuses the latter."""
    for asked, has_calls in (
        ({"tools": [PING], "tool_choice": "required"}, True),
        ({"tools": [PING], "guided_json": SCHEMA}, True),
        ({"tools": [PING], "tool_choice": "none", "guided_json": SCHEMA}, False),
        ({"guided_grammar": 'root ::= "a"'}, False),
    ):
        reply = speaker.post("/v1/chat/completions", {**ASK, **asked})
        assert reply.status_code == 200, reply.text
        wanted = fake.seen[-1][1].structured_outputs
        assert wanted is not None
        assert wanted.has_calls is has_calls, asked


def test_of_forms_only_json_goes_with_calls(
    fake: FakeEngine, speaker: Running, real: Running, tiny: dict[str, Any]
) -> None:
    asked = {**ASK, "tools": [PING], "structured_outputs": {"regex": "a"}}
    refused = speaker.post("/v1/chat/completions", asked)
    assert refused.status_code == 400
    assert "send tool_choice none, or ask for JSON" in refused.json()["error"]["message"]
    assert speaker.post("/v1/chat/completions", {**asked, "tool_choice": "none"}).status_code == 200
    assert fake.seen[-1][1].structured_outputs.regex == "a"  # type: ignore[union-attr]
    form = {"json": json.dumps({"const": {}}), "disable_any_whitespace": True}
    reply = real.post(
        "/v1/chat/completions", {**tiny, "tools": [PING], "structured_outputs": form}
    ).json()
    message = reply["choices"][0]["message"]
    assert message.get("tool_calls") or message["content"] == "{}"


def test_a_wrong_regex_is_a_400_that_names_the_fault(real: Running, tiny: dict[str, Any]) -> None:
    wrong = real.post("/v1/chat/completions", {**tiny, "structured_outputs": {"regex": "("}})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "structured_outputs"
    assert "the regex cannot be used" in wrong.json()["error"]["message"]


def test_strict_functions_are_enforced_or_refused(
    real_client: openai.OpenAI, tiny: dict[str, Any]
) -> None:
    strict: Any = {"type": "function", "function": {**PING["function"], "strict": True}}
    with pytest.raises(openai.BadRequestError, match="no token of this model"):
        real_client.chat.completions.create(**tiny, tools=[strict])
    answer = real_client.chat.completions.create(**tiny, tools=[strict], tool_choice="required")
    assert answer.choices[0].message.tool_calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_schema_is_a_400_that_names_the_fault(
    real: Running, real_client: openai.OpenAI, tiny: dict[str, Any], *, stream: bool
) -> None:
    for schema, said in (({"type": "objectx"}, "objectx"), ({"not": {}}, "not")):
        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            real_client.chat.completions.create(**tiny, response_format=form, stream=stream)
        assert refused.value.param == "response_format"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        real_client.chat.completions.create(
            **tiny, tools=[tool], tool_choice="required", stream=stream  # type: ignore[list-item]
        )
    assert refused.value.param == "tools"
    assert real.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
