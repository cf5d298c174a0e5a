"""Small closed worlds with checkable questions: stories, sums, lists, JSON, tools."""

# ruff: noqa: PLR2004 (odds of what happens in a story read best where they are used)
from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.evals.lookup import FIRST_NAMES, LAST_NAMES

if TYPE_CHECKING:
    import random

ROOMS = ("kitchen", "garden", "hall", "cellar", "attic", "library", "stable", "tower")
OBJECTS = ("lamp", "key", "letter", "basket", "rope", "coin", "map", "bell")
CITIES = [
    "Paris",
    "Rome",
    "Oslo",
    "Lima",
    "Cairo",
    "Delhi",
    "Tokyo",
    "Madrid",
    "Vienna",
    "Dublin",
    "Athens",
    "Lisbon",
    "Berlin",
    "Prague",
    "Warsaw",
    "Ottawa",
]
WORDS = [
    "river",
    "stone",
    "apple",
    "cloud",
    "table",
    "green",
    "horse",
    "paper",
    "light",
    "water",
    "bread",
    "chair",
    "music",
    "night",
    "plant",
    "glass",
    "winter",
    "summer",
    "window",
    "market",
    "silver",
    "garden",
    "candle",
    "bridge",
    "basket",
    "ladder",
    "letter",
    "yellow",
]
_COUNTS = ("nothing", "one thing", "two things", "three things", "four things")


@dataclass(slots=True)
class _World:
    """Where everybody and everything is while a story goes on."""

    rooms: dict[str, list[str]] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)
    left_in: dict[str, str] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)


def story(rng: random.Random, *, num_events: int) -> tuple[str, list[tuple[str, str]]]:
    """Tell a story of people, rooms and things; give it with every question and its answer."""
    people = rng.sample(FIRST_NAMES, rng.randint(2, 4))
    things = rng.sample(OBJECTS, rng.randint(1, 4))
    world = _World()
    for person in people:
        _move(rng, world, person)
    while len(world.told) < num_events:
        person = rng.choice(people)
        held = [t for t in things if world.holder.get(t) == person]
        free = [t for t in things if t not in world.holder]
        kind = rng.random()
        if kind < 0.4 and free:
            thing = rng.choice(free)
            world.holder[thing] = person
            world.left_in.pop(thing, None)
            world.told.append(f"{person} picked up the {thing}.")
        elif kind < 0.55 and held:
            thing = rng.choice(held)
            room = world.rooms[person][-1]
            del world.holder[thing]
            world.left_in[thing] = room
            world.told.append(f"{person} left the {thing} in the {room}.")
        else:
            _move(rng, world, person)
    return "Story: " + " ".join(world.told), _story_questions(world, people, things)


def _move(rng: random.Random, world: _World, person: str) -> None:
    been = world.rooms.setdefault(person, [])
    room = rng.choice([r for r in ROOMS if not been or r != been[-1]])
    been.append(room)
    world.told.append(f"{person} went to the {room}.")


def _story_questions(world: _World, people: list[str], things: list[str]) -> list[tuple[str, str]]:
    found = []
    for person in people:
        been = world.rooms[person]
        found.append((f"Where is {person}?", f"{person} is in the {been[-1]}."))
        if len(been) > 1:
            found.append(
                (f"Where was {person} before?", f"Before, {person} was in the {been[-2]}.")
            )
    for thing in things:
        if thing in world.holder:
            holder = world.holder[thing]
            room = world.rooms[holder][-1]
            found.append((f"Who has the {thing}?", f"The {thing} is with {holder}."))
            found.append(
                (
                    f"Where is the {thing}?",
                    f"The {thing} is with {holder}. {holder} is in the {room}.",
                )
            )
        elif thing in world.left_in:
            room = world.left_in[thing]
            found.append((f"Who has the {thing}?", f"The {thing} is with nobody."))
            found.append((f"Where is the {thing}?", f"The {thing} is in the {room}."))
    return found


def _column_steps(top: int, bottom: int, sign: str) -> tuple[str, int]:
    """Write a sum or difference digit by digit from the right; give the steps and the result."""
    width = len(str(max(top, bottom)))
    above, below = str(top).zfill(width)[::-1], str(bottom).zfill(width)[::-1]
    carry, built = 0, ""
    lines = []
    for a_text, b_text in zip(above, below, strict=True):
        a, b = int(a_text), int(b_text)
        if sign == "+":
            total = a + b + carry
            lines.append(f"{a} + {b} + {carry} = {total}")
            carry, digit = divmod(total, 10)
        else:
            borrow = int(a - b - carry < 0)
            lines.append(f"{a + 10 * borrow} - {b} - {carry} = {a + 10 * borrow - b - carry}")
            carry, digit = borrow, a + 10 * borrow - b - carry
        built = f"{digit}{built}"
        lines[-1] += f", so {built} and {carry}"
    if sign == "+" and carry:
        built = f"1{built}"
        lines.append(f"so {built}")
    return "\n".join(lines), int(built)


def arithmetic(rng: random.Random, *, most_digits: int = 4) -> tuple[str, str]:
    """Ask for a sum or a difference; the answer shows its steps in a think block."""
    a = rng.randrange(10 ** rng.randint(1, most_digits))
    b = rng.randrange(10 ** rng.randint(1, most_digits))
    sign = rng.choice("+-")
    if sign == "-" and a < b:
        a, b = b, a
    steps, result = _column_steps(a, b, sign)
    question = rng.choice((f"What is {a} {sign} {b}?", f"{a} {sign} {b} = ?"))
    return question, f"<think>\n{steps}\n</think>\n\n{a} {sign} {b} = {result}."


def copying(rng: random.Random, *, most_words: int = 24) -> tuple[str, str]:
    """Ask to repeat a list of words and numbers."""
    items = [
        rng.choice(WORDS) if rng.random() < 0.6 else str(rng.randrange(1000))
        for _ in range(rng.randint(2, most_words))
    ]
    text = " ".join(items)
    return f"Copy: {text}", f"Copy: {text}"


def reversing(rng: random.Random, *, most_words: int = 10) -> tuple[str, str]:
    """Ask for a list of different words from its end to its beginning."""
    items = rng.sample(WORDS, rng.randint(2, most_words))
    return f"Reverse: {' '.join(items)}", f"Reversed: {' '.join(reversed(items))}"


def sorting(rng: random.Random, *, most_numbers: int = 8) -> tuple[str, str]:
    """Ask to sort two-digit numbers."""
    items = rng.sample(range(10, 100), rng.randint(2, most_numbers))
    ordered = " ".join(map(str, sorted(items)))
    return f"Sort: {' '.join(map(str, items))}", f"Sorted: {ordered}"


def extraction(rng: random.Random) -> tuple[str, str]:
    """Ask to turn a sentence into JSON with the keys named."""
    name = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
    person: dict[str, Any] = {
        "name": name,
        "age": rng.randint(18, 90),
        "city": rng.choice(CITIES),
        "pet": rng.choice(("cat", "dog", "horse", "bird")),
    }
    text = rng.choice(
        (
            "{name} is {age} years old, lives in {city} and has a {pet}.",
            "{name} lives in {city} with a {pet} and is {age} years old.",
            "At {age}, {name} has a {pet} and a house in {city}.",
        )
    ).format(**person)
    keys = rng.sample(list(person), rng.randint(2, 4))
    answer = json.dumps({key: person[key] for key in keys})
    return f"Give {', '.join(keys)} as JSON: {text}", answer


def _tool(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(parameters),
            },
        },
    }


TOOLS = {
    "get_weather": _tool("get_weather", "Weather of a city", city="string"),
    "get_time": _tool("get_time", "Local time of a city", city="string"),
    "add": _tool("add", "Add two numbers", a="integer", b="integer"),
    "send_message": _tool("send_message", "Send a message", to="string", text="string"),
    "set_timer": _tool("set_timer", "Start a timer", minutes="integer"),
    "find_number": _tool("find_number", "Look up a phone number", name="string"),
}
NO_TOOL = "I have no tool for that."
_SKIES = ("sunny", "cloudy", "rainy", "windy")


@dataclass(frozen=True, slots=True)
class ToolTalk:
    """A conversation that needs a tool.

    Args:
        tools: What the model is offered.
        question: The user's words.
        call: Name and arguments of the right call; None where no tool offered fits.
        result: What the tool gives back; empty without a call.
        answer: What to say in the end.
    """

    tools: list[dict[str, Any]]
    question: str
    call: tuple[str, dict[str, Any]] | None
    result: str
    answer: str

    @property
    def call_text(self) -> str:
        """The call as the model must write it, or the refusal."""
        if self.call is None:
            return NO_TOOL
        name, arguments = self.call
        written = f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}'
        return f"<tool_call>\n{written}\n</tool_call>"


def tool_talk(rng: random.Random) -> ToolTalk:
    """Ask for something that one of six tools can do, offer some tools, sometimes not that one."""
    name = rng.choice(list(TOOLS))
    city, person = rng.choice(CITIES), rng.choice(FIRST_NAMES)
    a, b, minutes = rng.randrange(100), rng.randrange(100), rng.randint(1, 60)
    degrees, sky = rng.randint(-5, 35), rng.choice(_SKIES)
    hour = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    text = " ".join(rng.sample(WORDS, rng.randint(1, 3)))
    full_name = f"{person} {rng.choice(LAST_NAMES)}"
    number = "".join(rng.choices("0123456789", k=4))
    requests: dict[str, tuple[str, dict[str, Any], str, str]] = {
        "get_weather": (
            rng.choice((f"What is the weather in {city}?", f"How is the weather in {city}?")),
            {"city": city},
            f'{{"degrees": {degrees}, "sky": "{sky}"}}',
            f"It is {degrees} degrees and {sky} in {city}.",
        ),
        "get_time": (
            rng.choice((f"What time is it in {city}?", f"Tell me the time in {city}.")),
            {"city": city},
            f'{{"time": "{hour}"}}',
            f"It is {hour} in {city}.",
        ),
        "add": (
            f"Use a tool to add {a} and {b}.",
            {"a": a, "b": b},
            f'{{"sum": {a + b}}}',
            f"The sum of {a} and {b} is {a + b}.",
        ),
        "send_message": (
            rng.choice((f"Send {person} the message: {text}", f"Tell {person}: {text}")),
            {"to": person, "text": text},
            '{"sent": true}',
            f"I sent it to {person}.",
        ),
        "set_timer": (
            rng.choice((f"Set a timer for {minutes} minutes.", f"Wake me in {minutes} minutes.")),
            {"minutes": minutes},
            '{"started": true}',
            f"The timer runs for {minutes} minutes.",
        ),
        "find_number": (
            f"Find the number of {full_name}.",
            {"name": full_name},
            f'{{"number": "{number}"}}',
            f"The number of {full_name} is {number}.",
        ),
    }
    question, arguments, result, answer = requests[name]
    offered = rng.sample([n for n in TOOLS if n != name], rng.randint(0, 3))
    has_it = rng.random() < 0.85 or not offered
    if has_it:
        offered.append(name)
    rng.shuffle(offered)
    return ToolTalk(
        tools=[TOOLS[n] for n in offered],
        question=question,
        call=(name, arguments) if has_it else None,
        result=result if has_it else "",
        answer=answer if has_it else NO_TOOL,
    )
