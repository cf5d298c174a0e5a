"""Clients that people use, unchanged, against the demo model."""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.clients.conftest import Clients

pytestmark = pytest.mark.clients

OPENAI = """
import json, os
import openai
client = openai.OpenAI(base_url=os.environ["SERVER"] + "/v1")
(model,) = client.models.list().data
assert model.id == "demo"
ask = dict(model="demo", messages=[{"role": "user", "content": "What is the capital of France?"}])
whole = client.chat.completions.create(**ask, temperature=0, max_tokens=40)
assert "Paris" in whole.choices[0].message.content, whole
with client.chat.completions.stream(**ask, temperature=0) as stream:
    for _ in stream:
        pass
    assert "Paris" in stream.get_final_completion().choices[0].message.content
scored = client.completions.create(
    model="demo", prompt=[5, 6, 7], echo=True, logprobs=1, max_tokens=1, temperature=0
)
logprobs = scored.choices[0].logprobs
assert len(logprobs.token_logprobs) == 4 and logprobs.token_logprobs[0] is None
response = client.responses.create(
    model="demo", input="What is the capital of France?", temperature=0, store=False
)
assert "Paris" in response.output_text, response
with client.responses.stream(model="demo", input="What is 2 + 3?", temperature=0) as stream:
    events = [event.type for event in stream]
assert events[-1] == "response.completed", events
try:
    client.chat.completions.create(**{**ask, "model": "other"})
except openai.NotFoundError as error:
    assert error.body["code"] == 404
else:
    raise AssertionError("no error")
print("openai", openai.__version__)
"""
ANTHROPIC = """
import os
import anthropic
client = anthropic.Anthropic(base_url=os.environ["SERVER"])
ask = dict(
    model="demo", max_tokens=60, extra_body={"temperature": 0},
    messages=[{"role": "user", "content": "What is the capital of France?"}],
)
whole = client.messages.create(**ask)
assert any("Paris" in getattr(block, "text", "") for block in whole.content), whole
with client.messages.stream(**ask) as stream:
    text = "".join(stream.text_stream)
assert text == "".join(block.text for block in whole.content if block.type == "text")
assert client.messages.count_tokens(model="demo", messages=ask["messages"]).input_tokens > 5
print("anthropic", anthropic.__version__)
"""
LITELLM = """
import asyncio, os
import litellm
base = os.environ["SERVER"] + "/v1"
ask = dict(messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0)
for model in ("hosted_vllm/demo", "openai/demo"):
    whole = litellm.completion(model=model, api_base=base, api_key="key", **ask)
    assert "Paris" in whole.choices[0].message.content, whole
    parts = litellm.completion(model=model, api_base=base, api_key="key", stream=True, **ask)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content, (text, whole)
plain = litellm.text_completion(
    model="text-completion-openai/demo", api_base=base, api_key="key", prompt="Once upon",
    max_tokens=5, temperature=0,
)
assert plain.choices[0].text, plain
"""
LANGCHAIN = """
import os
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def get_weather(city: str) -> str:
    "Tell the weather of a city."
    return "rain"

model = ChatOpenAI(
    model="demo", base_url=os.environ["SERVER"] + "/v1", api_key="key", temperature=0, max_retries=0
)
whole = model.invoke("What is the capital of France?")
assert "Paris" in whole.content, whole
assert whole.usage_metadata["output_tokens"] > 0
streamed = "".join(part.content for part in model.stream("What is the capital of France?"))
assert streamed == whole.content
called = model.bind_tools([get_weather], tool_choice="required").invoke("Weather in Rome?")
(call, *_) = called.tool_calls
assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str), called
"""
NODE = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.env.SERVER + "/v1", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const whole = await client.chat.completions.create({ model: "demo", messages, temperature: 0 });
const text = whole.choices[0].message.content;
if (!text.includes("Paris")) throw new Error(text);
let streamed = "";
const chunks = await client.chat.completions.create(
  { model: "demo", messages, temperature: 0, stream: true });
for await (const chunk of chunks) streamed += chunk.choices[0].delta.content ?? "";
if (streamed !== text) throw new Error(streamed);
const events = [];
const stream = client.responses.stream({ model: "demo", input: "What is 2 + 3?", temperature: 0 });
for await (const event of stream) events.push(event.type);
const final = await stream.finalResponse();
if (final.status !== "completed" || !final.output_text) throw new Error(JSON.stringify(final));
if (events.at(-1) !== "response.completed") throw new Error(events.join());
let caught;
try { await client.chat.completions.create({ model: "other", messages }); }
catch (error) { caught = error; }
if (!(caught instanceof OpenAI.NotFoundError)) throw new Error(String(caught));
if (caught.type !== "not_found_error") throw new Error(caught.type);
"""
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
{more}
"""


def test_openai(clients: Clients, tmp_path: Path) -> None:
    clients.need("openai")
    clients.script(OPENAI, tmp_path)


def test_anthropic(clients: Clients, tmp_path: Path) -> None:
    clients.need("anthropic")
    clients.script(ANTHROPIC, tmp_path)


def test_litellm(clients: Clients, tmp_path: Path) -> None:
    clients.need("litellm")
    clients.script(LITELLM, tmp_path)


def test_langchain(clients: Clients, tmp_path: Path) -> None:
    clients.need("langchain-openai")
    clients.script(LANGCHAIN, tmp_path)


def test_openai_for_node(clients: Clients, tmp_path: Path) -> None:
    node = shutil.which("node")
    folder = Path(os.environ.get("CLIENTS_NODE_MODULES", "node_modules")).resolve()
    if node is None or not (folder / "openai").is_dir():
        pytest.skip("npm install openai, and name its node_modules in CLIENTS_NODE_MODULES")
    print("openai for node", json.loads((folder / "openai/package.json").read_text())["version"])
    (tmp_path / "node_modules").symlink_to(folder)
    (tmp_path / "client.mjs").write_text(NODE)
    clients.run([node, "client.mjs"], tmp_path)


def _completed(clients: Clients, prompt: str) -> str:
    """What the server makes of a prompt, asked without lm-eval."""
    body = {"prompt": prompt, "stop": ["."], "max_tokens": 30, "temperature": 0}
    request = urllib.request.Request(
        f"{clients.url}/v1/completions", data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        text: str = json.load(reply)["choices"][0]["text"]
    return text


def test_lm_eval_scores_choices_generations_and_perplexity(
    clients: Clients, tmp_path: Path
) -> None:
    clients.need("lm-eval")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    words = ["lamp", "house", "garden", "window", "river", "mountain"]
    rows = [
        {"text": f"The {word} and the {word} and the {word} and the",
         "choices": [f" {word}", " zqx"], "target": 0}
        for word in words
    ]
    files = {
        "choice": rows,
        "generate": [{"text": "What is the capital of France?", "target": "Paris"}],
        "perplexity": [{"text": "", "target": "It was a truth universally acknowledged."}],
    }
    more = {
        "choice": ("multiple_choice", 'doc_to_choice: "{{choices}}"\nmetric_list:\n'
                   "  - metric: acc\n    aggregation: mean\n    higher_is_better: true"),
        "generate": ("generate_until", "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 30\n"
                     "  temperature: 0\nmetric_list:\n  - metric: exact_match\n"
                     "    aggregation: mean\n    higher_is_better: true"),
        "perplexity": ("loglikelihood_rolling", "metric_list:\n  - metric: word_perplexity\n"
                       "    aggregation: weighted_perplexity\n    higher_is_better: false"),
    }
    for name, lines in files.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        kind, rest = more[name]
        (tasks / f"{name}.yaml").write_text(
            TASK.format(name=f"toy_{name}", file=file, kind=kind, more=rest)
        )
    arguments = (
        f"model=demo,base_url={clients.url}/v1/completions,tokenizer_backend=remote,"
        "num_concurrent=4,max_retries=1,tokenized_requests=True,max_length=2048"
    )
    clients.run(
        [
            clients.python, "-m", "lm_eval", "run", "--model", "local-completions",
            "--model_args", arguments, "--include_path", str(tasks),
            "--tasks", "toy_choice,toy_generate,toy_perplexity", "--output_path", "out",
            "--log_samples",
        ],
        tmp_path,
    )
    (file,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(file.read_text())["results"]
    print(results)
    # A word that was just said three times is likelier than one that is none.
    assert results["toy_choice"]["acc,none"] == 1.0
    (file,) = (tmp_path / "out").rglob("samples_toy_generate*.jsonl")
    (text,) = json.loads(file.read_text())["resps"][0]
    assert text == _completed(clients, files["generate"][0]["text"])
    assert 1.0 < results["toy_perplexity"]["word_perplexity,none"] < 1e6
