"""Faults of the engine's own state."""

# ruff: noqa: D102  the engine documents the methods that detours override

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.check.toy.engine import (
    Checkpoint,
    Sequence,
    ToyEngine,
)
from headrace.check.toy.faults import UNORDERED, WRONG, fault

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from headrace import rt
    from headrace.check.toy.engine import StepInFlight

    Counts = npt.NDArray[np.int64]


@fault("length-read-at-result-time", "V", (WRONG,))
class LengthReadAtResultTime(ToyEngine):
    """A request's length is read when the next step has already advanced it."""

    def set_up(self) -> None:
        super().set_up()
        self.launched = dict.fromkeys(self.sequences, 0)

    def fetch_results(self, frame: rt.Frame, step: StepInFlight) -> None:
        super().fetch_results(frame, step)
        step.extra = dict(self.launched)
        for index, makes_tokens in step.rows:
            self.launched[index] += makes_tokens

    def count_before(self, sequence: Sequence, step: StepInFlight) -> int:
        counts = self.launched if self.is_faulty else step.extra
        return max(len(sequence.tokens), counts[sequence.request.index])


@fault("two-threads-update-one-request", "H", UNORDERED, "progress")
class TwoThreadsUpdate(ToyEngine):
    """Two threads use one field of a request without a hand-off."""

    class Progress:
        """Tokens a request has made."""

        count = 0

    def set_up(self) -> None:
        super().set_up()
        watch = self.runtime.watch
        self.progress = {
            index: watch(f"progress {index}", self.Progress()) for index in self.sequences
        }

    def count_before(self, sequence: Sequence, step: StepInFlight) -> int:
        del step
        count: int = self.progress[sequence.request.index].count
        return count

    def deliver(self, sequence: Sequence, tokens: list[int], row: int, step: StepInFlight) -> None:
        if not self.is_faulty:
            self.progress[sequence.request.index].count += len(tokens)
        super().deliver(sequence, tokens, row, step)

    def consume(self) -> None:
        while (item := self.out_queue.get()) is not None:
            index, tokens = item
            self.delivered[index] += tokens
            if self.is_faulty:
                self.progress[index].count += len(tokens)


@fault("preemption-assumes-the-next-acceptance", "V", (WRONG,))
class PreemptionAssumes(ToyEngine):
    """A preemption saves the state before the host knows what the last step kept."""

    def preempt(self, sequence: Sequence) -> None:
        if not self.is_faulty:
            super().preempt(sequence)
            return
        assumed = sequence.accepted
        while sequence.in_flight:
            self.process(self.in_flight.popleft())
        sequence.accepted = assumed
        super().preempt(sequence)


@fault("preemption-saves-the-first-column", "V", (WRONG,))
class PreemptionSavesFirst(ToyEngine):
    """A preemption saves the state after the first token, whatever was accepted."""

    def launch_keep(
        self, stream: rt.Stream, target: rt.Buffer, sequence: Sequence, index: int, accepted: int
    ) -> None:
        super().launch_keep(stream, target, sequence, index, 1 if self.is_faulty else accepted)


@fault("slot-not-cleared", "V", (WRONG,))
class SlotNotCleared(ToyEngine):
    """A new sequence starts from the state of the slot's last owner."""

    def start_from_zero(self, sequence: Sequence) -> None:
        if not self.is_faulty:
            super().start_from_zero(sequence)


@fault("prefix-one-block-short", "V", (WRONG,))
class PrefixOneBlockShort(ToyEngine):
    """A prefix hit skips more tokens than the checkpoint holds."""

    def start_from_prefix(self, sequence: Sequence, entry: Checkpoint, length: int) -> None:
        super().start_from_prefix(sequence, entry, length)
        if self.is_faulty and length + 1 < len(sequence.request.prompt):
            sequence.scheduled += 1
