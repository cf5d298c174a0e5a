"""Which replica gets a request: the one that holds most of its prompt, unless it is too busy.

Keys are those of the prefix cache's chain, cut to 8 bytes, at boundaries where states are kept. Two
prompts with the same 8 bytes would cost a miss, never a wrong token: a replica looks its own cache
up with the whole key.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

KEY_BYTES = 8


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Put the cut keys one behind the other."""
    return b"".join(key[:KEY_BYTES] for key in keys)


def unpack_keys(packed: bytes) -> list[bytes]:
    """Undo `pack_keys`."""
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica as the router knows it.

    Attributes:
        name: Its name.
        load: Requests in flight there.
        held: Packed keys of the prefixes that it holds.
        is_avoided: It failed this request already.
    """

    name: str
    load: int
    held: Container[bytes]
    is_avoided: bool = False


def rank(keys: Sequence[bytes], candidates: Iterable[Candidate], max_extra_load: int) -> list[str]:
    """Order replicas, the best one first.

    Args:
        keys: Of the prompt's boundaries, the shortest prefix first.
        candidates: All replicas.
        max_extra_load: How much more load than the least loaded one a replica may have to be
            chosen for what it holds; beyond it load alone counts.

    Returns:
        The names of all candidates.
    """
    ready = [one for one in candidates if not one.is_avoided]
    avoided = [one for one in candidates if one.is_avoided]
    least = min((one.load for one in ready), default=0)
    near = [one for one in ready if one.load - least <= max_extra_load]
    far = [one for one in ready if one.load - least > max_extra_load]
    near.sort(key=lambda one: (-num_held(keys, one.held), one.load, _turn(keys, one.name)))
    return [one.name for group in (near, _by_load(far), _by_load(avoided)) for one in group]


def num_held(keys: Sequence[bytes], held: Container[bytes]) -> int:
    """Boundaries of the longest held prefix; shorter ones need not be held with it."""
    return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in held), 0)


def _by_load(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda one: one.load)


def _turn(keys: Sequence[bytes], name: str) -> bytes:
    """Where all else is equal: each prefix has its own order of replicas, with every router."""
    return blake2b((keys[0] if keys else b"") + name.encode(), digest_size=8).digest()


class RecentRoutes:
    """Prefixes that replicas are about to hold: sent there, not yet in a summary.

    Without it a burst with one long prompt would be spread before its first answer is there.

    Args:
        lifetime_s: How long a route counts; after it the summary has it, or it came to nothing.
        max_keys: Most keys of one replica.
        clock: Seconds.
    """

    def __init__(
        self, *, lifetime_s: float, max_keys: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lifetime_s = lifetime_s
        self._max_keys = max_keys
        self._clock = clock
        self._routes: dict[str, OrderedDict[bytes, float]] = {}

    def note(self, name: str, keys: Iterable[bytes]) -> None:
        """A prompt with these keys was sent to a replica."""
        routes = self._routes.setdefault(name, OrderedDict())
        now = self._clock()
        for key in keys:
            routes[key] = now
            routes.move_to_end(key)
        while len(routes) > self._max_keys:
            routes.popitem(last=False)

    def held(self, name: str) -> Container[bytes]:
        """Keys that were sent to a replica a short while ago."""
        routes = self._routes.get(name)
        if routes is None:
            return ()
        oldest = self._clock() - self._lifetime_s
        while routes and next(iter(routes.values())) < oldest:
            routes.popitem(last=False)
        return routes

    def keep_only(self, names: Container[str]) -> None:
        """Forget replicas that are gone."""
        for name in [one for one in self._routes if one not in names]:
            del self._routes[name]


@dataclass(frozen=True, slots=True)
class Either:
    """What is in one of two containers."""

    first: Container[bytes]
    second: Container[bytes]

    def __contains__(self, key: object) -> bool:
        return key in self.first or key in self.second
