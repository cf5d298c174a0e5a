"""Faults of stream order: waits left out, memory used again too early."""

# ruff: noqa: D102  the engine documents the methods that detours override

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from headrace.check.toy import model
from headrace.check.toy.engine import (
    OUTPUTS,
    RESULTS,
    Checkpoint,
    Sequence,
    ToyEngine,
)
from headrace.check.toy.faults import UNORDERED, fault
from headrace.check.toy.model import BLOCK, NUM_ROWS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from headrace import rt
    from headrace.check.toy.engine import StepInFlight
    from headrace.rt.frames import HostMemory

    Counts = npt.NDArray[np.int64]


@fault("copy-stream-does-not-wait", "H", UNORDERED, "out.")
class CopyStreamDoesNotWait(ToyEngine):
    """The copy stream does not wait for compute."""

    def fetch_results(self, frame: rt.Frame, step: StepInFlight) -> None:
        step.ticket = self.runtime.fetch(
            {name: frame.outputs[name] for name in RESULTS},
            on=self.d2h,
            after=None if self.is_faulty else step.compute,
            rows=step.rows,
        )


@fault("outputs-overwritten-while-copied", "H", UNORDERED, "shared.")
class OutputsOverwritten(ToyEngine):
    """The next step overwrites outputs that are still being copied."""

    def set_up(self) -> None:
        super().set_up()
        self.shared = {
            name: self.runtime.alloc(f"shared.{name}", OUTPUTS[name].shape, torch.int64)
            for name in RESULTS
        }
        self.copied: rt.Event | None = None

    def fetch_results(self, frame: rt.Frame, step: StepInFlight) -> None:
        if self.copied is not None and not self.is_faulty:
            self.compute.wait(self.copied)
        outputs = {name: frame.outputs[name] for name in RESULTS}
        self.runtime.launch(model.copy_all, self.compute, source=outputs, target=self.shared)
        step.ticket = self.runtime.fetch(
            self.shared, on=self.d2h, after=self.compute.record(), rows=step.rows
        )
        self.copied = step.ticket.event


@fault("zeroed-on-a-stream-nobody-waits-for", "H", UNORDERED, "state")
class ZeroNobodyWaitsFor(ToyEngine):
    """A slot is zeroed on a side stream that the step does not wait for."""

    def start_from_zero(self, sequence: Sequence) -> None:
        kept = self.compute
        if self.is_faulty:
            self.compute = self.runtime.stream("nobody")
        super().start_from_zero(sequence)
        self.compute = kept


@fault("restored-on-a-stream-nobody-waits-for", "H", UNORDERED, "state")
class RestoreNobodyWaitsFor(ToyEngine):
    """A checkpoint is restored on a side stream that the step does not wait for."""

    def launch_restore(self, source: rt.Buffer, sequence: Sequence, index: int) -> rt.Event:
        kept = self.compute
        if self.is_faulty:
            self.compute = self.runtime.stream("nobody")
        event = super().launch_restore(source, sequence, index)
        self.compute = kept
        return event


@fault("state-overwritten-while-checkpointed", "H", UNORDERED, "state")
class StateOverwritten(ToyEngine):
    """The next step overwrites a state while it is checkpointed."""

    def wait_for_checkpoint(self, ready: rt.Event) -> None:
        if not self.is_faulty:
            super().wait_for_checkpoint(ready)


@fault("checkpoint-does-not-wait-for-the-step", "H", UNORDERED, "state")
class CheckpointDoesNotWait(ToyEngine):
    """A state is checkpointed before the step that makes it is done."""

    def publish(self, sequence: Sequence, computed: rt.Event) -> None:
        super().publish(sequence, self.early if self.is_faulty else computed)

    def launch_step(self) -> None:
        self.early = self.h2d.record()
        super().launch_step()


@fault("event-recorded-on-another-stream", "H", UNORDERED, "state")
class EventOnAnotherStream(ToyEngine):
    """The checkpoint's event is recorded on a stream that does not make it."""

    def wait_for_checkpoint(self, ready: rt.Event) -> None:
        self.compute.wait(self.h2d.record() if self.is_faulty else ready)


@fault("wait-on-an-event-never-recorded", "R", ("NEVER-RECORDED",))
class NeverRecorded(ToyEngine):
    """The step waits for an event that nobody records."""

    def wait_for_checkpoint(self, ready: rt.Event) -> None:
        del ready
        done = self.runtime.event()
        if not self.is_faulty:
            self.checkpointing.record(done)
        self.compute.wait(done)


class AttendFirst(ToyEngine):
    """Attention starts before the drafts are there; only the rest of the step waits for them."""

    def launch_drafts(self, frame: rt.Frame, staged: rt.Event) -> None:
        kept = self.compute
        self.compute = self.runtime.stream("nobody")
        super().launch_drafts(frame, staged)
        self.compute = kept
        self.drafted = self.draft.record()

    def between_launches(self) -> None:
        self.compute.wait(self.drafted)


@fault("inputs-not-waited-for", "H", UNORDERED, ".in.")
class InputsNotWaitedFor(AttendFirst):
    """The step does not wait for the copy of its inputs."""

    def wait_for_inputs(self, staged: rt.Event) -> None:
        if not self.is_faulty:
            super().wait_for_inputs(staged)


@fault("scratch-shared-by-two-streams", "H", UNORDERED, "scratch")
class SharedScratch(AttendFirst):
    """Draft and step share one scratch on two streams."""

    def set_up(self) -> None:
        super().set_up()
        if self.is_faulty:
            self.draft_scratch = self.scratch


@fault("temporary-reused-early", "H", UNORDERED, "temporary")
class TemporaryReused(AttendFirst):
    """A temporary's memory is handed out again while another stream still uses it."""

    def launch_drafts(self, frame: rt.Frame, staged: rt.Event) -> None:
        alloc = partial(self.runtime.alloc, shape=(NUM_ROWS,), dtype=torch.int64, fill=None)
        self.draft_scratch = alloc(f"temporary draft {self.step}")
        super().launch_drafts(frame, staged)
        if self.is_faulty:
            self.runtime.raw.free(self.draft_scratch)
        self.scratch = alloc(f"temporary {self.step}")

    def fetch_results(self, frame: rt.Frame, step: StepInFlight) -> None:
        super().fetch_results(frame, step)
        if not self.is_faulty:
            self.runtime.free(self.draft_scratch)
        self.runtime.free(self.scratch)


@fault("slot-handed-out-early", "H", UNORDERED, "state")
class SlotHandedOutEarly(ToyEngine):
    """A slot is handed out before its last user is done."""

    def give_slot(self, sequence: Sequence) -> None:
        if self.is_faulty:
            self.slots.give(sequence.slot - 1, after=None)
        else:
            super().give_slot(sequence)


@fault("abort-frees-a-slot-in-flight", "H", UNORDERED, "state")
class AbortFreesSlot(ToyEngine):
    """An abort frees a slot that a step in flight still writes."""

    def give_slot(self, sequence: Sequence) -> None:
        if self.is_faulty and sequence.is_aborted:
            self.slots.give(sequence.slot - 1, after=None)
        else:
            super().give_slot(sequence)

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        if sequence.is_aborted:
            # The next sequence gets this very slot.
            while len(self.slots) > 1:
                self.spare.append(self.slots.take())
            self.returned = self.step + 3

    def set_up(self) -> None:
        super().set_up()
        self.spare: list[int] = []
        self.returned = 0

    def admit(self) -> None:
        super().admit()
        if self.step >= self.returned:
            for slot in self.spare:
                self.slots.give(slot, after=self.compute.record())
            self.spare.clear()


@fault("prefix-published-too-early", "H", UNORDERED, "kept")
class PrefixPublishedEarly(ToyEngine):
    """A prefix is restored before its checkpoint is complete."""

    def start_from_prefix(self, sequence: Sequence, entry: Checkpoint, length: int) -> None:
        if not self.is_faulty:
            self.side.wait(entry.ready)
        self.launch_restore(self.kept, sequence, entry.index)
        entry.ready = self.last_side()
        sequence.scheduled = sequence.length = length

    def take_slot(self, sequence: Sequence) -> None:
        # Given-back slots wait for compute, which would order the restore by accident.
        sequence.slot = 1 + self.slots.take()


@fault("offloaded-checkpoint-overwritten", "H", UNORDERED, "kept")
class OffloadedOverwritten(ToyEngine):
    """A checkpoint's memory is used again while its old content is being offloaded."""

    def set_up(self) -> None:
        super().set_up()
        self.store: dict[tuple[int, ...], tuple[HostMemory, rt.Event, list[int]]] = {}

    def evict(self) -> None:
        key = next(iter(self.prefixes))
        entry = self.prefixes.pop(key)
        memory = self.runtime.raw.host_array(f"offloaded {len(self.store)}", (1, 3), torch.int64)
        self.d2h.wait(entry.ready)
        source = self.kept[entry.index : entry.index + 1]
        self.runtime.raw.copy_to_host(memory, source, self.d2h)
        event = self.d2h.record()
        self.store[key] = (memory, event, entry.blocks)
        self.checkpoint_slots.give(entry.index, after=entry.ready if self.is_faulty else event)

    def longest_prefix(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        for length in range((len(prompt) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            key = prompt[:length]
            if key in self.prefixes:
                return key
            if key in self.store:
                self.prefetch(key)
                return key
        return ()

    def prefetch(self, key: tuple[int, ...]) -> None:
        """Bring a checkpoint back from the host."""
        memory, event, blocks = self.store.pop(key)
        if not len(self.checkpoint_slots):
            self.evict()
        index = self.checkpoint_slots.take(on=self.h2d)
        self.h2d.wait(event)
        self.runtime.raw.copy_to_device(self.kept[index : index + 1], memory, self.h2d)
        self.prefixes[key] = Checkpoint(index, self.h2d.record(), blocks)
