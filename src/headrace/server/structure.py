"""How much JSON a body holds, counted before it is parsed.

A parser keeps everybody else waiting until it is done: it is one call that holds the interpreter.
Text and numbers it reads fast; millions of objects take it seconds, with the collector of garbage
looking at each of them. So their number is bounded, and counting goes in short pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import RequestError
from headrace.sampling_params import MAX_BIASES

MAX_CONTAINERS = 1 << 16
MAX_NAMES = MAX_BIASES + (1 << 10)
"""Those of the most biases that one request may have, and of everything else."""
MAX_VALUES = 1 << 20
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Structure:
    """What stands outside of strings, at most.

    Attributes:
        num_containers: Objects and lists.
        num_names: Names in objects.
        num_values: Values in lists, and names.
    """

    num_containers: int
    num_names: int
    num_values: int

    def check(self) -> None:
        """Refuse what would take long to parse.

        Raises:
            RequestError: Of one kind there are too many.
        """
        for number, limit, what in (
            (self.num_containers, MAX_CONTAINERS, "objects and lists"),
            (self.num_names, MAX_NAMES, "names in objects"),
            (self.num_values, MAX_VALUES, "values"),
        ):
            if number > limit:
                raise RequestError(
                    f"the body has {number} {what} but at most {limit} are allowed; "
                    "send several requests"
                )


def check_structure(data: bytes) -> None:
    """Refuse a body that would take long to parse; whether it is JSON is not looked at.

    Raises:
        RequestError: It has too many objects, lists, names or values.
    """
    marks = _count([data])
    try:
        # Those in strings are counted too: of most bodies nothing more need be known.
        marks.check()
    except RequestError:
        _count(_outside_of_strings(data)).check()


def _count(parts: list[bytes]) -> Structure:
    def number(mark: bytes) -> int:
        return sum(part.count(mark) for part in parts)

    return Structure(
        num_containers=number(b"{") + number(b"["), num_names=number(b":"),
        num_values=number(b",") + 1,
    )


def _outside_of_strings(data: bytes) -> list[bytes]:
    """What is left of each piece of the data without its strings."""
    # Backslashes stand in strings alone; without the escaped ones, quotes begin and end strings.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    left = []
    is_inside = False
    for begin in range(0, len(plain), _PIECE_BYTES):
        parts = plain[begin : begin + _PIECE_BYTES].split(b'"')
        left.append(b"".join(parts[is_inside::2]))
        is_inside ^= len(parts) % 2 == 0
    return left
