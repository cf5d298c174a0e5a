"""Blocks of one pool: who owns them, which are cached, which may be taken.

KV blocks and state blocks have the same life, so one class serves both; each attention cache and
each state group has a pool of its own, and no size is derived from another pool's size.

A block is in exactly one place:

    free        no content worth keeping
    owned       referenced by one or more sequences (and perhaps published under a key)
    cached      referenced by none but published: a lookup may revive it, an allocation may evict it
    rung        like cached, but left before anybody had asked for it: evicted before those
    kept        like cached, but under a protected key: no allocation may evict it
    retiring    released while a step in flight may still touch it (kept by `RetireQueue`)

Block 0 is the null block: never allocated, never written.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NULL_BLOCK = 0
_GHOSTS = 65536
_RUNG_SHARE = 8
"""Of this many blocks that may be evicted, one may be a rung at the cost of the others.

Not none: in a pool that is full of old prompts, the newest ones would have no rungs at all.
"""


class CacheEntry(NamedTuple):
    """A published block.

    Attributes:
        block: Its id.
        is_generated: Some of its content was computed by the step path (generated tokens), so it
            serves a later prompt only within tolerance, never bit for bit.
    """

    block: int
    is_generated: bool


class BlockPool:
    """A pool of `num_blocks` blocks, the null block included.

    Args:
        name: For messages.
        num_blocks: Blocks in the pool, at least 2.
    """

    def __init__(self, name: str, num_blocks: int) -> None:
        assert num_blocks > 1, f"{name}: {num_blocks=}; the null block and one more are needed"
        self.name = name
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(1, num_blocks))
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._entries: dict[bytes, CacheEntry] = {}
        # Made once: a prompt publishes dozens at a time.
        self._exact = [CacheEntry(block, is_generated=False) for block in range(num_blocks)]
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._rungs: OrderedDict[int, None] = OrderedDict()
        self._rung_keys: set[bytes] = set()
        self._protected: dict[bytes, int] = {}
        self._kept: set[int] = set()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self.num_evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks an allocation could get: free ones and evictable cached ones."""
        return len(self._free) + len(self._evictable) + len(self._rungs)

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Published blocks that no sequence references."""
        return len(self._evictable) + len(self._rungs) + len(self._kept)

    @property
    def num_rungs(self) -> int:
        """The rungs among them."""
        return len(self._rungs)

    @property
    def num_kept(self) -> int:
        """Those among them that no allocation may evict."""
        return len(self._kept)

    @property
    def num_protected(self) -> int:
        """Protected keys: the most blocks that allocations may not evict."""
        return len(self._protected)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    def refs(self, block: int) -> int:
        """Owners of a block."""
        return self._refs[block]

    def is_published(self, block: int) -> bool:
        """Whether a key leads to the block."""
        return self._keys[block] is not None

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, evicting cached ones as needed.

        Rungs go first, down to their share of what may be evicted; of each kind the least recently
        used goes first.

        Returns:
            The ids, or None (and nothing taken) if there are not enough.
        """
        if count > self.num_available:
            return None
        if not self._rungs:
            return self._take_many(count)
        blocks: list[int] = []
        for _ in range(count):
            order = self._evictable
            if self._rungs and (not order or len(self._rung_keys) > self._rung_quota):
                order = self._rungs
            blocks.append(self._take(order))
        return blocks

    def allocate_for_rungs(self, count: int) -> list[int]:
        """Take `count` blocks for rungs, evicting older ones; others only up to their share.

        Args:
            count: At most `room_for_rungs`.
        """
        blocks: list[int] = []
        for place in range(count):
            is_below = len(self._rung_keys) + place < self._rung_quota
            blocks.append(self._take(self._evictable if is_below else self._rungs))
        return blocks

    def room_for_rungs(self, reserve: int) -> int:
        """Blocks that rungs may take: not from what others may want, but for their share.

        Args:
            reserve: Blocks that others may want before the rungs are written and can make room.
        """
        num_in_use = len(self._rung_keys) - len(self._rungs)
        spare = len(self._free) + len(self._rungs) - reserve
        return max(0, min(max(spare, self._rung_quota - num_in_use), self.num_available - reserve))

    def fork(self, *blocks: int) -> None:
        """Add an owner to each block; revives cached ones."""
        refs = self._refs
        for block in blocks:
            assert block != NULL_BLOCK, f"{self.name}: the null block has no owners"
            if refs[block] == 0:
                if block in self._kept:
                    self._kept.remove(block)
                elif block in self._rungs:
                    del self._rungs[block]
                else:
                    assert block in self._evictable, f"{self.name}: free {block=} cannot be shared"
                    del self._evictable[block]
            refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Give up one ownership of each block; the last owner's block is cached or free again."""
        for block in blocks:
            refs = self._refs[block] - 1
            assert refs >= 0, f"{self.name}: {block=} freed twice"
            self._refs[block] = refs
            if refs == 0:
                self._rest(block)

    def publish(self, block: int, key: bytes, *, is_generated: bool) -> None:
        """Let lookups of `key` find this owned block.

        An entry that exists stays, unless it was generated and this one is not: the content is
        the same tokens, and the exact one serves more requests.
        """
        assert self._refs[block] > 0, f"{self.name}: {block=} published without an owner"
        old = self._entries.get(key)
        if old is not None and (old.block == block or is_generated or not old.is_generated):
            self.promote(key)
            return
        if self._keys[block] is not None:
            if self._keys[block] == key:
                return
            self._forget(block, ghost=False)
        if old is not None:
            self.unpublish(old.block)
        self._keys[block] = key
        self._entries[key] = CacheEntry(block, is_generated) if is_generated else self._exact[block]
        self._ghosts.pop(key, None)

    def publish_rung(self, block: int, key: bytes) -> None:
        """Publish an exact block that nobody has asked for; it makes room before all others.

        Where there is an entry, its rank stays.
        """
        old = self._entries.get(key)
        if old is not None and not old.is_generated:
            return
        self.publish(block, key, is_generated=False)
        if old is None:
            self._rung_keys.add(key)

    def promote(self, key: bytes) -> None:
        """Let the block of this key be a rung no longer: somebody has asked for it."""
        if key not in self._rung_keys:
            return
        self._rung_keys.remove(key)
        block = self._entries[key].block
        if block in self._rungs:
            del self._rungs[block]
            self._evictable[block] = None

    def publish_run(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        """Publish the exact blocks of one prompt; most have no key, nor their keys a block."""
        entries = self._entries
        for block, key in zip(blocks, keys, strict=True):
            if key in entries or self._keys[block] is not None:
                self.publish(block, key, is_generated=False)
                continue
            assert self._refs[block] > 0, f"{self.name}: {block=} published without an owner"
            self._keys[block] = key
            entries[key] = self._exact[block]
            self._ghosts.pop(key, None)

    def lookup(self, key: bytes) -> CacheEntry | None:
        """The published block of a key, without taking it."""
        return self._entries.get(key)

    def newest_keys(self) -> Iterator[bytes]:
        """Keys of published blocks, the one published last first."""
        return reversed(self._entries)

    def lookup_run(self, keys: Iterable[bytes], *, exact_only: bool) -> list[int]:
        """Blocks of the first keys that have one, up to the first that has not.

        Args:
            keys: A chain.
            exact_only: Blocks that generated tokens contributed to count as missing.
        """
        blocks: list[int] = []
        get = self._entries.get
        for key in keys:
            entry = get(key)
            if entry is None or (exact_only and entry.is_generated):
                break
            blocks.append(entry.block)
        return blocks

    def touch(self, block: int) -> None:
        """Mark a cached block as recently used."""
        for order in (self._evictable, self._rungs):
            if block in order:
                order.move_to_end(block)

    def was_any_evicted(self, keys: Iterable[bytes]) -> bool:
        """Whether a block of one of these keys was evicted lately (bounded memory)."""
        return not self._ghosts.keys().isdisjoint(keys)

    def unpublish(self, block: int) -> None:
        """Take the block's key away; a cached block becomes free."""
        if self._keys[block] is None:
            return
        self._forget(block, ghost=False)
        if not self._refs[block]:
            self._evictable.pop(block, None)
            self._rungs.pop(block, None)
            self._kept.discard(block)
            self._free.append(block)

    def is_protected(self, key: bytes) -> bool:
        """Whether the block of this key is spared, now or once there is one."""
        return key in self._protected

    def protect(self, key: bytes) -> None:
        """Spare the block of this key, now and whenever there is one, until as many `unprotect`."""
        self._protected[key] = self._protected.get(key, 0) + 1
        entry = self._entries.get(key)
        if entry is None:
            return
        for order in (self._evictable, self._rungs):
            if entry.block in order:
                del order[entry.block]
                self._kept.add(entry.block)

    def unprotect(self, key: bytes) -> None:
        """Undo one `protect`."""
        count = self._protected.pop(key) - 1
        if count:
            self._protected[key] = count
            return
        entry = self._entries.get(key)
        if entry is not None and entry.block in self._kept:
            self._kept.remove(entry.block)
            self._rest(entry.block)

    def clear_cache(self) -> None:
        """Forget every published block; owned blocks stay owned."""
        for entry in list(self._entries.values()):
            self.unpublish(entry.block)
        self._ghosts.clear()

    def check(self, owned: dict[int, int]) -> None:
        """Assert conservation and single ownership.

        Args:
            owned: Every reference that exists outside the pool, block to count.
        """
        for block in range(1, self.num_blocks):
            assert self._refs[block] == owned.get(block, 0), (
                f"{self.name}: {block=} has {self._refs[block]} references, "
                f"{owned.get(block, 0)} owners"
            )
        free, cached = set(self._free), {*self._evictable, *self._rungs, *self._kept}
        assert len(cached) == self.num_cached, f"{self.name}: a block is cached in two ways"
        for block in cached:
            is_kept = self._keys[block] in self._protected
            assert is_kept == (block in self._kept), f"{self.name}: {block=} {is_kept=}"
            is_rung = not is_kept and self._keys[block] in self._rung_keys
            assert is_rung == (block in self._rungs), f"{self.name}: {block=} {is_rung=}"
        assert self._rung_keys <= self._entries.keys(), f"{self.name}: a rung has no block"
        held = {block for block in range(1, self.num_blocks) if self._refs[block]}
        assert len(free) == len(self._free), f"{self.name}: a block is free twice"
        assert not free & cached, f"{self.name}: blocks {free & cached} are free and cached"
        assert not held & (free | cached), f"{self.name}: a block is held and elsewhere"
        assert len(free) + len(cached) + len(held) == self.num_usable, f"{self.name}: lost blocks"
        for key, entry in self._entries.items():
            assert self._keys[entry.block] == key, f"{self.name}: {entry.block=} has another key"
        assert sum(key is not None for key in self._keys) == len(self._entries)
        assert self._refs[NULL_BLOCK] == 0, f"{self.name}: the null block has an owner"
        assert self._keys[NULL_BLOCK] is None, f"{self.name}: the null block is published"

    @property
    def _rung_quota(self) -> int:
        """Rungs that there may be at the cost of others."""
        return (len(self._rung_keys) + len(self._evictable)) // _RUNG_SHARE

    def _take_many(self, count: int) -> list[int]:
        """Own free blocks, then the first evictable ones."""
        free, refs = self._free, self._refs
        num_free = min(count, len(free))
        blocks = [free.popleft() for _ in range(num_free)]
        if num_free < count:
            blocks.extend(self._evict(count - num_free))
        for block in blocks:
            assert refs[block] == 0, f"{self.name}: {block=} handed out while owned"
            refs[block] = 1
        return blocks

    def _evict(self, count: int) -> list[int]:
        """Empty the first evictable blocks, none of which is a rung."""
        order, keys, entries, ghosts = self._evictable, self._keys, self._entries, self._ghosts
        blocks = [order.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            key = keys[block]
            assert key is not None, f"{self.name}: evictable {block=} has no key"
            keys[block] = None
            del entries[key]
            ghosts[key] = None
        while len(ghosts) > _GHOSTS:
            ghosts.popitem(last=False)
        self.num_evictions += count
        return blocks

    def _take(self, order: OrderedDict[int, None]) -> int:
        """Own a free block, or else the first of `order`, which is evicted."""
        if self._free:
            block = self._free.popleft()
        else:
            assert order, f"{self.name}: there is nothing to evict"
            block, _ = order.popitem(last=False)
            self._forget(block, ghost=True)
            self.num_evictions += 1
        assert self._refs[block] == 0, f"{self.name}: {block=} handed out while owned"
        self._refs[block] = 1
        return block

    def _rest(self, block: int) -> None:
        """Put a block without owners where it belongs."""
        key = self._keys[block]
        if key is None:
            self._free.append(block)
        elif key in self._protected:
            self._kept.add(block)
        elif key in self._rung_keys:
            self._rungs[block] = None
        else:
            self._evictable[block] = None

    def _forget(self, block: int, *, ghost: bool) -> None:
        key = self._keys[block]
        if key is None:
            return
        self._keys[block] = None
        self._rung_keys.discard(key)
        del self._entries[key]
        if ghost:
            self._ghosts[key] = None
            if len(self._ghosts) > _GHOSTS:
                self._ghosts.popitem(last=False)


class RetireQueue:
    """References that were given up while steps in flight may still touch the blocks.

    A block goes back to its pool only when the last step that could touch it has retired, so no
    later owner can meet a late write (align.md, I7).
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, BlockPool, list[int]]] = deque()
        self._counts: Counter[BlockPool] = Counter()

    def release(self, pool: BlockPool, blocks: list[int], *, last_step: int, retired: int) -> None:
        """Give the references up once step `last_step` has retired.

        Args:
            pool: Where they go back to.
            blocks: One entry per reference.
            last_step: Newest step that may touch the blocks.
            retired: Newest step whose results have been read.
        """
        if not blocks:
            return
        if last_step <= retired:
            pool.free(blocks)
        else:
            self._waiting.append((last_step, pool, blocks))
            self._counts[pool] += len(blocks)

    def retire(self, retired: int) -> None:
        """Free what waited for steps up to `retired`."""
        while self._waiting and self._waiting[0][0] <= retired:
            _, pool, blocks = self._waiting.popleft()
            self._counts[pool] -= len(blocks)
            pool.free(blocks)

    def owned(self, pool: BlockPool, into: dict[int, int]) -> None:
        """Count the references held here into `into`."""
        for _, owner, blocks in self._waiting:
            if owner is pool:
                for block in blocks:
                    into[block] = into.get(block, 0) + 1

    def num_waiting(self, pool: BlockPool) -> int:
        """References of a pool that wait here."""
        return self._counts[pool]
