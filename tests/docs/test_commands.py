"""What the documentation tells people to type: parsed in every run, run with `-m full`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.cli.aliases import (
    GRAMMAR_BACKENDS,
    SAME_VALUE,
    SPECULATIVE,
    SWITCHES,
    WITHOUT_EFFECT,
    translate,
)
from headrace.cli.main import build_app, known_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md", ROOT / "benchmarks" / "results" / "README.md", *sorted(DOCS.rglob("*.md"))
]
GUIDE = sorted((DOCS / "guide").glob("*.md"))
SERVER = ROOT / "src" / "headrace" / "server"
UNFIT = (
    "source",                               # of the environment that runs this
    "headrace eval --damage state",         # shows a damage, and so ends with 1; minutes long
    "headrace check --seeds 1000",          # the same as the line above it, for an hour
    "python benchmarks/h200_table.py",      # of a GPU; tests/bench has a test of it
    "python tools/family_table.py",         # writes into the README; a test keeps that true
    "headrace deploy nano",                 # needs headrace[ray]; `pytest -m distributed` runs it
    "python examples/deploy/chaos.py",      # the same
    "pytest tests/matrix -k lfm2",          # minutes long, and a part of `pytest -m full`
)
SMALLER = {
    "--random-weights benchmarks/shapes/qwen3.5-4b-text.json": "--random-weights shape.json",
    "--batch 1,8,32,128,256": "--batch 1,2",
    "--output-tokens 257": "--output-tokens 17",
    "benchmarks/results/": "",
    "--shared-prefix 16384": "--shared-prefix 512",
    "--requests 64": "--requests 8",
    "--requests 200 --arrival-rate 5": "--requests 5 --arrival-rate 5",
    "myfamily": "lfm2",
    "path/to/config.json": "shape.json",
}
"""What stands in pages for what a reader has, or needs a large machine; smaller for a test."""
SHAPE = ROOT / "src" / "headrace" / "assets" / "nano" / "config.json"
PROGRAMS = ("headrace", "curl", "make", "python", "pytest", "pip", "mkdocs")
PLACEHOLDERS = {
    "N": "1", "URL": "http://127.0.0.1:8000", "FILE": "file", "MODEL": "nano", "GET": "GET",
}
OTHERS_PROGRAMS = ("python -m sglang", "python -m vllm")
START_TIMEOUT_S, COMMAND_TIMEOUT_S = 180.0, 300.0
SKETCHED = ("races.md",)
"""Pages that quote the code: a mutant alone is no program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return [Block(language=language, text=text) for language, text in found]


WITH_COMMANDS = [page for page in PAGES if blocks(page)]


def commands(text: str) -> list[str]:
    """Split a block into commands; quotes and backslashes go on over lines."""
    found: list[str] = []
    pending = ""
    for line in text.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # A quote is open.
            pending += "\n"
            continue
        if words:
            found.append(pending)
        pending = ""
    assert not pending, f"a command does not end: {pending!r}"
    return found


def parts(command: str) -> list[list[str]]:
    """Words of each command of a pipeline."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    found: list[list[str]] = [[]]
    for word in lexer:
        if word == "|":
            found.append([])
        else:
            found[-1].append(word)
    return found


def check(words: list[str]) -> None:
    """Fail if a command could not even begin."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, arguments = Path(words[0]).name, words[1:]
    if program == "headrace":
        build_app().parse_args(
            translate(arguments).tokens, exit_on_error=False, print_error=False
        )
    elif program == "curl":
        check_curl(arguments)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, re.M) for target in arguments)
    elif program == "python":
        check_python(arguments)
    elif program == "pytest":
        check_python(["-m", "pytest", *arguments])
    elif program == "pip":
        check_pip(arguments)
    else:
        assert program in {"source", "echo", "mkdocs"}, f"nothing is known about {words}"


def check_curl(arguments: list[str]) -> None:
    (url,) = [word for word in arguments if word.startswith("http")]
    path = re.sub(r"https?://[^/]+", "", url)
    sources = "".join((SERVER / name).read_text("utf-8") for name in ("app.py", "page.py"))
    assert f'"{path}"' in sources, f"no route {path}"
    if "-d" in arguments:
        json.loads(arguments[arguments.index("-d") + 1])


def check_python(arguments: list[str]) -> None:
    if arguments[0] != "-m":
        assert (ROOT / arguments[0]).is_file(), arguments[0]
        return
    assert importlib.util.find_spec(arguments[1]) is not None, arguments[1]
    if arguments[1] == "pytest" and "-m" in arguments[2:]:
        marker = arguments[arguments.index("-m", 2) + 1]
        settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert not marker or re.search(rf'^    "{marker}[:(]', settings, re.M), marker


def check_pip(arguments: list[str]) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    for extra in re.findall(r"headrace\[(\w+)\]", " ".join(arguments)):
        assert extra in extras, extra


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_pages_can_begin(page: Path) -> None:
    for block in blocks(page):
        if block.language in {"sh", "bash", "console"}:
            for command in commands(block.text):
                for words in parts(command):
                    check(words)
        if block.language == "python":
            compile(block.text, str(page), "exec")


def named(page: Path) -> list[str]:
    """Commands within sentences; forms such as `bench this|that [MODEL]` are none."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    return [
        re.sub(r"\b[A-Z]+\b", lambda word: PLACEHOLDERS.get(word[0], word[0]), one)
        for one in found
        if one.startswith(tuple(f"{program} " for program in PROGRAMS))
        and not re.search(r"…|\\\||\[[A-Z]|COMMAND", one) and not one.startswith(OTHERS_PROGRAMS)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_can_begin(page: Path) -> None:
    for command in named(page):
        for words in parts(command):
            check(words)


def test_no_command_hides_in_a_block_without_a_language() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        unnamed = re.sub(r"^```\w+\n.*?^```\n", "", text, flags=re.M | re.S)
        plain = re.findall(r"^```\n(.*?)^```", unnamed, re.M | re.S)
        outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        indented = re.findall(r"^    (\S.*)$", outside, re.M)
        for line in [*"\n".join(plain).splitlines(), *indented]:
            assert not line.startswith(tuple(f"{one} " for one in PROGRAMS)), (page.name, line)


def test_the_table_of_clients_is_that_of_the_tests() -> None:
    page = (DOCS / "guide" / "serve.md").read_text(encoding="utf-8")
    table = page.partition("| client | version |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"^\| ([\w-]+) \|", table, re.M))
    with (ROOT / "pyproject.toml").open("rb") as file:
        extra = tomllib.load(file)["project"]["optional-dependencies"]["clients"]
    # Anything above openai itself brings that along.
    assert listed == {"openai", *(re.split(r"[\[><=]", wanted)[0] for wanted in extra)}


def test_flags_that_the_guide_names_exist() -> None:
    known = {f"--{name.replace('_', '-')}" for name in known_settings()}
    known |= {flag for flag, _ in SWITCHES.values()}
    known |= {*SAME_VALUE, *SWITCHES, *WITHOUT_EFFECT, SPECULATIVE, "--help"}
    known |= set(GRAMMAR_BACKENDS)
    for page in GUIDE:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
        assert named <= known, (page.name, named - known)


def test_interfaces_say_what_other_engines_flags_do() -> None:
    text = (DOCS / "interfaces.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("Names of other engines are understood")
    understood, _, rest = rest.partition("Accepted without effect, with a warning:")
    without, _, _ = rest.partition(", and")
    flags = re.compile(r"`(--?[a-z][a-z-]+)`")

    assert set(flags.findall(without)) == WITHOUT_EFFECT.keys()
    assert set(flags.findall(understood)) <= {*SAME_VALUE, *SWITCHES, SPECULATIVE}
    off = {flag for flag, native in SWITCHES.items() if native == ("--graphs", "off")}
    assert off <= set(flags.findall(understood))


@pytest.mark.parametrize(
    "command",
    [
        "headrace serve --no-such-flag 3", "headrace nothing", "curl -s http://h:1/nowhere",
        "curl http://h:1/v1/completions -d '{'", "make nothing", "python tools/nothing.py",
        "python -m pytest -m nothing", "pip install 'headrace[nothing]'", "rm -r x",
    ],
)
def test_wrong_commands_are_noticed(command: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - of several libraries
        check(parts(command)[0])


def docs_hook() -> Any:  # noqa: ANN401 - a module that is in no package
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("docs_hook")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_the_table_of_other_engines_flags_is_that_of_the_code() -> None:
    page = (DOCS / "guide" / "moving.md").read_text(encoding="utf-8")
    assert docs_hook().with_aliases(page) == page, "run python tools/docs_hook.py"
    assert "`--mamba-cache-mode`" in page


def test_pages_that_the_site_fills_in_say_where_their_content_is() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if "<!-- generated:" in text:
            assert "The site (`mkdocs build`)" in text, page
            targets = re.findall(r"\]\(([^)#]+)\)", text)
            assert targets, page
            assert all((page.parent / target).exists() for target in targets), page


def test_every_generated_part_is_made_from_the_code() -> None:
    hook = docs_hook()
    wanted = {
        name for page in PAGES
        for name in re.findall(r"<!-- generated: (\w+) -->", page.read_text(encoding="utf-8"))
    }

    assert wanted == set(hook.GENERATED)
    made = {name: make() for name, make in hook.GENERATED.items()}
    assert "--api-key-file" in made["cli"]
    assert "`max_num_seqs`" in made["settings"]
    assert "`presence_penalty`" in made["sampling"]
    assert "`vllm:num_requests_running`" in made["metrics"]
    assert "0001-absolute-grid" in made["decisions"]


def test_every_page_is_in_the_navigation() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"([\w/-]+\.md)$", settings, re.M))

    assert all((DOCS / page).is_file() for page in listed)
    shown = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    missing = {name for name in shown - listed if not re.match(r"decisions/\d", name)}
    assert not missing, f"add to nav in mkdocs.yml: {sorted(missing)}"


@pytest.mark.full
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="pip install 'headrace[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert not re.search(r"^WARNING", done.stderr, re.M), done.stderr
    for file in tmp_path.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        loads = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)', text)
        assert loads == [], file.name


@contextlib.contextmanager
def background(command: str, url: str, cwd: Path) -> Iterator[None]:
    """A server that runs until the end of the page."""
    words = shlex.split(command, comments=True)
    process = subprocess.Popen(words, cwd=cwd, env=environment())
    try:
        end = time.monotonic() + START_TIMEOUT_S
        while not is_healthy(url):
            assert process.poll() is None, f"{command} ended with {process.returncode}"
            assert time.monotonic() < end, f"{command} did not answer"
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        assert process.wait(60) == 0


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def environment() -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}"}


def run(command: list[str], cwd: Path) -> None:
    done = subprocess.run(
        command, cwd=cwd, env=environment(), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=COMMAND_TIMEOUT_S, check=False,
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    # A conversation greets on stderr.
    assert (done.stdout + done.stderr).strip(), f"{command[-1]} said nothing"


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_commands_of_the_pages_work(page: Path, tmp_path: Path) -> None:
    (tmp_path / "shape.json").write_bytes(SHAPE.read_bytes())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with contextlib.ExitStack() as servers:
        for block in blocks(page):
            text = re.sub(r"\b8000\b", port, block.text).replace(".venv/bin/", "")
            for large, small in SMALLER.items():
                text = text.replace(large, small)
            if block.language == "python" and page.name not in SKETCHED:
                run([sys.executable, "-c", text], tmp_path)
            for command in commands(text) if block.language == "sh" else ():
                if command.startswith("headrace serve"):
                    url = f"http://127.0.0.1:{port}"
                    servers.enter_context(background(command, url, tmp_path))
                elif command.startswith("make"):
                    # They set up an environment and run all tests: that is what runs this.
                    run(["make", "-n", *command.partition("#")[0].split()[1:]], ROOT)
                elif command.startswith(UNFIT):
                    continue
                elif command.startswith(("pytest ", "python -m pytest ")):
                    run(["bash", "-ec", f"{command} -p no:cacheprovider"], ROOT)
                else:
                    failing = command.replace("curl -s", "curl -sS --fail-with-body")
                    run(["bash", "-ec", f"set -o pipefail; {failing}"], tmp_path)
