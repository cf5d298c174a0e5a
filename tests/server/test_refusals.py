"""What clients get when they, or we, are wrong: OpenAI's error object with the status in it."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.config import EngineConfig
from headrace.errors import EngineDeadError, QueueFullError, RequestError
from headrace.server.settings import ServerSettings
from tests.server.conftest import FakeEngine

if TYPE_CHECKING:
    import httpx

    from tests.server.conftest import Running, Start

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "fake", "prompt": "the lamp"}
TOOLS = [{"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}}]
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": PROMPT}
FLOATS = [
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"
]


def refusal(reply: httpx.Response, status: int, param: str | None = None) -> str:
    """Check the form of an error and return its message."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    kinds = {
        400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
        413: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable_error",
    }
    assert error["type"] == kinds[status]
    assert error["code"] == status
    assert error["param"] == param
    message: str = error["message"]
    return message


def still_serves(serving: Running) -> None:
    assert serving.post("/v1/chat/completions", CHAT).status_code == 200
    assert not serving.engine.active


@pytest.mark.scenarios("B111")
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"nan"', '"inf"'])
def test_no_parameter_may_be_nan_or_infinite(serving: Running, path: str, value: str) -> None:
    for name in FLOATS:
        text = json.dumps({**BODIES[path], name: "@"}).replace('"@"', value)
        reply = serving.client.post(path, content=text)
        assert name in refusal(reply, 400, param=name)
    still_serves(serving)


@pytest.mark.scenarios("B111")
def test_nan_inside_a_field_is_named_by_the_field(serving: Running) -> None:
    text = json.dumps({**CHAT, "logit_bias": {"5": "@"}}).replace('"@"', "NaN")
    refusal(serving.client.post("/v1/chat/completions", content=text), 400, param="logit_bias")


@pytest.mark.scenarios("B111")
def test_nan_is_found_however_deep_it_lies(serving: Running) -> None:
    text = f'{{"prompt": {"[" * 900}NaN{"]" * 900}}}'
    reply = serving.client.post("/v1/completions", content=text)
    assert "must be finite" in refusal(reply, 400, "prompt")


@pytest.mark.scenarios("B111", "B118")
def test_a_large_body_is_not_searched_for_nan(
    serving: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.server.bodies._not_finite", pytest.fail)
    text = f'{{"prompt": [{"5," * 150_000}5], "temperature": NaN}}'
    reply = serving.client.post("/v1/completions", content=text)
    assert "not valid JSON" in refusal(reply, 400)


@pytest.mark.scenarios("B114")
@pytest.mark.parametrize("max_tokens", [None, -1, 0, 1, 10**9])
@pytest.mark.parametrize("length", [63, 64, 65, 1000])
@pytest.mark.parametrize("echo", [False, True])
def test_edges_of_max_tokens(
    serving: Running, max_tokens: int | None, length: int, *, echo: bool
) -> None:
    body: dict[str, Any] = {"prompt": [5] * length, "echo": echo}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    reply = serving.post("/v1/completions", body)
    if max_tokens == -1 or (max_tokens == 0 and not echo):
        message = refusal(reply, 400, param="max_tokens")
        assert str(max_tokens) in message
    elif length >= 64:
        message = refusal(reply, 400, param="prompt")
        assert f"{length} tokens" in message
        assert "max_model_len is 64" in message
    else:
        assert reply.status_code == 200
        assert reply.json()["usage"]["completion_tokens"] == (0 if max_tokens == 0 else 1)
        assert serving.engine.seen[-1][1].max_tokens == 1


@pytest.mark.parametrize(
    ("path", "change", "param", "words"),
    [
        ("/v1/completions", {"prompt": ""}, None, None),
        ("/v1/completions", {"prompt": []}, "prompt", "missing or empty"),
        ("/v1/completions", {"prompt": [[]]}, "prompt", "empty"),
        ("/v1/completions", {"prompt": None}, "prompt", "missing or empty"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt", "must be text"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt", "must be text"),
        ("/v1/completions", {"prompt": [1.5]}, "prompt", "must be text"),
        ("/v1/completions", {"prompt": [True]}, "prompt", "must be text"),
        ("/v1/completions", {"prompt": [5, -1]}, "prompt", "-1"),
        ("/v1/completions", {"prompt": [5, 10**9]}, "prompt", "1000000000"),
        ("/v1/completions", {"prompt": [5, 10**40]}, "prompt", None),
        ("/v1/completions", {"prompt": ["a"] * 2000}, "prompt", "at most 1024"),
        ("/v1/completions", {"suffix": "x"}, "suffix", "not supported"),
        ("/v1/completions", {"best_of": 2, "n": 3}, "best_of", "best_of is 2 but n is 3"),
        ("/v1/completions", {"best_of": 10**6}, "best_of", "at most"),
        ("/v1/completions", {"best_of": 3, "stream": True}, "best_of", "cannot be streamed"),
        ("/v1/completions", {"logprobs": True}, "logprobs", "integer"),
        ("/v1/completions", {"logprobs": 21}, "logprobs", "21"),
        ("/v1/chat/completions", {"messages": []}, "messages", "at least 1"),
        ("/v1/chat/completions", {"messages": None}, "messages", "list"),
        ("/v1/chat/completions", {"messages": ["x"]}, "messages", "dict"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages", "needs a role"),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages",
         "unknown role tool"),
        ("/v1/chat/completions", {"temperature": -0.1}, "temperature", "-0.1"),
        ("/v1/chat/completions", {"temperature": True}, "temperature", "number"),
        ("/v1/chat/completions", {"top_p": 0}, "top_p", "(0, 1]"),
        ("/v1/chat/completions", {"top_k": 1.5}, "top_k", "integer"),
        ("/v1/chat/completions", {"n": 0}, "n", "1..128"),
        ("/v1/chat/completions", {"n": 10**20}, "n", None),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens", "at least 1"),
        ("/v1/chat/completions", {"min_tokens": 500}, "min_tokens", "500"),
        ("/v1/chat/completions", {"stop": [""]}, "stop", "non-empty"),
        ("/v1/chat/completions", {"stop": ["a"] * 50}, "stop", "at most"),
        ("/v1/chat/completions", {"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ("/v1/chat/completions", {"logit_bias": {"5": 101}}, "logit_bias", "101"),
        ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ("/v1/chat/completions", {"stream_options": 3}, "stream_options", None),
        ("/v1/chat/completions", {"response_format": {"type": "xml"}}, "response_format",
         "use text, json_object or json_schema"),
        ("/v1/completions", {"response_format": {"type": "json_schema"}}, "response_format",
         "with a schema in it"),
        ("/v1/chat/completions", {"tools": TOOLS}, "tools", "no format of tool calls"),
        ("/v1/chat/completions", {"tools": [{"type": "web_search"}]}, "tools", "only functions"),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice", "needs tools"),
        ("/v1/chat/completions", {"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice",
         "use auto, none, required"),
        ("/v1/chat/completions",
         {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice", "not among tools"),
        ("/v1/chat/completions", {"tools": TOOLS * 2}, "tools", "'ask' twice"),
        *(
            ("/v1/chat/completions",
             {"tools": [{"function": {"name": "f", "parameters": parameters}}]}, "tools", said)
            for parameters, said in (
                ({"required": 5}, "required of parameters must be a list of names"),
                ({"required": [1]}, "required of parameters must be a list of names"),
                ({"properties": ["a"]}, "properties of parameters must be an object"),
                ({"properties": {"a": 5}}, "'a' of parameters must be a schema"),
                ({"properties": {"a": {"enum": 5}}}, "enum of 'a' of parameters must be a list"),
                ({"$defs": 5}, "$defs of parameters must be an object"),
            )
        ),
        ("/v1/chat/completions", {"functions": [{"name": "x"}]}, "functions", "use tools"),
        ("/v1/chat/completions", {"continue_final_message": True}, "continue_final_message",
         "the last one is of user"),
        ("/v1/chat/completions",
         {"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", "send one of them"),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools", "needs a function"),
        ("/v1/chat/completions", {"chat_template": "x"}, "chat_template", "not accepted"),
        *(
            (path, change, next(iter(change)), said)
            for path in BODIES
            for change, said in (
                ({"structured_outputs": {}}, "exactly one of json, regex, choice, grammar"),
                ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "got regex and choice"),
                ({"structured_outputs": {"regexp": "a"}}, "'regexp', which is unknown"),
                ({"structured_outputs": {"choice": "yes"}}, "a list of texts"),
                ({"structured_outputs": {"choice": [1]}}, "a list of texts"),
                ({"structured_outputs": {"regex": 5}}, "must be text"),
                ({"structured_outputs": {"json": "{"}}, "json is no JSON"),
                ({"structured_outputs": {"json": "[]"}}, "must be a schema, got list"),
                ({"structured_outputs": {"json_object": 1}}, "true or false"),
                ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "bounded here"),
                ({"structured_outputs": {"json": {}, "disable_any_whitespace": 1}}, "true or"),
                ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
                 "put additionalProperties false into the schema"),
                ({"structured_outputs": {"structural_tag": "{}"}}, "as tools"),
                ({"structural_tag": "{}"}, "as tools"),
                ({"response_format": {"type": "structural_tag"}}, "as tools"),
                ({"response_format": {"type": "regex", "value": "a"}}, "send structured_outputs"),
                ({"guided_whitespace_pattern": " "}, "disable_any_whitespace"),
                ({"guided_choice": "yes"}, "a list of texts"),
                ({"regex": "a", "ebnf": 'root ::= "a"'}, "regex and ebnf both say"),
                ({"grammar": "", "response_format": {"type": "text"}}, "must be text that is not"),
                ({"guided_json": {}, "response_format": {"type": "json_object"}}, "send one of"),
            )
        ),
    ],
)
def test_wrong_values_are_named(
    serving: Running, path: str, change: dict[str, Any], param: str | None, words: str | None
) -> None:
    reply = serving.post(path, {**BODIES[path], **change})
    if param is None:
        # This tokenizer adds BOS, so even no text is a prompt.
        assert reply.status_code == 200
    else:
        message = refusal(reply, 400, param=param)
        assert words is None or words in message
    still_serves(serving)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 5000, b'{"a": "\\ud800"}', b'{"prompt":NaN']
)
def test_a_body_that_is_no_json_object_is_refused(serving: Running, text: bytes) -> None:
    for path in (*BODIES, "/tokenize", "/detokenize"):
        refusal(serving.client.post(path, content=text), 400)
    still_serves(serving)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_body_is_a_server_error(serving: Running, data: st.DataObject) -> None:
    bodies = {**BODIES, "/v1/responses": {"input": "hi"}}
    path = data.draw(st.sampled_from([*bodies, "/tokenize", "/detokenize"]))
    names = st.sampled_from([
        "prompt", "messages", "stream", "n", "stop", "logprobs", "temperature", "max_tokens",
        "logit_bias", "stream_options", "tokens", "echo", "model", "tools", "top_logprobs", "seed",
        "input", "reasoning", "tool_choice", "text", "include", "truncation", "instructions",
        "structured_outputs", "response_format", "regex", "guided_choice", "json_schema",
    ])
    values = st.recursive(
        st.none() | st.booleans() | st.integers(-5, 70) | st.floats(width=32)
        | st.text(max_size=6) | st.sampled_from(["fake", "role", "user"]),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(
            ["role", "content", "type", "text", "effort", "format", "name", "tools", "regex"]
        ), inner, max_size=3),
        max_leaves=6,
    )
    body = {**bodies.get(path, {}), **data.draw(st.dictionaries(names, values, max_size=3))}
    reply = serving.client.post(path, content=json.dumps(body))
    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400:
        refusal(reply, reply.status_code, param=reply.json()["error"]["param"])


def test_unknown_models_and_routes_are_not_found(serving: Running) -> None:
    for path, body in BODIES.items():
        assert "'other'" in refusal(serving.post(path, {**body, "model": "other"}), 404)
    assert "/v2/x" in refusal(serving.client.get("/v2/x"), 404)
    refusal(serving.post("/v1/rerank", {"input": "x"}), 404)
    wrong_method = serving.client.get("/v1/completions")
    assert wrong_method.status_code == 405
    assert wrong_method.json()["error"]["code"] == 405


def test_unknown_fields_are_accepted_and_warned_about_once(
    serving: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="headrace.server"):
        for _ in range(3):
            body = {**CHAT, "brand_new_field": 1, "user": "me"}
            assert serving.post("/v1/chat/completions", body).status_code == 200
    warned = [record.getMessage() for record in caplog.records]
    assert warned == ["request field 'brand_new_field' is unknown and has no effect"]


@pytest.mark.scenarios("B118")
def test_a_huge_body_is_refused_by_its_size(serve: Start) -> None:
    with serve(settings=ServerSettings(max_body_bytes=10_000)) as server:
        message = refusal(server.post("/v1/completions", {"prompt": "a" * 20_000}), 413)
        assert "10000" in message
        chunks = (b" " * 1000 for _ in range(1000))
        refusal(server.client.post("/v1/completions", content=chunks), 413)
        still_serves(server)


@pytest.mark.scenarios("B118")
def test_a_long_text_is_refused_before_it_is_tokenised(serving: Running) -> None:
    # Far more text than could be tokenised within the test's time.
    message = refusal(
        serving.post("/v1/completions", {"prompt": "the lamp post " * 900_000}), 400, "prompt"
    )
    assert "at least" in message
    assert "max_model_len is 64" in message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_full_queue_says_when_to_try_again(serving: Running, path: str, *, stream: bool) -> None:
    serving.engine.failure = QueueFullError("4 requests wait; try later", retry_after_s=2.5)
    for body in (BODIES[path], {"prompt": ["a", "b"], **CHAT}):
        reply = serving.post(path, {**body, "stream": stream})
        assert refusal(reply, 429) == "4 requests wait; try later"
        assert reply.headers["retry-after"] == "3"


def test_a_list_longer_than_the_queue_is_no_reason_to_try_again(
    serving: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.engine, "config", EngineConfig(max_waiting=5))
    reply = serving.post("/v1/completions", {"prompt": ["a", "b"], "n": 3})
    assert refusal(reply, 400, param="prompt") == (
        "prompt has 2 prompts, with n 3 that is 6 sequences, but at most 5 may wait; send several "
        "requests, or raise max_waiting"
    )
    assert serving.post("/v1/completions", {"prompt": ["a", "b"], "n": 2}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_is_unavailable(serving: Running, *, stream: bool) -> None:
    serving.engine.failure = EngineDeadError("the engine died; restart the server")
    refusal(serving.post("/v1/chat/completions", {**CHAT, "stream": stream}), 503)


@pytest.mark.parametrize("stream", [False, True])
def test_what_we_did_not_foresee_is_not_shown(
    serving: Running, caplog: pytest.LogCaptureFixture, *, stream: bool
) -> None:
    serving.engine.failure = ZeroDivisionError("secret detail")
    reply = serving.post("/v1/chat/completions", {**CHAT, "stream": stream})
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("path", ["/cache/pins", "/health"])
def test_a_failing_route_is_answered_like_any_other(
    serve: Start, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    engine = FakeEngine()
    with (
        caplog.at_level(logging.INFO, "headrace"),
        serve(engine, ServerSettings(access_log=True, log_level="info")) as server,
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("pins", "check_health"):
                patch.setattr(engine, name, _fail)
            reply = server.client.get(path, headers={"x-request-id": "mine"})
        metrics = server.client.get("/metrics").text
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert reply.headers.get_list("x-request-id") == ["mine"]
    assert "secret detail" in caplog.text
    logged = [r for r in caplog.records if r.name == "headrace.access"]
    assert [vars(r)["status"] for r in logged] == ([] if path == "/health" else [500])
    assert 'requests_refused_total{engine="0",model_name="fake",status="500"} 1.0' in metrics


async def _fail() -> None:
    raise ZeroDivisionError("secret detail")


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine_are_counted(serve: Start, *, stream: bool) -> None:
    with serve() as server:
        for failure in (
            QueueFullError("4 wait", retry_after_s=1), EngineDeadError("gone"),
            RequestError("no", param="prompt"),
        ):
            server.engine.failure = failure
            server.post("/v1/completions", {**PROMPT, "stream": stream})
        metrics = server.client.get("/metrics").text
    label = 'engine="0",model_name="fake"'
    queue = 'model_name="fake",reason="max_num_queued_reqs"'
    assert f"vllm:admission_rejections_total{{{queue}}} 1.0" in metrics
    for status in (400, 429, 503):
        assert f'requests_refused_total{{{label},status="{status}"}} 1.0' in metrics


@pytest.mark.parametrize("prompt", ["the", ["the", "lamp"]])
def test_an_error_within_a_stream_is_its_last_event(
    serving: Running, prompt: str | list[str]
) -> None:
    serving.engine.failure_after = 1
    body = {"prompt": prompt, "stream": True}
    with serving.client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        events = reply.read().decode().strip().split("\n\n")
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["code"] == 503
    assert error["type"] == "service_unavailable_error"
    assert not serving.engine.active


def test_keys_are_checked_except_for_probes(serve: Start) -> None:
    with serve(settings=ServerSettings(api_keys=("first", "zweiter-schlüssel"))) as server:
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "first"},
                        {"x-api-key": "firs"}):
            for path in ("/v1/models", "/stats", "/nowhere"):
                refusal(server.client.get(path, headers=headers), 401)
            assert server.client.post(
                "/v1/chat/completions", json=CHAT, headers=headers
            ).status_code == 401
        for headers in ({"authorization": "Bearer first"}, {"x-api-key": "first"},
                        {"Authorization": "bearer first"}):
            assert server.client.get("/v1/models", headers=headers).status_code == 200
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert server.client.get(path).status_code == 200


def test_the_official_client_sees_its_own_exceptions(serving: Running) -> None:
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**CHAT, "model": "other"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**CHAT, temperature=-1)
    serving.engine.failure = QueueFullError("full", retry_after_s=1)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(**CHAT)
    serving.engine.failure = None
    serving.engine.failure_after = 1
    with pytest.raises(openai.APIError, match="died"):
        list(client.chat.completions.create(**CHAT, stream=True))
    client.close()
