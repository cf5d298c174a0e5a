"""Captured launches, replayed as one.

Static: the buffers a captured op was given, by address. They must outlive the graph unresized and
must not belong to a rotating frame. Rotating: frame inputs are copied to the static inputs before a
replay, static outputs into the frame after it, by ops on the replay's stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.rt.buffers import View, row_array
from headrace.rt.errors import RtError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from headrace.rt.buffers import Buffer, RowIds
    from headrace.rt.effects import Op
    from headrace.rt.runtime import Runtime
    from headrace.rt.streams import Stream

    Rows = Mapping[str, tuple[RowIds | None, RowIds | None]]


@dataclass(frozen=True, slots=True)
class CapturedLaunch:
    """One launch inside a graph: the op and its arguments as they were at capture."""

    op: Op[Any]
    arguments: dict[str, object]

    def replayed(self, rows: Rows) -> dict[str, object]:
        """The arguments of a replay: captured rows give way to the replay's."""
        op = self.op
        return {
            name: (
                with_rows(value, rows, reads=op.reads[name], writes=op.writes[name])
                if name in op.effects
                else value
            )
            for name, value in self.arguments.items()
        }


@dataclass(slots=True, eq=False)
class Graph:
    """A captured sequence of launches; made by `Runtime.graph`.

    Attributes:
        key: Given at creation, for example (batch size, query length).
        inputs: Static buffers the caller fills before a replay.
        outputs: Static buffers it reads after one.
        stream: What it is captured on.
        launches: What was captured, in order.
        native: The backend's own graph.
    """

    runtime: Runtime
    key: Hashable
    inputs: Mapping[str, Buffer]
    outputs: Mapping[str, Buffer]
    stream: Stream
    launches: list[CapturedLaunch] = field(default_factory=list)
    native: object | None = None

    def replay(self, stream: Stream, rows: Rows | None = None) -> None:
        """Run the captured launches again.

        Args:
            stream: Where.
            rows: This replay's (read, write) rows of buffers that were captured with `Buffer.rows`,
                by buffer name: the host-known superset. Left out, the whole buffer counts.

        Raises:
            RtError: Nothing was captured.
        """
        if not self.launches:
            raise RtError(f"graph {self.key!r} captured no launch")
        self.runtime.replay_graph(self, stream, rows or {})


def with_rows(argument: object, rows: Rows, *, reads: bool, writes: bool) -> object:
    """Captured views with this replay's rows; without them the whole buffer counts."""
    if isinstance(argument, View) and argument.by_row:
        view = View(argument.buffer, argument.device_tensor, argument.start, argument.stop)
        view.generation = argument.generation
        given = rows.get(argument.buffer.name)
        if given is not None:
            # One buffer may be read by one captured op and written by another.
            view.by_row = True
            view.read = row_array(given[0]) if reads else None
            view.write = row_array(given[1]) if writes else None
        return view
    if isinstance(argument, tuple):
        return tuple(with_rows(item, rows, reads=reads, writes=writes) for item in argument)
    if isinstance(argument, list):
        return [with_rows(item, rows, reads=reads, writes=writes) for item in argument]
    if isinstance(argument, dict):
        return {
            key: with_rows(item, rows, reads=reads, writes=writes) for key, item in argument.items()
        }
    return argument
