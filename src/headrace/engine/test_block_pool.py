"""Blocks have one place each, keys have one block each, and late releases wait."""

from __future__ import annotations

import random
import secrets

import pytest

from headrace.engine.block_pool import NULL_BLOCK, BlockPool, RetireQueue


def test_allocation_never_hands_out_the_null_block() -> None:
    pool = BlockPool("kv", 5)
    assert sorted(pool.allocate(4) or []) == [1, 2, 3, 4]
    assert pool.allocate(1) is None


def test_a_request_for_too_many_blocks_takes_none() -> None:
    pool = BlockPool("kv", 4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3


def test_released_published_blocks_stay_until_an_allocation_evicts_the_oldest() -> None:
    pool = BlockPool("kv", 4)
    blocks = pool.allocate(3) or []
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key, is_generated=False)
    pool.free([blocks[1], blocks[0], blocks[2]])
    assert pool.num_cached == 3
    pool.touch(blocks[1])
    assert pool.allocate(1) == [blocks[0]]
    assert pool.lookup(b"a") is None
    assert pool.was_any_evicted([b"a"])
    assert pool.lookup(b"b") is not None
    assert not pool.was_any_evicted([b"b"])


def put(pool: BlockPool, key: bytes, *, is_rung: bool = False) -> int:
    """Publish a block that nobody owns."""
    (block,) = pool.allocate(1) or []
    if is_rung:
        pool.publish_rung(block, key)
    else:
        pool.publish(block, key, is_generated=False)
    pool.free([block])
    return block


def test_rungs_are_evicted_before_all_others_whatever_their_age() -> None:
    pool = BlockPool("state", 6)
    old = [put(pool, b"old"), put(pool, b"older")]
    rungs = [put(pool, b"r0", is_rung=True), put(pool, b"r1", is_rung=True)]
    put(pool, b"new")
    assert (pool.num_rungs, pool.num_available, pool.num_cached) == (2, 5, 5)
    assert pool.allocate(3) == [*rungs, old[0]]
    assert pool.was_any_evicted([b"r0"])
    pool.check(dict.fromkeys([*rungs, old[0]], 1))


def test_an_eighth_of_what_may_be_evicted_may_be_rungs() -> None:
    pool = BlockPool("state", 20)
    others = [put(pool, b"%d" % number) for number in range(16)]
    rungs = [put(pool, b"r%d" % number, is_rung=True) for number in range(3)]
    # 3 of 19 are more than that, 2 of 18, of 17 and of 16 are not, 2 of 15 are.
    assert pool.allocate(5) == [rungs[0], *others[:3], rungs[1]]


def test_rungs_of_new_prompts_get_their_share_of_a_pool_full_of_old_ones() -> None:
    pool = BlockPool("state", 19)
    others = [put(pool, b"%d" % number) for number in range(18)]
    assert pool.room_for_rungs(0) == 2
    assert pool.room_for_rungs(17) == 1, "what others may want comes first"
    assert pool.room_for_rungs(18) == 0
    assert pool.allocate_for_rungs(2) == others[:2]
    for block, key in zip(others[:2], (b"r0", b"r1"), strict=True):
        pool.publish_rung(block, key)
    assert pool.room_for_rungs(0) == 0, "none more while those are written"
    pool.free(others[:2])
    assert pool.room_for_rungs(0) == 2
    assert pool.allocate_for_rungs(2) == others[:2], "the oldest rungs, and no others"


def test_rungs_take_free_blocks_and_those_of_older_rungs_alone() -> None:
    pool = BlockPool("state", 6)
    others = [put(pool, b"a"), put(pool, b"b")]
    rung = put(pool, b"r", is_rung=True)
    assert pool.room_for_rungs(0) == 3
    assert pool.room_for_rungs(2) == 1
    blocks = pool.allocate_for_rungs(3)
    assert blocks[-1] == rung
    assert not set(blocks) & set(others)
    with pytest.raises(AssertionError, match="nothing to evict"):
        pool.allocate_for_rungs(1)


def test_a_rung_that_is_asked_for_is_one_no_longer() -> None:
    pool = BlockPool("state", 6)
    first, second = put(pool, b"r0", is_rung=True), put(pool, b"r1", is_rung=True)
    pool.promote(b"r1")
    pool.promote(b"unknown")
    assert pool.num_rungs == 1
    # Whoever computes the same state again asks for it too; a second rung changes nothing.
    (again,) = pool.allocate(1) or []
    pool.publish_rung(again, b"r0")
    assert pool.num_rungs == 1
    pool.publish(again, b"r0", is_generated=False)
    assert pool.num_rungs == 0
    assert pool.lookup(b"r0") is not None
    assert not pool.is_published(again)
    pool.free([again])
    pool.check({})
    assert {first, second} == set(pool._evictable)


def test_a_rung_stays_one_while_it_is_used_and_held() -> None:
    pool = BlockPool("state", 5)
    rung = put(pool, b"r", is_rung=True)
    pool.fork(rung)
    pool.protect(b"r")
    pool.free([rung])
    assert (pool.num_rungs, pool.num_kept, pool.room_for_rungs(0)) == (0, 1, 3)
    pool.unprotect(b"r")
    assert (pool.num_rungs, pool.num_kept) == (1, 0)
    pool.protect(b"r")
    assert (pool.num_rungs, pool.num_kept) == (0, 1)
    pool.unprotect(b"r")
    pool.unpublish(rung)
    pool.check({})
    assert pool.num_free == 4


def test_a_cached_block_is_revived_with_its_content() -> None:
    pool = BlockPool("kv", 3)
    (block,) = pool.allocate(1) or []
    pool.publish(block, b"a", is_generated=False)
    pool.free([block])
    pool.fork(block)
    assert (pool.refs(block), pool.num_cached) == (1, 0)
    assert pool.allocate(2) is None


def test_a_block_freed_twice_is_caught() -> None:
    pool = BlockPool("kv", 3)
    (block,) = pool.allocate(1) or []
    pool.free([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool("kv", 3)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.fork(1)


def test_an_exact_entry_replaces_a_generated_one_and_never_the_reverse() -> None:
    pool = BlockPool("state", 4)
    first, second, third = pool.allocate(3) or []
    pool.publish(first, b"k", is_generated=True)
    pool.publish(second, b"k", is_generated=False)
    entry = pool.lookup(b"k")
    assert entry is not None
    assert (entry.block, entry.is_generated) == (second, False)
    assert not pool.is_published(first)
    pool.publish(third, b"k", is_generated=True)
    assert not pool.is_published(third)
    pool.check({first: 1, second: 1, third: 1})


def test_a_generated_entry_that_is_replaced_while_cached_becomes_free() -> None:
    pool = BlockPool("state", 4)
    first, second = pool.allocate(2) or []
    pool.publish(first, b"k", is_generated=True)
    pool.free([first])
    pool.publish(second, b"k", is_generated=False)
    assert pool.num_cached == 0
    assert pool.num_free == 2
    pool.check({second: 1})


def test_unpublishing_frees_what_nobody_owns_and_only_that() -> None:
    pool = BlockPool("kv", 4)
    owned, cached = pool.allocate(2) or []
    pool.publish(owned, b"a", is_generated=False)
    pool.publish(cached, b"b", is_generated=False)
    pool.free([cached])
    pool.clear_cache()
    assert pool.lookup(b"a") is None
    assert pool.num_free == 2
    pool.check({owned: 1})


def test_the_check_notices_a_lost_block() -> None:
    pool = BlockPool("kv", 3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="has 1 references, 0 owners"):
        pool.check({})


def test_blocks_return_only_when_the_last_step_that_touched_them_has_retired() -> None:
    pool, queue = BlockPool("kv", 3), RetireQueue()
    blocks = pool.allocate(2) or []
    queue.release(pool, blocks, last_step=7, retired=5)
    queue.retire(6)
    assert pool.num_available == 0
    owned: dict[int, int] = {}
    queue.owned(pool, owned)
    assert owned == dict.fromkeys(blocks, 1)
    assert queue.num_waiting(pool) == 2
    queue.retire(7)
    assert pool.num_free == 2
    assert queue.num_waiting(pool) == 0


def test_blocks_of_steps_that_have_retired_return_at_once() -> None:
    pool, queue = BlockPool("kv", 3), RetireQueue()
    queue.release(pool, pool.allocate(1) or [], last_step=5, retired=5)
    assert pool.num_free == 2


def test_b20_random_lives_of_blocks_agree_with_a_dictionary() -> None:
    """B20: a lookup finds a block only if its present content is what the key says."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    pool = BlockPool("kv", 9)
    content: dict[int, bytes] = {}
    owners: list[int] = []
    for operation in range(10_000):
        chance = rng.random()
        if chance < 0.3:
            for block in pool.allocate(rng.randint(1, 3)) or []:
                assert block != NULL_BLOCK
                content[block] = b"%d" % rng.randrange(12)
                owners.append(block)
        elif chance < 0.6 and owners:
            pool.free([owners.pop(rng.randrange(len(owners)))])
        elif chance < 0.85 and owners:
            block = rng.choice(owners)
            # Private blocks may be filled again as long as no lookup finds them.
            if pool.refs(block) == 1 and not pool.is_published(block):
                content[block] = b"%d" % rng.randrange(12)
            pool.publish(block, content[block], is_generated=rng.random() < 0.3)
        elif chance < 0.95:
            key = b"%d" % rng.randrange(12)
            entry = pool.lookup(key)
            if entry is not None:
                assert content[entry.block] == key, f"{operation=}: {entry} holds other tokens"
                pool.fork(entry.block)
                owners.append(entry.block)
        elif chance < 0.99:
            pool.unpublish(rng.randrange(1, pool.num_blocks))
        else:
            pool.clear_cache()
        pool.check({block: owners.count(block) for block in owners})
