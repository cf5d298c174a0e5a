"""A rank other than 0: loads its part of the model, and executes the steps that rank 0 sends.

    python -m headrace.engine.follower FD      # FD: the pipe to rank 0, inherited

It has neither scheduler nor text. When rank 0 ends, so does it, whatever it is doing.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch

from headrace.config import launched_rank
from headrace.engine.load import load_parts
from headrace.parallel.launched import link_to_leader
from headrace.parallel.messages import Failed, Hello, Number, Progress, Ready, Start
from headrace.parallel.steps import take_steps

if TYPE_CHECKING:
    from headrace.config import EngineConfig

_BEAT_S = 0.1
_LEAVE_S = 2.0
"""For a rank that was told to stop, or whose collective failed, to end by itself."""


class Follower:
    """This rank's place among the others, for `load_parts`.

    Attributes:
        group: Of all ranks.
    """

    def __init__(self, link: Connection, start: Start) -> None:
        self.group = start.join()
        self._link = link

    def least(self, value: int) -> int:
        """Agree on the smallest of the numbers that the ranks have; each calls this in turn."""
        self._link.send(Number(value))
        answer = self._link.recv()
        assert isinstance(answer, Number), f"rank 0 said {answer}"
        return answer.value


def follow(link: Connection) -> None:
    """Be a rank, until rank 0 has no more steps.

    Args:
        link: The pipe to rank 0.

    Raises:
        Exception: Whatever went wrong; rank 0 has been told.
    """
    try:
        start = link.recv()
        assert isinstance(start, Start), f"rank 0 said {start}"
        watcher = threading.Thread(target=_end_with, args=(link.fileno(), start), daemon=True)
        watcher.start()
        _name_log(start.rank)
        link.send(Hello(os.getpid()))
        if start.config.device == "cuda":
            torch.cuda.set_device(start.rank)
        parts = load_parts(start.config, ranks=Follower(link, start), has_text=False)
        link.send(Ready())
        take_steps(link, parts.worker)
    except BaseException as error:
        with suppress(OSError):  # Rank 0 may be gone.
            link.send(Failed(f"{type(error).__name__}: {error}"))
        raise


def follow_if_launched(config: EngineConfig) -> None:
    """Under `torchrun`, be a rank if this is none of number 0, and end the process with that.

    Args:
        config: Settings; where one device has all of the model, each process is for itself.

    Raises:
        SystemExit: Rank 0 has no more steps.
    """
    launched = launched_rank()
    if launched is None or launched.rank == 0 or config.tensor_parallel_size == 1:
        return
    with link_to_leader(launched) as link:
        follow(link)
    raise SystemExit(0)


def _end_with(descriptor: int, start: Start) -> None:
    """End this process when rank 0 does: it may wait in a collective and not look.

    Until then show that the process runs.
    """
    beats = Progress.of(start.folder, start.size).beats
    hang_up = select.epoll()
    hang_up.register(descriptor, select.EPOLLRDHUP)
    while not hang_up.poll(_BEAT_S):  # lint-rt: of a pipe, not of the device
        beats[start.rank] += 1
    time.sleep(_LEAVE_S)
    os._exit(1)


def _name_log(rank: int) -> None:
    logging.basicConfig(format=f"rank {rank}: %(levelname)s %(message)s", force=True)


def main() -> None:
    """Follow the rank 0 that started this process."""
    with Connection(int(sys.argv[1])) as link:
        follow(link)


if __name__ == "__main__":
    main()
