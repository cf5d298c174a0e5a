"""The page at `/`: what is served, and that the figures it reads are there."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.conftest import Running, Start

STATIC = Path(__file__).parents[2] / "src" / "headrace" / "server" / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))


class Links(HTMLParser):
    """Collects what a page loads or leads to, and what a strict policy forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.forbidden: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.found += [values[name] or "" for name in ("src", "href") if name in values]
        self.ids += [values["id"] or ""] if "id" in values else []
        self.forbidden += [name for name in values if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in values):
            self.forbidden.append(tag)


def page_links() -> Links:
    links = Links()
    links.feed((STATIC / "index.html").read_text(encoding="utf-8"))
    return links


@pytest.fixture(scope="module")
def real(random_model: Path, start_server: Start) -> Iterator[Running]:
    """A server whose engine has drafted, generated and hit its cache."""
    config = EngineConfig(model=str(random_model), max_num_seqs=4, speculative="mtp:2")
    with start_server(AsyncLLM(config), ServerSettings(log_level="warning")) as server:
        body = {"prompt": "about lamps " * 12, "max_tokens": 8, "ignore_eos": True}
        for _ in range(2):
            assert server.post("/v1/completions", body).status_code == 200
        yield server


def test_every_file_that_the_page_names_is_served_with_the_policy(serving: Running) -> None:
    own = [link for link in page_links().found if link == "/" or link.startswith("/page/")]
    imported = {
        f"/page/{name}" for script in SCRIPTS
        for name in re.findall(r'from "\./(\w+\.js)"', script.read_text(encoding="utf-8"))
    }
    paths = {"/", *own, *imported}

    assert {f"/page/{file.name}" for file in STATIC.iterdir()} - {"/page/index.html"} <= paths
    for path in paths:
        reply = serving.client.get(path)
        assert reply.status_code == 200, path
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert reply.headers["x-content-type-options"] == "nosniff"


def test_an_unknown_file_is_a_404_and_no_way_out_of_the_folder(serving: Running) -> None:
    for path in ("/page/nothing.js", "/page/..%2Fapp.py", "/page/__init__.py"):
        assert serving.client.get(path).status_code == 404


def test_page_loads_nothing_from_elsewhere_and_parses_no_text() -> None:
    links = page_links()

    assert not links.forbidden
    assert [link for link in links.found if not link.startswith(("/", "#"))] == []
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|url\(|//\w+\.", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_scripts_find_the_elements_that_they_name() -> None:
    ids = page_links().ids
    named = {
        name for script in SCRIPTS
        for name in re.findall(r'byId\("([\w-]+)"\)', script.read_text(encoding="utf-8"))
    }

    assert len(set(ids)) == len(ids)
    assert named <= set(ids)


def read_keys(variable: str) -> set[str]:
    """Dotted paths of the members of a variable that the scripts read; methods are left out."""
    pattern = re.compile(rf"(?<![./\w]){variable}\??((?:\.[a-z_]+\b(?!\())+)")
    found = {
        path for script in SCRIPTS for path in pattern.findall(script.read_text(encoding="utf-8"))
    }
    return {path.removeprefix(".").removesuffix(".length") for path in found}


def has(values: Any, path: str) -> bool:  # noqa: ANN401 - JSON
    for name in path.split("."):
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def test_figures_that_the_page_reads_exist(real: Running) -> None:
    stats = real.client.get("/stats").json()
    model = real.client.get("/model").json()
    activity = real.client.get("/activity").json()
    sources = {
        "stats": stats, "cache": stats["prefix_cache"], "pool": stats["kv_blocks"],
        "model": model, "layer": model["layers"][0], "group": model["state_groups"][0],
        "fit": model["fits"][0], "activity": activity, "step": activity["steps"][0],
    }
    for variable, values in sources.items():
        keys = read_keys(variable)
        assert keys, variable
        missing = {key for key in keys if not has(values, key)}
        assert not missing, f"{variable}: {missing}"
    assert stats["prefix_cache"]["hit_tokens"] > 0
    assert len(model["state_groups"]) <= len(stats["state_blocks"])


def test_steps_have_times_in_order_and_count_their_tokens(real: Running) -> None:
    steps = real.client.get("/activity").json()["steps"]
    stats = real.client.get("/stats").json()

    assert [step["step_id"] for step in steps] == list(
        range(steps[0]["step_id"], steps[0]["step_id"] + len(steps))
    )
    for step in steps:
        times = [step[f"{name}_s"] for name in ("begin", "enqueued", "wait", "landed", "end")]
        assert times == sorted(times)
    counted = sum(s["known_tokens"] + s["generating"] + s["draft_tokens"] for s in steps)
    assert counted == stats["forward_tokens"]
    assert any(step["draft_tokens"] for step in steps)


def test_sequences_are_listed_while_they_run(real: Running) -> None:
    body = {"prompt": "x" * 9, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with real.client.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        (listed,) = real.client.get("/activity").json()["sequences"]
        assert read_keys("sequence") <= set(listed)
        assert listed["status"] == "running"
        assert 1 <= listed["output_tokens"] <= listed["max_tokens"] == 200
        assert listed["kv_blocks"] >= 1
        assert listed["state_blocks"] >= 1


def test_model_is_described_with_the_pools_that_were_allocated(real: Running) -> None:
    model = real.client.get("/model").json()

    assert [layer["kind"] for layer in model["layers"]] == [
        "linear_attention", "linear_attention", "full_attention",
    ]
    assert model["max_num_seqs"] == 4
    assert model["num_drafts"] == 2
    assert model["fits"][-1]["sequences"] <= 4


def test_page_needs_no_key_but_its_figures_do(serve: Start) -> None:
    settings = ServerSettings(log_level="warning", api_keys=("secret",))
    with serve(settings=settings) as server:
        assert server.client.get("/").status_code == 200
        assert server.client.get("/page/main.js").status_code == 200
        for path in ("/stats", "/activity", "/model"):
            assert server.client.get(path).status_code == 401
            headers = {"authorization": "Bearer secret"}
            assert server.client.get(path, headers=headers).status_code == 200
