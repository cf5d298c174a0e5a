"""Host threads of the simulated device: one runs at a time, handing over at the queues.

Real threads, so that the engine's code is the same; a baton, so that one seed is one run.
"""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from headrace.rt.errors import DeadlockError
from headrace.rt.queues import Queue
from headrace.rt.runtime import Thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.rt.checking import Checker
    from headrace.rt.clocks import HostActor
    from headrace.rt.runtime import Policy

T = TypeVar("T")


class _Runner:
    """A thread that takes part."""

    __slots__ = ("baton", "name", "ready")

    def __init__(self, name: str) -> None:
        self.name = name
        self.baton = threading.Semaphore(0)
        self.ready: Callable[[], bool] = _always


def _always() -> bool:
    return True


class Baton:
    """Decides which host thread runs."""

    def __init__(self, seed: int, policy: Policy, checker: Checker) -> None:
        self.checker = checker
        self._random = random.Random(seed + 1)  # noqa: S311  a schedule, not a secret
        self._is_random = policy == "random"
        self._current = _Runner("main")
        self._runners = [self._current]

    def add(self, name: str) -> _Runner:
        """A new thread, which may run when somebody hands over."""
        runner = _Runner(name)
        self._runners.append(runner)
        return runner

    def leave(self, runner: _Runner) -> None:
        """A thread has ended; another goes on."""
        self._runners.remove(runner)
        self._hand_over(runner)

    def block_until(self, ready: Callable[[], bool], what: str) -> None:
        """Let others run until a condition holds.

        Raises:
            DeadlockError: Nobody can run.
        """
        me = self._current
        while not ready():
            me.ready = ready
            others = [one for one in self._runners if one is not me and one.ready()]
            if not others:
                me.ready = _always
                self.checker.misuse(
                    "DEADLOCK", what, f"host thread {me.name!r} waits and no other thread can run"
                )
                raise DeadlockError(f"host thread {me.name!r} waits for {what} and nobody can run")
            self._hand_over(me)
            me.baton.acquire()
            self._current = me
        me.ready = _always

    def maybe_switch(self) -> None:
        """A point at which a random schedule may go on with another thread."""
        if self._is_random and len(self._runners) > 1 and self._random.random() < 0.5:  # noqa: PLR2004
            me = self._current
            if any(one is not me and one.ready() for one in self._runners):
                self._hand_over(me)
                me.baton.acquire()
                self._current = me

    def _hand_over(self, me: _Runner) -> None:
        others = [one for one in self._runners if one is not me and one.ready()]
        if others:
            chosen = self._random.choice(others) if self._is_random else others[0]
            self._current = chosen
            chosen.baton.release()


class SimThread(Thread):
    """A host thread with a clock of its own, ordered after its start and before its join."""

    def __init__(self, baton: Baton, target: Callable[[], None], name: str) -> None:
        self._baton = baton
        self._target = target
        self._runner: _Runner | None = None
        self._actor: HostActor | None = None
        self._failure: BaseException | None = None
        self._is_done = False
        super().__init__(self._run, name)

    def start(self) -> None:
        """Start it; it runs when this thread hands over."""
        clocks = self._baton.checker.clocks
        self._actor = clocks.new_host(f"host {self.name}", clocks.host())
        self._runner = self._baton.add(self.name)
        super().start()

    def join(self, timeout_s: float | None = None) -> None:
        """Let it run to its end.

        Raises:
            BaseException: What it ended with.
        """
        del timeout_s
        self._baton.block_until(lambda: self._is_done, f"the end of thread {self.name!r}")
        assert self._actor is not None
        self._baton.checker.clocks.receive(self._actor.clock)
        super().join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        assert self._runner is not None
        assert self._actor is not None
        self._runner.baton.acquire()
        self._baton.checker.clocks.enter_thread(self._actor)
        try:
            self._target()
        except BaseException as error:  # raised again by join
            self._failure = error
        self._is_done = True
        self._baton.leave(self._runner)


class SimQueue(Queue[T]):
    """A queue whose items carry the sender's clock."""

    def __init__(self, baton: Baton, maxsize: int) -> None:
        super().__init__()
        self._baton = baton
        self._maxsize = maxsize
        self._sent: deque[tuple[T, list[int]]] = deque()

    def put(self, item: T) -> None:
        """Add an item; hands over while the queue is full."""
        if self._maxsize:
            self._baton.block_until(lambda: len(self._sent) < self._maxsize, "room in a queue")
        self._sent.append((item, self._baton.checker.clocks.send()))
        self._baton.maybe_switch()

    def get(self, timeout_s: float | None = None) -> T:
        """Take the oldest item; hands over while the queue is empty.

        Raises:
            queue.Empty: A time limit was given and no other thread can run.
        """
        try:
            self._baton.block_until(lambda: bool(self._sent), "an item in a queue")
        except DeadlockError:
            if timeout_s is None:
                raise
            raise queue.Empty from None
        return self._take()

    def drain(self) -> list[T]:
        """Take everything that is there."""
        self._baton.maybe_switch()
        return [self._take() for _ in range(len(self._sent))]

    def _take(self) -> T:
        item, clock = self._sent.popleft()
        self._baton.checker.clocks.receive(clock)
        return item
