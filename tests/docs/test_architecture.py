"""The architecture page says what is there, and what a request really passes through."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import FrameType

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headrace"
PAGE = ROOT / "docs" / "architecture.md"


def files_between(marks: str) -> list[str]:
    """Read the files named between two marks of the page, such as path:begin and path:end."""
    text = PAGE.read_text(encoding="utf-8")
    listed = text.partition(f"<!-- {marks}:begin -->")[2].partition(f"<!-- {marks}:end -->")[0]
    return re.findall(r"`([\w/]+\.py)`", listed)


class Recorder:
    """Notes, while it is entered, which files of the package have a function called."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._is_on = False
        self._prefix = f"{PACKAGE}/"
        # The engine's thread starts later; it must have the profiler from its beginning.
        threading.setprofile(self._note)

    def __enter__(self) -> None:
        self._is_on = True

    def __exit__(self, *_: object) -> None:
        self._is_on = False
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if self._is_on and event == "call" and file.startswith(self._prefix):
            self.files.add(file.removeprefix(self._prefix))


def test_a_chat_request_passes_through_the_listed_files(random_model: Path) -> None:
    from starlette.testclient import TestClient  # noqa: PLC0415 - imports the server and torch

    from headrace import AsyncLLM, EngineConfig  # noqa: PLC0415
    from headrace.server.app import create_app  # noqa: PLC0415

    recorder = Recorder()
    engine = AsyncLLM(EngineConfig(model=str(random_model), device="cpu", max_num_seqs=4))
    # Longer than a state block, so that the scan and a checkpoint are on the way.
    message = {"role": "user", "content": "hello " * 20}
    body = {"messages": [message], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with TestClient(create_app(engine)) as client, recorder:
        reply = client.post("/v1/chat/completions", json={"model": engine.model_name, **body})

    assert reply.status_code == 200, reply.text
    path, used = set(files_between("path")), set(files_between("used"))
    not_reached, not_listed = path - recorder.files, recorder.files - path - used
    assert not not_reached, f"take off the path in docs/architecture.md: {sorted(not_reached)}"
    assert not not_listed, f"add to the files in docs/architecture.md: {sorted(not_listed)}"


@pytest.mark.parametrize("marks", ["path", "used"])
def test_listed_files_exist_and_are_listed_once(marks: str) -> None:
    files = files_between(marks)

    assert files
    assert len(set(files)) == len(files)
    assert [file for file in files if not (PACKAGE / file).is_file()] == []


def test_profiler_is_off_again() -> None:
    assert sys.getprofile() is None


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.name
)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_decision_has_a_number_of_its_own() -> None:
    names = sorted(path.name for path in (ROOT / "docs/decisions").glob("0*.md"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    for name in names:
        head = (ROOT / "docs/decisions" / name).read_text(encoding="utf-8").splitlines()[0]
        assert head.startswith(f"# {name[:4]}: "), head
