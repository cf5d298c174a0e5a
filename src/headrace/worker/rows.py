"""Which carry row a sequence has: the two batch layouts.

`slots`: a sequence keeps one row, its slot, until it leaves; counts, columns and lengths stay on
the device, and nothing is ever moved.

`compact`: rows are dense. When sequences leave, the last rows move into the holes. Counts live in
host arrays that move along; they are never the target of a device copy. What a step found out about
its rows comes back through its ticket, in that step's row order, and is applied through that
step's row map. Tokens and drafts stay on the device and are gathered by the map from old to new
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from headrace.worker.step import SchedulerOutput

COUNT_NAMES = ("computed", "accepted", "state_column", "base_len")


@dataclass(frozen=True, slots=True, eq=False)
class ProducerMap:
    """Row map of one step: what its landing rows are.

    Attributes:
        seq_ids: Sequence of each landing row: verify rows, known rows, then forks.
        num_verify: How many are verify rows.
        known_ends: For each of the others, the computed tokens after it if it ended its known
            tokens, else -1.
        num_scheduled: Tokens of each verify row, [num_verify].
    """

    seq_ids: tuple[int, ...]
    num_verify: int
    known_ends: tuple[int, ...]
    num_scheduled: np.ndarray | tuple[int, ...]

    @classmethod
    def of(cls, output: SchedulerOutput) -> ProducerMap:
        """The map of a step."""
        verify = output.verify
        ids = verify.seq_ids if verify is not None else ()
        lengths = () if verify is None else verify.num_drafts + 1
        forks = output.forks
        return cls(
            seq_ids=(
                *ids,
                *(row.seq_id for row in output.known),
                *(fork.seq_id for _, fork in forks),
            ),
            num_verify=len(ids),
            known_ends=(
                *(row.end if row.ends_known else -1 for row in output.known),
                *(row.end for row, _ in forks),
            ),
            num_scheduled=lengths,
        )


class CompactRows:
    """Dense batch rows and their host counts.

    Attributes:
        seq_ids: Sequence of each row, in row order.
        counts: Name to [max_num_seqs] i64, one entry a row; moved when rows move.
    """

    def __init__(self, max_num_seqs: int, unit: int, interval: int) -> None:
        self.seq_ids: list[int] = []
        self.counts = {name: np.zeros(max_num_seqs, dtype=np.int64) for name in COUNT_NAMES}
        self._row: dict[int, int] = {}
        self._previous: dict[int, int] = {}
        self._last: tuple[tuple[int, ...], np.ndarray] | None = None  # Of `rows_of`.
        self._stay: np.ndarray | None = None  # Row map of a step in which nobody comes or goes.
        self._unit = unit
        self._interval = interval

    def row(self, seq_id: int) -> int:
        """Row of a sequence."""
        return self._row[seq_id]

    def rows_of(self, seq_ids: tuple[int, ...]) -> np.ndarray:
        """Row of each sequence, -1 for those that have left, [n] i64; not to be written."""
        if self._last is not None and self._last[0] == seq_ids:
            return self._last[1]
        get = self._row.get
        rows = np.array([get(seq_id, -1) for seq_id in seq_ids], dtype=np.int64)
        rows.flags.writeable = False
        self._last = (seq_ids, rows)
        return rows

    def begin_step(
        self,
        left: tuple[int, ...],
        admitted: tuple[int, ...],
        forks: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Close the holes of those that left, then append those that enter.

        Args:
            left: Sequences whose rows are given up.
            admitted: Sequences that get a row, in order.
            forks: (parent, child): a child that enters inherits its parent's counts and previous
                row, even if the parent leaves now. The parent's last step must have been applied.
        """
        if not (left or admitted or forks):
            if self._stay is None:
                self._previous = dict(self._row)
                self._stay = np.arange(len(self.seq_ids))
            return
        self._last = self._stay = None
        self._previous = dict(self._row)
        inherited = self._inherited(forks)
        self._close_holes(left)
        for seq_id in admitted:
            row = len(self.seq_ids)
            self.seq_ids.append(seq_id)
            self._row[seq_id] = row
            for name, array in self.counts.items():
                array[row] = 1 if name == "accepted" else 0
            if seq_id in inherited:
                self._previous[seq_id], values = inherited[seq_id]
                for name, value in values.items():
                    self.counts[name][row] = value

    def prev_positions(self) -> np.ndarray:
        """Previous row of each row, -1 for a new one, [rows] i64."""
        if self._stay is not None:
            return self._stay
        return np.array([self._previous.get(seq_id, -1) for seq_id in self.seq_ids], np.int64)

    def apply(
        self, produced: ProducerMap, num_sampled: np.ndarray | None, accepted: np.ndarray | None
    ) -> None:
        """Take in what a step did, through the map of that step.

        Args:
            produced: The step's own row map. Sequences that have left are skipped.
            num_sampled: Its landing, [landing rows]; None if no row of it had drafts: then every
                verify row kept one token and nothing needs to be read.
            accepted: Likewise, the counts after the save.
        """
        computed, column = self.counts["computed"], self.counts["state_column"]
        base, kept = self.counts["base_len"], self.counts["accepted"]
        place = self.rows_of(produced.seq_ids[: produced.num_verify])
        landed = np.flatnonzero(place >= 0)  # Landing rows of sequences that are still here.
        rows = place[landed]
        before = computed[rows]
        scheduled = np.asarray(produced.num_scheduled, dtype=np.int64)
        column[rows] = (before + scheduled[landed] - 1) // self._unit
        write = (base[rows] // self._interval + 1) * self._interval
        base[rows] = np.where(before >= write, write, base[rows])
        if num_sampled is None or accepted is None:
            computed[rows] = before + 1
            kept[rows] = 1
        else:
            computed[rows] = before + num_sampled[landed]
            kept[rows] = accepted[landed]
        for index, end in enumerate(produced.known_ends):
            row = self._row.get(produced.seq_ids[produced.num_verify + index])
            if row is None or end < 0:
                continue
            computed[row] = base[row] = end
            kept[row] = 1
            column[row] = (end - 1) // self._unit

    def _close_holes(self, left: tuple[int, ...]) -> None:
        holes = sorted(self._row.pop(seq_id) for seq_id in left if seq_id in self._row)
        for hole in holes:
            self.seq_ids[hole] = -1
        for hole in holes:
            while self.seq_ids and self.seq_ids[-1] == -1:
                self.seq_ids.pop()
            if hole >= len(self.seq_ids):
                break
            self._move(len(self.seq_ids) - 1, hole)
        while self.seq_ids and self.seq_ids[-1] == -1:
            self.seq_ids.pop()

    def _inherited(
        self, forks: tuple[tuple[int, int], ...]
    ) -> dict[int, tuple[int, dict[str, int]]]:
        """Each child's previous row and counts: its parent's."""
        inherited: dict[int, tuple[int, dict[str, int]]] = {}
        for parent, child in forks:
            if parent in inherited:  # A fork of a fork, both new.
                inherited[child] = inherited[parent]
                continue
            row = self._row[parent]
            inherited[child] = (row, {n: int(array[row]) for n, array in self.counts.items()})
        return inherited

    def _move(self, source: int, target: int) -> None:
        seq_id = self.seq_ids[source]
        self.seq_ids[target] = seq_id
        self.seq_ids[source] = -1
        self._row[seq_id] = target
        for array in self.counts.values():
            array[target] = array[source]
