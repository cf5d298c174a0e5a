"""What rank 0 and the other ranks tell each other, besides steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace import rt

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from headrace.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """From rank 0, first: which rank the other is, and of what.

    Attributes:
        config: Settings; the device is resolved.
        rank: The receiver's.
        size: Ranks.
        folder: Private to the ranks, for the files by which they meet.
    """

    config: EngineConfig
    rank: int
    size: int
    folder: Path

    def join(self) -> rt.Group:
        """Meet the other ranks; returns when all have come.

        Raises:
            RuntimeError: One did not come in time.
        """
        # Rank 0 ends a rank that hangs, by its own clock, before others give up here.
        timeout_s = self.config.rank_timeout + 30.0
        kind = rt.NcclGroup if self.config.device == "cuda" else rt.GlooGroup
        return kind(
            self.folder / "meeting", self.rank, self.size, timeout_s=timeout_s,
            progress=Progress.of(self.folder, self.size).collectives,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """What ranks have done, in memory that all of them see; each writes its own places.

    Attributes:
        collectives: That each rank has come to, [size] i64.
        beats: Of each rank's watcher, [size] i64: they stop when the process does.
    """

    collectives: npt.NDArray[np.int64]
    beats: npt.NDArray[np.int64]

    @classmethod
    def of(cls, folder: Path, size: int) -> Progress:
        """Map the file in the ranks' folder; rank 0 is the first to do so."""
        file = folder / "progress"
        if not file.exists():
            file.write_bytes(bytes(2 * 8 * size))
        return cls(*np.memmap(file, dtype=np.int64, mode="r+", shape=(2, size)))


@dataclass(frozen=True, slots=True)
class Hello:
    """To rank 0: the process has begun."""

    process_id: int


@dataclass(frozen=True, slots=True)
class Number:
    """To rank 0: a number of this rank; back: the smallest of all."""

    value: int


@dataclass(frozen=True, slots=True)
class Ready:
    """To rank 0: the model is loaded and memory is allocated."""


@dataclass(frozen=True, slots=True)
class Failed:
    """To rank 0: this rank ends because of an error."""

    why: str


@dataclass(frozen=True, slots=True)
class Land:
    """From rank 0: wait for the results of the oldest step, as it does now."""


@dataclass(frozen=True, slots=True)
class Stop:
    """From rank 0: there are no more steps."""
