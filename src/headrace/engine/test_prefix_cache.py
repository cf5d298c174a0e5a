"""Joint hits, their reasons, and keys that name exactly one prefix."""

from __future__ import annotations

import random
import secrets

import pytest

from headrace.engine.block_pool import BlockPool
from headrace.engine.prefix_cache import (
    PrefixCache,
    chain_keys,
    last_reusable_boundary,
    root_key,
)

P, UNIT = 4, 8


class Pools:
    """A cache of one KV pool and two state groups, and a way to publish prefixes in it."""

    def __init__(self, *, is_bitwise: bool = True, num_blocks: int = 60) -> None:
        self.kv = BlockPool("kv", num_blocks)
        self.states = (BlockPool("state.0", num_blocks), BlockPool("state.1", num_blocks))
        self.cache = PrefixCache(
            kv_pool=self.kv,
            state_pools=self.states,
            block_size=P,
            unit=UNIT,
            is_enabled=True,
            is_bitwise=is_bitwise,
        )

    def keys(self, tokens: list[int], salt: str | None = None) -> list[bytes]:
        return chain_keys(root_key(salt), tokens, P)

    def put_kv(self, tokens: list[int], *, is_generated: bool = False) -> None:
        for key in self.keys(tokens):
            self.put(self.kv, key, is_generated=is_generated)

    def put_state(self, tokens: list[int], groups: tuple[int, ...] = (0, 1), *,
                  is_generated: bool = False) -> None:
        for group in groups:
            self.put(self.states[group], self.keys(tokens)[-1], is_generated=is_generated)

    def put(self, pool: BlockPool, key: bytes, *, is_generated: bool) -> None:
        (block,) = pool.allocate(1) or []
        pool.publish(block, key, is_generated=is_generated)
        pool.free([block])


TOKENS = list(range(100, 140))


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 16, 17, 32, 33, 48, 49])
def test_b09_the_last_reusable_boundary_leaves_a_token_and_loses_no_more_than_that(
    num_tokens: int,
) -> None:
    boundary = last_reusable_boundary(num_tokens, UNIT)
    assert boundary == (num_tokens - 1) // UNIT * UNIT
    assert boundary < num_tokens
    assert num_tokens - boundary <= UNIT


def test_b09_a_look_ahead_of_a_unit_costs_at_most_one_unit() -> None:
    for num_tokens in range(1, 80):
        for lookahead in range(UNIT + 1):
            least = last_reusable_boundary(num_tokens, UNIT) - UNIT
            assert last_reusable_boundary(num_tokens, UNIT, lookahead) >= least


def test_a_hit_is_the_longest_prefix_that_every_group_has() -> None:
    pools = Pools()
    pools.put_kv(TOKENS[:32])
    pools.put_state(TOKENS[:8])
    pools.put_state(TOKENS[:16])
    pools.put_state(TOKENS[:24], (0,))
    match = pools.cache.match(pools.keys(TOKENS), len(TOKENS))
    assert match.num_tokens == 16
    assert len(match.kv_blocks) == 16 // P
    assert len(match.state_blocks) == 2
    assert match.junction == 32, "attention matched further: a checkpoint there would help"


def test_b07_attention_alone_is_no_hit() -> None:
    pools = Pools()
    pools.put_kv(TOKENS[:32])
    match = pools.cache.match(pools.keys(TOKENS), len(TOKENS))
    assert (match.num_tokens, match.kv_blocks, match.state_blocks) == (0, [], [])
    assert match.missed == {"last_token": 1, "below_unit": 7, "no_checkpoint": 32}


def test_states_alone_are_no_hit() -> None:
    pools = Pools()
    pools.put_kv(TOKENS[:12])
    pools.put_state(TOKENS[:16])
    assert pools.cache.match(pools.keys(TOKENS), len(TOKENS)).num_tokens == 0


def test_generated_blocks_serve_within_tolerance_and_never_bit_for_bit() -> None:
    for is_bitwise, hit in ((True, 0), (False, 16)):
        pools = Pools(is_bitwise=is_bitwise)
        pools.put_kv(TOKENS[:16])
        pools.put_state(TOKENS[:16], is_generated=True)
        match = pools.cache.match(pools.keys(TOKENS[:20]), 20)
        assert match.num_tokens == hit
        assert ("generated_checkpoint" in match.missed) is is_bitwise
        pools = Pools(is_bitwise=is_bitwise)
        pools.put_kv(TOKENS[:16], is_generated=True)
        pools.put_state(TOKENS[:16])
        assert pools.cache.match(pools.keys(TOKENS[:20]), 20).num_tokens == hit


def test_each_missed_token_has_one_reason() -> None:
    def reason(name: str, count: int) -> dict[str, int]:
        return {"last_token": 1, name: count}

    pools = Pools()
    tokens = TOKENS[:17]
    keys = pools.keys(tokens)
    cache = pools.cache
    assert cache.match(keys, 17).missed == reason("no_checkpoint", 16)
    assert cache.match(keys, 17, pending=[keys[3]]).missed == reason("in_flight", 16)
    assert cache.match(keys, 17, wants_prompt_logprobs=True).missed == reason("prompt_logprobs", 16)
    assert cache.match(keys[:0], 3).missed == reason("below_unit", 2)
    assert cache.match([], 1).missed == {"last_token": 1}
    pools.put_kv(tokens[:16])
    pools.put_state(tokens[:16])
    salted = pools.keys(tokens, "secret")
    assert cache.match(salted, 17, unsalted_keys=keys).missed == reason("salt", 16)
    assert cache.match(keys, 17).missed == {"last_token": 1}
    for pool in (pools.kv, *pools.states):
        taken = pool.allocate(pool.num_available) or []
        pool.free(taken)
    assert cache.match(keys, 17).missed == reason("evicted", 16)
    cache.clear()
    cache.note_generated(keys[3])
    assert cache.match(keys, 17).missed == reason("generated_checkpoint", 16)
    off = PrefixCache(kv_pool=None, state_pools=(), block_size=P, unit=UNIT, is_enabled=False,
                      is_bitwise=True)
    assert off.match([], 17).missed == reason("disabled", 16)


def test_b21_pinned_hits_survive_an_allocation_of_everything_else() -> None:
    pools = Pools(num_blocks=7)
    pools.put_kv(TOKENS[:16])
    pools.put_state(TOKENS[:16])
    match = pools.cache.match(pools.keys(TOKENS[:24]), 24)
    assert match.num_tokens == 16
    pools.cache.pin(match)
    taken = pools.kv.allocate(pools.kv.num_available) or []
    assert not set(taken) & set(match.kv_blocks)
    pools.kv.check(dict.fromkeys([*taken, *match.kv_blocks], 1))
    assert pools.cache.match(pools.keys(TOKENS[:24]), 24).num_tokens == 16
    pools.cache.unpin(match)
    pools.kv.free(taken)
    pools.kv.check({})


def test_keys_differ_in_every_token_salt_and_place() -> None:
    keys = {root_key(None), root_key(""), root_key("a")}
    assert len(keys) == 3
    base = chain_keys(root_key(None), TOKENS[:8], P)
    for place in range(8):
        changed = list(TOKENS[:8])
        changed[place] += 1
        other = chain_keys(root_key(None), changed, P)
        assert other[1] != base[1]
        assert (other[0] == base[0]) is (place >= P)
    swapped = chain_keys(root_key(None), TOKENS[4:8] + TOKENS[:4], P)
    assert not set(swapped) & set(base)


def test_keys_continue_from_any_block() -> None:
    whole = chain_keys(root_key("x"), TOKENS, P)
    first = chain_keys(root_key("x"), TOKENS[:12], P)
    assert whole == first + chain_keys(first[-1], TOKENS[12:], P)


def test_b20_random_walks_agree_with_a_model_of_exact_prefixes() -> None:
    """10,000 publications, evictions and lookups against "prefix -> is it there"."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    pools = Pools(num_blocks=14)
    cache = pools.cache
    holds: dict[tuple[int, int], tuple[int, ...]] = {}
    everything = (pools.kv, *pools.states)
    reached = 0
    for _ in range(10_000):
        tokens = [rng.randrange(2) if i % P == 0 else 0 for i in range(rng.randint(1, 33))]
        keys = pools.keys(tokens)
        match = cache.match(keys, len(tokens))
        assert sum(match.missed.values()) + match.num_tokens == len(tokens)
        cache.pin(match)
        n = match.num_tokens
        reached += n > 0
        for index, block in enumerate(match.kv_blocks):
            assert holds[0, block] == tuple(tokens[: (index + 1) * P])
        for group, block in enumerate(match.state_blocks):
            assert holds[1 + group, block] == tuple(tokens[:n])
        owned: list[tuple[int, list[int]]] = [(0, list(match.kv_blocks))]
        owned += [(1 + g, [block]) for g, block in enumerate(match.state_blocks)]
        boundary = last_reusable_boundary(len(tokens), UNIT)
        fresh = [(0, (index + 1) * P) for index in range(len(match.kv_blocks), len(keys))]
        fresh += [(1 + group, boundary) for group in range(2) if boundary > n]
        for number, end in fresh:
            if (got := everything[number].allocate(1)) is not None:
                holds[number, got[0]] = tuple(tokens[:end])
                everything[number].publish(got[0], keys[end // P - 1], is_generated=False)
                owned.append((number, got))
        for number, blocks in owned:
            everything[number].free(blocks)
        for pool in everything:
            pool.check({})
        if rng.random() < 0.01:
            cache.clear()
    assert reached > 100, "the walk must hit often to mean anything"


def test_a_prefix_is_resumable_where_attention_and_every_group_have_it() -> None:
    pools = Pools()
    pools.put_kv(TOKENS[:24])
    pools.put_state(TOKENS[:8])
    pools.put_state(TOKENS[:16], groups=(1,))
    pools.put_state(TOKENS[:24])
    pools.put_state(TOKENS[:32])  # Without its KV.
    keys = pools.keys(TOKENS)

    assert pools.cache.resumable_keys(10) == [keys[5], keys[1]]  # The newest first.
    assert pools.cache.resumable_keys(1) == [keys[5]]
    pools.cache.is_enabled = False
    assert pools.cache.resumable_keys(10) == []


@pytest.mark.parametrize("is_bitwise", [True, False])
def test_generated_prefixes_are_resumable_only_where_bits_are_not_promised(
    *, is_bitwise: bool
) -> None:
    pools = Pools(is_bitwise=is_bitwise)
    pools.put_kv(TOKENS[:8], is_generated=True)
    pools.put_state(TOKENS[:8], is_generated=True)

    assert len(pools.cache.resumable_keys(10)) == (0 if is_bitwise else 1)
