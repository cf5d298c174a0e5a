"""Collectives: ranks that compute parts of one model exchange them, in the same order on each.

A collective runs inside an op, between its products. To the checker a group is memory: `exchange`,
a count of the collectives made. Every op that makes some declares it as `ReadWrite` and is given
it; so two launches with collectives that nothing orders are a race in its reports (on a device they
would be a deadlock: ranks need not meet in the same one first), and an op that makes collectives
without declaring it is an undeclared write.

* `GlooGroup`: processes on the CPU. Sums are made in rank order, so their bits are always the same.
* `NcclGroup`: processes with a GPU each; collectives are captured in graphs like kernels.
* `LocalGroup`: threads of one process, for tests and the simulated device.
"""

from __future__ import annotations

import abc
import datetime
import os
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from headrace.rt.errors import RtError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from headrace.rt.buffers import Buffer
    from headrace.rt.runtime import Runtime


class Group(abc.ABC):
    """The ranks of one model, as one of them sees them.

    Args:
        rank: This one, 0 .. size - 1.
        size: How many there are.
        progress: Collectives that each rank has come to, [size] i64, in memory that all share: the
            rank that others wait for has come to the fewest. None keeps no count.

    Attributes:
        rank, size: As given.
    """

    def __init__(
        self, rank: int, size: int, progress: npt.NDArray[np.int64] | None = None
    ) -> None:
        if not 0 <= rank < size:
            raise RtError(f"rank {rank} is none of 0..{size - 1}")
        self.rank = rank
        self.size = size
        self._progress = progress
        self._calls: Tensor | None = None

    def attach(self, runtime: Runtime) -> Buffer:
        """Allocate the memory that stands for the group in the effects of ops, once.

        Returns:
            The argument of ops that make collectives, [1] i64.
        """
        if self._calls is not None:
            raise RtError("a group belongs to one runtime, and this one was attached before")
        exchange = runtime.alloc("exchange", (1,), torch.int64, kind="exchange", fill=0)
        self._calls = exchange.device_tensor
        return exchange

    def all_gather(self, part: Tensor) -> Tensor:
        """Bring the parts of all ranks together.

        Args:
            part: Of the same shape and dtype on every rank, contiguous.

        Returns:
            [size, *part.shape], the same bits on every rank.

        Raises:
            RuntimeError: A rank did not take part: it ended, or did not come in time.
        """
        self._count()
        return self._gather(part)

    def all_reduce(self, part: Tensor) -> Tensor:
        """Add the parts of all ranks.

        Args:
            part: As in `all_gather`; may be overwritten.

        Returns:
            Their sum, in the shape and dtype of the part.

        Raises:
            RuntimeError: See `all_gather`.
        """
        self._count()
        total, *others = self._gather(part).unbind()
        for other in others:
            total = total + other
        return total

    def _count(self) -> None:
        if self._calls is None:
            raise RtError("a collective before its group was attached to a runtime")
        self._calls.add_(1)
        self._come()

    def _come(self) -> None:
        if self._progress is not None:
            self._progress[self.rank] += 1

    @abc.abstractmethod
    def _gather(self, part: Tensor) -> Tensor:
        """Exchange; see `all_gather`."""

    def abort(self) -> None:  # noqa: B027  optional
        """End collectives that wait for a rank which does not come; from any thread."""

    def close(self) -> None:  # noqa: B027  optional
        """Give connections back; no collective follows."""


class GlooGroup(Group):
    """Processes on one machine that meet in memory of the host.

    Args:
        path: A file that all ranks see, for finding each other; it need not exist.
        rank: This process.
        size: Processes.
        timeout_s: How long a rank waits for others.
        progress: See `Group`.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        progress: npt.NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(rank, size, progress)
        # Not the process's default group, of which there is one, and perhaps its owner's.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001 - there is no other name
        # All are on this machine; its name may not be one that resolves.
        options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
        options._timeout = datetime.timedelta(seconds=timeout_s)  # noqa: SLF001
        self._native = gloo(_store(path, size), rank, size, options)

    def _gather(self, part: Tensor) -> Tensor:
        out = part.new_empty(self.size, *part.shape)
        self._native.allgather([list(out.unbind())], [part]).wait()
        return out


class NcclGroup(Group):
    """Processes with a GPU each.

    Sums are NCCL's own: their order is fixed by the number of ranks and the size, and all ranks get
    the same bits. A collective is ordered by the stream that is current where it is called, as any
    other work of its op.

    Args:
        path, rank, size: As of `GlooGroup`.
        timeout_s: How long NCCL waits when the ranks meet first.
        progress: See `Group`; what graphs replay is not in it.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        progress: npt.NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(rank, size, progress)
        # NVLink multicast needs a fabric manager that containers often lack; it then hangs.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        # What to do about a rank that does not come is the engine's business: it names the rank.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)  # noqa: SLF001 - no other name
        self._native = nccl(_store(path, size), rank, size, options)
        # Connections are made by the first collective, which must not be inside a capture.
        first = torch.zeros(1, device="cuda")
        self._native.allreduce([first]).wait()
        torch.cuda.synchronize()

    def _count(self) -> None:
        """Not counted in `exchange`: here the communicator itself is what they share."""
        self._come()

    def _gather(self, part: Tensor) -> Tensor:
        out = part.new_empty(self.size, *part.shape)
        # It takes what is joined along the first axis.
        flat = out.view(self.size * part.shape[0], *part.shape[1:])
        self._native._allgather_base(flat, part).wait()  # noqa: SLF001 - as torch.distributed does
        return out

    def all_reduce(self, part: Tensor) -> Tensor:
        """Add in place; see `Group.all_reduce`."""
        self._count()
        self._native.allreduce([part]).wait()
        return part

    def abort(self) -> None:
        """End collectives that wait."""
        self._native.abort()

    def close(self) -> None:
        """Give the communicator back."""
        self._native.shutdown()


def _store(path: Path, size: int) -> Any:  # noqa: ANN401 - torch does not export the class
    return dist.FileStore(str(path), size)  # type: ignore[attr-defined]


class LocalGroup(Group):
    """Threads of one process; made by `local_groups`."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, len(meeting.parts))
        self._meeting = meeting

    def _gather(self, part: Tensor) -> Tensor:
        meeting = self._meeting
        meeting.parts[self.rank] = part.clone()
        meeting.wait(self.rank)
        out = torch.stack([other for other in meeting.parts if other is not None])
        # Nobody brings the next part before all have this one.
        meeting.wait(self.rank)
        return out

    def abort(self) -> None:
        """End collectives that wait, and all later ones."""
        self._meeting.barrier.abort()


class _Meeting:
    """Where the threads of a group meet."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout_s)

    def wait(self, rank: int) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise RtError(f"rank {rank} waited in a collective and others did not come") from None


def local_groups(size: int, timeout_s: float = 30.0) -> tuple[LocalGroup, ...]:
    """Make the groups of threads that compute parts of one model.

    Args:
        size: How many; each of them uses its own group, in a thread of its own.
        timeout_s: How long one waits for the others.
    """
    meeting = _Meeting(size, timeout_s)
    return tuple(LocalGroup(rank, meeting) for rank in range(size))
