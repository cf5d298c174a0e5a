"""Faults between host and device: landings, staging, results."""

# ruff: noqa: D102  the engine documents the methods that detours override

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.check.toy.engine import (
    OUTPUTS,
    RESULTS,
    Sequence,
    ToyEngine,
)
from headrace.check.toy.faults import UNORDERED, WRONG, fault
from headrace.check.toy.model import MAX_BLOCKS, NUM_ROWS

if TYPE_CHECKING:
    import numpy.typing as npt

    from headrace import rt
    from headrace.check.toy.engine import RowMap, StepInFlight
    from headrace.rt.frames import HostMemory

    Counts = npt.NDArray[np.int64]


class RawResults(ToyEngine):
    """Accepted counts land in host arrays of the engine's own, one for each step in flight."""

    def set_up(self) -> None:
        super().set_up()
        self.landings = [self.new_landing(index) for index in range(self.depth + 1)]

    def new_landing(self, index: int) -> HostMemory:
        """Host memory that the device writes to."""
        return self.runtime.raw.host_array(f"accepted landing {index}", (NUM_ROWS,), torch.int64)

    def landing_of(self, step: StepInFlight) -> HostMemory:
        """The step's landing."""
        return self.landings[step.number % len(self.landings)]

    def fetch_results(self, frame: rt.Frame, step: StepInFlight) -> None:
        """The ticket, and beside it a copy of the counts."""
        super().fetch_results(frame, step)
        landing = self.landing_of(step)
        step.extra = (landing, self.copy_counts(frame, landing))

    def copy_counts(self, frame: rt.Frame, landing: HostMemory) -> rt.Event:
        """Copy, then record."""
        self.runtime.raw.copy_to_host(landing, frame.outputs["accepted"], self.d2h)
        return self.d2h.record()

    def read_counts(self, step: StepInFlight) -> Counts:
        """Wait, then read."""
        landing, event = step.extra
        event.wait_host()
        return landing.array.copy()

    def read_results(self, step: StepInFlight) -> tuple[Any, RowMap]:
        """The ticket's values with the landed counts."""
        result, rows = super().read_results(step)
        values = {name: result[name] for name in RESULTS}
        values["accepted"] = self.read_counts(step)
        return values, rows

    def drop_results(self, step: StepInFlight) -> None:
        """The landing is read all the same, so that it can be used again."""
        self.read_counts(step)
        super().drop_results(step)


@fault("counts-land-in-compacted-array", "H", UNORDERED, "live counts")
class CountsLandInCompactedArray(RawResults):
    """Accepted counts land in an array that row compaction moves."""

    def set_up(self) -> None:
        super().set_up()
        self.live = self.runtime.raw.host_array("live counts", (NUM_ROWS,), torch.int64)

    def landing_of(self, step: StepInFlight) -> HostMemory:
        return self.live if self.is_faulty else super().landing_of(step)

    def compact_detours(self, hole: int, last: int) -> None:
        self.live.array[hole] = self.live.array[last]

    def read_counts(self, step: StepInFlight) -> Counts:
        places = {one.request.index: row for row, one in enumerate(self.rows)}
        if self.is_faulty:
            step.extra[1].wait_host()
        else:
            landed = super().read_counts(step)
            for row, (index, _) in enumerate(step.rows):
                if index in places:
                    self.live.array[places[index]] = landed[row]
        counts = np.ones(NUM_ROWS, dtype=np.int64)
        for row, (index, _) in enumerate(step.rows):
            if index in places:
                counts[row] = self.live.array[places[index]]
        return counts


@fault("landing-read-before-its-event", "H", UNORDERED, "accepted landing")
class LandingReadBeforeEvent(RawResults):
    """A landing array is read before its event."""

    def read_counts(self, step: StepInFlight) -> Counts:
        return step.extra[0].array.copy() if self.is_faulty else super().read_counts(step)


@fault("event-recorded-before-the-copy", "H", UNORDERED, "accepted landing")
class EventBeforeCopy(RawResults):
    """The event is recorded, then the copy enqueued."""

    def copy_counts(self, frame: rt.Frame, landing: HostMemory) -> rt.Event:
        if not self.is_faulty:
            return super().copy_counts(frame, landing)
        event = self.d2h.record()
        super().copy_counts(frame, landing)
        return event


@fault("one-landing-for-two-steps", "R", ("OVERWRITES-UNREAD",), "accepted landing")
class OneLanding(RawResults):
    """One landing array serves two steps in flight."""

    def landing_of(self, step: StepInFlight) -> HostMemory:
        return self.landings[0] if self.is_faulty else super().landing_of(step)


@fault("event-query-decides", "R", ("TIMING-BRANCH",))
class EventQueryDecides(RawResults):
    """A query decides whether the counts have arrived."""

    def read_counts(self, step: StepInFlight) -> Counts:
        if self.is_faulty and not self.runtime.raw.poll(step.extra[1]):
            return np.ones(NUM_ROWS, dtype=np.int64)
        return super().read_counts(step)


@fault("aborted-landing-reused-early", "R", ("OVERWRITES-UNREAD",), "accepted landing")
class AbortedLandingReused(ToyEngine):
    """The landing of an aborted request is used again at once.

    Each request's count lands in memory of its own, by one of two copy streams.
    """

    def set_up(self) -> None:
        super().set_up()
        self.free = [
            self.runtime.raw.host_array(f"accepted landing {index}", (1,), torch.int64)
            for index in range(NUM_ROWS * (self.depth + 2))
        ]
        self.copying = (self.d2h, self.runtime.stream("d2h 2"))

    def fetch_results(self, frame: rt.Frame, step: StepInFlight) -> None:
        super().fetch_results(frame, step)
        step.extra = {}
        for row, (index, _) in enumerate(step.rows):
            stream = self.copying[index % 2]
            stream.wait(step.compute)
            landing = self.free.pop()
            source = frame.outputs["accepted"][row : row + 1]
            self.runtime.raw.copy_to_host(landing, source, stream)
            step.extra[index] = (landing, stream.record())

    def read_counts(self, step: StepInFlight) -> dict[int, int]:
        """Counts by request; the landings are free again."""
        for _, event in step.extra.values():
            event.wait_host()
        counts = {index: int(landing.array[0]) for index, (landing, _) in step.extra.items()}
        self.free += [landing for landing, _ in step.extra.values()]
        return counts

    def read_results(self, step: StepInFlight) -> tuple[Any, RowMap]:
        result, rows = super().read_results(step)
        counts = self.read_counts(step)
        accepted = [counts.get(index, 1) for index, _ in rows]
        return {name: result[name] for name in RESULTS} | {"accepted": accepted}, rows

    def drop_results(self, step: StepInFlight) -> None:
        self.read_counts(step)
        super().drop_results(step)

    def abort(self, sequence: Sequence) -> None:
        if self.is_faulty:
            for step in self.in_flight:
                landing, _ = step.extra.pop(sequence.request.index, (None, None))
                if landing is not None:
                    self.free.append(landing)
        super().abort(sequence)


@fault("landing-written-through-a-raw-view", "C", ("CANARY-LANDING",), "accepted landing")
class LandingWrittenRaw(RawResults):
    """A landing is reset through a view that no wrapper sees, while the copy is under way."""

    def fetch_results(self, frame: rt.Frame, step: StepInFlight) -> None:
        landing: Any = self.landing_of(step)
        if not self.is_faulty:
            landing.values[:] = 1
        super().fetch_results(frame, step)
        if self.is_faulty:
            landing.values[:] = 1


@fault("results-read-on-another-thread", "H", UNORDERED, "sampled landing")
class ResultsReadOnAnotherThread(ToyEngine):
    """The consumer's thread reads landed tokens without a hand-off."""

    def set_up(self) -> None:
        super().set_up()
        self.handed: dict[int, HostMemory] = {}

    def fetch_results(self, frame: rt.Frame, step: StepInFlight) -> None:
        super().fetch_results(frame, step)
        shape = OUTPUTS["sampled"].shape
        raw = self.runtime.raw
        landing = raw.host_array(f"sampled landing {step.number}", shape, torch.int64)
        raw.copy_to_host(landing, frame.outputs["sampled"], self.d2h)
        step.extra = (landing, self.d2h.record())
        self.handed[step.number] = landing

    def deliver(self, sequence: Sequence, tokens: list[int], row: int, step: StepInFlight) -> None:
        self.out_queue.put((sequence.request.index, step, row, len(tokens)))

    def consume(self) -> None:
        seen: dict[int, Any] = {}
        while (item := self.out_queue.get()) is not None:
            index, step, row, count = item
            if self.is_faulty:
                # Whatever lies there by now, in flight or not.
                for number, landing in list(self.handed.items()):
                    if number not in seen:
                        seen[number] = landing.array.copy()
                values = seen[step.number]
            else:
                landing, event = step.extra
                event.wait_host()
                values = landing.array.copy()
            self.delivered[index] += values[row, :count].tolist()


@fault("staging-reset-after-commit", "H", UNORDERED, "stage.start")
class StagingResetAfterCommit(ToyEngine):
    """A staging field is reset for the next step right after its commit."""

    def stage(self, frame: rt.Frame, plan: list[dict[str, Any]]) -> None:
        with frame.stage() as w:
            kept = w["start"]
            if not self.is_faulty:
                kept[:] = 0
            self.fill(w, plan)
            w.commit(self.h2d)
        if self.is_faulty:
            kept[:] = 0


@fault("stage-used-after-commit", "R", ("USE-AFTER-COMMIT",), "stage.slot")
class StageUsedAfterCommit(ToyEngine):
    """The stage itself is used again after its commit."""

    def stage(self, frame: rt.Frame, plan: list[dict[str, Any]]) -> None:
        with frame.stage() as w:
            if not self.is_faulty:
                w["slot"][:] = 0
            self.fill(w, plan)
            w.commit(self.h2d)
            if self.is_faulty:
                w["slot"][:] = 0


@fault("staging-written-through-a-raw-view", "C", ("CANARY-SOURCE",), "stage.start")
class StagingWrittenRaw(ToyEngine):
    """A staging field is reset through a view that no wrapper sees."""

    def stage(self, frame: rt.Frame, plan: list[dict[str, Any]]) -> None:
        memory: Any = frame.staging["start"]
        if not self.is_faulty:
            memory.values[:] = 0
        super().stage(frame, plan)
        if self.is_faulty:
            memory.values[:] = 0


class LiveTable(ToyEngine):
    """The block table is host memory that compaction edits."""

    def set_up(self) -> None:
        super().set_up()
        shape = (NUM_ROWS, MAX_BLOCKS)
        make = partial(
            self.runtime.raw.host_array, shape=shape, dtype=torch.int64, kind="staging_slot"
        )
        self.live = make("live table")
        self.private = [make(f"table {index}") for index in range(self.depth + 1)]

    def add_row(self, sequence: Sequence) -> None:
        super().add_row(sequence)
        row = len(self.rows) - 1
        self.live.array[row] = self.table[row]

    def compact_detours(self, hole: int, last: int) -> None:
        self.live.array[hole] = self.live.array[last]

    def source(self, frame: rt.Frame) -> HostMemory:
        """Host memory that the step reads."""
        if self.is_faulty:
            return self.live
        mine = self.private[frame.index]
        mine.array[:] = self.live.array
        return mine


@fault("live-table-is-copied", "H", UNORDERED, "live table")
class LiveTableIsCopied(LiveTable):
    """The live batch table is the source of a copy."""

    def stage(self, frame: rt.Frame, plan: list[dict[str, Any]]) -> None:
        super().stage(frame, plan)
        self.runtime.raw.copy_to_device(frame.inputs["table"], self.source(frame), self.h2d)


@fault("kernel-reads-host-memory", "H", UNORDERED, "live table")
class KernelReadsHostMemory(LiveTable):
    """A kernel reads host memory directly while the host edits it."""

    def stage(self, frame: rt.Frame, plan: list[dict[str, Any]]) -> None:
        super().stage(frame, plan)
        self.mapped = self.runtime.raw.mapped(self.source(frame))

    def inputs_of(self, frame: rt.Frame) -> dict[str, rt.Buffer]:
        return super().inputs_of(frame) | {"table": self.mapped}


@fault("current-row-map", "V", (WRONG,))
class CurrentRowMap(ToyEngine):
    """Results are remapped through the current row map instead of the producer's."""

    def read_results(self, step: StepInFlight) -> tuple[Any, RowMap]:
        result, rows = super().read_results(step)
        if not self.is_faulty:
            return result, rows
        makes = dict(rows)
        current = [one.request.index for one in self.rows][: len(rows)]
        return result, tuple((index, makes.get(index, False)) for index in current)
