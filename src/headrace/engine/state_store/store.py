"""Pieces in host memory and in files, and the threads that bring them there and back.

The engine's thread asks (`find`, `has`), hands over (`take`, `fetch`) and hears of what is done
(`hear_all`, `wait`); it never waits for a copy or a disk. Three threads do the work:

    lander    waits for copies from the device, puts their pieces into memory, queues their files
    writer    writes files
    reader    gathers the pieces of a prefix, from memory or from files, and checks the latter

Memory holds the least recently used pieces up to a number of bytes; files are a `Folder`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

from headrace.engine.state_store.wire import BadPieceError, Fault, join, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from headrace import rt
    from headrace.engine.state_store.folder import Folder
    from headrace.engine.state_store.wire import Wire
    from headrace.worker.step import PieceKind, PieceSave

_LOG = logging.getLogger(__name__)
_READERS = 4
"""Files that are read and checked at once; both release Python's lock."""
_MAX_WRITE_BYTES = 1 << 30
"""Of pieces that wait to be written to files; more are not."""
_CLOSE_S = 10.0
"""That pieces on their way have to reach the disk when the store is closed."""

Name = tuple["PieceKind", bytes]
Reason = Fault | Literal["absent", "evicted", "unreadable"]


class Fetch:
    """A prefix on its way from the store to the scheduler.

    Attributes:
        keys: The prefix cache's, of its columns.
        first: Columns that the device has the KV of.
        pieces: Once they are here: KV of the columns from `first` on, then the state; [bytes] u8.
        fault: Once it is known: why there are none.
    """

    __slots__ = ("__weakref__", "fault", "first", "keys", "pieces")

    def __init__(self, keys: tuple[bytes, ...], first: int) -> None:
        self.keys = keys
        self.first = first
        self.pieces: tuple[np.ndarray, ...] | None = None
        self.fault: Reason | None = None

    @property
    def is_done(self) -> bool:
        """Whether there is something to wait for."""
        return self.pieces is not None or self.fault is not None

    @property
    def names(self) -> list[tuple[Name, int]]:
        """The pieces that it has, each with its column."""
        columns = range(self.first, len(self.keys))
        kv: list[tuple[Name, int]] = [(("kv", self.keys[column]), column) for column in columns]
        return [*kv, (("state", self.keys[-1]), len(self.keys))]


@dataclass(frozen=True, slots=True, eq=False)
class _Fetched:
    """What the reader says of a fetch."""

    fetch: Fetch
    pieces: tuple[np.ndarray, ...]
    bad: tuple[tuple[Name, Reason], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Landed:
    """What the lander says of saves: their names, and how many of them will be written."""

    names: tuple[Name, ...]
    num_queued: int


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """What the writer says of a piece, written or not."""


class Memory:
    """Pieces in host memory, least recently used out first; any thread may use it.

    Args:
        max_bytes: Of all pieces.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_evictions = 0
        self._pieces: OrderedDict[Name, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def has(self, name: Name) -> bool:
        """Whether the piece is here."""
        return name in self._pieces

    def get(self, name: Name) -> np.ndarray | None:
        """The piece, which is used by that."""
        with self._lock:
            data = self._pieces.get(name)
            if data is not None:
                self._pieces.move_to_end(name)
            return data

    def put(self, name: Name, data: np.ndarray) -> None:
        """Take a piece in, if it is not larger than everything."""
        with self._lock:
            if name in self._pieces or data.nbytes > self.max_bytes:
                return
            self._pieces[name] = data
            self.num_bytes += data.nbytes
            while self.num_bytes > self.max_bytes:
                _, old = self._pieces.popitem(last=False)
                self.num_bytes -= old.nbytes
                self.num_evictions += 1

    def discard(self, name: Name) -> None:
        """Forget a piece."""
        with self._lock:
            data = self._pieces.pop(name, None)
            if data is not None:
                self.num_bytes -= data.nbytes


class StateStore:
    """Both tiers.

    Args:
        runtime: Of its threads, and of the copies that they wait for.
        wire: Form and names of the pieces.
        memory_bytes: Bound of the pieces in memory, 0 for none there.
        folder: Where the files are, or None.
    """

    def __init__(
        self, runtime: rt.Runtime, wire: Wire, *, memory_bytes: int, folder: Folder | None
    ) -> None:
        self.wire = wire
        self.memory = Memory(memory_bytes)
        self.folder = folder
        self.misses: Counter[str] = Counter()
        self.num_hits = 0
        self.num_hit_tokens = 0
        self.num_saved = 0
        self.num_dropped = 0
        self.num_failed_writes = 0
        self.num_landing = 0
        self._saving: set[Name] = set()
        self._bad: set[Name] = set()
        self._fetches: WeakValueDictionary[bytes, Fetch] = WeakValueDictionary()
        self._num_reading = 0
        self._num_writing = 0
        self._lock = threading.Lock()
        self._num_write_bytes = 0
        self._landing: rt.Queue[tuple[rt.Ticket, tuple[PieceSave, ...]] | None]
        self._writing: rt.Queue[tuple[Name, np.ndarray, int] | None]
        self._reading: rt.Queue[Fetch | None]
        self._done: rt.Queue[_Fetched | _Landed | _Written]
        self._landing, self._writing = runtime.queue(), runtime.queue()
        self._reading, self._done = runtime.queue(), runtime.queue()
        self._is_closed = False
        self._threads = [
            runtime.thread(self._land, "state store lander"),
            runtime.thread(self._write, "state store writer"),
            runtime.thread(self._read, "state store reader"),
        ]
        for thread in self._threads:
            thread.start()

    # The engine's thread -----------------------------------------------------------------------

    def has(self, name: Name) -> bool:
        """Whether a piece is here or on its way here."""
        if name in self._saving or self.memory.has(name):
            return True
        return self.folder is not None and self.folder.has(*name)

    def find(self, keys: Sequence[bytes], *, have: int, beyond: int) -> int:
        """Find the longest prefix whose pieces are here.

        Args:
            keys: The prefix cache's, one a column.
            have: Columns that the device has the KV of.
            beyond: Columns of the hit that there is without the store.

        Returns:
            Its columns, or 0 if none is longer than `beyond`; the reason is counted then.
        """
        covered = have
        while covered < len(keys) and self._is_there(("kv", keys[covered])):
            covered += 1
        for columns in range(covered, beyond, -1):
            if self._is_there(("state", keys[columns - 1])):
                return columns
        is_foreign = self.folder is not None and (
            self.folder.is_foreign("state", keys[-1])
            or (have < len(keys) and self.folder.is_foreign("kv", keys[have]))
        )
        self.misses["foreign" if is_foreign else "absent"] += 1
        return 0

    @property
    def num_fetches(self) -> int:
        """Fetches that somebody holds."""
        return len(self._fetches)

    def fetch(self, keys: Sequence[bytes], first: int) -> Fetch:
        """Let the pieces of a prefix be gathered; the same one for all who ask meanwhile."""
        known = self._fetches.get(keys[-1])
        if known is not None and known.first <= first and known.fault is None:
            return known
        fetch = self._fetches[keys[-1]] = Fetch(tuple(keys), first)
        self._num_reading += 1
        self._reading.put(fetch)
        return fetch

    @property
    def num_losses(self) -> int:
        """Pieces that were here and are not any more, as far as this process knows."""
        on_disk = 0 if self.folder is None else self.folder.num_evictions
        return self.misses.total() + self.memory.num_evictions + on_disk

    def take(self, ticket: rt.Ticket, saves: tuple[PieceSave, ...]) -> None:
        """Take pieces over whose copies have been enqueued.

        Args:
            ticket: Rows by kind.
            saves: What they are, in the same order.
        """
        self._saving.update((save.kind, save.key) for save in saves)
        self.num_landing += 1
        self._landing.put((ticket, saves))

    def reject(self, name: Name, reason: Reason) -> None:
        """Take away a piece that is not what its name says."""
        self.misses[reason] += 1
        self._bad.add(name)
        self.memory.discard(name)
        if self.folder is not None:
            self.folder.discard(*name)

    def hear_all(self) -> None:
        """Hear of everything that the threads have done."""
        for item in self._done.drain():
            self._hear(item)

    def wait(self, timeout_s: float) -> None:
        """Wait for one thing that a thread does, if there is any to come."""
        if not self._is_busy:
            return
        try:
            item = self._done.get(timeout_s)
        except queue.Empty:
            return
        self._hear(item)

    def flush(self) -> None:
        """Wait until everything that was taken over is where it belongs."""
        while self._is_busy:
            self._hear(self._done.get())

    def export(self, keys: Sequence[bytes]) -> bytes | None:
        """Make an archive of the longest prefix that is here.

        Args:
            keys: One a column.

        Returns:
            The archive, or None if no prefix is here.
        """
        columns = self.find(keys, have=0, beyond=0)
        if not columns:
            return None
        fetch = Fetch(tuple(keys[:columns]), 0)
        found = self._gather(fetch)
        if found.bad:
            for name, reason in found.bad:
                self.reject(name, reason)
            return self.export(keys)
        pieces = zip(fetch.names, found.pieces, strict=True)
        return join(self.wire.encode(*name, data) for (name, _), data in pieces)

    def take_archive(self, archive: bytes) -> tuple[int, dict[str, int]]:
        """Take the pieces of an archive in.

        Returns:
            How many were taken, and how many were not, by reason.
        """
        taken, refused = 0, Counter[str]()
        try:
            for column, raw in enumerate(split(archive)):
                try:
                    kind, key = self.wire.name_of(raw)
                    data = self.wire.decode(kind, key, raw).copy()
                except BadPieceError as error:
                    refused[error.fault] += 1
                    continue
                data.setflags(write=False)
                self._num_writing += self._keep((kind, key), data, column)
                taken += 1
        except BadPieceError as error:
            refused[error.fault] += 1
        self.misses.update(refused)
        return taken, dict(refused)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, as JSON values."""
        folder = self.folder
        return {
            "hits": self.num_hits,
            "hit_tokens": self.num_hit_tokens,
            "misses": dict(self.misses),
            "saved_pieces": self.num_saved,
            "dropped_pieces": self.num_dropped,
            "failed_writes": self.num_failed_writes,
            "memory_bytes": self.memory.num_bytes,
            "memory_max_bytes": self.memory.max_bytes,
            "memory_evictions": self.memory.num_evictions,
            "disk_bytes": 0 if folder is None else folder.num_bytes,
            "disk_max_bytes": 0 if folder is None else folder.max_bytes,
            "disk_evictions": 0 if folder is None else folder.num_evictions,
        }

    def close(self) -> None:
        """Let the threads finish what they have; for the last time."""
        if self._is_closed:
            return
        self._is_closed = True
        lander, writer, reader = self._threads
        self._reading.put(None)
        reader.join(_CLOSE_S)
        self._landing.put(None)
        lander.join(_CLOSE_S)
        # Behind what the lander has queued.
        self._writing.put(None)
        writer.join(_CLOSE_S)

    def _is_there(self, name: Name) -> bool:
        if name in self._bad:
            return False
        return self.memory.has(name) or (self.folder is not None and self.folder.has(*name))

    @property
    def _is_busy(self) -> bool:
        return bool(self._num_reading or self.num_landing or self._num_writing > 0)

    def _hear(self, item: _Fetched | _Landed | _Written) -> None:
        if isinstance(item, _Written):
            self._num_writing -= 1  # The lander may say only later that it was queued.
            return
        if isinstance(item, _Landed):
            self.num_landing -= 1
            self._num_writing += item.num_queued
            self._saving.difference_update(item.names)
            self._bad.difference_update(item.names)
            return
        self._num_reading -= 1
        for name, reason in item.bad:
            self.reject(name, reason)
        if item.bad:
            item.fetch.fault = item.bad[0][1]
        else:
            item.fetch.pieces = item.pieces

    # The lander and the writer -----------------------------------------------------------------

    def _land(self) -> None:
        # Nothing that is done stays in a variable while a thread waits: pieces are large.
        while (item := self._landing.get()) is not None:
            self._done.put(self._take_in(*item))
            del item

    def _take_in(self, ticket: rt.Ticket, saves: tuple[PieceSave, ...]) -> _Landed:
        rows = ticket.result()
        places: Counter[PieceKind] = Counter()
        num_queued = 0
        for save in saves:
            row = rows[save.kind][places[save.kind]]
            places[save.kind] += 1
            data = row[: self.wire.num_bytes(save.kind)].copy()
            data.setflags(write=False)
            num_queued += self._keep((save.kind, save.key), data, save.column)
        return _Landed(tuple((save.kind, save.key) for save in saves), num_queued)

    def _keep(self, name: Name, data: np.ndarray, column: int) -> bool:
        """Put a piece into memory, and let it be written; returns whether it will be."""
        self.memory.put(name, data)
        with self._lock:
            self.num_saved += 1
            if self.folder is None:
                return False
            if self._num_write_bytes + data.nbytes > _MAX_WRITE_BYTES:
                self.num_dropped += 1
                return False
            self._num_write_bytes += data.nbytes
        self._writing.put((name, data, column))
        return True

    def _write(self) -> None:
        while (item := self._writing.get()) is not None:
            self._write_piece(*item)
            del item
            self._done.put(_Written())

    def _write_piece(self, name: Name, data: np.ndarray, column: int) -> None:
        assert self.folder is not None
        try:
            if not self.folder.has(*name):
                self.folder.write(*name, *self.wire.encode(*name, data), column)
        except OSError as error:
            if not self.num_failed_writes:
                _LOG.warning("the state store cannot write to its folder: %s", error)
            self.num_failed_writes += 1
        with self._lock:
            self._num_write_bytes -= data.nbytes

    # The reader --------------------------------------------------------------------------------

    def _read(self) -> None:
        while (fetch := self._reading.get()) is not None:
            self._done.put(self._gather(fetch))
            del fetch  # Or whoever asks for the same prefix again would be given this one.

    def _gather(self, fetch: Fetch) -> _Fetched:
        """Get all pieces of a fetch, the last columns first: so the first ones stay longest."""
        wanted = fetch.names[::-1]
        with ThreadPoolExecutor(_READERS) as pool:
            found = list(pool.map(self._get, wanted))[::-1]
        bad = [
            (name, item) for (name, _), item in zip(fetch.names, found, strict=True)
            if isinstance(item, str)
        ]  # fmt: skip
        pieces = [item for item in found if not isinstance(item, str)]
        return _Fetched(fetch, tuple(pieces), tuple(bad))

    def _get(self, wanted: tuple[Name, int]) -> np.ndarray | Reason:
        """Get one piece, or say why it is not to be had."""
        name, column = wanted
        data = self.memory.get(name)
        if data is not None:
            if self.folder is not None:
                self.folder.touch(*name, column)
            return data
        if self.folder is None:
            return "evicted"
        try:
            raw = self.folder.read(*name)
            if raw is None:
                return "evicted"
            data = self.wire.decode(*name, raw)
        except BadPieceError as error:
            return error.fault
        except OSError:
            return "unreadable"
        self.folder.touch(*name, column)
        self.memory.put(name, data)
        return data
