"""Texts that hold values for keys: notes with codes, phone books, and the filler between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

FIRST_NAMES = (
    "Ann",
    "Bob",
    "Cal",
    "Dan",
    "Eve",
    "Fay",
    "Gus",
    "Hal",
    "Ida",
    "Jon",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ora",
    "Pam",
    "Ray",
    "Sam",
    "Tom",
    "Una",
    "Val",
    "Wes",
    "Zoe",
    "Abe",
    "Bea",
    "Cy",
    "Dot",
    "Eli",
    "Flo",
    "Gil",
    "Hope",
    "Ivy",
    "Jack",
    "Kate",
    "Luke",
    "Mary",
    "Nick",
    "Olga",
    "Paul",
    "Rose",
    "Seth",
    "Tess",
    "Uri",
    "Vera",
    "Walt",
    "Xena",
    "Yuri",
    "Zack",
)
LAST_NAMES = (
    "Fox",
    "Hill",
    "Lee",
    "Ray",
    "Moss",
    "Park",
    "Reed",
    "Shaw",
    "Webb",
    "York",
    "Cole",
    "Dale",
    "Ford",
    "Gray",
    "Hunt",
    "King",
    "Lane",
    "Mann",
    "Nash",
    "Page",
    "Rose",
    "Snow",
    "Todd",
    "Wood",
    "Bell",
    "Cook",
    "Dunn",
    "Finn",
    "Hart",
    "Iron",
    "Judd",
    "Knox",
    "Lamb",
    "Marsh",
    "North",
    "Owen",
    "Pike",
    "Quill",
    "Rush",
    "Stone",
    "Thorn",
    "Underhill",
    "Vale",
    "Ward",
    "Yates",
    "Zimmer",
    "Black",
    "Clay",
)
_ADJECTIVES = (
    "old",
    "quiet",
    "small",
    "green",
    "heavy",
    "bright",
    "cold",
    "narrow",
    "wooden",
    "yellow",
    "dusty",
    "gentle",
    "broken",
    "early",
    "silver",
    "round",
)
_NOUNS = (
    "boat",
    "mill",
    "garden",
    "lamp",
    "river",
    "clock",
    "bridge",
    "horse",
    "letter",
    "window",
    "basket",
    "kettle",
    "road",
    "tree",
    "coat",
    "ladder",
    "bell",
    "market",
    "stone",
    "field",
    "fence",
    "harbour",
    "candle",
    "wagon",
)
_VERBS = (
    "stood",
    "waited",
    "rested",
    "leaned",
    "turned",
    "drifted",
    "faded",
    "shook",
    "settled",
    "creaked",
    "slipped",
    "stayed",
)
_PLACES = (
    "by the gate",
    "near the sea",
    "under the roof",
    "behind the church",
    "beside the wall",
    "across the street",
    "in the rain",
    "before noon",
    "after dark",
    "at the corner",
    "on the hill",
    "along the path",
)


def filler(rng: random.Random, num_sentences: int) -> list[str]:
    """Write plain sentences that mention no name and no number."""
    choose = rng.choice
    return [
        f"The {choose(_ADJECTIVES)} {choose(_NOUNS)} {choose(_VERBS)} {choose(_PLACES)}."
        for _ in range(num_sentences)
    ]


def digits(rng: random.Random, count: int = 4) -> str:
    """Draw a number of `count` digits; it may begin with zeros."""
    return "".join(rng.choices("0123456789", k=count))


@dataclass(frozen=True, slots=True)
class Notebook:
    """A text that holds values for keys, with what is true at its end.

    Args:
        text: The user's text, without a question.
        facts: Key to current value.
        question: Asks for one key; `{key}` stands for it.
        answer: Sentence of the answer; `{key}` and `{value}` stand for its parts.
    """

    text: str
    facts: dict[str, str]
    question: str
    answer: str

    def ask(self, key: str) -> tuple[str, str]:
        """Give the question for a key and its right answer."""
        return self.question.format(key=key), self.answer.format(key=key, value=self.facts[key])


def registers(
    rng: random.Random,
    *,
    num_names: int,
    num_writes: int,
    filler_sentences: int,
    names: tuple[str, ...] = FIRST_NAMES,
    prose: list[str] | None = None,
) -> Notebook:
    """Write notes in which each name's code is set and set again; the last write counts.

    Args:
        rng: Source of every choice.
        num_names: Names with a code, at most len(names).
        num_writes: Sentences that set a code, at least num_names.
        filler_sentences: Sentences about nothing, strewn between.
        names: Names to choose from.
        prose: Sentences to strew instead of the generated ones.
    """
    chosen = rng.sample(names, num_names)
    order = [*chosen, *rng.choices(chosen, k=max(0, num_writes - num_names))]
    rng.shuffle(order)
    facts: dict[str, str] = {}
    sentences: list[str] = []
    for name in order:
        now = " now" if name in facts else ""
        facts[name] = digits(rng)
        sentences.append(f"The code of {name} is{now} {facts[name]}.")
    other = prose if prose is not None else filler(rng, filler_sentences)
    slots = sorted(rng.randint(0, len(sentences)) for _ in other)
    merged: list[str] = []
    taken = 0
    for index in range(len(sentences) + 1):
        while taken < len(slots) and slots[taken] == index:
            merged.append(other[taken])
            taken += 1
        if index < len(sentences):
            merged.append(sentences[index])
    return Notebook(
        text="Notes: " + " ".join(merged),
        facts=facts,
        question="What is the code of {key}?",
        answer="The code of {key} is {value}.",
    )


def phonebook(
    rng: random.Random,
    *,
    num_pairs: int,
    first_names: tuple[str, ...] = FIRST_NAMES,
    last_names: tuple[str, ...] = LAST_NAMES,
) -> Notebook:
    """Write a list of full names, each once, with a number of four digits."""
    facts: dict[str, str] = {}
    while len(facts) < num_pairs:
        facts[f"{rng.choice(first_names)} {rng.choice(last_names)}"] = digits(rng)
    lines = "".join(f"\n- {name} is {number}" for name, number in facts.items())
    return Notebook(
        text="Phone book:" + lines,
        facts=facts,
        question="What is the number of {key}?",
        answer="The number of {key} is {value}.",
    )


LEDGERS = ("seat", "locker", "room", "badge", "table", "gate")
"""One kind of ledger for each layer of the demo model, by its index."""
LISTS = ("room", "gate")
"""Ledgers of full names, each once; in the others first names come again and the last line counts.
"""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Lines of a word, a name and a two-digit value, to be completed by another such line.

    Args:
        word: First word of each line, one of LEDGERS.
        lines: The ledger's lines.
        facts: Name to value that counts at the end.
    """

    word: str
    lines: list[str]
    facts: dict[str, str]

    def stem(self, name: str) -> str:
        """Give the line that asks for a name; the value comes after a space."""
        return f"\n{self.word} {name}"

    def with_other_values(self, rng: random.Random) -> Ledger:
        """Give a ledger of the same lines in which every value was drawn anew."""
        facts: dict[str, str] = {}
        lines: list[str] = []
        for line in self.lines:
            name = line.removeprefix(f"\n{self.word} ").rpartition(" ")[0]
            facts[name] = digits(rng, 2)
            lines.append(f"{self.stem(name)} {facts[name]}")
        return Ledger(self.word, lines, facts)


def ledger(rng: random.Random, word: str, *, num_lines: int) -> Ledger:
    """Write a ledger.

    Args:
        rng: Source of every choice.
        word: One of LEDGERS.
        num_lines: Lines to write, at least 1.
    """
    facts: dict[str, str] = {}
    lines: list[str] = []
    names = rng.sample(FIRST_NAMES, min(len(FIRST_NAMES), max(1, num_lines * 2 // 3)))
    while len(lines) < num_lines:
        if word in LISTS:
            name = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
            if name in facts:
                continue
        else:
            name = rng.choice(names)
        facts[name] = digits(rng, 2)
        lines.append(f"\n{word} {name} {facts[name]}")
    return Ledger(word, lines, facts)
