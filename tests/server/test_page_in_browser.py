"""The page in a real browser: `pytest -m browser`, with `headrace[browser]` and a Chromium.

SCREENSHOTS=docs/images keeps the pictures that the documentation shows.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.errors import EngineDeadError
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

    from tests.server.conftest import FakeEngine, Running, Start

pytestmark = pytest.mark.browser

SCHEMES = ("light", "dark")
WIDE = {"width": 1280, "height": 900}
BIG_TEXT = "x" * 40
LINEAR_KNEE, LEAST_CONTRAST = 0.03928, 4.5


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - an extra of its own

    found = shutil.which("chromium") or shutil.which("google-chrome")
    assert found, "no chromium on the PATH; install your system's package"
    with sync_playwright() as library:
        # The sandbox needs rights that containers do not give; the page is our own.
        chromium = library.chromium.launch(executable_path=found, args=["--no-sandbox"])
        print(f"playwright {version('playwright')}, Chromium {chromium.version}")
        yield chromium
        chromium.close()


@pytest.fixture
def look_at(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page; at the end nothing may have been complained about in the console."""
    complaints: list[str] = []
    pages: list[Page] = []

    def look(server: Running, *, expected: str = "(?!)", **options: object) -> Page:
        page = browser.new_page(**{"viewport": WIDE, **options})  # type: ignore[arg-type]

        def note(text: str) -> None:
            if not re.search(expected, text):
                complaints.append(text)

        page.on("console", lambda message: note(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: note(f"error: {error}"))
        page.on("request", lambda request: request.url.startswith(server.url) or note(request.url))
        page.goto(server.url)
        pages.append(page)
        return page

    yield look
    for page in pages:
        page.close()
    assert complaints == []


@pytest.fixture(scope="module")
def nano(start_server: Start) -> Iterator[Running]:
    config = EngineConfig(model="nano", max_num_seqs=8, num_kv_blocks=400, num_state_blocks=64)
    with start_server(AsyncLLM(config), ServerSettings(log_level="warning")) as server:
        yield server


def ask(page: Page, text: str) -> str:
    """Send a message by keyboard and wait for the whole answer."""
    before = page.locator(".figures").count()
    page.get_by_role("textbox", name="Your message").fill(text)
    page.keyboard.press("Enter")
    page.locator(".figures").nth(before).wait_for()
    return page.locator(".turn.assistant .text").nth(before).inner_text()


def tile(page: Page, name: str) -> str:
    return page.locator(f'[data-tile="{name}"]').inner_text()


def test_chat_answers_and_the_figures_move(
    nano: Running, look_at: Callable[..., Page], tmp_path: Path
) -> None:
    pictures = Path(os.environ.get("SCREENSHOTS", tmp_path))
    for scheme in SCHEMES:
        page = look_at(nano, color_scheme=scheme)
        page.get_by_role("status").get_by_text("ready").wait_for()
        steps = int(tile(page, "steps").replace(",", ""))

        served = nano.engine.stats()["finished_requests"]
        assert "nano" in ask(page, "Who are you?")
        assert "look up" in ask(page, "What can you do?")

        page.locator(".figures").nth(1).get_by_text("prompt tokens from the cache").wait_for()
        done = page.locator('[data-tile="requests done"]')
        done.get_by_text(str(served + 2), exact=True).wait_for()
        page.locator("#sequences", has_text="None runs or waits").wait_for()
        assert int(tile(page, "steps").replace(",", "")) > steps
        assert page.locator("#steps rect").count() >= 4
        assert page.locator("#drafts .row").count() == 1
        assert page.locator("#cache").get_by_text("last token").is_visible()
        page.screenshot(path=pictures / f"page-{scheme}.png", full_page=True)


def test_running_sequences_are_listed(nano: Running, look_at: Callable[..., Page]) -> None:
    page = look_at(nano)
    body = {"prompt": "The code of Ann is", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    for _ in range(2):
        page.get_by_role("status").get_by_text("ready").wait_for()
        with nano.client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            lines = reply.iter_lines()
            next(lines)
            row = page.locator("#sequences tr", has_text="running")
            row.wait_for()
            assert "/ 3,000" in row.inner_text()
            assert tile(page, "running") == "1"
            page.get_by_role("status").get_by_text("working").wait_for()
        page.locator("#sequences", has_text="None runs or waits").wait_for()


def test_model_is_drawn(nano: Running, look_at: Callable[..., Page]) -> None:
    page = look_at(nano)
    layers = nano.client.get("/model").json()["layers"]

    page.locator("#layers li").first.wait_for()
    drawn = page.locator("#layers li")
    assert [drawn.nth(i).get_attribute("aria-label") for i in range(drawn.count())] == [
        f"layer {layer['index']}: {layer['kind']}" for layer in layers
    ]
    assert page.locator("#memory .row").count() == 3
    assert page.locator("#contexts .row").count() == len(nano.client.get("/model").json()["fits"])


def luminance(colour: str) -> float:
    """Relative luminance of an rgb(...) colour. Source: WCAG 2.2."""
    values = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [
        v / 12.92 if v <= LINEAR_KNEE else ((v + 0.055) / 1.055) ** 2.4 for v in values
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_contrast_in_both_schemes(serving: Running, look_at: Callable[..., Page]) -> None:
    backgrounds = set()
    for scheme in SCHEMES:
        page = look_at(serving, color_scheme=scheme)
        for text, behind in (
            ("h2", ".card"), ("body", "body"), (".legend", ".card"), ("footer", "body"),
            ("#send", "#send"), (".tiles dt", ".tiles div"), ("#clear", ".card"),
        ):
            page.locator(text).first.wait_for()
            read = "(e, name) => getComputedStyle(e)[name]"
            front = luminance(page.locator(text).first.evaluate(read, "color"))
            back = luminance(page.locator(behind).first.evaluate(read, "backgroundColor"))
            high, low = max(front, back), min(front, back)
            assert (high + 0.05) / (low + 0.05) >= LEAST_CONTRAST, (scheme, text)
        backgrounds.add(page.locator("body").evaluate(read, "backgroundColor"))
    assert len(backgrounds) == 2


def test_a_narrow_window_does_not_scroll_sideways(
    nano: Running, look_at: Callable[..., Page]
) -> None:
    page = look_at(nano, viewport={"width": 360, "height": 740})
    page.locator("#layers li").first.wait_for()
    ask(page, BIG_TEXT)

    wide = page.locator("html").evaluate("e => e.scrollWidth - e.clientWidth")
    assert wide <= 0


def test_markup_of_the_model_is_shown_as_text(
    engine: FakeEngine, serving: Running, look_at: Callable[..., Page]
) -> None:
    engine.reply = "<img src=x onerror=alert()><b>a</b>"
    page = look_at(serving)
    page.on("dialog", lambda _: pytest.fail("the model's text was run"))

    assert ask(page, "<i>hello</i>") == engine.reply
    assert page.locator("#log img, #log b, #log i").count() == 0
    assert page.locator(".turn.user .text").inner_text() == "<i>hello</i>"


def test_an_answer_can_be_stopped_and_the_chat_begun_anew(
    engine: FakeEngine, serving: Running, look_at: Callable[..., Page]
) -> None:
    engine.pause = threading.Event()
    page = look_at(serving)
    page.get_by_role("button", name="Hello!").click()
    page.get_by_role("button", name="Stop").click()
    page.locator(".figures", has_text="stopped").wait_for()
    engine.pause = None

    assert ask(page, "again") == engine.reply
    prompt, _ = engine.seen[-1]
    assert isinstance(prompt, list)
    assert serving.engine.tokenizer.decode(prompt).count("user") == 2
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    assert ask(page, "anew") == engine.reply
    prompt, _ = engine.seen[-1]
    assert serving.engine.tokenizer.decode(prompt).count("user") == 1


def test_an_error_is_shown_and_the_message_kept(
    engine: FakeEngine, serving: Running, look_at: Callable[..., Page]
) -> None:
    engine.failure = EngineDeadError("the engine died of a test; restart the server")
    page = look_at(serving, expected="503")
    page.get_by_role("textbox", name="Your message").fill("hello")
    page.get_by_role("button", name="Send").click()

    page.get_by_role("alert").get_by_text("died of a test").wait_for()
    assert page.get_by_role("textbox", name="Your message").input_value() == "hello"
    assert page.locator(".turn").count() == 0


def test_page_asks_for_the_key_and_uses_it(
    serve: Start, look_at: Callable[..., Page]
) -> None:
    settings = ServerSettings(log_level="warning", api_keys=("secret",))
    with serve(settings=settings) as server:
        page = look_at(server, expected="401")
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Use").click()
        page.get_by_role("status").get_by_text("ready").wait_for()
        assert not page.get_by_label("API key").is_visible()
        assert ask(page, "hello") == server.engine.reply
        # It would go on asking for figures, and complain that the server is gone.
        page.close()
