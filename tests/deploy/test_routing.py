"""Who gets a request: what replicas hold, how busy they are, what was sent there lately."""

from __future__ import annotations

import pytest

from headrace.deploy.routing import (
    Candidate,
    Either,
    RecentRoutes,
    num_held,
    pack_keys,
    rank,
    unpack_keys,
)

KEYS = [bytes([place]) * 8 for place in range(1, 5)]


def candidate(
    name: str, *, load: int = 0, held: int = 0, is_avoided: bool = False
) -> Candidate:
    return Candidate(
        name=name, load=load, held=frozenset(KEYS[held - 1 : held]), is_avoided=is_avoided
    )


def test_the_longest_held_prefix_wins_over_a_lower_load() -> None:
    candidates = [candidate("a"), candidate("b", load=3, held=2), candidate("c", held=1)]
    assert rank(KEYS, candidates, max_extra_load=4) == ["b", "c", "a"]


def test_a_holder_is_passed_over_once_it_is_too_busy() -> None:
    at_bound = [candidate("a", load=1), candidate("b", load=5, held=4)]
    beyond = [candidate("a", load=1), candidate("b", load=6, held=4)]
    assert rank(KEYS, at_bound, max_extra_load=4) == ["b", "a"]
    assert rank(KEYS, beyond, max_extra_load=4) == ["a", "b"]


def test_load_decides_between_replicas_that_hold_the_same() -> None:
    candidates = [candidate("a", load=2, held=3), candidate("b", load=1, held=3)]
    assert rank(KEYS, candidates, max_extra_load=4) == ["b", "a"]


def test_a_replica_that_failed_comes_last_and_its_load_sets_no_bound() -> None:
    candidates = [
        candidate("a", held=4, is_avoided=True), candidate("b", load=9), candidate("c", load=12),
    ]
    assert rank(KEYS, candidates, max_extra_load=4)[-1] == "a"
    held = [*candidates[:2], candidate("c", load=12, held=1)]
    assert rank(KEYS, held, max_extra_load=4) == ["c", "b", "a"]


def test_the_only_replica_is_asked_though_it_failed() -> None:
    assert rank(KEYS, [candidate("a", is_avoided=True)], max_extra_load=4) == ["a"]


def test_new_prefixes_spread_over_equal_replicas_the_same_way_in_every_router() -> None:
    names = ["a", "b", "c"]
    firsts = []
    for place in range(60):
        key = place.to_bytes(8, "little")
        orders = [
            rank([key], [candidate(name) for name in order], max_extra_load=4)
            for order in (names, names[::-1])
        ]
        assert orders[0] == orders[1]
        firsts.append(orders[0][0])
    assert min(firsts.count(name) for name in names) > 8


def test_a_state_at_the_end_of_a_prefix_is_enough() -> None:
    assert num_held(KEYS, {KEYS[2]}) == 3
    assert num_held(KEYS, set()) == 0
    assert num_held([], {KEYS[2]}) == 0


def test_packed_keys_are_cut_and_found_again() -> None:
    full = [bytes([place]) * 16 for place in range(1, 5)]
    assert unpack_keys(pack_keys(full)) == KEYS
    assert unpack_keys(b"") == []


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_route_counts_for_a_while() -> None:
    clock = Clock()
    recent = RecentRoutes(lifetime_s=5, max_keys=10, clock=clock)
    recent.note("a", KEYS[:1])
    clock.now = 4
    recent.note("a", KEYS[1:2])
    assert [key in recent.held("a") for key in KEYS[:2]] == [True, True]
    assert KEYS[0] not in recent.held("b")
    clock.now = 6
    assert [key in recent.held("a") for key in KEYS[:2]] == [False, True]


def test_routes_are_bounded_and_go_with_their_replica() -> None:
    recent = RecentRoutes(lifetime_s=5, max_keys=2, clock=Clock())
    recent.note("a", KEYS[:3])
    assert [key in recent.held("a") for key in KEYS[:3]] == [False, True, True]
    recent.keep_only({"b"})
    assert KEYS[2] not in recent.held("a")


@pytest.mark.parametrize("place", [0, 1])
def test_either_container_will_do(place: int) -> None:
    both = Either({KEYS[0]}, {KEYS[1]})
    assert KEYS[place] in both
    assert KEYS[2] not in both
