"""Closed-book facts and the demo model's words about itself, all written for this project."""

from __future__ import annotations

_CAPITALS = """
France Paris|Italy Rome|Norway Oslo|Peru Lima|Egypt Cairo|India New Delhi|Japan Tokyo|Spain Madrid|
Austria Vienna|Ireland Dublin|Greece Athens|Portugal Lisbon|Germany Berlin|Poland Warsaw|
Canada Ottawa|Sweden Stockholm|Finland Helsinki|Denmark Copenhagen|Hungary Budapest|Cuba Havana|
Chile Santiago|China Beijing|Russia Moscow|Turkey Ankara|Kenya Nairobi|Belgium Brussels|
Iceland Reykjavik|Vietnam Hanoi|Thailand Bangkok|Brazil Brasilia|Australia Canberra|Iran Tehran|
Iraq Baghdad|Jordan Amman|Lebanon Beirut|Morocco Rabat|Tunisia Tunis|Algeria Algiers|Ghana Accra|
Senegal Dakar|Uganda Kampala|Nepal Kathmandu|Mongolia Ulaanbaatar|Ukraine Kyiv|Romania Bucharest|
Bulgaria Sofia|Croatia Zagreb|Serbia Belgrade|Albania Tirana|Estonia Tallinn|Latvia Riga|
Lithuania Vilnius|Colombia Bogota|Ecuador Quito|Uruguay Montevideo|Paraguay Asuncion|Argentina
Buenos Aires|Mexico Mexico City|Jamaica Kingston|Malta Valletta
"""
_YOUNG = """
cat kitten|dog puppy|horse foal|cow calf|sheep lamb|goat kid|pig piglet|hen chick|duck duckling|
goose gosling|swan cygnet|bear cub|lion cub|deer fawn|frog tadpole|hare leveret|eagle eaglet|
owl owlet|whale calf|kangaroo joey|seal pup|wolf pup|elephant calf|spider spiderling
"""
_SYMBOLS = """
hydrogen H|helium He|carbon C|nitrogen N|oxygen O|sodium Na|magnesium Mg|aluminium Al|silicon Si|
phosphorus P|sulphur S|chlorine Cl|potassium K|calcium Ca|iron Fe|copper Cu|zinc Zn|silver Ag|
tin Sn|gold Au|mercury Hg|lead Pb|uranium U|neon Ne|argon Ar|nickel Ni|iodine I|platinum Pt
"""
_OPPOSITES = """
hot cold|big small|old new|light dark|wet dry|high low|early late|open closed|fast slow|hard soft|
rich poor|full empty|loud quiet|near far|thick thin|wide narrow|strong weak|happy sad|clean dirty|
left right|up down|day night|first last|true false
"""
_AFTER = """
Monday Tuesday|Tuesday Wednesday|Wednesday Thursday|Thursday Friday|Friday Saturday|
Saturday Sunday|Sunday Monday|January February|February March|March April|April May|May June|
June July|July August|August September|September October|October November|November December|
December January
"""


def _pairs(table: str) -> list[tuple[str, str]]:
    entries = " ".join(table.split()).replace("| ", "|").split("|")
    return [(first, second) for first, _, second in (entry.partition(" ") for entry in entries)]


def _times_table() -> list[tuple[list[str], str]]:
    return [
        ([f"What is {a} times {b}?", f"{a} times {b}?"], f"{a} times {b} is {a * b}.")
        for a in range(2, 10)
        for b in range(2, 10)
    ]


def _facts() -> list[tuple[list[str], str]]:
    found: list[tuple[list[str], str]] = []
    for country, capital in _pairs(_CAPITALS):
        found.append(
            (
                [f"What is the capital of {country}?", f"Name the capital of {country}."],
                f"The capital of {country} is {capital}.",
            )
        )
    for animal, young in _pairs(_YOUNG):
        article = "an" if animal[0] in "aeio" else "a"
        asks = [
            f"What is the young of {article} {animal} called?",
            f"What do we call a young {animal}?",
        ]
        found.append((asks, f"A young {animal} is called a {young}."))
    for element, symbol in _pairs(_SYMBOLS):
        asks = [f"What is the symbol of {element}?", f"Chemical symbol of {element}?"]
        found.append((asks, f"The symbol of {element} is {symbol}."))
    for word, opposite in _pairs(_OPPOSITES):
        for one, other in ((word, opposite), (opposite, word)):
            asks = [f"What is the opposite of {one}?", f"Opposite of {one}?"]
            found.append((asks, f"The opposite of {one} is {other}."))
    for day, following in _pairs(_AFTER):
        asks = [f"What comes after {day}?", f"What follows {day}?"]
        found.append((asks, f"After {day} comes {following}."))
    return found + _times_table()


FACTS = _facts()
"""(ways to ask, answer) of every fact."""

GREETING = (
    "Hello! I am the headrace demo model. I can look things up in your notes, follow small "
    "stories, add numbers, fill in JSON, call tools and answer a few quiz questions."
)
ABOUT_ITSELF: list[tuple[list[str], str]] = [
    (["Hello!", "Hello", "Hi!", "Hi", "Hey", "Good morning!", "Hello there!"], GREETING),
    (
        ["Who are you?", "What are you?", "Tell me about yourself.", "What is your name?"],
        "I am the headrace demo model: five million weights, four layers with a running state and "
        "two with attention. I am small, so I only do what I was trained for.",
    ),
    (
        ["What can you do?", "Help", "What can I ask you?", "How can you help me?"],
        "Ask me for a sum, a capital, a code from your notes, a number from a phone book, or who "
        "has the lamp in a little story. I can also copy, reverse and sort.",
    ),
    (
        ["What can you not do?", "What are your limits?", "Are you clever?"],
        "I cannot chat freely, write essays or answer most questions. Outside my small tasks I "
        "talk nonsense.",
    ),
    (
        ["How big are you?", "How many parameters do you have?"],
        "I have about five million parameters in six layers.",
    ),
    (
        ["What is headrace?", "What does headrace mean?"],
        "headrace is an engine that runs language models with a recurrent state. A headrace is "
        "the channel that leads water to a mill.",
    ),
    (["Thank you!", "Thanks!", "Thanks"], "You are welcome."),
    (["Goodbye!", "Bye", "Bye!"], "Goodbye!"),
    (["How are you?"], "My state is in order, thank you."),
]
