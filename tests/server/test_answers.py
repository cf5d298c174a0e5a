"""What clients get when all goes well."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine, Running

REPLY = "hello there by the lamp post"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "fake", "prompt": "the lamp", "max_tokens": 40}


def contents(events: list[dict[str, Any]]) -> str:
    return "".join(
        choice["delta"].get("content", "") for event in events for choice in event["choices"]
    )


def test_a_chat_is_answered(serving: Running) -> None:
    body = serving.post("/v1/chat/completions", CHAT).json()
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": REPLY, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["object"] == "chat.completion"
    assert body["model"] == "fake"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    details = usage["prompt_tokens_details"]
    assert details["cached_tokens"] == 2
    assert 2 + sum(details["missed_tokens"].values()) == usage["prompt_tokens"]


def test_a_chat_stream_has_role_text_finish_usage_and_end(serving: Running) -> None:
    body = {**CHAT, "stream_options": {"include_usage": True}}
    events = serving.stream("/v1/chat/completions", body)
    assert len({event["id"] for event in events}) == 1
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert contents(events) == REPLY
    assert events[-1]["choices"] == []
    whole = serving.post("/v1/chat/completions", CHAT).json()
    assert events[-1]["usage"] == whole["usage"]
    reasons = [e["choices"][0]["finish_reason"] for e in events[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert all("content" in e["choices"][0]["delta"] for e in events[:-1])


def test_without_being_asked_a_stream_says_no_usage(serving: Running) -> None:
    events = serving.stream("/v1/chat/completions", CHAT)
    assert all(event["choices"] and "usage" not in event for event in events)


def test_a_completion_is_answered_streamed_or_not(serving: Running) -> None:
    whole = serving.post("/v1/completions", PROMPT).json()
    assert whole["object"] == "text_completion"
    assert whole["choices"][0]["text"] == REPLY
    events = serving.stream("/v1/completions", PROMPT)
    assert "".join(event["choices"][0]["text"] for event in events) == REPLY


def test_completions_take_sixteen_tokens_unless_told(engine: FakeEngine, serving: Running) -> None:
    body = serving.post("/v1/completions", {"prompt": "the"}).json()
    assert body["usage"]["completion_tokens"] <= 16
    assert engine.seen[-1][1].max_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_of_several_prompts_keep_their_places(serving: Running, *, stream: bool) -> None:
    prompts = ["the lamp", "by", "house"]
    body = {"prompt": prompts, "n": 2, "max_tokens": 40, "echo": True}
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    if stream:
        for event in serving.stream("/v1/completions", body):
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                if choice["finish_reason"]:
                    assert choice["index"] not in reasons
                    reasons[choice["index"]] = choice["finish_reason"]
    else:
        answer = serving.post("/v1/completions", body).json()
        texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
        reasons = {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}
    assert texts == {index: prompts[index // 2] + REPLY for index in range(6)}
    assert reasons == dict.fromkeys(range(6), "stop")


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]], [[5, 6, 7], [8]]])
def test_prompts_may_be_token_ids(engine: FakeEngine, serving: Running, prompt: list[Any]) -> None:
    reply = serving.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
    assert reply.status_code == 200
    seen = [ids for ids, _ in engine.seen]
    assert seen == (prompt if isinstance(prompt[0], list) else [prompt])


def test_token_ids_work_without_a_tokenizer(engine: FakeEngine, serving: Running) -> None:
    engine.tokenizer = None
    reply = serving.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 3})
    assert reply.json()["usage"]["completion_tokens"] == 3
    refused = serving.post("/v1/completions", {"prompt": "text"})
    assert refused.status_code == 400
    assert "no tokenizer" in refused.json()["error"]["message"]
    assert serving.post("/v1/chat/completions", CHAT).status_code == 400


def test_all_sampling_fields_arrive(engine: FakeEngine, serving: Running) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "n": 1,
        "stop_token_ids": [4], "min_tokens": 2, "ignore_eos": True, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "repetition_penalty": 1.5, "allowed_token_ids": [5, 6],
        "bad_words": ["x"], "skip_special_tokens": False, "include_stop_str_in_output": True,
        "cache_salt": "s", "cache_checkpoint": [3], "cache_pin": "p",
    }
    body = {**CHAT, **fields, "stop": "lamp", "logit_bias": {"5": -1}, "max_completion_tokens": 9}
    assert serving.post("/v1/chat/completions", body).status_code == 200
    params = engine.seen[-1][1]
    for name, value in fields.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == expected, name
    assert params.stop == ("lamp",)
    assert params.logit_bias == {5: -1.0}
    assert params.max_tokens == 9


@pytest.mark.scenarios("B106")
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(serving: Running, *, stream: bool) -> None:
    body = {**CHAT, "stop": ["lamp post", "zzz"]}
    if stream:
        events = serving.stream("/v1/chat/completions", body)
        last = events[-1]["choices"][0]
        assert contents(events) == "hello there by the "
    else:
        last = serving.post("/v1/chat/completions", body).json()["choices"][0]
        assert last["message"]["content"] == "hello there by the "
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "lamp post")


@pytest.mark.scenarios("B109")
def test_bos_is_once_in_chats_completions_and_tokenize(
    engine: FakeEngine, serving: Running
) -> None:
    serving.post("/v1/completions", {"prompt": "the"})
    serving.post("/v1/completions", {"prompt": "<s>the"})
    serving.post("/v1/chat/completions", CHAT)
    seen = [ids for ids, _ in engine.seen]
    assert [ids.count(0) for ids in seen] == [1, 1, 1]
    messages = {"messages": CHAT["messages"]}
    assert serving.post("/tokenize", {"prompt": "the"}).json()["tokens"] == seen[0] == seen[1]
    assert serving.post("/tokenize", messages).json()["tokens"] == seen[2]


def test_tokenize_and_detokenize_are_inverse(serving: Running) -> None:
    body = {"prompt": "the lamp 😀", "add_special_tokens": False, "return_token_strs": True}
    answer = serving.post("/tokenize", body).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 64
    back = serving.post("/detokenize", {"tokens": answer["tokens"]}).json()
    assert back == {"prompt": "the lamp 😀"}
    info = serving.client.get("/tokenizer_info").json()
    assert info["bos_token"] == "<s>"


def test_no_reader_of_lines_splits_an_event(engine: FakeEngine, serving: Running) -> None:
    engine.reply = "a\u2028b\u2029c\x85d\ne"
    body = json.dumps({**CHAT, "stream": True})
    with serving.client.stream("POST", "/v1/chat/completions", content=body) as reply:
        lines = [line for line in reply.read().decode().splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert contents(events) == engine.reply


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_finite_numbers_and_bytes(serving: Running, *, stream: bool) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 3, "max_tokens": 4}
    if stream:
        events = serving.stream("/v1/chat/completions", body)
        parts = [e["choices"][0]["logprobs"] for e in events]
        entries = [entry for part in parts if part for entry in part["content"]]
    else:
        answer = serving.post("/v1/chat/completions", body).json()
        entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] == -0.123456789
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.123456789, -1.0, -9999.0]


def test_echo_with_logprobs_scores_the_prompt(serving: Running) -> None:
    ids = [5, 6, 7]
    body = {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 1}
    answer = serving.post("/v1/completions", body).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert logprobs["token_logprobs"] == [None, -0.123456789, -0.123456789, -0.123456789]
    assert logprobs["top_logprobs"][0] is None
    for token, value, top in zip(
        logprobs["tokens"][1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:],
        strict=True,
    ):
        assert top[token] == value == max(top.values())
    assert answer["choices"][0]["text"] == "".join(logprobs["tokens"])
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)


def test_scoring_alone_returns_the_prompt_and_no_more(serving: Running) -> None:
    body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = serving.post("/v1/completions", body).json()
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 3
    assert answer["usage"]["completion_tokens"] == 0


def test_the_model_is_listed_with_its_length(serving: Running) -> None:
    card = serving.client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("fake", 64)
    assert card["min_cacheable_prefix_tokens"] == 16
    assert serving.client.get("/v1/models/fake").json() == card
    assert serving.client.get("/v1/models/none/of/it").status_code == 404


def test_a_request_id_comes_back(serving: Running) -> None:
    sent = serving.client.get("/version", headers={"x-request-id": "abc-1"})
    assert sent.headers["x-request-id"] == "abc-1"
    made = serving.client.get("/version", headers={"x-request-id": "a" * 500})
    assert len(made.headers["x-request-id"]) == 32


def test_pins_are_listed_and_released_by_name(serving: Running) -> None:
    pins = serving.client.get("/cache/pins").json()
    assert pins == {"system": {"kv_blocks": 4, "checkpoints": 1}}
    assert serving.client.delete("/cache/pins/system").json() == {"released": "system"}
    gone = serving.client.delete("/cache/pins/system")
    assert gone.status_code == 404
    assert "there is no pin 'system'" in gone.json()["error"]["message"]
    assert serving.client.get("/cache/pins").json() == {}
