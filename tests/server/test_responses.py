"""The Responses API, through the official client and over plain HTTP."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import openai
import pytest

from headrace.dialects import read_tools
from headrace.errors import EngineDeadError, RequestError
from headrace.server.responses import ResponsesBody, chat_of
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.conftest import FakeEngine, Running, Start

WEATHER: dict[str, Any] = {
    "type": "function", "name": "weather", "strict": None,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
REPLY = f"<think>\nhello\n</think>\n\nthe house {CALL}\n{CALL.replace('Rome', 'Oslo')}"
ASK: dict[str, Any] = {"model": "fake", "input": "hi", "store": False}


@pytest.fixture(scope="module")
def speaker(start_server: Start) -> Iterator[Running]:
    with start_server(settings=ServerSettings(
        log_level="warning", tool_call_parser="hermes", reasoning_parser="think"
    )) as server:
        yield server


@pytest.fixture
def fake(speaker: Running) -> FakeEngine:
    speaker.engine.__init__()
    speaker.engine.max_model_len = 600
    engine: FakeEngine = speaker.engine
    return engine


@pytest.fixture
def client(speaker: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{speaker.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def events_of(speaker: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    with speaker.client.stream("POST", "/v1/responses", json={**body, "stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        text = reply.read().decode()
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_text_is_answered_whole_and_streamed(fake: FakeEngine, client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASK, instructions="be brief", temperature=0.25)
    assert whole.output_text == fake.reply
    assert whole.status == "completed"
    assert whole.store is False  # type: ignore[attr-defined]
    assert whole.temperature == 0.25
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert whole.usage.input_tokens_details.cached_tokens == 2

    with client.responses.stream(**ASK, instructions="be brief") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == fake.reply
    assert final.usage == whole.usage
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]


def test_reasoning_text_and_calls_are_items(
    fake: FakeEngine, client: openai.OpenAI, speaker: Running
) -> None:
    fake.reply = REPLY
    ask = {**ASK, "tools": [WEATHER, {"type": "web_search"}]}
    whole = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    for response in (whole, final):
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert response.output[0].content[0].text == "hello"  # type: ignore[union-attr, index]
        assert response.output_text == "the house"
        calls = [item for item in response.output if item.type == "function_call"]
        assert [json.loads(call.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
        assert len({call.call_id for call in calls}) == 2
        assert response.usage is not None
        reasoning = response.usage.output_tokens_details.reasoning_tokens
        assert 0 < reasoning <= response.usage.output_tokens

    # Deltas of each item add up to what its end says.
    events = events_of(speaker, ask)
    sums: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            sums[event["item_id"]] = sums.get(event["item_id"], "") + event["delta"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert len(done) == 4
    for item in done:
        text = item.get("arguments") or item["content"][0]["text"]
        assert sums[item["id"]] == text
    assert [item["id"] for item in events[-1]["response"]["output"]] == [
        item["id"] for item in done
    ]


def test_an_answer_that_is_cut_off_is_incomplete(
    fake: FakeEngine, client: openai.OpenAI, speaker: Running
) -> None:
    whole = client.responses.create(**ASK, max_output_tokens=2)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    last = events_of(speaker, {**ASK, "max_output_tokens": 2})[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"][0]["content"][0]["text"] == whole.output_text
    assert len(fake.seen) == 2


def test_an_error_inside_a_stream_is_an_event(
    fake: FakeEngine, client: openai.OpenAI, speaker: Running
) -> None:
    fake.failure_after = 1
    fake.pause = threading.Event()
    fake.pause.set()
    last = events_of(speaker, ASK)[-1]
    assert last["type"] == "error"
    assert "died in a step" in last["message"]
    assert last["code"] == "503"
    with (
        pytest.raises(openai.APIError, match="died in a step"),
        client.responses.stream(**ASK) as stream,
    ):
        list(stream)
    fake.failure = EngineDeadError("gone")
    with pytest.raises(openai.InternalServerError, match="gone"):
        client.responses.create(**ASK, stream=True)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "response_format"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"max_output_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"reasoning": {"effort": 5}}, "reasoning"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {
            "type": "allowed_tools", "mode": "required", "tools": [{"name": ["weather"]}],
        }}, "tool_choice"),
        ({"tools": [{**WEATHER, "strict": True, "parameters": {"required": 5}}]}, "tools"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_what_is_not_there_is_refused_by_name(
    speaker: Running, change: dict[str, Any], param: str
) -> None:
    reply = speaker.post("/v1/responses", {**ASK, **change})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_items_become_a_conversation() -> None:
    chat = chat_of(ResponsesBody(
        instructions="first",
        input=[
            {"role": "developer", "content": [
                {"type": "input_text", "text": "second"}, {"type": "input_text", "text": "third"},
            ]},
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "summary": [], "content": [
                {"type": "reasoning_text", "text": "hm"}
            ]},
            {"role": "assistant", "type": "message", "content": [
                {"type": "output_text", "text": "wait"}
            ]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "function_call_output", "call_id": "c2", "output": [
                {"type": "output_text", "text": "sun"}
            ]},
        ],
        tools=[WEATHER, {"type": "custom", "name": "x"}],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"name": "weather"}]},
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        max_output_tokens=9, top_k=4, seed=3, cache_pin="p", cache_checkpoint=[1],
        include_stop_str_in_output=True, truncation="disabled",
        include=["reasoning.encrypted_content"], n=1,
    ))
    assert [message["role"] for message in chat.messages] == [
        "system", "user", "assistant", "tool", "tool"
    ]
    assert chat.messages[0]["content"] == "first\n\nsecond\nthird"
    answer = chat.messages[2]
    assert (answer["content"], answer["reasoning_content"]) == ("wait", "hm")
    assert [call["id"] for call in answer["tool_calls"]] == ["c1", "c2"]
    assert chat.messages[4] == {"role": "tool", "tool_call_id": "c2", "content": "sun"}
    assert chat.tools is not None
    assert [tool["function"]["name"] for tool in chat.tools] == ["weather"]
    assert chat.tool_choice == "required"
    assert (chat.max_tokens, chat.top_k, chat.seed) == (9, 4, 3)
    assert (chat.cache_pin, chat.cache_checkpoint) == ("p", [1])
    assert chat.include_stop_str_in_output is True
    assert chat.reasoning_effort == "low"
    assert chat.response_format == {
        "type": "json_schema", "json_schema": {"schema": {"type": "object"}}
    }
    with pytest.raises(RequestError, match="input is empty"):
        chat_of(ResponsesBody(instructions="only", input=[]))


def test_strict_functions_stay_strict() -> None:
    chat = chat_of(ResponsesBody(input="hi", tools=[
        {**WEATHER, "strict": True}, {**WEATHER, "name": "other"}
    ]))
    assert [tool.is_strict for tool in read_tools(chat.tools)] == [True, False]


def test_embeddings_are_refused_with_a_reason(speaker: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="gives no embeddings"):
        client.embeddings.create(model="fake", input="a")
    assert speaker.post("/v1/embeddings", {}).json()["error"]["param"] == "model"
