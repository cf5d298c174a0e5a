"""Pieces in files: a folder that the processes of a machine share, bounded in bytes.

A file appears whole, by a rename; readers never meet a half. Two processes that write the same
piece write the same bytes, and the later rename wins. The newest time of change says what was used
last. Only eviction takes a lock, so that two processes do not evict twice as much.

    FOLDER/<context>/<key>.<kind>     a piece
    FOLDER/<context>/.<random>.tmp    one that is being written, or was when its process died
    FOLDER/.lock                      held by the process that evicts
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from headrace.worker.step import PieceKind

_SLACK = 16
"""One part in so many: freed beyond the bound at once, and written before others' files are
looked at again."""
_RANK_NS = 10_000_000
"""Between columns of a prefix: longer than from one write to the next."""
_ABANDONED_S = 600.0
"""Seconds after which an unfinished file is nobody's."""


class Folder:
    """Files of one context, and the bytes of all of them.

    Args:
        path: Where; made if it is not there.
        context: In hexadecimal.
        max_bytes: Of all contexts together. A process looks at the others' files after each 16th
            part of it that it wrote, so that much more may be there for a moment.

    Raises:
        ConfigError: The folder cannot be written to.
    """

    def __init__(self, path: Path, context: str, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_evictions = 0
        self._own = path / context
        self._since_look = 0
        try:
            self._own.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._own):
                pass
        except OSError as error:
            raise ConfigError(
                f"state_store {str(path)!r} cannot be written to ({error.strerror}); name a folder "
                "that this user may write, or leave state_store out"
            ) from error
        self.evict()

    def has(self, kind: PieceKind, key: bytes) -> bool:
        """Whether there is such a piece now."""
        return self._file(kind, key).exists()

    def is_foreign(self, kind: PieceKind, key: bytes) -> bool:
        """Whether another context has a piece of these tokens."""
        name = self._file(kind, key).name
        return any((other / name).exists() for other in self._contexts() if other != self._own)

    def read(self, kind: PieceKind, key: bytes) -> bytes | None:
        """Read a piece as it lies there, or None if it is gone; any thread may.

        Raises:
            OSError: It cannot be read.
        """
        try:
            return self._file(kind, key).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, kind: PieceKind, key: bytes, head: bytes, data: np.ndarray, rank: int) -> None:
        """Write a piece, and make room for it.

        Args:
            kind: What it is.
            key: The prefix cache's.
            head: What comes before its data.
            data: [n] u8.
            rank: Its column, see `touch`.

        Raises:
            OSError: The disk is full, or does not work.
        """
        # Somebody may have cleared the folder away while we run.
        self._own.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self._own)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(head)
                file.write(data.data)
            Path(name).rename(self._file(kind, key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self.touch(kind, key, rank)
        size = len(head) + len(data)
        self.num_bytes += size
        self._since_look += size
        if self.num_bytes > self.max_bytes or self._since_look > self.max_bytes // _SLACK:
            self.evict()

    def touch(self, kind: PieceKind, key: bytes, rank: int) -> None:
        """Note that a piece is used.

        Args:
            kind: What it is.
            key: The prefix cache's.
            rank: Its column: of pieces that are used together the later ones make room first, since
                without the earlier ones they are of no use.
        """
        now = time.time_ns() - rank * _RANK_NS
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._file(kind, key), ns=(now, now))

    def discard(self, kind: PieceKind, key: bytes) -> None:
        """Take a piece away that is of no use."""
        with contextlib.suppress(OSError):
            self._file(kind, key).unlink()

    def evict(self) -> None:
        """Count all files, and delete the least recently used ones if they are too many."""
        with (self.path / ".lock").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # Another process is at it, and counts our files too.
            self._evict()

    def _evict(self) -> None:
        found = sorted(self._files())
        total = sum(size for _, size, _ in found)
        keep = self.max_bytes - self.max_bytes // _SLACK
        if total > self.max_bytes:
            for _, size, path in found:
                if total <= keep:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size
                    self.num_evictions += 1
        self.num_bytes, self._since_look = total, 0

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Time of last use, bytes and path of every file; unfinished ones of the dead go first."""
        before = time.time() - _ABANDONED_S
        for context in self._contexts():
            for path in context.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    if path.suffix != ".tmp":
                        yield stat.st_mtime_ns, stat.st_size, path
                    elif stat.st_mtime < before:
                        path.unlink()

    def _contexts(self) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError):
            for path in self.path.iterdir():
                if path.is_dir():
                    yield path

    def _file(self, kind: PieceKind, key: bytes) -> Path:
        return self._own / f"{key.hex()}.{kind}"
