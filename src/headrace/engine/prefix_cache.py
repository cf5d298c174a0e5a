"""Which prefixes are cached: KV blocks and state checkpoints under one chain of hashes.

A KV hit is all blocks of [0, n); a state hit is one block, the state after exactly n tokens, in
every state group. The joint hit is the largest n that all of them cover. Keys name only tokens
that a sequence really has. See docs/architecture.md and decision 0002.

A client may have entries *held* under a name of its choice: eviction spares them until the name is
released. How many there may be is bounded, so that every sequence still finds room.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from collections.abc import Sequence as Seq

    from headrace.engine.block_pool import BlockPool

_DIGEST = 16
_EMPTY = blake2b(digest_size=_DIGEST)
"""Copied for each key: a third faster than making one."""
_REMEMBERED = 65536


def root_key(salt: str | None) -> bytes:
    """Hash that a chain starts from; every extra key is typed and length-delimited."""
    digest = blake2b(b"headrace/1", digest_size=_DIGEST)
    if salt is not None:
        raw = salt.encode()
        digest.update(b"salt" + len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def chain_keys(
    parent: bytes, token_ids: Seq[int] | np.ndarray, block_size: int
) -> list[bytes]:
    """Keys of the full blocks of `token_ids`, chained from `parent`."""
    if isinstance(token_ids, np.ndarray):
        raw = token_ids.astype("<i4").tobytes()
    else:
        # Twice as fast as an array of a list.
        raw = struct.pack(f"<{len(token_ids)}i", *token_ids)
    size = 4 * block_size
    keys: list[bytes] = []
    for start in range(0, len(raw) - size + 1, size):
        digest = _EMPTY.copy()
        digest.update(parent + raw[start : start + size])
        parent = digest.digest()
        keys.append(parent)
    return keys


def last_reusable_boundary(num_tokens: int, unit: int, lookahead: int = 1) -> int:
    """Largest checkpoint that a prompt of this many tokens can resume from.

    At least `lookahead` tokens must be left to compute. The side that writes checkpoints and the
    side that looks them up both use this function.
    """
    return max(0, num_tokens - max(1, lookahead)) // unit * unit


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why entries cannot be held.

    Attributes:
        what: KV or state.
        needed: Blocks that would be held in addition.
        left, limit: Blocks that may be held in addition, and in all.
    """

    what: str
    needed: int
    left: int
    limit: int


@dataclass(slots=True)
class Match:
    """What the cache has for a prompt.

    Attributes:
        num_tokens: Length of the joint hit.
        kv_blocks: KV blocks of [0, num_tokens).
        state_blocks: Per state group, the block with the state after num_tokens tokens; empty for
            a hit of 0.
        junction: Boundary up to which attention alone matched: a checkpoint there would have
            helped. 0 if there is none beyond the hit.
        missed: Reason to number of prompt tokens that must be computed.
    """

    num_tokens: int = 0
    kv_blocks: list[int] = field(default_factory=list)
    state_blocks: list[int] = field(default_factory=list)
    junction: int = 0
    missed: dict[str, int] = field(default_factory=dict)

    def blame_damage(self) -> None:
        """Give the tokens that a longer hit would have covered another reason."""
        others = {"last_token", "below_unit"}
        damaged = sum(count for reason, count in self.missed.items() if reason not in others)
        self.missed = {r: count for r, count in self.missed.items() if r in others}
        if damaged:
            self.missed["damaged"] = damaged


class PrefixCache:
    """Lookups and publications over the KV pool and the state pools.

    Args:
        kv_pool: Attention's pool, or None for a model without attention.
        state_pools: One per state group.
        block_size: Tokens per KV block (P), also the hash unit.
        unit: Tokens per state column (bs), a multiple of P.
        is_enabled: False for `--prefix-cache none`.
        is_bitwise: Skip entries that generated tokens contributed to (exactness level E1).
        lookahead: Tokens a drafter must see again.
        max_held: Most KV blocks, and most blocks of each state group, that may be held.
    """

    def __init__(
        self,
        *,
        kv_pool: BlockPool | None,
        state_pools: tuple[BlockPool, ...],
        block_size: int,
        unit: int,
        is_enabled: bool,
        is_bitwise: bool,
        lookahead: int = 1,
        max_held: tuple[int, int] = (0, 0),
    ) -> None:
        self.kv_pool = kv_pool
        self.state_pools = state_pools
        self.block_size = block_size
        self.unit = unit
        self.is_enabled = is_enabled
        self.is_bitwise = is_bitwise
        self.lookahead = lookahead
        self.max_held = max_held
        self._held: dict[str, tuple[set[bytes], set[bytes]]] = {}
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.missed: dict[str, int] = {}
        self._generated: OrderedDict[bytes, None] = OrderedDict()

    def note_generated(self, key: bytes) -> None:
        """Remember that generation passed this boundary, so that a miss there has its reason."""
        self._generated[key] = None
        if len(self._generated) > _REMEMBERED:
            self._generated.popitem(last=False)

    def match(
        self,
        keys: list[bytes],
        num_prompt_tokens: int,
        *,
        unsalted_keys: list[bytes] | None = None,
        pending: Collection[bytes] = (),
        wants_prompt_logprobs: bool = False,
    ) -> Match:
        """Find the longest joint hit; takes nothing, so the caller pins at once.

        Args:
            keys: Chain keys of the prompt's full KV blocks.
            num_prompt_tokens: Tokens of the prompt (or of prompt and output after a preemption).
            unsalted_keys: The same tokens' keys without the salt, to name the reason "salt".
            pending: Keys of checkpoints that running sequences are computing now.
            wants_prompt_logprobs: The request needs logits of every prompt token.
        """
        match = Match()
        limit = last_reusable_boundary(num_prompt_tokens, self.unit, self.lookahead)
        rest = num_prompt_tokens
        if not self.is_enabled or wants_prompt_logprobs:
            reason = "disabled" if not self.is_enabled else "prompt_logprobs"
            match.missed = {"last_token": 1, reason: rest - 1} if rest > 1 else {"last_token": 1}
            return match
        kv_blocks = self._kv_run(keys, limit)
        covered = limit if kv_blocks is None else len(kv_blocks) * self.block_size
        boundary = covered // self.unit * self.unit
        blocks: list[int] | None = None
        while boundary > 0:
            blocks = self._states_at(keys[boundary // self.block_size - 1])
            if blocks is not None:
                break
            boundary -= self.unit
        match.num_tokens = boundary
        if boundary:
            match.state_blocks = blocks or []
            if kv_blocks is not None:
                match.kv_blocks = kv_blocks[: boundary // self.block_size]
        match.junction = covered // self.unit * self.unit if covered > boundary else 0
        if match.junction <= boundary:
            match.junction = 0
        match.missed = self._reasons(
            keys, boundary, limit, num_prompt_tokens,
            unsalted_keys=unsalted_keys, pending=pending,
        )
        return match

    def extended(
        self,
        match: Match,
        num_tokens: int,
        keys: list[bytes],
        num_prompt_tokens: int,
        *,
        unsalted_keys: list[bytes] | None,
        pending: Collection[bytes],
    ) -> Match:
        """What a match becomes when the state store adds to it; takes nothing either.

        Args:
            match: What the cache has.
            num_tokens: Length of the prefix with what the store has; longer than the match.
            keys: As for `match`, as the others are.
            num_prompt_tokens: Tokens of the prompt.
            unsalted_keys: The same tokens' keys without the salt.
            pending: Keys of checkpoints that running sequences are computing now.

        Returns:
            The match with all KV blocks of the prefix that the cache has, and no state blocks.
        """
        limit = last_reusable_boundary(num_prompt_tokens, self.unit, self.lookahead)
        return Match(
            num_tokens=num_tokens,
            kv_blocks=self._kv_run(keys, num_tokens) or [],
            junction=match.junction if match.junction > num_tokens else 0,
            missed=self._reasons(
                keys, num_tokens, limit, num_prompt_tokens,
                unsalted_keys=unsalted_keys, pending=pending,
            ),
        )

    def record(self, match: Match, num_prompt_tokens: int) -> None:
        """Count an admitted match."""
        self.num_query_tokens += num_prompt_tokens
        self.num_hit_tokens += match.num_tokens
        for reason, count in match.missed.items():
            self.missed[reason] = self.missed.get(reason, 0) + count

    def pin(self, match: Match) -> None:
        """Reference the hit's blocks before anything is allocated for the same sequence."""
        if self.kv_pool is not None:
            self.kv_pool.fork(*match.kv_blocks)
        for pool, block in zip(self.state_pools, match.state_blocks, strict=False):
            pool.fork(block)

    def unpin(self, match: Match) -> None:
        """Undo `pin`."""
        if self.kv_pool is not None:
            self.kv_pool.free(match.kv_blocks)
        for pool, block in zip(self.state_pools, match.state_blocks, strict=False):
            pool.free([block])

    def promote(self, keys: Iterable[bytes]) -> None:
        """Let the checkpoints of these keys be rungs no longer: somebody has asked for them."""
        for key in keys:
            for pool in self.state_pools:
                pool.promote(key)

    def held(self) -> dict[str, tuple[int, int]]:
        """KV blocks and checkpoints held under each name."""
        return {name: (len(kv), len(states)) for name, (kv, states) in self._held.items()}

    def shortage(
        self, kv_keys: Collection[bytes], state_keys: Collection[bytes]
    ) -> Shortage | None:
        """Why these entries cannot be held, or None if they can."""
        checks = [(pool, "state", state_keys, self.max_held[1]) for pool in self.state_pools]
        if self.kv_pool is not None:
            checks.append((self.kv_pool, "KV", kv_keys, self.max_held[0]))
        for pool, what, keys, limit in checks:
            needed = sum(not pool.is_protected(key) for key in set(keys))
            if needed > limit - pool.num_protected:
                return Shortage(what, needed, limit - pool.num_protected, limit)
        return None

    def hold(self, name: str, kv_keys: Collection[bytes], state_keys: Collection[bytes]) -> None:
        """Spare the entries of these keys from eviction, those to come too; adds to the name's."""
        assert self.shortage(kv_keys, state_keys) is None, f"{name=} has not been checked"
        if not state_keys:
            return
        kv, states = self._held.setdefault(name, (set(), set()))
        if self.kv_pool is not None:
            for key in set(kv_keys) - kv:
                self.kv_pool.protect(key)
        for pool in self.state_pools:
            for key in set(state_keys) - states:
                pool.protect(key)
        kv.update(kv_keys)
        states.update(state_keys)

    def release(self, name: str) -> bool:
        """Let the entries held under a name be evicted again; returns whether there were any."""
        if name not in self._held:
            return False
        kv, states = self._held.pop(name)
        if self.kv_pool is not None:
            for key in kv:
                self.kv_pool.unprotect(key)
        for pool in self.state_pools:
            for key in states:
                pool.unprotect(key)
        return True

    def clear(self) -> None:
        """Forget everything cached (weights changed, or a client asked).

        Names stay: what they hold is spared again once it is computed again.
        """
        if self.kv_pool is not None:
            self.kv_pool.clear_cache()
        for pool in self.state_pools:
            pool.clear_cache()

    def resumable_keys(self, limit: int) -> list[bytes]:
        """Keys of boundaries at which a prompt finds its states and the KV block before them.

        An earlier KV block may be gone, so a prompt with such a key mostly hits, not always.

        Args:
            limit: Most keys, those published last.
        """
        pools = self._pools()
        if not self.is_enabled or not pools:
            return []
        found = (key for key in pools[-1].newest_keys() if self._is_in_all(pools, key))
        return list(islice(found, limit))

    def _is_in_all(self, pools: list[BlockPool], key: bytes) -> bool:
        for pool in pools:
            entry = pool.lookup(key)
            if entry is None or (self.is_bitwise and entry.is_generated):
                return False
        return True

    def _kv_run(self, keys: list[bytes], limit: int) -> list[int] | None:
        """Usable KV blocks from the start, of at most `limit` tokens; None without attention."""
        if self.kv_pool is None:
            return None
        return self.kv_pool.lookup_run(
            keys[: limit // self.block_size], exact_only=self.is_bitwise
        )

    def _states_at(self, key: bytes) -> list[int] | None:
        blocks: list[int] = []
        for pool in self.state_pools:
            entry = pool.lookup(key)
            if entry is None or (self.is_bitwise and entry.is_generated):
                return None
            blocks.append(entry.block)
        return blocks

    def _has_generated(self, keys: list[bytes]) -> bool:
        """Whether generation passed one of these boundaries."""
        if not self._generated.keys().isdisjoint(keys):
            return True
        found = [map(pool.lookup, keys) for pool in self.state_pools]
        return any(
            all(entries) and any(entry.is_generated for entry in entries if entry)
            for entries in zip(*found, strict=True)
            if entries[0]
        )

    def _reasons(
        self,
        keys: list[bytes],
        hit: int,
        limit: int,
        num_tokens: int,
        *,
        unsalted_keys: list[bytes] | None,
        pending: Collection[bytes],
    ) -> dict[str, int]:
        missed = {"last_token": 1}
        if num_tokens - limit > 1:
            missed["below_unit"] = num_tokens - limit - 1
        if limit > hit:
            pools = self._pools()
            boundaries = [
                keys[end // self.block_size - 1]
                for end in range(hit + self.unit, limit + 1, self.unit)
            ]
            if self.is_bitwise and self._has_generated(boundaries):
                reason = "generated_checkpoint"
            elif any(key in pending for key in boundaries):
                reason = "in_flight"
            elif any(pool.was_any_evicted(boundaries) for pool in pools):
                reason = "evicted"
            elif unsalted_keys is not None and any(
                all(pool.lookup(unsalted_keys[end // self.block_size - 1]) for pool in pools)
                for end in range(hit + self.unit, limit + 1, self.unit)
            ):
                reason = "salt"
            else:
                reason = "no_checkpoint"
            missed[reason] = limit - hit
        return missed

    def _pools(self) -> list[BlockPool]:
        return [*([self.kv_pool] if self.kv_pool is not None else []), *self.state_pools]
