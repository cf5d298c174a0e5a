"""Faults of rows and declared effects."""

# ruff: noqa: D102  the engine documents the methods that detours override

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace import rt
from headrace.check.toy import model
from headrace.check.toy.engine import (
    Sequence,
    ToyEngine,
)
from headrace.check.toy.faults import fault
from headrace.check.toy.model import NUM_ROWS, PREFILL

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Counts = npt.NDArray[np.int64]


@fault("two-rows-with-one-slot", "R", ("DUPLICATE-ROWS",), "state")
class TwoRowsOneSlot(ToyEngine):
    """Two rows of a step have one state slot."""

    def plan_row(self, row: int, sequence: Sequence) -> dict[str, Any]:
        plan = super().plan_row(row, sequence)
        return plan | {"slot": self.rows[0].slot} if self.is_faulty and row == 1 else plan


@fault("two-rows-with-one-block", "R", ("DUPLICATE-ROWS",), "kv")
class TwoRowsOneBlock(ToyEngine):
    """Two rows of a step write one KV block."""

    def add_row(self, sequence: Sequence) -> None:
        if self.is_faulty and self.rows:
            for block in self.rows[0].blocks:
                self.block_users[block] += 1
            self.release_blocks(sequence.blocks)
            sequence.blocks = list(self.rows[0].blocks)
        super().add_row(sequence)


@fault("padding-rows-write-a-live-slot", "R", ("DUPLICATE-ROWS",), "state")
class PaddingWritesLiveSlot(ToyEngine):
    """Padding rows of a batch name a live slot instead of the null one."""

    def fill(self, w: Any, plan: list[dict[str, Any]]) -> None:  # noqa: ANN401
        super().fill(w, plan)
        padding = slice(len(plan), NUM_ROWS)
        w["sort"][padding] = PREFILL
        w["count"][padding] = 1
        w["slot"][padding] = self.padding_slot(plan)

    def padding_slot(self, plan: list[dict[str, Any]]) -> int:
        """Slot of the rows nobody uses."""
        return plan[0]["slot"] if self.is_faulty and plan else 0

    def launch_forward(self, frame: rt.Frame, plan: list[dict[str, Any]]) -> None:
        padding = {"slot": self.padding_slot(plan), "blocks": [], "first_block": 0}
        super().launch_forward(frame, plan + [padding] * (NUM_ROWS - len(plan)))


@rt.op(role="zero", state=rt.ReadWrite, window=rt.ReadWrite)
def zero_range(*, state: Tensor, window: Tensor, slot: int, count: int) -> None:
    """Clear slots from one on."""
    state[slot : slot + count] = 0
    window[slot : slot + count] = 0


@fault("op-writes-more-than-it-declares", "R", ("UNDECLARED-WRITE",), "state")
class WritesMoreThanDeclared(ToyEngine):
    """An op clears the neighbour of the slot that its launch declares."""

    def start_from_zero(self, sequence: Sequence) -> None:
        self.runtime.launch(
            zero_range,
            self.side,
            state=self.state.rows(write=[sequence.slot]),
            window=self.window.rows(write=[sequence.slot]),
            slot=sequence.slot - 1 if self.is_faulty and sequence.slot > 1 else sequence.slot,
            count=2 if self.is_faulty and sequence.slot > 1 else 1,
        )
        self.compute.wait(self.side.record())


@fault("op-reads-more-than-it-declares", "R", ("UNDECLARED-ROW-READ",), "")
class ReadsMoreThanDeclared(ToyEngine):
    """An op reads a checkpoint that its launch does not declare."""

    def launch_restore(self, source: rt.Buffer, sequence: Sequence, index: int) -> rt.Event:
        declared = index
        if self.is_faulty:
            index = (index + 1) % source.num_rows
        self.runtime.launch(
            model.restore,
            self.side,
            kept=source.rows(read=[declared]),
            state=self.state.rows(write=[sequence.slot]),
            window=self.window.rows(write=[sequence.slot]),
            slot=sequence.slot,
            index=index,
        )
        event = self.side.record()
        self.compute.wait(event)
        return event


@fault("tensor-leaves-its-launch", "R", ("OUTSIDE-LAUNCH",), "state")
class TensorLeavesLaunch(ToyEngine):
    """A tensor is kept from a launch and written outside any."""

    def start_from_zero(self, sequence: Sequence) -> None:
        if not self.is_faulty:
            super().start_from_zero(sequence)
            return
        if not hasattr(self, "leaked"):
            self.leaked: list[Tensor] = []

            @rt.op(role="zero", state=rt.Read, window=rt.Read)
            def leak(*, state: Tensor, window: Tensor) -> None:
                self.leaked += [state, window]

            self.runtime.launch(leak, self.compute, state=self.state, window=self.window)
            self.runtime.synchronize()
        for tensor in self.leaked:
            tensor[sequence.slot] = 0


@rt.op(role="zero", state=rt.ReadWrite, window=rt.ReadWrite)
def zero_at(*, state: Tensor, window: Tensor, slot: Tensor) -> None:
    """Clear the slot that a plain tensor names."""
    state[slot] = 0
    window[slot] = 0


@fault("argument-changed-while-queued", "R", ("MUTATED-ARGUMENT",), "slot")
class ArgumentChanged(ToyEngine):
    """A plain tensor that a queued launch will read is changed."""

    def start_from_zero(self, sequence: Sequence) -> None:
        if not hasattr(self, "slot_tensor") or not self.is_faulty:
            self.slot_tensor = torch.zeros((), dtype=torch.int64)
        self.slot_tensor.fill_(sequence.slot)
        self.runtime.launch(
            zero_at,
            self.side,
            state=self.state.rows(write=[sequence.slot]),
            window=self.window.rows(write=[sequence.slot]),
            slot=self.slot_tensor,
        )
        self.compute.wait(self.side.record())
