"""Steps that repeat, captured: the launches of generating rows alone, for padded sizes.

A captured step always reads and writes the same memory and always has the same shape. So its inputs
are copied from the step's frame to static ones before it, its outputs from static ones to the frame
after it, and its rows are filled up to a size of `row_sizes`. Rows of padding have no tokens, null
blocks, no slot and the carry row behind all slots, which is nobody's; tokens of padding have
column -1, the null slot and token 0. What they write is that carry row and bytes that stand there
already.

buffer        | shape, dtype   | written by                      | read by            | until
--------------|----------------|---------------------------------|--------------------|----------
graph.in.*    | as frame.in.*  | copy_fields, before the step    | the step's launches| next step
graph.out.*   | as frame.out.* | verify, save, land_drafts       | copy_fields, after | next step

A size is launched one by one at first, which compiles its kernels and makes whatever is made once;
at its second use it is captured, on the stream that it was launched on, and replayed from then on.
Where a larger size is captured already it stands in for a while: sizes that only pass by are not
captured.
Where tokens are chosen in a special way (sampled, with rules, masks or log-probabilities), `verify`
is launched between two captured parts. Steps with prompts are not captured.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace import rt
from headrace.errors import ConfigError
from headrace.models.batch import ROW_TILE
from headrace.worker.buffers import input_fields, output_fields, state_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from torch import Tensor

    from headrace.worker.buffers import WorkerSizes
    from headrace.worker.step import VerifyPlan

    Size = tuple[int, int, int]
    Kind = tuple[Hashable, ...]
    Key = tuple[str, Size, Kind]

FIRST_LENGTH = 512
"""Tokens that the shortest captured step has room for in each sequence: one split of its attention.

Longer ones double, so that a growing sequence meets few sizes.
"""

MOST_ROOM = 2**22
"""Rows times tokens of room for which a step is captured.

Attention keeps partial sums of all of it, used or not: 128 bytes a token with 4 KV heads of 256, so
half a GiB. What is beyond is launched with the room that its rows need.
"""

PATIENCE, SHORT_PATIENCE = 16, 4
"""Steps of a size for which a larger one stands in, close by or not.

A new size compiles kernels (half a second for a new number of tokens a row) and is captured, which
takes as long as several steps; the ends of a batch's sequences go through many sizes.
"""

CLOSE_TIMES, CLOSE_MORE = 4, 64
"""A size is close with at most so many times the tokens, or so many more: below some dozens of
tokens a step takes as long as the weights take to be read."""

_FINE, _MIDDLE = 32, 128


@rt.op(role="graph input", source=rt.Read, target=rt.Write)
def copy_fields(*, source: tuple[Tensor, ...], target: tuple[Tensor, ...]) -> None:
    """Copy each source to its target, between a frame and static memory."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in target):
        of_dtype = [at for at, tensor in enumerate(target) if tensor.dtype is dtype]
        # One launch for all fields of a dtype.
        torch._foreach_copy_([target[at] for at in of_dtype], [source[at] for at in of_dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """What a step of generating rows alone is filled up to.

    Attributes:
        num_rows: Rows.
        query_len: Tokens of each, Q.
        kv_width: Columns of the KV tables.
        state_width: Columns of the state tables.
        max_seq_len: Tokens of the longest sequence that its KV tables have room for.
        null_row: Carry row of those that are nobody's.
    """

    num_rows: int
    query_len: int
    kv_width: int
    state_width: int
    max_seq_len: int
    null_row: int


def row_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows that steps are filled up to, ascending; the last one is `most`."""
    sizes = [1, 2, 4, *range(8, min(most, _FINE), 8)]
    sizes += [*range(_FINE, min(most, _MIDDLE), 16), *range(_MIDDLE, most, 32)]
    return (*(size for size in sizes if size < most), most)


def logits_bytes(num_rows: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Bytes of the largest temporaries of a captured step: a drafter's logits for all rows.

    The model's own have a buffer.
    """
    return -(-num_rows // ROW_TILE) * ROW_TILE * vocab_size * dtype.itemsize


class StepGraphs:
    """The captured steps of one worker.

    Args:
        runtime: The way to the device.
        sizes: The worker's.
        stream: What steps are launched on.
        num_tables: State tables.
        dtype: Of the model.

    Attributes:
        inputs, outputs: Static memory, by field.
        counts: Static counts of the compact layout, which launches are handed as carry.
        num_launches, num_captures, num_replays: Steps, or parts of one, that were launched one by
            one, captured, and replayed.
    """

    def __init__(
        self,
        runtime: rt.Runtime,
        sizes: WorkerSizes,
        stream: rt.Stream,
        *,
        num_tables: int,
        dtype: torch.dtype,
    ) -> None:
        self._runtime = runtime
        self._sizes = sizes
        self._stream = stream
        self._row_sizes = row_sizes(sizes.max_num_seqs)
        self._launched: set[Key] = set()
        self._graphs: dict[Key, rt.Graph] = {}
        self._captured: dict[Kind, set[Size]] = {}
        self._wanted: Counter[tuple[Kind, Size]] = Counter()
        self.num_launches = self.num_captures = self.num_replays = 0
        fields = input_fields(sizes, num_tables)
        # Read by a launch that is not captured.
        del fields["row_map"]
        self._fields = self._static("in", fields, "input")
        self.counts = self._fields["counts"]
        self.inputs = rt.Bundle({n: b for n, b in self._fields.items() if n != "counts"})
        self.outputs = self._static("out", output_fields(sizes), "output")
        # Sizes come in any order, and a small one's memory is of no use to a larger one. All of
        # them find their largest temporaries in what is set aside here.
        largest = logits_bytes(sizes.max_num_seqs, sizes.vocab_size, dtype)
        runtime.reserve_for_graphs(largest, stream)

    def _static(self, part: str, fields: Mapping[str, rt.Field], kind: str) -> rt.Bundle:
        return rt.Bundle({
            name: self._runtime.alloc(
                f"graph.{part}.{name}", field.shape, field.dtype, kind=field.kind or kind, fill=0
            )
            for name, field in fields.items()
        })

    def fill(self, verify: VerifyPlan, kind: Kind) -> Padding | None:
        """What a step of generating rows alone is filled up to, or None if it is not captured.

        Its own size, unless a larger one is captured and its own is not: that is replayed until its
        own has been wanted often enough to be worth its capture.

        Args:
            verify: The rows.
            kind: Everything else that its launches depend on.
        """
        sizes = self._sizes
        count = len(verify.seq_ids)
        length, wanted = FIRST_LENGTH, verify.max_seq_len + sizes.max_drafts
        while length < wanted:
            length *= 2
        own = (
            next(size for size in self._row_sizes if size >= count),
            int(verify.num_drafts.max()) + 1,
            min(-(-length // sizes.block_size), sizes.table_width),
        )
        if own[0] * own[2] * sizes.block_size > MOST_ROOM:
            return None
        num_rows, query_len, kv_width = self._choose(own, kind)
        return Padding(
            num_rows=num_rows,
            query_len=query_len,
            kv_width=kv_width,
            max_seq_len=kv_width * sizes.block_size,
            state_width=state_columns(sizes),
            null_row=sizes.max_num_seqs,
        )

    def _choose(self, own: Size, kind: Kind) -> Size:
        """The size to use for a step of a size."""
        captured = self._captured.setdefault(kind, set())
        if own in captured:
            return own
        self._wanted[kind, own] += 1
        times = self._wanted[kind, own]
        larger = [size for size in captured if all(map(int.__ge__, size, own))]
        if larger:
            best = min(larger, key=lambda size: (size[0] * size[1], size))
            tokens = own[0] * own[1]
            is_close = best[0] * best[1] <= max(CLOSE_TIMES * tokens, tokens + CLOSE_MORE)
            return best if times <= (PATIENCE if is_close else SHORT_PATIENCE) else own
        if own[1] > 1 and times <= PATIENCE:
            # Rows with fewer drafts than usual: at their end, or by the draft policy for a while.
            return own[0], 1 + self._sizes.max_drafts, own[2]
        return own

    def load(self, frame: rt.Frame, rows: Mapping[str, int]) -> None:
        """Copy what was staged of a frame to the static inputs."""
        fields = [(name, count) for name, count in rows.items() if name in self._fields]
        self._runtime.launch(
            copy_fields, self._stream,
            source=tuple(frame.inputs[name][:count] for name, count in fields),
            target=tuple(self._fields[name][:count] for name, count in fields),
        )  # fmt: skip

    def store(self, wanted: Mapping[str, rt.View]) -> None:
        """Copy what the host reads of a step from the static outputs to its frame.

        Args:
            wanted: Views of the frame's outputs, by field.
        """
        self._runtime.launch(
            copy_fields, self._stream,
            source=tuple(self.outputs[name][: len(view)] for name, view in wanted.items()),
            target=tuple(wanted.values()),
        )  # fmt: skip

    def run(self, part: str, size: Size, kind: Kind, enqueue: Callable[[rt.Stream], None]) -> None:
        """Launch a part of a step, or replay it.

        Args:
            part: Which.
            size: What the step was filled up to.
            kind: Everything else that its launches depend on, but for the values in memory.
            enqueue: Makes the launches, at least one, on the stream that it is given.
        """
        key = (part, size, kind)
        graph = self._graphs.get(key)
        if graph is None:
            if key not in self._launched:
                self._launched.add(key)
                self.num_launches += 1
                enqueue(self._stream)
                return
            graph = self._graphs[key] = self._capture(key, enqueue)
            self._captured[kind].add(size)
            self.num_captures += 1
        self.num_replays += 1
        graph.replay(self._stream)

    def _capture(self, key: Key, enqueue: Callable[[rt.Stream], None]) -> rt.Graph:
        try:
            return self._runtime.graph(
                ("step", key), enqueue, inputs=self.inputs, outputs=self.outputs, on=self._stream
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"no memory is left to capture a step of {key[1][0]} rows; lower "
                "gpu_memory_utilization or max_num_seqs, or use graphs off"
            ) from error
