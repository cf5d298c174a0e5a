"""Results on their way to the host.

A copy to the host always lands in memory that nobody else can reach. The ticket is the only way to
the values, and carries the producer's row map: values are never remapped through the current one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace.rt.errors import RtError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from headrace.rt.streams import Event

    Array = npt.NDArray[np.generic]


class Landing(Protocol):
    """Host memory a copy ends in, leased for one ticket."""

    def take(self) -> Mapping[str, Array]:
        """Read the values, after the event, as private read-only arrays; frees the memory."""
        ...

    def abandon(self, event: Event) -> None:
        """Free the memory unread, once the event has happened."""
        ...


class DoneCallback(Protocol):
    """Told that a ticket is about to be read or dropped."""

    def __call__(self, ticket: Ticket, /, *, is_dropped: bool) -> None:
        """Note it."""
        ...


class Result:
    """Values of one fetch.

    Attributes:
        rows: The row map given to `Runtime.fetch`, that of the step that produced the values.
    """

    __slots__ = ("_arrays", "rows")

    def __init__(self, arrays: Mapping[str, Array], rows: Hashable) -> None:
        self._arrays = arrays
        self.rows = rows

    def __getitem__(self, name: str) -> Array:
        """Read-only values of one fetched view, rows in the producer's order."""
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def keys(self) -> tuple[str, ...]:
        """Names given to `Runtime.fetch`."""
        return tuple(self._arrays)


class Ticket:
    """A claim on the values of one fetch.

    Attributes:
        event: When the copy has landed.
        rows: The producer's row map.
        landing: Where the copy lands; None once it was read or dropped. For the runtime.
    """

    __slots__ = ("_on_done", "_result", "event", "landing", "rows")

    def __init__(
        self,
        event: Event,
        landing: Landing,
        rows: Hashable,
        on_done: DoneCallback | None = None,
    ) -> None:
        self.event = event
        self.rows = rows
        self.landing: Landing | None = landing
        self._result: Result | None = None
        self._on_done = on_done

    def result(self) -> Result:
        """Wait for the values.

        Returns:
            The same object at every call.

        Raises:
            RtError: The ticket was dropped.
        """
        result = self._result
        if result is None:
            landing = self._close("result", is_dropped=False)
            self.event.wait_host()
            result = self._result = Result(landing.take(), self.rows)
        return result

    def drop(self) -> None:
        """Give the values up. Their memory stays busy until the copy has landed.

        Raises:
            RtError: The ticket was read or dropped before.
        """
        self._close("drop", is_dropped=True).abandon(self.event)

    def _close(self, what: str, *, is_dropped: bool) -> Landing:
        landing = self.landing
        if landing is None:
            raise RtError(f"{what}() on a ticket that was read or dropped before")
        if self._on_done is not None:
            self._on_done(self, is_dropped=is_dropped)
        self.landing = None
        return landing
