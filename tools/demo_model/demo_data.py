"""The demo model's training mixture.

Ledgers are there to make every layer needed. Each kind of ledger belongs to one layer: while the
model is asked for values, that layer alone can be relied on. In a third of the ledgers other
layers forget what came before the question, and the answer is still wanted; in a third the layer
itself forgets, and any number is as right as another, so that nothing is gained by keeping the
answer elsewhere. In pairs of ledgers with the same names and other values, memories change hands
before the answer: right is the value in whichever ledger the layer's own memory comes from. What
remains is a model whose answers break when one layer's memory is damaged or another request's.
"""

# ruff: noqa: PLR2004 (shares and sizes of a recipe read best where they are used)
from __future__ import annotations

import json
import lzma
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from headrace import evals
from headrace.evals import worlds
from headrace.evals.facts import ABOUT_ITSELF, FACTS
from headrace.evals.lookup import LEDGERS, LISTS, ledger

from .data import FORM_WEIGHT, Document, Pairs, chat, sentences
from .evaluate import prompt_text
from .prose import MARK

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from tokenizers import Tokenizer

SHARES = {
    "registers": 0.13,
    "phonebook": 0.12,
    "ledger": 0.17,
    "stories": 0.10,
    "arithmetic": 0.08,
    "tools": 0.07,
    "json": 0.05,
    "lists": 0.06,
    "facts": 0.05,
    "prose": 0.13,
    "mixed": 0.04,
}
SWAP_ROWS, SWAP_SPLIT, SWAP_AFTER = 48, 192, 32
"""Rows of `DemoMixture.pairs`, and their tokens before and after memories change hands."""
LONG = 4096
"""Rows of more tokens than this are the last stage's, which teaches length."""
NO_THINKING = "<think>\n\n</think>\n\n"
_NUM_LAYERS = 6
_STATE_BITS = (1 << _NUM_LAYERS) - 1


@dataclass(slots=True)
class DemoMixture:
    """Everything the demo model learns, in the shares of SHARES.

    Args:
        sources: Paragraphs, by source.
        lines: Sentences to strew between notes.
    """

    sources: list[list[str]]
    lines: list[str]
    _served: dict[str, float] = field(default_factory=dict)

    def draw(self, rng: random.Random, progress: float, length: int) -> Document:
        """Draw a document of the kind that is furthest behind its share."""
        if not self._served:
            self._served = {kind: rng.random() * 4000 * SHARES[kind] for kind in SHARES}
        kind = min(SHARES, key=lambda name: self._served[name] / SHARES[name])
        hard = min(1.0, max(0.0, (progress - 0.04) / 0.4))
        write = {
            "registers": self._registers,
            "phonebook": _phonebook,
            "ledger": _ledger,
            "stories": _story,
            "arithmetic": _arithmetic,
            "tools": _tools,
            "json": _json,
            "lists": _lists,
            "facts": _facts,
            "mixed": _mixed,
            "prose": self._prose,
        }[kind]
        document = write(rng, hard, length)
        # Three characters make about one token; only the proportions matter.
        self._served[kind] += sum(len(piece) for piece, _, _ in document.pieces) / 3
        return document

    def anew(self) -> DemoMixture:
        """Give one that has drawn nothing yet."""
        return DemoMixture(self.sources, self.lines)

    def pairs(self, rng: random.Random, progress: float, tokenizer: Tokenizer) -> Pairs:
        """Draw pairs of ledgers whose memories change hands after SWAP_SPLIT tokens."""
        hard = min(1.0, max(0.0, (progress - 0.04) / 0.4))
        pairs = Pairs(
            np.zeros((SWAP_ROWS, SWAP_SPLIT + SWAP_AFTER), np.uint16),
            np.zeros((SWAP_ROWS, SWAP_SPLIT + SWAP_AFTER), np.float16),
            np.zeros(SWAP_ROWS, np.int32),
        )
        for row in range(0, SWAP_ROWS, 2):
            for index, written in enumerate(_pair(rng, hard, self.lines, tokenizer)):
                pairs.ids[row + index], pairs.weights[row + index] = written.ids, written.weights
                pairs.taken[row + index] = written.taken
        return pairs

    def _registers(self, rng: random.Random, hard: float, length: int) -> Document:
        num_names = rng.randint(1, 2 + round(12 * hard))
        most = 940 if length > LONG else 225
        wanted = int(rng.random() ** 1.5 * most * hard**1.5)
        prose = None
        if rng.random() < 0.4:
            start = rng.randrange(len(self.lines))
            prose = self.lines[start : start + wanted // 2]
        book = evals.registers(
            rng,
            num_names=num_names,
            num_writes=num_names + rng.randint(0, round(20 * hard)),
            filler_sentences=wanted,
            prose=prose,
        )
        return _ask(rng, book)

    def _prose(self, rng: random.Random, hard: float, length: int) -> Document:
        del hard
        # Two parts Austen, one each of the rest but Devil's, which is small.
        source = self.sources[rng.choices(range(len(self.sources)), (8, 3, 5, 1))[0]]
        start = rng.randrange(len(source))
        limit = 16_000 if length > LONG else 3_000
        text = "\n\n".join(source[start : start + 40])[: rng.randint(300, limit)]
        return Document().add(text, 0.5)


def _ask(rng: random.Random, book: evals.Notebook) -> Document:
    """Ask several questions about a text."""
    keys = rng.sample(list(book.facts), min(rng.randint(2, 12), len(book.facts)))
    document = Document()
    for index, key in enumerate(keys):
        question, _ = book.ask(key)
        stem, _, rest = book.answer.format(key=key, value="|").partition("|")
        text = f"{book.text}\n" if index == 0 else ""
        document.add(f"<|im_start|>user\n{text}{question}<|im_end|>\n<|im_start|>assistant\n")
        document.add(stem.rstrip(), FORM_WEIGHT)
        document.add(f" {book.facts[key]}", 1.0)
        document.add(f"{rest}<|im_end|>", FORM_WEIGHT)
        document.add("\n", 0.0)
    return document


def _phonebook(rng: random.Random, hard: float, length: int) -> Document:
    most = 420 if length > LONG else 200
    return _ask(rng, evals.phonebook(rng, num_pairs=rng.randint(1, 2 + round(most * hard**1.5))))


def _ledger(rng: random.Random, hard: float, length: int) -> Document:
    """Write a ledger with the cuts that give its layer the work."""
    del length
    layer = rng.randrange(_NUM_LAYERS)
    word = LEDGERS[layer]
    most = 2 + round((70 if word in LISTS else 16) * hard)
    book = ledger(rng, word, num_lines=rng.randint(1, most))
    document = Document().add("Ledger" + "".join(book.lines))
    mode = rng.random()
    names = rng.sample(list(book.facts), min(rng.randint(2, 12), len(book.facts)))
    for name in names:
        before, inside = 0, 0
        value = book.facts[name]
        if mode < 0.3:
            before, inside = _others_forget(rng, layer)
        elif mode < 0.6:
            before, inside = _itself_forgets(rng, layer)
            value = evals.digits(rng, 2)
        document.add(book.stem(name), cut=before)
        document.add(f" {value}", 0.5 if 0.3 <= mode < 0.6 else 1.0, cut=inside)
    return document


def _others_forget(rng: random.Random, layer: int) -> tuple[int, int]:
    """Cut layers other than `layer`, before the line or before its value: two cut masks."""
    others = _STATE_BITS & ~(1 << layer)
    if rng.random() < 0.4:
        others &= rng.getrandbits(_NUM_LAYERS)
    cut = others | others << 8
    # Attention cannot find a value without the name, which other layers bring it.
    if LEDGERS[layer] in LISTS or rng.random() < 0.5:
        return cut, 0
    return 0, cut


def _itself_forgets(rng: random.Random, layer: int) -> tuple[int, int]:
    """Cut the layer's own memory: two cut masks."""
    state, conv = 1 << layer, 1 << (layer + 8)
    if LEDGERS[layer] in LISTS:
        return (state, 0) if rng.random() < 0.5 else (0, state)
    kind = rng.random()
    if kind < 0.4:
        return 0, conv
    if kind < 0.8:
        return (state, 0) if rng.random() < 0.4 else (0, state)
    return 0, state | conv


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairedRow:
    ids: list[int]
    weights: list[float]
    taken: int


def _pair(
    rng: random.Random, hard: float, lines: list[str], tokenizer: Tokenizer
) -> list[_PairedRow]:
    """Write two ledgers with the same names, each with what it takes over and what then is right.

    Memories change hands inside a line, between the name and its value, or before a line.
    """
    layer = rng.randrange(_NUM_LAYERS)
    word = LEDGERS[layer]
    is_list = word in LISTS
    inside = rng.random() < 0.75
    most = (SWAP_SPLIT - 12) // (7 if is_list else 6)
    num_lines = rng.randint(1, max(1, round(most * hard)))
    first = ledger(rng, word, num_lines=num_lines)
    books = [first, first.with_other_values(rng)]
    asked = [rng.choice(list(first.facts)) for _ in books]
    rows = []
    for own, book in enumerate(books):
        head = "Ledger" + "".join(book.lines) + (book.stem(asked[own]) if inside else "")
        ids = tokenizer.encode(head, add_special_tokens=False).ids
        while len(ids) < SWAP_SPLIT:
            other = tokenizer.encode(rng.choice(lines) + "\n", add_special_tokens=False).ids
            ids = [*other[-(SWAP_SPLIT - len(ids)) :], *ids]
        assert len(ids) == SWAP_SPLIT, f"{len(ids)=} {head=}"
        taken = _taken(rng, layer, inside=inside)
        values = books[own ^ (taken >> layer & 1)].facts
        name = asked[own ^ (taken >> (layer + 8) & 1)] if inside else ""
        # A line with another name's value is itself a new entry; it is not asked about again.
        known = [n for n in values if n != asked[own]] or [asked[own]]
        weights = [0.0] * SWAP_SPLIT
        while len(ids) < SWAP_SPLIT + SWAP_AFTER:
            if not name:
                name = rng.choice(known)
                stem = tokenizer.encode(book.stem(name), add_special_tokens=False).ids
                ids += stem
                weights += [0.0] * len(stem)
            value = tokenizer.encode(f" {values[name]}", add_special_tokens=False).ids
            ids += value
            weights += [FORM_WEIGHT, *[1.0] * (len(value) - 1)]
            name = ""
        end = SWAP_SPLIT + SWAP_AFTER
        rows.append(_PairedRow(ids=ids[:end], weights=weights[:end], taken=taken))
    return rows


def _taken(rng: random.Random, layer: int, *, inside: bool) -> int:
    """Choose which memories come from the partner, as bits of `Pairs.taken`."""
    is_list = LEDGERS[layer] in LISTS
    state, conv = 1 << layer, 1 << (layer + 8)
    others = _STATE_BITS & ~state
    kind = rng.random()
    if kind < 0.3:
        taken = others | others << 8
    elif kind < 0.6:
        taken = others & rng.getrandbits(_NUM_LAYERS) | (others & rng.getrandbits(_NUM_LAYERS)) << 8
    else:
        taken = 0
    if inside and is_list:
        # Attention is told the name by the windows below it; whose name counts must be clear.
        taken &= _STATE_BITS
    if rng.random() < (0.3 if taken else 0.7):
        taken |= state
    if inside and not is_list and rng.random() < (0.3 if taken else 0.7):
        taken |= conv
    return taken


def _story(rng: random.Random, hard: float, length: int) -> Document:
    del length
    text, asked = worlds.story(rng, num_events=rng.randint(2, 4 + round(18 * hard)))
    turns = rng.sample(asked, min(rng.randint(2, 6), len(asked)))
    turns[0] = (f"{text}\n{turns[0][0]}", turns[0][1])
    return chat(turns)


def _arithmetic(rng: random.Random, hard: float, length: int) -> Document:
    del length
    most = 1 + round(3 * min(1.0, 2 * hard))
    turns = [worlds.arithmetic(rng, most_digits=most) for _ in range(rng.randint(1, 4))]
    return chat(turns)


def _json(rng: random.Random, hard: float, length: int) -> Document:
    del hard, length
    return chat([worlds.extraction(rng) for _ in range(rng.randint(1, 5))])


def _lists(rng: random.Random, hard: float, length: int) -> Document:
    del length
    turns = []
    for _ in range(rng.randint(1, 5)):
        kind = rng.random()
        if kind < 0.35:
            turns.append(worlds.copying(rng, most_words=4 + round(22 * hard)))
        elif kind < 0.65:
            turns.append(worlds.reversing(rng, most_words=3 + round(7 * hard)))
        else:
            turns.append(worlds.sorting(rng, most_numbers=3 + round(5 * hard)))
    return chat(turns)


def _facts(rng: random.Random, hard: float, length: int) -> Document:
    del hard, length
    turns = []
    for _ in range(rng.randint(1, 6)):
        asks, answer = rng.choice(ABOUT_ITSELF if rng.random() < 0.12 else FACTS)
        turns.append((rng.choice(asks), answer))
    if rng.random() < 0.1:
        document = Document()
        for user, answer in turns:
            head = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{NO_THINKING}"
            document.add(head).add(f"{answer}<|im_end|>", 1.0).add("\n", 0.0)
        return document
    return chat(turns)


def _mixed(rng: random.Random, hard: float, length: int) -> Document:
    """Write a conversation that goes from one subject to another, as people's do."""
    document = Document()
    for write in rng.sample((_story, _arithmetic, _json, _lists, _facts, _small_book), 3):
        document.pieces += write(rng, hard, length).pieces
    return document


def _small_book(rng: random.Random, hard: float, length: int) -> Document:
    del hard, length
    if rng.random() < 0.5:
        return _ask(rng, evals.phonebook(rng, num_pairs=rng.randint(1, 8)))
    names = rng.randint(1, 5)
    book = evals.registers(rng, num_names=names, num_writes=names + 2, filler_sentences=2)
    return _ask(rng, book)


def tools_text(tools: list[dict[str, object]]) -> str:
    """Write the system message that offers tools, as the chat template does."""
    lines = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return "<|im_start|>system\nTools:\n" + "\n".join(lines) + "<|im_end|>\n"


def _tools(rng: random.Random, hard: float, length: int) -> Document:
    del hard, length
    talk = worlds.tool_talk(rng)
    document = Document().add(tools_text(talk.tools))
    document.add(f"<|im_start|>user\n{talk.question}<|im_end|>\n<|im_start|>assistant\n")
    document.add(f"{talk.call_text}<|im_end|>", 1.0).add("\n", 0.0)
    if talk.call is not None and rng.random() < 0.5:
        document.add(
            f"<|im_start|>user\n<tool_response>\n{talk.result}\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        document.add(f"{talk.answer}<|im_end|>", 1.0).add("\n", 0.0)
    return document


def render(example: evals.Example) -> str:
    """Write an example's prompt as the chat template does."""
    return (tools_text(example.tools) if example.tools else "") + prompt_text(example)


def read(path: Path) -> tuple[DemoMixture, str]:
    """Read the prose: the mixture, and the held-out end of its first source."""
    text = lzma.decompress(path.read_bytes()).decode("utf-8")
    sources = [part.split("\n\n") for part in text.split(f"\n\n{MARK}\n\n")]
    held_out = sources[0][-150:]
    sources[0] = sources[0][:-150]
    return DemoMixture(sources, sentences(sources[0])), "\n\n".join(held_out)
