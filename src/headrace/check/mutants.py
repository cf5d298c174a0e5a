"""The registry of mutants: faults put back on purpose, to show that the checker sees them.

A mutant is killed when the checker reports it and names the memory and both sites. It counts only
if two more things hold: its correct twin, which takes the same detour, stays clean; and with checks
off at least one schedule or order shows a wrong value, so the fault is real.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MutantClass = Literal["K", "H", "R", "V", "C"]
"""Kernel detector, happens-before, extra rule, value oracle, canary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of one mutant.

    Attributes:
        killed: The run was reported, naming the mutated memory and both sites.
        kind: Kind of the deciding report; "" if none.
        site_a, site_b: Both accesses, "path:line in function".
        seed: Seed that makes the run again.
        twin_clean: The correct twin gave no report and no wrong value.
        effect_shown: With checks off, some schedule or order gave a wrong value.
        report: The deciding report in full, for people.
    """

    killed: bool
    kind: str
    site_a: str
    site_b: str
    seed: int
    twin_clean: bool
    effect_shown: bool
    report: str = ""

    @property
    def counts(self) -> bool:
        """Killed, with a clean twin and a visible effect."""
        return self.killed and self.twin_clean and self.effect_shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault.

    Attributes:
        name: Unique, in words with dashes.
        letter: Which part of the checker is to see it.
        run: Runs the mutant, its twin and the schedules without checks, all from one seed.
        summary: One sentence.
    """

    name: str
    letter: MutantClass
    run: Callable[[int], Outcome]
    summary: str = ""


_registry: dict[str, Mutant] = {}


def register(mutant: Mutant) -> Mutant:
    """Add a mutant.

    Raises:
        ValueError: The name is taken.
    """
    if mutant.name in _registry:
        raise ValueError(f"mutant {mutant.name!r} is registered already; names are unique")
    _registry[mutant.name] = mutant
    return mutant


def registered() -> Sequence[Mutant]:
    """All mutants, in the order of their names."""
    return [_registry[name] for name in sorted(_registry)]
