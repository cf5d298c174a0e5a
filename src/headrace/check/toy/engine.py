"""The toy engine: scheduling, steps in flight, checkpoints, abort and preemption.

This is the engine as it should be. The faults of the catalogue are subclasses (`mutants.py`) that
go another way at one place, wrongly if `is_faulty`, else rightly: the mutant and its twin.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace import rt
from headrace.check.toy import model
from headrace.check.toy.model import BLOCK, EMPTY, MAX_BLOCKS, NUM_DRAFTS, NUM_ROWS, PREFILL, QUERY

if TYPE_CHECKING:
    from types import CodeType

    from headrace.check.toy.workload import ToyRequest, Workload

NUM_SLOTS = 6
NUM_BLOCKS = 44
NUM_CHECKPOINTS = 2
MAX_STEPS = 400

INPUTS = {
    "sort": rt.Field((NUM_ROWS,), torch.int64),
    "slot": rt.Field((NUM_ROWS,), torch.int64),
    "count": rt.Field((NUM_ROWS,), torch.int64),
    "start": rt.Field((NUM_ROWS,), torch.int64),
    "prev_row": rt.Field((NUM_ROWS,), torch.int64),
    "tokens": rt.Field((NUM_ROWS, QUERY), torch.int64),
    "table": rt.Field((NUM_ROWS, MAX_BLOCKS), torch.int64),
}
OUTPUTS = {
    "accepted": rt.Field((NUM_ROWS,), torch.int64, "accepted_counts"),
    "sampled": rt.Field((NUM_ROWS, NUM_DRAFTS + 1), torch.int64, "sampled_tokens"),
    "length": rt.Field((NUM_ROWS,), torch.int64, "accepted_counts"),
    "drafts": rt.Field((NUM_ROWS, NUM_DRAFTS), torch.int64),
}
RESULTS = ("accepted", "sampled", "length")
RowMap = tuple[tuple[int, bool], ...]
"""(request, whether the row makes tokens) of each row."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request being served.

    Attributes:
        scheduled: Prompt tokens scheduled so far.
        in_flight: Steps that hold a row of it and are not processed.
        accepted: Tokens its last processed row kept.
        length: Tokens in its state, as far as the host knows.
        saved: Checkpoint of a preempted sequence.
        resume_at: Step from which it may run again.
    """

    request: ToyRequest
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    slot: int = 0
    scheduled: int = 0
    in_flight: int = 0
    accepted: int = 1
    length: int = 0
    saved: int | None = None
    resume_at: int = 0
    is_done: bool = False
    is_aborted: bool = False
    is_draining: bool = False


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A published prefix: its state, its blocks, and the event after which it may be read."""

    index: int
    ready: rt.Event
    blocks: list[int]


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step whose results have not been processed."""

    number: int
    rows: RowMap
    ticket: rt.Ticket | None
    compute: rt.Event
    extra: Any = None


class ToyEngine:
    """Serves one workload.

    Args:
        runtime: Where.
        workload: What.
        depth: Steps in flight.
        is_faulty: Whether a subclass takes its detour wrongly. Nothing here depends on it.
    """

    def __init__(
        self,
        runtime: rt.Runtime,
        workload: Workload,
        *,
        depth: int = 2,
        is_faulty: bool = False,
    ) -> None:
        self.runtime = runtime
        self.workload = workload
        self.depth = depth
        self.is_faulty = is_faulty
        self.h2d = runtime.stream("h2d")
        self.compute = runtime.stream("compute")
        self.draft = runtime.stream("draft")
        self.d2h = runtime.stream("d2h")
        self.side = runtime.stream("side")
        self.checkpointing = runtime.stream("checkpoint")
        alloc = runtime.alloc
        width = NUM_DRAFTS + 1
        self.kv = alloc("kv", (NUM_BLOCKS, BLOCK), torch.int64, kind="kv_block", null_row=0)
        self.state = alloc(
            "state", (NUM_SLOTS, width), torch.int64, kind="recurrent_state", null_row=0
        )
        self.window = alloc(
            "window", (NUM_SLOTS, width + 1), torch.int64, kind="conv_window", null_row=0
        )
        self.kept = alloc("kept", (NUM_CHECKPOINTS, 3), torch.int64, kind="checkpoint")
        self.saved = alloc("saved", (NUM_ROWS, 3), torch.int64, kind="checkpoint")
        self.scratch = alloc("scratch", (NUM_ROWS,), torch.int64)
        self.draft_scratch = alloc("draft scratch", (NUM_ROWS,), torch.int64)
        self.nothing = {
            name: alloc(f"nothing.{name}", OUTPUTS[name].shape, torch.int64) for name in RESULTS
        }
        self.ring = runtime.frames("step", depth=depth + 1, inputs=INPUTS, outputs=OUTPUTS)
        self.slots = runtime.slot_pool(NUM_SLOTS - 1, kind="recurrent_state")
        self.checkpoint_slots = runtime.slot_pool(NUM_CHECKPOINTS, kind="checkpoint")
        self.saved_slots = runtime.slot_pool(NUM_ROWS, kind="checkpoint")
        self.free_blocks = deque(range(1, NUM_BLOCKS))
        self.block_users = [0] * NUM_BLOCKS
        self.prefixes: dict[tuple[int, ...], Checkpoint] = {}
        self.sequences = {one.index: Sequence(one) for one in workload.requests}
        self.waiting = deque(workload.requests)
        self.preempted: list[Sequence] = []
        # The live batch: row -> sequence, compacted when one ends. Private to this thread.
        self.rows: list[Sequence] = []
        self.table = np.zeros((NUM_ROWS, MAX_BLOCKS), dtype=np.int64)
        self.in_flight: deque[StepInFlight] = deque()
        self.step = 0
        self.last_compute: rt.Event | None = None
        self.prev_outputs: dict[str, rt.View] = {
            name: buffer.whole for name, buffer in self.nothing.items()
        }
        self.prev_rows: dict[int, int] = {}
        self.delivered: dict[int, list[int]] = {one.index: [] for one in workload.requests}
        self.out_queue = runtime.queue()
        self.set_up()

    def set_up(self) -> None:
        """More memory, for subclasses."""

    # The loop.

    def run(self) -> dict[int, list[int]]:
        """Serve everything; tokens by request."""
        consumer = self.runtime.thread(self.consume, "consumer")
        consumer.start()
        while self.has_work() and self.step < MAX_STEPS:
            self.handle_events()
            self.admit()
            self.launch_step()
            while len(self.in_flight) >= self.depth or (self.in_flight and not self.rows):
                self.process(self.in_flight.popleft())
            self.step += 1
        while self.in_flight:
            self.process(self.in_flight.popleft())
        self.out_queue.put(None)
        consumer.join()
        self.runtime.finish()
        return self.delivered

    def has_work(self) -> bool:
        """Whether anything is left to serve."""
        return bool(self.waiting or self.rows or self.preempted or self.in_flight)

    def consume(self) -> None:
        """The other host thread: collects what was generated."""
        while (item := self.out_queue.get()) is not None:
            index, tokens = item
            self.delivered[index] += tokens

    def handle_events(self) -> None:
        """Aborts and preemptions of this step."""
        for index, step in self.workload.aborts.items():
            sequence = self.sequences[index]
            if step <= self.step and not sequence.is_done and not sequence.is_aborted:
                self.abort(sequence)
        for index, (step, pause) in self.workload.preemptions.items():
            sequence = self.sequences[index]
            if step == self.step and sequence in self.rows and not sequence.is_draining:
                sequence.is_draining = True
                sequence.resume_at = self.step + pause
        for sequence in list(self.rows):
            if sequence.is_draining:
                self.preempt(sequence)

    # Rows and slots.

    def remove_row(self, sequence: Sequence) -> None:
        """Move the last row into the hole."""
        with self.runtime.doing("row compaction"):
            hole, last = self.rows.index(sequence), len(self.rows) - 1
            self.rows[hole] = self.rows[last]
            self.rows.pop()
            self.table[hole] = self.table[last]
            self.compact_detours(hole, last)

    def compact_detours(self, hole: int, last: int) -> None:
        """Arrays of detours that move with the rows."""

    def give_slot(self, sequence: Sequence) -> None:
        """Give a slot back after everything enqueued so far has used it."""
        # Recorded now: the compute stream has waited for the slot's checkpoint since the step.
        self.slots.give(sequence.slot - 1, after=self.compute.record())

    def release(self, sequence: Sequence) -> None:
        """Give everything of a sequence back."""
        if sequence in self.rows:
            self.remove_row(sequence)
            self.give_slot(sequence)
        self.release_blocks(sequence.blocks)

    def release_blocks(self, blocks: list[int]) -> None:
        """One user less; blocks are used on the compute stream alone, in order."""
        for block in blocks:
            self.block_users[block] -= 1
            if not self.block_users[block]:
                self.free_blocks.append(block)

    def abort(self, sequence: Sequence) -> None:
        """The client has gone."""
        sequence.is_aborted = sequence.is_done = True
        if sequence.request in self.waiting:
            self.waiting.remove(sequence.request)
        elif sequence in self.preempted:
            self.preempted.remove(sequence)
            self.saved_slots.give(self.saved_index(sequence), after=self.last_side())
            self.release_blocks(sequence.blocks)
        else:
            self.release(sequence)

    def last_side(self) -> rt.Event:
        """After everything on the side stream so far."""
        return self.side.record()

    @staticmethod
    def saved_index(sequence: Sequence) -> int:
        """Its checkpoint."""
        assert sequence.saved is not None
        return sequence.saved

    def preempt(self, sequence: Sequence) -> None:
        """Save a sequence's state once the host knows what its last step kept."""
        while sequence.in_flight:
            self.process(self.in_flight.popleft())
        if sequence.is_done:
            return
        sequence.is_draining = False
        sequence.saved = self.saved_slots.take(on=self.side)
        # Recorded now, as for any slot: a checkpoint of it may have been enqueued since the step.
        self.side.wait(self.compute.record())
        self.launch_keep(self.side, self.saved, sequence, sequence.saved, sequence.accepted)
        self.remove_row(sequence)
        self.slots.give(sequence.slot - 1, after=self.side.record())
        self.prev_rows.pop(sequence.request.index, None)
        self.preempted.append(sequence)

    def launch_keep(
        self, stream: rt.Stream, target: rt.Buffer, sequence: Sequence, index: int, accepted: int
    ) -> None:
        """Copy a state to a checkpoint."""
        self.runtime.launch(
            model.keep,
            stream,
            state=self.state.rows(read=[sequence.slot]),
            window=self.window.rows(read=[sequence.slot]),
            kept=target.rows(write=[index]),
            slot=sequence.slot,
            index=index,
            accepted=accepted,
        )

    def launch_restore(self, source: rt.Buffer, sequence: Sequence, index: int) -> rt.Event:
        """Copy a checkpoint to a slot; the next step waits for it."""
        self.runtime.launch(
            model.restore,
            self.side,
            kept=source.rows(read=[index]),
            state=self.state.rows(write=[sequence.slot]),
            window=self.window.rows(write=[sequence.slot]),
            slot=sequence.slot,
            index=index,
        )
        event = self.side.record()
        self.compute.wait(event)
        return event

    def take_slot(self, sequence: Sequence) -> None:
        """A slot whose last use comes before what the side stream does next."""
        sequence.slot = 1 + self.slots.take(on=self.side)

    def admit(self) -> None:
        """Fill free rows: preempted sequences first."""
        for sequence in list(self.preempted):
            if len(self.rows) < NUM_ROWS and len(self.slots) and sequence.resume_at <= self.step:
                self.preempted.remove(sequence)
                self.take_slot(sequence)
                saved = self.saved_index(sequence)
                event = self.launch_restore(self.saved, sequence, saved)
                self.saved_slots.give(saved, after=event)
                sequence.saved = None
                self.add_row(sequence)
        while self.waiting and self.waiting[0].arrival <= self.step:
            sequence = self.sequences[self.waiting[0].index]
            if len(self.rows) >= NUM_ROWS or not len(self.slots) or not self.allocate(sequence):
                return
            self.waiting.popleft()
            self.add_row(sequence)

    def add_row(self, sequence: Sequence) -> None:
        """Append to the live batch."""
        row = len(self.rows)
        self.rows.append(sequence)
        self.table[row] = 0
        self.table[row, : len(sequence.blocks)] = sequence.blocks

    def allocate(self, sequence: Sequence) -> bool:
        """Blocks for the longest it may get, a slot, and the state to begin with."""
        request = sequence.request
        prefix = self.longest_prefix(request.prompt)
        entry = self.prefixes.get(prefix)
        # Drafts of the steps in flight may reach past the last token.
        longest = len(request.prompt) + request.max_new + (NUM_DRAFTS + 1) * (self.depth + 1)
        shared = list(entry.blocks) if entry is not None else []
        needed = min(-(-longest // BLOCK), MAX_BLOCKS) - len(shared)
        if needed > len(self.free_blocks):
            return False
        fresh = [self.free_blocks.popleft() for _ in range(needed)]
        sequence.blocks = shared + fresh
        for block in sequence.blocks:
            self.block_users[block] += 1
        self.take_slot(sequence)
        if entry is None:
            self.start_from_zero(sequence)
        else:
            self.start_from_prefix(sequence, entry, len(prefix))
        return True

    def start_from_zero(self, sequence: Sequence) -> None:
        """Clear the slot on the side stream, before the next step."""
        self.runtime.launch(
            model.zero,
            self.side,
            state=self.state.rows(write=[sequence.slot]),
            window=self.window.rows(write=[sequence.slot]),
            slot=sequence.slot,
        )
        self.compute.wait(self.side.record())

    def start_from_prefix(self, sequence: Sequence, entry: Checkpoint, length: int) -> None:
        """Restore a checkpoint on the side stream, before the next step."""
        self.side.wait(entry.ready)
        entry.ready = self.launch_restore(self.kept, sequence, entry.index)
        sequence.scheduled = sequence.length = length

    def longest_prefix(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """The longest published prefix; the last token must be computed."""
        for length in range((len(prompt) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            if prompt[:length] in self.prefixes:
                return prompt[:length]
        return ()

    # A step.

    def launch_step(self) -> None:
        """Stage, draft, compute and fetch one step; an empty batch is a legal step."""
        frame = self.ring.next()
        plan = [self.plan_row(row, sequence) for row, sequence in enumerate(self.rows)]
        self.stage(frame, plan)
        staged = self.h2d.record()
        self.wait_for_inputs(staged)
        self.launch_drafts(frame, staged)
        self.launch_forward(frame, plan)
        event = self.compute.record()
        self.last_compute = event
        rows: RowMap = tuple((one["index"], one["makes_tokens"]) for one in plan)
        step = StepInFlight(self.step, rows, None, event)
        self.fetch_results(frame, step)
        self.prev_outputs = {name: frame.outputs[name].whole for name in RESULTS}
        self.prev_rows = {index: row for row, (index, _) in enumerate(rows)}
        self.in_flight.append(step)
        for sequence in self.rows:
            sequence.in_flight += 1
            self.publish(sequence, event)

    def plan_row(self, row: int, sequence: Sequence) -> dict[str, Any]:
        """What a row computes in this step."""
        prompt = sequence.request.prompt
        index = sequence.request.index
        plan: dict[str, Any] = {
            "index": index,
            "slot": sequence.slot,
            "blocks": sequence.blocks,
            "row": row,
            "sequence": sequence,
        }
        if sequence.scheduled < len(prompt):
            start = sequence.scheduled
            # Chunks end on block boundaries, where checkpoints may be taken.
            count = min(QUERY - start % BLOCK, len(prompt) - start)
            sequence.scheduled += count
            return plan | {
                "sort": PREFILL,
                "count": count,
                "start": start,
                "prev_row": -1,
                "tokens": prompt[start : start + count],
                "makes_tokens": sequence.scheduled == len(prompt),
                "first_block": start // BLOCK,
            }
        known = sequence.tokens[-1:] or prompt[-1:]
        return plan | {
            "sort": model.VERIFY,
            "count": 1,
            "start": sequence.length,
            # Without a row in the step before, the host knows token and length itself.
            "prev_row": self.prev_rows.get(index, -1),
            "tokens": known,
            "makes_tokens": True,
            "first_block": min(sequence.length, len(prompt)) // BLOCK,
        }

    def stage(self, frame: rt.Frame, plan: list[dict[str, Any]]) -> None:
        """Fill the frame's inputs from the plan and the live table."""
        with frame.stage() as w:
            self.fill(w, plan)
            w.commit(self.h2d)

    def fill(self, w: Any, plan: list[dict[str, Any]]) -> None:  # noqa: ANN401
        """Write every field; rows without a sequence are padding."""
        for name in ("sort", "slot", "count", "start"):
            w[name][:] = [one[name] for one in plan] + [EMPTY] * (NUM_ROWS - len(plan))
        w["prev_row"][:] = [one["prev_row"] for one in plan] + [-1] * (NUM_ROWS - len(plan))
        tokens = np.zeros((NUM_ROWS, QUERY), dtype=np.int64)
        for row, one in enumerate(plan):
            tokens[row, : len(one["tokens"])] = one["tokens"]
        w["tokens"][:] = tokens
        table = self.table.copy()
        table[len(plan) :] = 0
        w["table"][:] = table

    def inputs_of(self, frame: rt.Frame) -> dict[str, rt.Buffer]:
        """What the step's ops get as inputs."""
        return dict(frame.inputs)

    def wait_for_inputs(self, staged: rt.Event) -> None:
        """The step comes after its inputs."""
        self.compute.wait(staged)

    def launch_drafts(self, frame: rt.Frame, staged: rt.Event) -> None:
        """Guess tokens on a stream of its own, then let the step wait."""
        self.draft.wait(staged)
        if self.last_compute is not None:
            self.draft.wait(self.last_compute)
        launch = self.runtime.launch
        scratch = self.draft_scratch
        inputs = self.inputs_of(frame)
        launch(
            model.draft_begin, self.draft, inputs=inputs, prev=self.prev_outputs, scratch=scratch
        )
        launch(
            model.draft_extend, self.draft, scratch=scratch, drafts=frame.outputs["drafts"].whole
        )
        self.compute.wait(self.draft.record())

    def launch_forward(self, frame: rt.Frame, plan: list[dict[str, Any]]) -> None:
        """Attention over earlier tokens, then everything else."""
        read, write = self.block_rows(plan)
        slots = [one["slot"] for one in plan]
        self.runtime.launch(
            model.attend,
            self.compute,
            inputs=self.inputs_of(frame),
            prev=self.prev_outputs,
            kv=self.kv.rows(read=read),
            scratch=self.scratch,
        )
        self.between_launches()
        self.runtime.launch(
            model.forward,
            self.compute,
            inputs=self.inputs_of(frame),
            prev=self.prev_outputs,
            drafts=frame.outputs["drafts"],
            scratch=self.scratch,
            kv=self.kv.rows(write=write),
            state=self.state.rows(read=slots, write=slots),
            window=self.window.rows(read=slots, write=slots),
            out={name: frame.outputs[name] for name in RESULTS},
        )

    def between_launches(self) -> None:
        """A place for detours."""

    @staticmethod
    def block_rows(plan: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Blocks a step may read; and those it may write, from each row's first new token on."""
        read = sorted({block for one in plan for block in one["blocks"]})
        write = [block for one in plan for block in one["blocks"][one["first_block"] :]]
        return read, write

    def fetch_results(self, frame: rt.Frame, step: StepInFlight) -> None:
        """Copy the results to the host."""
        step.ticket = self.runtime.fetch(
            {name: frame.outputs[name] for name in RESULTS},
            on=self.d2h,
            after=step.compute,
            rows=step.rows,
        )

    # Checkpoints.

    def publish(self, sequence: Sequence, computed: rt.Event) -> None:
        """Checkpoint a prompt's last whole block once its chunk is enqueued."""
        prompt = sequence.request.prompt
        length = sequence.scheduled
        if not length or length != (len(prompt) - 1) // BLOCK * BLOCK:
            return
        key = prompt[:length]
        if key in self.prefixes or sequence.length >= length:
            return
        if not len(self.checkpoint_slots):
            self.evict()
        index = self.checkpoint_slots.take(on=self.checkpointing)
        self.checkpointing.wait(computed)
        self.launch_keep(self.checkpointing, self.kept, sequence, index, 1)
        ready = self.checkpointing.record()
        self.wait_for_checkpoint(ready)
        blocks = sequence.blocks[: length // BLOCK]
        for block in blocks:
            self.block_users[block] += 1
        self.prefixes[key] = Checkpoint(index, ready, blocks)

    def wait_for_checkpoint(self, ready: rt.Event) -> None:
        """The next step overwrites the state that is being copied."""
        self.compute.wait(ready)

    def evict(self) -> None:
        """Drop the oldest prefix; its checkpoint is free after its last reader."""
        key = next(iter(self.prefixes))
        entry = self.prefixes.pop(key)
        self.checkpoint_slots.give(entry.index, after=entry.ready)
        self.release_blocks(entry.blocks)

    # Results.

    def process(self, step: StepInFlight) -> None:
        """Apply a step's results to its own rows."""
        rows = self.sequences
        if all(rows[index].is_done for index, _ in step.rows):
            self.drop_results(step)
            return
        values, row_map = self.read_results(step)
        for index, _ in step.rows:
            rows[index].in_flight -= 1
        for row, (index, makes_tokens) in enumerate(row_map):
            sequence = self.sequences[index]
            if sequence.is_done:
                continue
            if makes_tokens:
                self.apply(sequence, values, row, step)
            else:
                sequence.length = int(values["length"][row])

    def drop_results(self, step: StepInFlight) -> None:
        """Nobody wants these results any more."""
        if step.ticket is not None:
            step.ticket.drop()
        for index, _ in step.rows:
            self.sequences[index].in_flight -= 1

    def read_results(self, step: StepInFlight) -> tuple[Any, RowMap]:
        """Values by name, and the rows they belong to: the producer's."""
        assert step.ticket is not None
        result = step.ticket.result()
        return result, result.rows  # type: ignore[return-value]

    def count_before(self, sequence: Sequence, step: StepInFlight) -> int:  # noqa: ARG002
        """Tokens a sequence had before a step."""
        return len(sequence.tokens)

    def apply(
        self,
        sequence: Sequence,
        values: Any,  # noqa: ANN401  arrays by name
        row: int,
        step: StepInFlight,
    ) -> None:
        """Append what a row kept."""
        request = sequence.request
        accepted = int(values["accepted"][row])
        sequence.accepted = accepted
        sequence.length = int(values["length"][row])
        before = self.count_before(sequence, step)
        fresh: list[int] = []
        for token in values["sampled"][row][:accepted].tolist():
            fresh.append(int(token))
            if token == model.END or before + len(fresh) >= request.max_new:
                sequence.is_done = True
                break
        sequence.tokens += fresh
        self.deliver(sequence, fresh, row, step)
        if sequence.is_done:
            self.release(sequence)

    def deliver(
        self,
        sequence: Sequence,
        tokens: list[int],
        row: int,  # noqa: ARG002
        step: StepInFlight,  # noqa: ARG002
    ) -> None:
        """Hand tokens to the consumer's thread."""
        self.out_queue.put((sequence.request.index, tuple(tokens)))

    # For the value oracle.

    def value_sites(self, index: int) -> tuple[str, str]:
        """Where a request's values are made, and where they are applied."""
        made = ToyEngine.launch_forward.__code__
        applied = ToyEngine.apply.__code__
        del index
        return _site(made), _site(applied)


def _site(code: CodeType) -> str:
    name = code.co_filename.rpartition("/src/")[2]
    return f"src/{name}:{code.co_firstlineno} in {code.co_qualname}"


def wrong_requests(workload: Workload, answers: dict[int, list[int]]) -> list[int]:
    """Requests whose tokens differ from the reference; an aborted one may be a prefix of it."""
    wrong = []
    for request in workload.requests:
        reference = request.reference()
        answer = answers[request.index]
        if request.index in workload.aborts and len(answer) < len(reference):
            reference = reference[: len(answer)]
        if answer != reference:
            wrong.append(request.index)
    return wrong
