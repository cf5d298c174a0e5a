"""The scheduler's side of the state store: which pieces to save, and which prefix to load.

A checkpoint that a prompt leaves is wanted as soon as it is published; a rung, once it was hit. Its
blocks are pinned until a step has copied them, a bounded number of pieces in each. A prefix that
the store has and the device has not is read while its sequence waits; then the sequence gets fresh
blocks, and the steps before its first chunk fill them, a bounded number of pieces in each again.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from headrace.worker.step import PieceLoad, PieceSave

if TYPE_CHECKING:
    from headrace import rt
    from headrace.engine.block_pool import BlockPool, RetireQueue
    from headrace.engine.prefix_cache import Match, PrefixCache
    from headrace.engine.sequence import Sequence
    from headrace.engine.state_store.store import Fetch, StateStore
    from headrace.worker.step import PieceKind
    from headrace.worker.transfers import PieceLayouts

_MAX_FETCHES = 4
"""Prefixes that wait in host memory for their sequences, beyond the store's own bound."""
_MAX_LANDING = 3
"""Steps whose pieces are on their way to the host; more would hold more pinned memory."""
_MAX_COMPLETE = 65536
"""Prefixes that are remembered to be in the store."""
_PINNED_SHARE = 4
"""One block in so many may be pinned for the store; what exceeds it is not saved."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredHit:
    """A prefix that is in host memory and may be loaded.

    Attributes:
        num_columns: Its length.
        first: First column whose KV is among the pieces; the device has those before.
        pieces: KV of the columns from `first` on, then the state.
        column_size: KV blocks of a column.
    """

    num_columns: int
    first: int
    pieces: tuple[np.ndarray, ...]
    column_size: int

    def keep_whole_columns(self, kv_blocks: list[int]) -> None:
        """Shorten what the device has to whole columns: those are not loaded."""
        del kv_blocks[len(kv_blocks) // self.column_size * self.column_size :]

    def loads(
        self, kv_blocks: list[int], state_blocks: list[int], num_shared: int
    ) -> deque[PieceLoad]:
        """Say where the pieces go.

        Args:
            kv_blocks: Of the whole prefix.
            state_blocks: Of each state table.
            num_shared: KV blocks that are not loaded, as others may be reading them.
        """
        size = self.column_size
        loads = deque(
            PieceLoad(
                kind="kv", blocks=tuple(kv_blocks[column * size : (column + 1) * size]),
                data=self.pieces[column - self.first],
            )
            for column in range(num_shared // size, self.num_columns)
        )
        loads.append(
            PieceLoad(kind="state", blocks=tuple(state_blocks), data=self.pieces[-1])
        )
        return loads


class StoredPrefixes:
    """Between the prefix cache and the store.

    Args:
        store: The store.
        cache: What the device has.
        layouts: Of the pieces.
        max_pieces: Most KV pieces and state pieces in one step.
    """

    def __init__(
        self,
        store: StateStore,
        cache: PrefixCache,
        layouts: PieceLayouts,
        max_pieces: tuple[int, int],
    ) -> None:
        self.store = store
        self.max_pieces = max_pieces
        self._cache = cache
        self._size = layouts.blocks_per_column
        assert cache.kv_pool is not None, "every model has a pool of token ids"
        self._kv_pool: BlockPool = cache.kv_pool
        self._tokens = next(part for part in layouts.kv.tensors if part.name == "kv.tokens")
        self._queue: deque[PieceSave] = deque()
        self._queued: set[tuple[str, bytes]] = set()
        self._pins: Counter[BlockPool] = Counter()
        self._complete: set[bytes] = set()
        self._num_losses = 0

    # Saving ------------------------------------------------------------------------------------

    def want(self, keys: list[bytes]) -> None:
        """Let a checkpoint be saved that is published now, unless the store has it.

        Args:
            keys: The prefix cache's, of all KV blocks before it.
        """
        size = self._size
        columns = keys[size - 1 :: size]
        if self._is_complete(columns):
            return
        entries = [pool.lookup(columns[-1]) for pool in self._cache.state_pools]
        states = tuple(entry.block for entry in entries if entry and not entry.is_generated)
        kv = self._kv_pool.lookup_run(keys, exact_only=True)
        if len(kv) < len(keys) or len(states) < len(entries):
            return
        saves = [
            PieceSave(
                kind="kv", key=key, column=column,
                blocks=tuple(kv[column * size : (column + 1) * size]),
            )
            for column, key in enumerate(columns) if not self._is_known("kv", key)
        ]
        if not self._is_known("state", columns[-1]):
            saves.append(
                PieceSave(kind="state", key=columns[-1], column=len(columns), blocks=states)
            )
        if not self._may_pin(saves):
            self.store.num_dropped += len(saves)
            return
        for save in saves:
            for pool, block in self._blocks(save):
                pool.fork(block)
                self._pins[pool] += 1
            self._queued.add((save.kind, save.key))
        self._queue.extend(saves)

    def has_saves(self) -> bool:
        """Whether pieces wait for a step."""
        return bool(self._queue)

    def plan_saves(self, step_id: int, retire: RetireQueue, retired: int) -> tuple[PieceSave, ...]:
        """Choose pieces for a step; their blocks are given up when it has retired.

        Args:
            step_id: The step.
            retire: Who keeps them until then.
            retired: Newest step whose results have been read.
        """
        if self.store.num_landing >= _MAX_LANDING:
            return ()
        left = dict(zip(("kv", "state"), self.max_pieces, strict=True))
        chosen: list[PieceSave] = []
        while self._queue and left[self._queue[0].kind]:
            save = self._queue.popleft()
            left[save.kind] -= 1
            chosen.append(save)
            self._queued.remove((save.kind, save.key))
            for pool, block in self._blocks(save):
                self._pins[pool] -= 1
                retire.release(pool, [block], last_step=step_id, retired=retired)
        return tuple(chosen)

    def take(self, saves: tuple[PieceSave, ...], ticket: rt.Ticket) -> None:
        """Hand over what a step has copied."""
        self.store.take(ticket, saves)

    def num_pinned(self, pool: BlockPool) -> int:
        """References that the queue holds."""
        return self._pins[pool]

    def owned(self, pool: BlockPool, into: dict[int, int]) -> None:
        """Count the references that the queue holds into `into`."""
        for save in self._queue:
            for owner, block in self._blocks(save):
                if owner is pool:
                    into[block] = into.get(block, 0) + 1

    # Loading -----------------------------------------------------------------------------------

    def look_up(
        self, seq: Sequence, match: Match, keys: list[bytes]
    ) -> StoredHit | Literal["reading"] | None:
        """Look for a longer prefix than the device has.

        Args:
            seq: A waiting sequence, which keeps its place in what is being read.
            match: What the device has.
            keys: Those of its KV blocks that it may resume from.

        Returns:
            The prefix, "reading" if it is to be asked for again, or None if there is none.
        """
        size = self._size
        beyond = match.num_tokens // (size * self._cache.block_size)
        columns = keys[size - 1 :: size]
        if len(columns) <= beyond:
            seq.fetch = None
            return None
        run = self._kv_pool.lookup_run(keys, exact_only=self._cache.is_bitwise)
        have = len(run) // size
        fetch = seq.fetch
        if fetch is None and seq.has_asked_store:
            return None
        if fetch is not None:
            if not fetch.is_done:
                return "reading"
            hit = self._hit_of(seq, fetch)
            if hit is not None and hit.first <= have and hit.num_columns > beyond:
                return hit
            seq.fetch = None
        if self.store.num_fetches >= _MAX_FETCHES:
            return "reading"
        found = self.store.find(columns, have=have, beyond=beyond)
        seq.has_asked_store = True
        if found:
            seq.fetch = self.store.fetch(columns[:found], min(have, found))
        return "reading" if found else None

    def count_hit(self, num_tokens: int) -> None:
        """Count a prefix that a sequence got."""
        self.store.num_hits += 1
        self.store.num_hit_tokens += num_tokens

    def _hit_of(self, seq: Sequence, fetch: Fetch) -> StoredHit | None:
        """What has been gathered for a sequence, or None if there is something wrong with it."""
        if fetch.pieces is None:
            seq.has_met_damage |= fetch.fault != "evicted"
            return None
        if not self._fits(seq, fetch):
            # Others hold it too, and are not to be given it again.
            fetch.pieces, fetch.fault = None, "foreign"
            seq.has_met_damage = True
            return None
        return StoredHit(
            num_columns=len(fetch.keys), first=fetch.first, pieces=fetch.pieces,
            column_size=self._size,
        )

    def _fits(self, seq: Sequence, fetch: Fetch) -> bool:
        """Whether the pieces hold the very tokens of a sequence: keys are but hashes."""
        part, unit = self._tokens, self._tokens.shape[0]
        assert fetch.pieces is not None
        for column, data in zip(
            range(fetch.first, len(fetch.keys)), fetch.pieces[:-1], strict=True
        ):
            tokens = data[part.offset : part.offset + part.num_bytes].view(np.int64)
            expected = seq.token_ids[column * unit : (column + 1) * unit]
            if not np.array_equal(tokens, expected):
                self.store.reject(("kv", fetch.keys[column]), "foreign")
                return False
        return True

    def _is_complete(self, columns: list[bytes]) -> bool:
        """Whether the store has all pieces of a prefix; looked up once, as long as none is lost."""
        if self._num_losses != self.store.num_losses or len(self._complete) > _MAX_COMPLETE:
            self._num_losses = self.store.num_losses
            self._complete.clear()
        if columns[-1] not in self._complete:
            if not self._is_known("state", columns[-1]):
                return False
            if not all(self._is_known("kv", key) for key in columns):
                return False
            self._complete.add(columns[-1])
        return True

    def _is_known(self, kind: PieceKind, key: bytes) -> bool:
        return (kind, key) in self._queued or self.store.has((kind, key))

    def _may_pin(self, saves: list[PieceSave]) -> bool:
        more = Counter(pool for save in saves for pool, _ in self._blocks(save))
        return all(
            self._pins[pool] + count <= max(1, pool.num_usable // _PINNED_SHARE)
            for pool, count in more.items()
        )

    def _blocks(self, save: PieceSave) -> list[tuple[BlockPool, int]]:
        if save.kind == "kv":
            return [(self._kv_pool, block) for block in save.blocks]
        return list(zip(self._cache.state_pools, save.blocks, strict=True))
