"""The simulated device: queues of work, run when the policy says so.

Nothing here looks at clocks. Whatever order the policy picks is one that hardware could pick: work
of a stream in order, waits respected, copies landing in pieces.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from headrace.rt.errors import DeadlockError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.rt.clocks import Clocks, OpRecord
    from headrace.rt.runtime import Policy


class Mark:
    """One recording of an event."""

    __slots__ = ("is_done", "queue")

    def __init__(self, queue: WorkQueue) -> None:
        self.queue = queue
        self.is_done = False


class Work:
    """A unit of work: pieces that run in order, with scheduling between them."""

    __slots__ = ("pieces", "record")

    def __init__(self, record: OpRecord, pieces: list[Callable[[], None]]) -> None:
        self.record = record
        self.pieces = deque(pieces)


class Wait:
    """A stream waits for a mark."""

    __slots__ = ("mark",)

    def __init__(self, mark: Mark) -> None:
        self.mark = mark


class WorkQueue:
    """One stream's work."""

    __slots__ = ("items", "name", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.items: deque[Work | Wait | Mark] = deque()

    def can_run(self) -> bool:
        """Whether the first item may run now."""
        if not self.items:
            return False
        head = self.items[0]
        return not isinstance(head, Wait) or head.mark.is_done


class Device:
    """All queues, and the policy.

    Args:
        seed: One seed is one schedule.
        policy: "eager" runs work when it is enqueued; "lazy" runs only what somebody waits for and
            only what that needs; "random" draws, with a speed and perhaps one starved stream that
            depend on the seed.
        clocks: Told the time at which operations run.
    """

    def __init__(self, seed: int, policy: Policy, clocks: Clocks) -> None:
        self._policy = policy
        self._clocks = clocks
        self._random = random.Random(seed)  # noqa: S311  a schedule, not a secret
        self._speed = self._random.choice((0.05, 0.3, 0.6, 0.85, 0.95))
        self._starved = self._random.randrange(8)
        self._queues: list[WorkQueue] = []

    def new_queue(self, name: str) -> WorkQueue:
        """The queue of a new stream."""
        weight = 0.01 if len(self._queues) == self._starved else self._random.choice((0.3, 1.0, 3))
        queue = WorkQueue(name, weight)
        self._queues.append(queue)
        return queue

    def add(self, queue: WorkQueue, item: Work | Wait | Mark) -> None:
        """Enqueue, and let the device go on as the policy likes."""
        queue.items.append(item)
        if self._policy == "eager":
            self._drain(queue)
        else:
            self.pass_time()

    def pass_time(self) -> None:
        """The host did something; a random device uses the time."""
        self._clocks.tick += 1
        if self._policy != "random":
            return
        while self._random.random() < self._speed:
            if not self._step_any():
                return

    def finish(self, mark: Mark) -> None:
        """Run until a mark is reached.

        Raises:
            DeadlockError: It cannot be.
        """
        while not mark.is_done:
            if not (self._step_any() if self._policy == "random" else self._step_towards(mark)):
                raise DeadlockError(
                    f"a wait for stream {mark.queue.name!r} cannot end: nothing is left to run"
                )
        self.pass_time()

    def pieces_of(self, rows: int) -> list[tuple[int, int]]:
        """Ranges in which a copy of some rows lands: up to four."""
        if self._policy == "eager" or rows < 2:  # noqa: PLR2004  one row cannot be split
            return [(0, rows)]
        count = min(rows, 1 + self._random.randrange(4))
        cuts = sorted(self._random.sample(range(1, rows), count - 1))
        return list(zip([0, *cuts], [*cuts, rows], strict=True))

    def _drain(self, queue: WorkQueue) -> None:
        while queue.can_run():
            self._step(queue)

    def _step_towards(self, mark: Mark) -> bool:
        queue = mark.queue
        seen = set()
        while queue.items and not queue.can_run():
            if queue.name in seen:
                return False
            seen.add(queue.name)
            head = queue.items[0]
            assert isinstance(head, Wait)
            queue = head.mark.queue
        if not queue.items:
            return False
        self._step(queue)
        return True

    def _step_any(self) -> bool:
        ready = [queue for queue in self._queues if queue.can_run()]
        if not ready:
            return False
        if len(ready) == 1:
            self._step(ready[0])
        else:
            weights = [queue.weight for queue in ready]
            self._step(self._random.choices(ready, weights)[0])
        return True

    def _step(self, queue: WorkQueue) -> None:
        head = queue.items[0]
        if isinstance(head, Work):
            self._clocks.tick += 1
            if not head.record.begun:
                head.record.begun = self._clocks.tick
            head.pieces.popleft()()
            head.record.ended = self._clocks.tick
            if not head.pieces:
                queue.items.popleft()
        else:
            queue.items.popleft()
            if isinstance(head, Mark):
                head.is_done = True
