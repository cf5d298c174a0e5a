"""When the newest steps were planned, enqueued, waited for and taken in, for whoever looks on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.worker.step import SchedulerOutput

_SIZE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step whose results have been taken in. Times are seconds since the engine was built.

    Args:
        step_id: Counts from 1.
        begin_s: The scheduler began to plan it.
        enqueued_s: It had been handed to the device.
        wait_s: The host began to ask for its results.
        landed_s: They were there.
        end_s: They had been taken in.
        known_tokens: Tokens of prompts, and others that were known beforehand.
        generating: Sequences that generated.
        draft_tokens: Drafts that were verified.
    """

    step_id: int
    begin_s: float
    enqueued_s: float
    wait_s: float
    landed_s: float
    end_s: float
    known_tokens: int
    generating: int
    draft_tokens: int


class Timeline:
    """The newest steps. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._origin = time.monotonic()
        self._enqueued: dict[int, tuple[float, float, int, int, int]] = {}
        self._done: list[StepTimes] = []

    def now(self) -> float:
        """Seconds since the engine was built."""
        return time.monotonic() - self._origin

    def enqueued(self, step: SchedulerOutput, *, begin_s: float) -> None:
        """Note that a step has just been handed to the device."""
        verify = step.verify
        generating = drafts = 0
        if verify is not None:
            generating, drafts = len(verify.seq_ids), int(verify.num_drafts.sum())
        known = step.num_tokens - generating - drafts
        self._enqueued[step.step_id] = (begin_s, self.now(), known, generating, drafts)

    def taken_in(self, step: SchedulerOutput, *, wait_s: float, landed_s: float) -> None:
        """Note that a step's results have just been taken in."""
        begin, enqueued, known, generating, drafts = self._enqueued.pop(step.step_id)
        if len(self._done) == 2 * _SIZE:
            del self._done[:_SIZE]
        self._done.append(StepTimes(
            step_id=step.step_id, begin_s=begin, enqueued_s=enqueued, wait_s=wait_s,
            landed_s=landed_s, end_s=self.now(), known_tokens=known, generating=generating,
            draft_tokens=drafts,
        ))

    def newest(self) -> list[StepTimes]:
        """The newest steps, oldest first, at most 128."""
        return self._done[-_SIZE:]
