"""Rank 0's side: starts the other ranks, hands them steps, and notices those that end or hang.

A thread of its own reads what the ranks answer. When one ends, or is behind for too long, it ends
all of them: then nothing that rank 0 waits for can hang, and the error that it gets names the rank.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from headrace.errors import RankError
from headrace.parallel.messages import (
    Failed,
    Hello,
    Land,
    Number,
    Progress,
    Ready,
    Start,
    Stop,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace import rt
    from headrace.config import EngineConfig
    from headrace.worker.step import SchedulerOutput

_LOG = logging.getLogger(__name__)
_TICK_S = 0.2
_START_S = 300.0
"""For a process to import what it needs, or to load what rank 0 has loaded; or `rank_timeout`."""
_EXPLAIN_S = 5.0
"""For the end of a rank to be noticed, once something that needs it has failed."""
_STOP_S = 5.0

Message = TypeVar("Message", Hello, Number, Ready)


@dataclass(slots=True, eq=False)
class _Rank:
    """Another rank, as rank 0 knows it.

    Attributes:
        link: To it and from it.
        process: Its process if rank 0 started it.
        process_id: That process's, or the one that it said.
        answers: What it answered while it started.
    """

    link: Connection
    process: subprocess.Popen[bytes] | None
    process_id: int = 0
    answers: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)


class Leader:
    """All ranks but 0, in the hands of rank 0.

    Args:
        config: Settings, with the device resolved.
        links: To each of the others, and its process if it is this one's child.
        folder: Private, for the file by which groups meet; removed at the end.

    Attributes:
        failure: What ended the ranks, if something did.
        group: Of all ranks.

    Raises:
        RankError: A rank ended or did not begin.
    """

    def __init__(
        self,
        config: EngineConfig,
        links: list[tuple[Connection, subprocess.Popen[bytes] | None]],
        folder: TemporaryDirectory[str],
    ) -> None:
        self.size = 1 + len(links)
        self.failure: RankError | None = None
        self.group: rt.Group | None = None
        self._timeout_s = config.rank_timeout
        self._start_s = max(config.rank_timeout, _START_S)
        self._folder = folder
        self._ranks = {
            rank: _Rank(link, process, process.pid if process is not None else 0)
            for rank, (link, process) in enumerate(links, 1)
        }
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._is_stopping = False
        # How long rank 0 has been at something that needs all ranks, and what.
        self._busy_s: float | None = None
        self._doing = "start"
        self._progress = Progress.of(Path(folder.name), self.size)
        self._beats = self._progress.beats.copy()
        self._silent_s = np.zeros(self.size)
        self._watcher = threading.Thread(target=self._watch, name="headrace-ranks", daemon=True)
        starts = [
            Start(config=config, rank=rank, size=self.size, folder=Path(folder.name))
            for rank in range(self.size)
        ]
        try:
            with self.guard(is_timed=False):
                self._watcher.start()
                for rank, other in self._ranks.items():
                    other.link.send(starts[rank])
                for rank, other in self._ranks.items():
                    other.process_id = self._answer(rank, Hello, "begin", self._start_s).process_id
                self.group = starts[0].join()
        except BaseException:
            self.stop()
            raise

    @classmethod
    def start(cls, config: EngineConfig) -> Leader:
        """Start the other ranks as processes of this machine.

        Args:
            config: Settings, with the device resolved; tensor_parallel_size says how many.
        """
        links: list[tuple[Connection, subprocess.Popen[bytes] | None]] = []
        for _ in range(config.tensor_parallel_size - 1):
            ours, theirs = Pipe()
            with theirs:
                # What they print is no answer of this process. A group of their own: Ctrl-C is for
                # rank 0, which tells them.
                process = subprocess.Popen(  # noqa: S603 - this Python and a module of ours
                    [sys.executable, "-m", "headrace.engine.follower", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno() if _has_file(sys.stderr) else subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,
                )
            links.append((ours, process))
        return cls(config, links, TemporaryDirectory(prefix="headrace-"))

    # Steps -------------------------------------------------------------------------------------

    @contextmanager
    def guard(self, *, is_timed: bool = True) -> Iterator[None]:
        """Some work that needs all ranks: if it fails because of one, the error names that.

        Args:
            is_timed: Whether it may take `rank_timeout` and no longer.

        Raises:
            RankError: A rank ended, or the work took longer than a rank may be behind.
        """
        self.check()
        with self._lock:
            self._busy_s = 0.0 if is_timed else None
        try:
            yield
        except Exception as error:
            # What rank 0 was doing with it fails first, often.
            self._failed.wait(_EXPLAIN_S)
            if self.failure is None or self.failure is error:
                raise
            raise self.failure from error
        finally:
            with self._lock:
                self._busy_s = None
        self.check()

    def send(self, output: SchedulerOutput) -> None:
        """Hand a step to all other ranks; inside `guard`, before it is executed here."""
        frame = pickle.dumps(output, protocol=pickle.HIGHEST_PROTOCOL)
        self._doing = f"take step {output.step_id}"
        for other in self._ranks.values():
            other.link.send_bytes(frame)

    def land(self) -> None:
        """Have the others wait for the oldest step too; inside `guard`, before it is done here."""
        for other in self._ranks.values():
            other.link.send(Land())

    def check(self) -> None:
        """Raise if a rank has ended.

        Raises:
            RankError: It names the rank.
        """
        if self.failure is not None:
            raise self.failure

    # Start and end -----------------------------------------------------------------------------

    def least(self, value: int) -> int:
        """Agree on the smallest of the numbers that the ranks have; each calls this in turn."""
        with self.guard(is_timed=False):
            values = [self._answer(rank, Number, "load", self._start_s) for rank in self._ranks]
            smallest = min(value, *(number.value for number in values))
            for other in self._ranks.values():
                other.link.send(Number(smallest))
        return smallest

    def wait_until_ready(self) -> None:
        """Wait until all ranks take steps."""
        with self.guard(is_timed=False):
            for rank in self._ranks:
                self._answer(rank, Ready, "get ready", self._start_s)

    def stop(self) -> None:
        """End the other ranks; idempotent."""
        if self._is_stopping:
            return
        self._is_stopping = True
        for other in self._ranks.values():
            with suppress(OSError):
                other.link.send(Stop())
        end = time.monotonic() + _STOP_S
        for other in self._ranks.values():
            if other.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    other.process.wait(max(0.0, end - time.monotonic()))
        self._end_all()
        if self._watcher.ident is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        if self.group is not None and self.failure is None:
            self.group.close()
        for other in self._ranks.values():
            other.link.close()
        self._folder.cleanup()

    def _answer(self, rank: int, kind: type[Message], what: str, timeout_s: float) -> Message:
        """Wait for what a rank says while it starts."""
        end = time.monotonic() + timeout_s
        while True:
            self.check()
            try:
                found = self._ranks[rank].answers.get(timeout=_TICK_S)
            except queue.Empty:
                if time.monotonic() > end:
                    self._fail(rank, f"did not {what} within {timeout_s:g} s")
                continue
            assert isinstance(found, kind), f"rank {rank} said {found}, not {kind.__name__}"
            return found

    # The watcher's thread ----------------------------------------------------------------------

    def _watch(self) -> None:
        open_links = {other.link: rank for rank, other in self._ranks.items()}
        before = time.monotonic()
        while open_links and not self._is_stopping:
            ended, failed = [], []
            for link in wait(list(open_links), timeout=_TICK_S):
                assert isinstance(link, Connection)
                message = _receive(link)
                if message is None:
                    ended.append(open_links.pop(link))
                elif isinstance(message, Failed):
                    failed.append((open_links[link], message.why))
                else:
                    self._ranks[open_links[link]].answers.put(message)
            # First those that are gone: others may have failed because of them.
            for rank in ended:
                self._fail(rank, self._end_of(rank))
            for rank, why in failed:
                self._fail(rank, f"failed: {why}")
            now = time.monotonic()
            # Time in which this process was stopped is nobody's fault.
            self._count_time(min(now - before, 2 * _TICK_S))
            before = now

    def _count_time(self, passed_s: float) -> None:
        """Notice that rank 0 waits for too long, and for whom."""
        beats = self._progress.beats.copy()
        # Rank 0 has no beat: where it hangs, this thread goes on.
        self._silent_s[1:] += passed_s
        self._silent_s[beats != self._beats] = 0.0
        self._beats = beats
        with self._lock:
            if self._busy_s is None:
                return
            self._busy_s += passed_s
            if self._busy_s <= self._timeout_s:
                return
        self._fail(
            self._slowest(), f"did not {self._doing} with the others within {self._timeout_s:g} s "
            "(rank_timeout)",
        )

    def _slowest(self) -> int:
        """The rank that the others wait for."""
        if self._silent_s.max() > self._timeout_s / 2:
            return int(self._silent_s.argmax())
        # It runs and has not come to a collective that all others have come to.
        counts = self._progress.collectives
        return min(range(self.size), key=lambda rank: (counts[rank], rank == 0))

    def _end_of(self, rank: int) -> str:
        """What is known of the end of a rank's process."""
        process = self._ranks[rank].process
        code = None
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(1.0)
        if code is None:
            return "ended"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _fail(self, rank: int, why: str) -> None:
        """Give all ranks up because of one."""
        if self._is_stopping or self.failure is not None:
            return
        process_id = self._ranks[rank].process_id if rank else os.getpid()
        self.failure = RankError(
            f"rank {rank} of {self.size} (process {process_id}) {why}; its log says more, and the "
            "engine must be started again"
        )
        _LOG.critical("%s", self.failure)
        self._failed.set()
        self._end_all()
        if self.group is not None:
            self.group.abort()

    def _end_all(self) -> None:
        for other in self._ranks.values():
            if other.process is not None:
                other.process.kill()
                other.process.wait()
            elif other.process_id and self.failure is not None:
                # Started by somebody else: ended only where it might hang for ever.
                with suppress(ProcessLookupError):
                    os.kill(other.process_id, signal.SIGKILL)


def _receive(link: Connection) -> object | None:
    """What has come through a link; None at its end."""
    try:
        message: object = link.recv()
    except (EOFError, OSError):
        return None
    return message


def _has_file(stream: Any) -> bool:  # noqa: ANN401 - whatever stands for sys.stderr
    """Whether a stream has a file that a child process can write to."""
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
