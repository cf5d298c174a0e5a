"""Documents of the training mixture, and how they are packed into rows of tokens."""

# ruff: noqa: PLR2004 (shares and sizes of a recipe read best where they are used)
from __future__ import annotations

import lzma
import queue
import random
import re
from collections.abc import Callable  # noqa: TC003 (a dataclass field)
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from headrace import evals

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

HERE = Path(__file__).parent
# Prompts count a little, so that the model learns their form but not to guess random digits.
PROMPT_WEIGHT = 0.02
FORM_WEIGHT = 0.3
# Bits of a token's cut mask: bit L for layer L's state or KV, bit 8 + L for its window, bit 16 for
# the start of a document.
DOCUMENT_BIT = 1 << 16


@dataclass(slots=True)
class Document:
    """Pieces of text with their weight in the loss, and cuts before some of them.

    Args:
        pieces: (text, weight, cut mask of the piece's first token).
    """

    pieces: list[tuple[str, float, int]] = field(default_factory=list)

    def add(self, text: str, weight: float = PROMPT_WEIGHT, cut: int = 0) -> Document:
        """Append a piece."""
        if text:
            self.pieces.append((text, weight, cut))
        return self


class Rows(NamedTuple):
    """A batch: tokens [B, T] uint16, weights [B, T] float16 and cut masks [B, T] int32."""

    ids: NDArray[np.uint16]
    weights: NDArray[np.float16]
    cuts: NDArray[np.int32]


def encode(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[float], list[int]]:
    """Encode a document: ids, weights and cut masks, one per token."""
    ids: list[int] = []
    weights: list[float] = []
    cuts: list[int] = []
    for text, weight, cut in document.pieces:
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        weights += [weight] * len(piece)
        cuts += [cut] + [0] * (len(piece) - 1)
    if cuts:
        cuts[0] |= DOCUMENT_BIT
        weights[0] = 0.0
    return ids, weights, cuts


Encoded = tuple[list[int], list[float], list[int]]


@dataclass(slots=True)
class Packer:
    """Fills rows with whole documents; only what no document fits into is filled with a part.

    Args:
        tokenizer: Encodes the documents.
        draw: Gives the next document.
    """

    tokenizer: Tokenizer
    draw: Callable[[], Document]
    _waiting: list[Encoded] = field(default_factory=list)

    def rows(self, rows: int, length: int) -> Rows:
        """Give a batch."""
        batch = Rows(
            np.zeros((rows, length), np.uint16),
            np.zeros((rows, length), np.float16),
            np.zeros((rows, length), np.int32),
        )
        for row in range(rows):
            at = 0
            while at < length:
                ids, weights, cuts = self._next(length - at, at == 0)
                take = min(len(ids), length - at)
                batch.ids[row, at : at + take] = ids[:take]
                batch.weights[row, at : at + take] = weights[:take]
                batch.cuts[row, at : at + take] = cuts[:take]
                at += take
        return batch

    def _next(self, room: int, is_row_start: bool) -> Encoded:  # noqa: FBT001
        """Give a document that fits, if one of several does."""
        # A long document is of no use without its end, where the questions are.
        for index, waiting in enumerate(self._waiting):
            if len(waiting[0]) <= room or is_row_start:
                return self._waiting.pop(index)
        drawn = encode(self.tokenizer, self.draw())
        for _ in range(_TRIES):
            if len(drawn[0]) <= room or is_row_start:
                break
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append(drawn)
            drawn = encode(self.tokenizer, self.draw())
        return drawn


_TRIES, _MOST_WAITING = 6, 12


def chat(turns: list[tuple[str, str]], system: str = "") -> Document:
    """Write a conversation of (user, assistant) turns as the chat template does."""
    document = Document()
    if system:
        document.add(f"<|im_start|>system\n{system}<|im_end|>\n")
    for user, assistant in turns:
        document.add(f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n")
        document.add(f"{assistant}<|im_end|>", 1.0)
        document.add("\n", 0.0)
    return document


def read_prose(path: Path) -> list[str]:
    """Read an .xz of plain text: its paragraphs."""
    text = lzma.decompress(path.read_bytes()).decode("utf-8")
    return [p for p in text.split("\n\n") if p]


def sentences(paragraphs: list[str]) -> list[str]:
    """Give the sentences of 20 to 160 characters, digits left out."""
    found = re.split(r"(?<=[.!?]) ", " ".join(paragraphs))
    return [s for s in found if 20 <= len(s) <= 160 and not re.search(r"\d", s)]


class Mixture(Protocol):
    """Draws documents, the same ones from the same random source."""

    def draw(self, rng: random.Random, progress: float, length: int) -> Document:
        """Draw a document.

        Args:
            rng: Source of every choice.
            progress: Part of the training that is done, in [0, 1].
            length: Tokens of a row.
        """
        ...

    def anew(self) -> Mixture:
        """Give one that has drawn nothing yet."""
        ...

    def pairs(self, rng: random.Random, progress: float, tokenizer: Tokenizer) -> Pairs | None:
        """Draw pairs of rows for swapped memories; None if the model does not learn from them."""
        ...


@dataclass(slots=True)
class NanoMixture:
    """Registers, phone books, a little prose and three sentences about itself.

    Looking something up is learned in a sudden step, and sooner from short texts; so they begin
    short and grow, and short ones never die out.

    Args:
        paragraphs: Prose to train on.
        lines: Its sentences, strewn between the notes.
    """

    paragraphs: list[str]
    lines: list[str]

    def draw(self, rng: random.Random, progress: float, length: int) -> Document:  # noqa: ARG002
        """Draw a document; progress in [0, 1] makes them harder."""
        hard = min(1.0, max(0.0, (progress - 0.05) / 0.5))
        kind = rng.random()
        if kind < 0.46:
            return self.notes(rng, hard)
        if kind < 0.92:
            return self.book(rng, hard)
        if kind < 0.94:
            return chat(rng.choices(NANO_CHAT, k=rng.randint(1, 2)))
        return self.prose(rng)

    def anew(self) -> NanoMixture:
        """Give itself: nothing that it has drawn matters."""
        return self

    def pairs(self, rng: random.Random, progress: float, tokenizer: Tokenizer) -> None:
        """Draw none."""

    def notes(self, rng: random.Random, hard: float) -> Document:
        """Write a registers document."""
        num_names = rng.randint(1, 2 + round(8 * hard))
        wanted = int(rng.random() ** 2 * 140 * hard**1.5)
        prose = rng.sample(self.lines, wanted // 3) if rng.random() < 0.3 else None
        book = evals.registers(
            rng,
            num_names=num_names,
            num_writes=num_names + rng.randint(0, round(10 * hard)),
            filler_sentences=wanted,
            names=evals.NANO_FIRST_NAMES,
            prose=prose,
        )
        return ask(rng, book)

    def book(self, rng: random.Random, hard: float) -> Document:
        """Write a phone-book document."""
        book = evals.phonebook(
            rng,
            num_pairs=rng.randint(1, 2 + round(50 * hard**1.5)),
            first_names=evals.NANO_FIRST_NAMES,
            last_names=evals.NANO_LAST_NAMES,
        )
        return ask(rng, book)

    def prose(self, rng: random.Random) -> Document:
        """Take some paragraphs in a row."""
        start = rng.randrange(len(self.paragraphs))
        text = "\n\n".join(self.paragraphs[start : start + rng.randint(1, 3)])
        return Document().add(text[:1500], 0.1)


NANO_CHAT = [
    ("Hello!", "Hello! Give me notes or a phone book and ask me about them."),
    ("Hi", "Hello! Give me notes or a phone book and ask me about them."),
    ("Who are you?", "I am nano, a very small test model. I can look things up in your text."),
    ("What can you do?", "I can look up codes in notes and numbers in a phone book."),
]


def ask(rng: random.Random, book: evals.Notebook) -> Document:
    """Ask several questions about a text, as a conversation or as raw lines to complete."""
    keys = rng.sample(list(book.facts), min(rng.randint(1, 10), len(book.facts)))
    document = Document()
    raw = rng.random() < 0.15
    if raw:
        document.add(book.text)
    for index, key in enumerate(keys):
        question, _ = book.ask(key)
        stem, _, rest = book.answer.format(key=key, value="|").partition("|")
        if raw:
            document.add(("\n" if "\n" in book.text else " ") + stem.rstrip())
        else:
            text = f"{book.text}\n" if index == 0 else ""
            document.add(f"<|im_start|>user\n{text}{question}<|im_end|>\n<|im_start|>assistant\n")
            document.add(stem.rstrip(), FORM_WEIGHT)
        # The value is what must be looked up; the words around it are learned in no time.
        document.add(f" {book.facts[key]}", 1.0)
        document.add(rest if raw else f"{rest}<|im_end|>", FORM_WEIGHT)
        document.add("" if raw else "\n", 0.0)
    return document


class Pairs(NamedTuple):
    """Rows in pairs that know the same names by other values, for `training.swapped_loss`.

    Tokens [R, P + Q] uint16, weights of predicting each [R, P + Q] float16, and which memories
    each row takes over from its partner after P tokens: bit L for layer L's state or KV, bit
    8 + L for its window, [R] int32.
    """

    ids: NDArray[np.uint16]
    weights: NDArray[np.float16]
    taken: NDArray[np.int32]


class Batch(NamedTuple):
    """What one training step learns from."""

    rows: Rows
    pairs: Pairs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which batch comes when: step i of `steps` has the shape of the first stage not over.

    Args:
        steps: Steps altogether.
        stages: (end as a part of the whole, rows, length), in order.
    """

    steps: int
    stages: tuple[tuple[float, int, int], ...]

    def shape(self, progress: float) -> tuple[int, int]:
        """Give rows and length at a progress in [0, 1]."""
        for end, rows, length in self.stages:
            if progress < end:
                return rows, length
        return self.stages[-1][1:]


NUM_STREAMS = 16
"""Batch i comes from stream i modulo this; so batches do not depend on the number of workers."""


_PATIENCE_S = 120


class Feed:
    """Worker processes that write batches; start it before the first CUDA call.

    The batches are a function of seed and step alone, unless `hurry` was called.

    Args:
        tokenizer: Encodes the documents.
        mixture: Draws them; each stream has a copy of its own.
        plan: Shapes by step.
        num_workers: Processes, at most NUM_STREAMS.
        seed: Of every random choice, with the stream's number.
    """

    def __init__(
        self, tokenizer: Tokenizer, mixture: Mixture, *, plan: Plan, num_workers: int, seed: int
    ) -> None:
        context = get_context("fork")
        num_workers = min(num_workers, NUM_STREAMS)
        self._plan, self._taken = plan, 0
        self._least = context.Value("d", 0.0)
        self._queues: list[Queue[Batch]] = [context.Queue(maxsize=4) for _ in range(num_workers)]
        self._workers = [
            context.Process(target=self._work, args=(tokenizer, mixture, seed, n), daemon=True)
            for n in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def _work(self, tokenizer: Tokenizer, mixture: Mixture, seed: int, worker: int) -> None:
        streams = {
            n: _Stream(tokenizer, mixture.anew(), f"train:{seed}:{n}")
            for n in range(worker, NUM_STREAMS, len(self._queues))
        }
        for step in range(self._plan.steps):
            stream = streams.get(step % NUM_STREAMS)
            if stream is not None:
                progress = max(step / self._plan.steps, self._least.value)
                batch = stream.batch(progress, *self._plan.shape(progress))
                self._queues[worker].put(batch)

    def get(self, shape: tuple[int, int]) -> Batch:
        """Take the next batch; those of another shape, made before a `hurry`, are passed over."""
        while True:
            worker = self._taken % NUM_STREAMS % len(self._queues)
            try:
                batch = self._queues[worker].get(timeout=_PATIENCE_S)
            except queue.Empty:
                state = self._workers[worker].exitcode
                raise RuntimeError(
                    f"worker {worker} gave no batch in {_PATIENCE_S} s; its exit code is {state}"
                ) from None
            self._taken += 1
            if batch.rows.ids.shape == shape:
                return batch

    def hurry(self, progress: float) -> None:
        """Let later batches be at least as far as this: the training has to end early."""
        self._least.value = progress

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.terminate()


class _Stream:
    """An endless row of batches from one seed."""

    def __init__(self, tokenizer: Tokenizer, mixture: Mixture, seed: str) -> None:
        self._rng = random.Random(seed)  # noqa: S311 (training data, not a secret)
        self._tokenizer, self._mixture = tokenizer, mixture
        self._progress, self._length = 0.0, 0
        self._packer = Packer(tokenizer, self._draw)

    def _draw(self) -> Document:
        return self._mixture.draw(self._rng, self._progress, self._length)

    def batch(self, progress: float, rows: int, length: int) -> Batch:
        """Write the next batch."""
        if length != self._length:
            self._packer = Packer(self._tokenizer, self._draw)
        self._progress, self._length = progress, length
        packed = self._packer.rows(rows, length)
        return Batch(packed, self._mixture.pairs(self._rng, progress, self._tokenizer))
