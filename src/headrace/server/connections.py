"""Connections whose clients do not read: watched, and ended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio

_LOG = logging.getLogger(__name__)


class WatchedConnection(HttpToolsProtocol):
    """uvicorn's connection; one whose client takes nothing of an answer is closed after a while.

    Answers wait in the transport's buffer once the kernel's are full. uvicorn lets a stream wait
    for room, and closes a connection when its buffer is empty: with a client that never reads,
    both are forever. Here the buffer is looked at from time to time: while a stream waits, and
    after the last byte of an answer was handed over. Nothing is added to it at those times, so one
    that has not shrunk in between means that the client took nothing.

    What is closed counts as a client that went away, so its sequences are aborted.

    Attributes:
        send_timeout_s: Seconds in which a client has to take something; None waits forever.
    """

    send_timeout_s: float | None = None

    _watch: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The buffer is full: what writes waits."""
        super().pause_writing()
        self._begin_watch()

    def resume_writing(self) -> None:
        """There is room again."""
        super().resume_writing()
        self._end_watch()

    def on_message_begin(self) -> None:
        """Another request on this connection will write."""
        if not self.flow.write_paused:
            self._end_watch()
        super().on_message_begin()

    def on_response_complete(self) -> None:
        """Nothing more comes but what is in the buffer, unless the next request waits already."""
        if not self.pipeline:
            self._begin_watch()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client went away, or was closed."""
        super().connection_lost(exc)
        self._end_watch()

    def _begin_watch(self) -> None:
        self._end_watch()
        left = self.transport.get_write_buffer_size()
        if left and self.send_timeout_s is not None:
            self._watch = self.loop.call_later(self.send_timeout_s, self._look, left)

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _look(self, before: int) -> None:
        self._watch = None
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._begin_watch()
            return
        host = self.client[0] if self.client else "unknown"
        _LOG.warning(
            "a client at %s took nothing of its answer for %g s while %d bytes waited for it; its "
            "connection is closed; let it read, or raise send_timeout",
            host, self.send_timeout_s, left,
        )
        self.transport.abort()


def connection_kind(send_timeout_s: float | None) -> type[WatchedConnection]:
    """Connections with a timeout; uvicorn makes them, from a class.

    Args:
        send_timeout_s: Seconds in which a client has to take something; None waits forever.
    """

    class Connection(WatchedConnection):
        pass

    Connection.send_timeout_s = send_timeout_s
    return Connection
