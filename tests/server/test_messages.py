"""Anthropic's Messages API over plain HTTP, and through its official client where installed."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from headrace.dialects import read_tools
from headrace.errors import EngineDeadError, QueueFullError
from headrace.server.messages import MessagesBody, chat_of
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.conftest import FakeEngine, Running, Start

WEATHER: dict[str, Any] = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
REPLY = f"<think>\nhello\n</think>\n\nthe house {CALL}\n{CALL.replace('Rome', 'Oslo')}"
ASK: dict[str, Any] = {
    "model": "fake", "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}]
}


@pytest.fixture(scope="module")
def speaker(start_server: Start) -> Iterator[Running]:
    with start_server(settings=ServerSettings(
        log_level="warning", tool_call_parser="hermes", reasoning_parser="think",
        api_keys=("secret",),
    )) as server:
        server.client.headers["x-api-key"] = "secret"
        yield server


@pytest.fixture
def fake(speaker: Running) -> FakeEngine:
    speaker.engine.__init__()
    speaker.engine.max_model_len = 600
    engine: FakeEngine = speaker.engine
    return engine


def events_of(speaker: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    url = "/v1/messages?beta=true"
    with speaker.client.stream("POST", url, json={**body, "stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        text = reply.read().decode()
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"partial": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            text = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            blocks[event["index"]]["partial"] += text
    return blocks


def test_text_is_answered_whole_and_streamed(fake: FakeEngine, speaker: Running) -> None:
    reply = speaker.post("/v1/messages", {**ASK, "system": "be brief", "top_k": 5})
    whole = reply.json()
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    assert whole["type"] == "message"
    assert whole["content"] == [{"type": "text", "text": fake.reply}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    prompt, params = fake.seen[0]
    assert (params.top_k, params.max_tokens) == (5, 300)
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)

    events = events_of(speaker, {**ASK, "system": "be brief"})
    assert [event["type"] for event in events if "delta" not in event["type"]] == [
        "message_start", "content_block_start", "content_block_stop", "message_stop"
    ]
    assert events[0]["message"]["content"] == []
    assert added_up(events) == [{"type": "text", "text": "", "partial": fake.reply}]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == usage["output_tokens"]


def test_thinking_text_and_calls_are_blocks(fake: FakeEngine, speaker: Running) -> None:
    fake.reply = REPLY
    ask = {**ASK, "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]}
    whole = speaker.post("/v1/messages", ask).json()
    assert whole["stop_reason"] == "tool_use"
    assert [block["type"] for block in whole["content"]] == [
        "thinking", "text", "tool_use", "tool_use"
    ]
    assert whole["content"][0]["thinking"] == "hello"
    assert whole["content"][1]["text"] == "the house"
    assert [block["input"] for block in whole["content"][2:]] == [
        {"city": "Rome"}, {"city": "Oslo"}
    ]
    blocks = added_up(events_of(speaker, ask))
    assert [block["partial"] for block in blocks[:2]] == ["hello", "the house"]
    assert [json.loads(block["partial"])["city"] for block in blocks[2:]] == ["Rome", "Oslo"]
    assert [block["input"] for block in blocks[2:]] == [{}, {}]


def test_the_input_of_a_call_is_what_the_model_wrote(fake: FakeEngine, speaker: Running) -> None:
    written = '{"city": "Rome",\n "a": 6e+795, "b": 12345678901234567890123, "c": 1.10}'
    fake.reply = CALL.replace('{"city": "Rome"}', written)
    ask = {**ASK, "tools": [WEATHER]}
    assert f'"input":{written}' in speaker.post("/v1/messages", ask).text
    (block,) = added_up(events_of(speaker, ask))
    assert block["partial"] == written


@pytest.mark.parametrize(
    ("change", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["lamp"]}, "stop_sequence", "lamp"),
        ({}, "end_turn", None),
    ],
)
@pytest.mark.usefixtures("fake")
def test_the_stop_reason_says_what_ended_it(
    speaker: Running, change: dict[str, Any], reason: str, sequence: str | None
) -> None:
    whole = speaker.post("/v1/messages", {**ASK, **change}).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    delta = events_of(speaker, {**ASK, **change})[-2]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


def test_tokens_are_counted_as_they_would_be_used(fake: FakeEngine, speaker: Running) -> None:
    body = {name: value for name, value in ASK.items() if name != "max_tokens"}
    counted = speaker.post("/v1/messages/count_tokens", {**body, "system": "be brief"}).json()
    speaker.post("/v1/messages", {**ASK, "system": "be brief"})
    assert counted == {"input_tokens": len(fake.seen[0][0])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": [{"role": "user", "content": 3}]}, "list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "no object"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "'some'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "json_schema"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs is not supported"),
        ({"guided_json": {}}, "guided_json is not supported"),
        ({"response_format": {"type": "json_object"}}, "use output_config.format"),
        ({"tools": [{"type": "web_search_1"}], "tool_choice": {"type": "any"}}, "needs tools"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_errors_have_the_form_of_this_api(
    speaker: Running, change: dict[str, Any], message: str
) -> None:
    reply = speaker.post("/v1/messages", {**ASK, **change})
    assert reply.status_code == 400, reply.text
    body = reply.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert message in body["error"]["message"]


def test_what_the_engine_has_is_passed_on(
    fake: FakeEngine, speaker: Running, caplog: pytest.LogCaptureFixture
) -> None:
    body = {
        **ASK, "cache_pin": "p", "cache_checkpoint": 3,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    with caplog.at_level(logging.WARNING, logger="headrace.server"):
        for _ in range(2):
            assert speaker.post("/v1/messages", body).status_code == 200
    params = fake.seen[0][1]
    assert (params.cache_pin, params.cache_checkpoint) == ("p", (3,))
    (warned,) = [record.getMessage() for record in caplog.records]
    assert warned.startswith("request field 'thinking.budget_tokens' has no effect")
    chat = chat_of(MessagesBody(**ASK, tools=[{**WEATHER, "strict": True}]))
    assert [tool.is_strict for tool in read_tools(chat.tools)] == [True]


def test_every_kind_of_failure_has_its_type(fake: FakeEngine, speaker: Running) -> None:
    def kind(status: int, *, body: dict[str, Any] = ASK, **headers: str) -> str:
        reply = speaker.client.post("/v1/messages", json=body, headers=headers)
        assert reply.status_code == status
        error: str = reply.json()["error"]["type"]
        return error

    assert kind(401, **{"x-api-key": "wrong"}) == "authentication_error"
    assert kind(404, body={**ASK, "model": "other"}) == "not_found_error"
    fake.failure = QueueFullError("full")
    assert kind(429) == "rate_limit_error"
    fake.failure = EngineDeadError("gone")
    assert kind(503) == "overloaded_error"
    assert kind(503, body={**ASK, "stream": True}) == "overloaded_error"
    fake.failure = RuntimeError("ours")
    assert kind(500) == "api_error"
    assert speaker.client.get("/v1/messages").json()["type"] == "error"


def test_an_error_inside_a_stream_is_an_event(fake: FakeEngine, speaker: Running) -> None:
    fake.failure_after = 1
    last = events_of(speaker, ASK)[-1]
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"
    assert "died in a step" in last["error"]["message"]


def test_blocks_become_a_conversation() -> None:
    chat = chat_of(MessagesBody(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; nonce=2"},
            {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}},
        ],
        max_tokens=7,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"},
                                         {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "wait"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [
                    {"type": "text", "text": "rain"}
                ]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                {"type": "text", "text": "and now?"},
            ]},
            {"role": "assistant", "content": "It is"},
        ],
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"}, stop_sequences=["."],
    ))
    assert chat.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "wait", "reasoning_content": "hm", "tool_calls": [
            {"id": "t1", "type": "function",
             "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        ]},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "It is"},
    ]
    assert chat.continue_final_message
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    assert (chat.stop, chat.max_tokens) == (["."], 7)


@pytest.mark.clients
def test_the_official_client_reads_all_of_it(fake: FakeEngine, speaker: Running) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=speaker.url, api_key="secret", max_retries=0) as client:
        whole = client.messages.create(**ASK, system="be brief")
        assert whole.content[0].text == fake.reply
        with client.messages.stream(**ASK) as stream:
            assert "".join(stream.text_stream) == fake.reply
        assert client.messages.count_tokens(model="fake", messages=ASK["messages"]).input_tokens > 1

        fake.reply = REPLY
        with client.messages.stream(**ASK, tools=[WEATHER]) as stream:
            final = stream.get_final_message()
        assert final.stop_reason == "tool_use"
        assert [block.type for block in final.content] == [
            "thinking", "text", "tool_use", "tool_use"
        ]
        assert final.content[3].input == {"city": "Oslo"}

        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**ASK, "model": "other"})
        fake.failure_after = 1
        with (
            pytest.raises(anthropic.APIStatusError, match="died in a step"),
            client.messages.stream(**ASK) as stream,
        ):
            stream.get_final_message()
