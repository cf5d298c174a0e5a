"""Serve the shipped model and ask it 34 real questions at once, through the openai client.

    make demo                                  # or: .venv/bin/python examples/demo.py --help

Six documents are read first. Then come, all at the same time: four questions about each of them,
six conversations that go on, and some small talk. Documents share their prefixes, so most of each
prompt comes out of the prefix cache: attention's keys and values as well as recurrent state. Every
answer is checked. Exit code 0 means that every answer came and that recall is above the threshold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from headrace import evals

QUESTIONS_PER_DOCUMENT = 4
START_TIMEOUT_S = 180.0
REQUEST_TIMEOUT_S = 300.0
MAX_TOKENS = 64
RECALL_THRESHOLD = 0.95
"""Share of right answers that the documents' questions must reach."""

SMALL_TALK = ("Hello!", "Hi", "Who are you?", "What can you do?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request.

    Args:
        kind: For the table: notes, phone book, conversation or small talk.
        messages: The conversation so far, the question last.
        expected: The right answer; None where any answer will do.
    """

    kind: str
    messages: list[dict[str, str]]
    expected: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back."""

    question: Question
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def is_right(self) -> bool:
        """Whether it is the expected answer, or there was none to expect."""
        return self.question.expected in (None, self.text.strip())


def documents(rng: random.Random) -> list[tuple[str, evals.Notebook]]:
    """Write three pages of notes and three phone books."""
    found: list[tuple[str, evals.Notebook]] = []
    for size in (5, 6, 7):
        notes = evals.registers(
            rng,
            num_names=size,
            num_writes=2 * size,
            filler_sentences=20,
            names=evals.NANO_FIRST_NAMES,
        )
        book = evals.phonebook(
            rng,
            num_pairs=3 * size,
            first_names=evals.NANO_FIRST_NAMES,
            last_names=evals.NANO_LAST_NAMES,
        )
        found += [("notes", notes), ("phone book", book)]
    return found


def ask(kind: str, book: evals.Notebook, key: str) -> Question:
    """Ask for one key of a document, the document first."""
    question, expected = book.ask(key)
    content = f"{book.text}\n{question}"
    return Question(
        kind=kind, messages=[{"role": "user", "content": content}], expected=expected
    )


def go_on(opening: Answer, book: evals.Notebook, key: str) -> Question:
    """Ask for another key in the same conversation."""
    question, expected = book.ask(key)
    messages = [
        *opening.question.messages,
        {"role": "assistant", "content": opening.text},
        {"role": "user", "content": question},
    ]
    return Question(kind="conversation", messages=messages, expected=expected)


async def answer(client: AsyncOpenAI, model: str, question: Question) -> Answer:
    """Send one request."""
    reply = await client.chat.completions.create(
        model=model,
        messages=question.messages,  # type: ignore[arg-type]
        max_tokens=MAX_TOKENS,
        temperature=0,
    )
    choice, usage = reply.choices[0], reply.usage
    assert usage is not None, "the server left out usage"
    details = usage.prompt_tokens_details
    return Answer(
        question=question,
        text=choice.message.content or "",
        finish_reason=choice.finish_reason,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens if details else None) or 0,
        completion_tokens=usage.completion_tokens,
    )


async def converse(base_url: str, rng: random.Random) -> tuple[list[Answer], list[Answer], float]:
    """Send everything.

    Returns:
        The openings' answers, the concurrent requests' answers, and the seconds the latter took.
    """
    async with AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S, max_retries=0
    ) as client:
        model = (await client.models.list()).data[0].id
        books = documents(rng)
        keys = [
            rng.sample(list(book.facts), QUESTIONS_PER_DOCUMENT + 1) for _, book in books
        ]
        openings = await asyncio.gather(*(
            answer(client, model, ask(kind, book, chosen[0]))
            for (kind, book), chosen in zip(books, keys, strict=True)
        ))  # fmt: skip
        questions = [
            ask(kind, book, key)
            for (kind, book), chosen in zip(books, keys, strict=True)
            for key in chosen[1:]
        ]
        questions += [
            go_on(opening, book, chosen[1])
            for opening, (_, book), chosen in zip(openings, books, keys, strict=True)
        ]
        questions += [
            Question(
                kind="small talk", messages=[{"role": "user", "content": text}], expected=None
            )
            for text in SMALL_TALK
        ]
        rng.shuffle(questions)
        started = time.monotonic()
        answers = await asyncio.gather(*(answer(client, model, q) for q in questions))
        return list(openings), list(answers), time.monotonic() - started


class Server:
    """`headrace serve` in a process of its own, on a free port, for as long as it is entered."""

    def __init__(self, model: str) -> None:
        """Start it; it loads the model meanwhile."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "headrace", "serve", model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
        self._process = subprocess.Popen(command)  # noqa: S603 - our own command

    def __enter__(self) -> Server:
        """Wait until it answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise SystemExit(f"the server ended with code {self._process.returncode}")
            if time.monotonic() > deadline:
                self.__exit__()
                raise SystemExit(f"the server did not answer within {START_TIMEOUT_S:g} s")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        """Ask it to end, and see that it does."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def figures(self, path: str) -> dict[str, Any]:
        """Return what the server's page draws: /stats, /activity or /model."""
        with urllib.request.urlopen(f"{self.base_url}{path}", timeout=10) as reply:  # noqa: S310
            figures: dict[str, Any] = json.load(reply)
            return figures

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as reply:  # noqa: S310
                return int(reply.status) == 200  # noqa: PLR2004
        except (urllib.error.URLError, OSError):
            return False


def report(openings: list[Answer], answers: list[Answer], seconds: float) -> bool:
    """Print what was asked and answered.

    Returns:
        Whether every answer came and recall is above its threshold.
    """
    everything = [*openings, *answers]
    for kind in ("notes", "phone book", "conversation", "small talk"):
        for shown in [a for a in answers if a.question.kind == kind][:2]:
            last = shown.question.messages[-1]["content"].splitlines()[-1]
            mark = "right" if shown.is_right else f"WRONG, expected: {shown.question.expected}"
            mark = "nothing to check" if shown.question.expected is None else mark
            print(f"  [{kind}] {last}\n      {shown.text.strip()}  ({mark})")
    checked = [a for a in everything if a.question.expected is not None]
    right = Counter(a.question.kind for a in checked if a.is_right)
    asked = Counter(a.question.kind for a in checked)
    generated = sum(a.completion_tokens for a in answers)
    recall = sum(right.values()) / len(checked)
    came = [a for a in everything if a.text.strip() and a.finish_reason in {"stop", "length"}]
    print()
    for kind, count in asked.items():
        print(f"  {kind:<14}{right[kind]:>3} of {count} right")
    print(f"  recall        {recall:.1%} (needed: {RECALL_THRESHOLD:.0%})")
    print(
        f"  {len(answers)} concurrent requests in {seconds:.2f} s: {generated} tokens, "
        f"{generated / seconds:.0f} tokens/s generated, "
        f"{sum(a.prompt_tokens for a in answers) / seconds:.0f} prompt tokens/s taken in"
    )
    if len(came) < len(everything):
        print(f"  {len(everything) - len(came)} answers did not come")
    return len(came) == len(everything) and recall >= RECALL_THRESHOLD


def report_cache(answers: list[Answer], stats: dict[str, Any]) -> None:
    """Print where the prompts' tokens came from."""
    cached = sum(a.cached_tokens for a in answers)
    total = sum(a.prompt_tokens for a in answers)
    print(f"  prefix cache: {cached} of {total} prompt tokens were hits ({cached / total:.0%})")
    missed = stats["prefix_cache"]["missed_tokens"]
    for reason, count in sorted(missed.items(), key=lambda item: -item[1]):
        if count:
            print(f"      computed, {reason}: {count}")


def wait_for_interrupt() -> None:
    """Return at Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


def report_engine(server: Server) -> None:
    """Print what the page at / shows of the model and of the newest steps."""
    model = server.figures("/model")
    kinds = Counter(layer["kind"] for layer in model["layers"])
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    steps = server.figures("/activity")["steps"]
    took = sum(step["end_s"] - step["begin_s"] for step in steps) / len(steps)
    waited = sum(step["landed_s"] - step["wait_s"] for step in steps) / len(steps)
    print(
        f"  model: {layers}; a sequence has {model['state_bytes_per_sequence']} bytes of state and "
        f"{model['kv_bytes_per_token']} bytes of KV a token"
    )
    print(
        f"  newest {len(steps)} steps: {1000 * took:.1f} ms from plan to result, of which the host "
        f"waited {1000 * waited:.1f} ms"
    )


def main() -> int:
    """Run the demo and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="nano", help="a shipped model that knows the tasks")
    parser.add_argument("--seed", type=int, default=1, help="of the documents")
    parser.add_argument("--stay", action="store_true", help="serve on until Ctrl-C")
    options = parser.parse_args()
    print(f"starting headrace serve {options.model} ...", flush=True)
    with Server(options.model) as server:
        print(f"watch it at {server.base_url}/ while it lasts (--stay serves on)", flush=True)
        # Documents are test data, not secrets.
        rng = random.Random(options.seed)  # noqa: S311
        openings, answers, seconds = asyncio.run(converse(server.base_url, rng))
        passed = report(openings, answers, seconds)
        report_cache([*openings, *answers], server.figures("/stats"))
        report_engine(server)
        print("  passed" if passed else "  FAILED", flush=True)
        if options.stay:
            wait_for_interrupt()
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
