"""How ranks other than 0 take steps, and ranks that are threads, for tests and the checker."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Protocol

from headrace.parallel.messages import Land, Stop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from headrace.worker.step import SchedulerOutput
    from headrace.worker.worker import StepHandle, Worker


class Others(Protocol):
    """All ranks but 0, as the engine of rank 0 sees them."""

    def guard(self) -> AbstractContextManager[None]:
        """Some work that needs all ranks: if it fails because of one, the error names that."""

    def send(self, output: SchedulerOutput) -> None:
        """Hand a step to the others; inside `guard`, before it is executed here."""

    def land(self) -> None:
        """Have the others wait for the oldest step too; inside `guard`, before it is done here."""

    def check(self) -> None:
        """Raise if a rank has ended; cheap, from any thread."""

    def stop(self) -> None:
        """End the other ranks; idempotent."""


def take_steps(link: Connection, worker: Worker) -> None:
    """Do what rank 0 does, in its order: enqueue steps, and wait for the results of the oldest.

    Args:
        link: To rank 0; returns when it says stop.
        worker: This rank's.
    """
    in_flight: deque[StepHandle] = deque()
    while not isinstance(message := link.recv(), Stop):
        if isinstance(message, Land):
            in_flight.popleft().result()
        else:
            in_flight.append(worker.execute(message))


class LocalRanks:
    """Ranks that are threads of this process, with `rt.LocalGroup` between them.

    Args:
        workers: Of ranks 1 and up.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._errors: list[BaseException] = []
        self._links: list[Connection] = []
        self._threads: list[threading.Thread] = []
        for rank, worker in enumerate(workers, 1):
            ours, theirs = Pipe()
            thread = threading.Thread(
                target=self._follow, args=(theirs, worker), name=f"rank-{rank}", daemon=True
            )
            thread.start()
            self._links.append(ours)
            self._threads.append(thread)

    def _follow(self, link: Connection, worker: Worker) -> None:
        try:
            take_steps(link, worker)
        except BaseException as error:  # for the thread that waits for it
            self._errors.append(error)
            group = worker.fixed.model.shard.group
            assert group is not None
            group.abort()
        finally:
            link.close()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Some work that needs all ranks; another rank's error comes before what it causes here."""
        self.check()
        try:
            yield
        except Exception as error:
            if self._errors:
                raise self._errors[0] from error
            raise

    def send(self, output: SchedulerOutput) -> None:
        """Hand a step to the others."""
        for link in self._links:
            link.send(output)

    def land(self) -> None:
        """Have the others wait for the oldest step."""
        for link in self._links:
            link.send(Land())

    def check(self) -> None:
        """Raise what ended a rank."""
        if self._errors:
            raise self._errors[0]

    def stop(self) -> None:
        """Let the other ranks finish their steps and end."""
        for link, thread in zip(self._links, self._threads, strict=True):
            if thread.is_alive():
                link.send(Stop())
                thread.join()
            link.close()
        self._links.clear()
        self._threads.clear()
