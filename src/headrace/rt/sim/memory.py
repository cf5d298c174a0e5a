"""Host memory of the simulated device, with a shadow and canaries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.rt.checked_array import CheckedArray
from headrace.rt.errors import RefusedError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from headrace.rt.checking import Checker
    from headrace.rt.clocks import Rows, Shadow


class CheckedHostMemory:
    """Host memory that the device copies to or from.

    Attributes:
        name: For reports.
        values: The memory. For the runtime.
        memory_tensor: The same memory for torch. For the runtime.
        shadow: Its clocks.
        array: What the engine gets: recorded, or the plain array with checks off.
    """

    __slots__ = ("_checker", "array", "memory_tensor", "name", "shadow", "values")

    def __init__(
        self, name: str, memory_tensor: Tensor, shadow: Shadow, checker: Checker, *, checks: bool
    ) -> None:
        self.name = name
        self.memory_tensor = memory_tensor
        self.values: npt.NDArray[Any] = memory_tensor.numpy()
        self.shadow = shadow
        self._checker = checker
        self.array: Any = CheckedArray(self, self.values) if checks else self.values

    @property
    def tensor(self) -> Tensor:
        """Refused: it would be a way to the memory that nobody sees."""
        raise RefusedError(f"host memory {self.name!r} is checked; its tensor is not handed out")

    def host_read(self, rows: Rows) -> None:
        """Record a read by the host."""
        self._checker.host_access(self.shadow, rows, is_write=False)

    def host_write(self, rows: Rows) -> None:
        """Record a write by the host."""
        self._checker.host_access(self.shadow, rows, is_write=True)


def poison(dtype: torch.dtype) -> float:
    """A value no copy is likely to bring; equal to itself, so not NaN."""
    if dtype is torch.bool:
        return 1
    if dtype.is_floating_point:
        return -6.0e4 - 0.5 if dtype is torch.float16 else -1.2345678e30
    if dtype is torch.uint8:
        return 0xA5
    return -torch.iinfo(dtype).max + 0x5A


def same_bits(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether two arrays hold the same bits."""
    return one.tobytes() == other.tobytes()


def all_rows(shadow: Shadow) -> npt.NDArray[np.int64]:
    """Row numbers of a memory."""
    return np.arange(len(shadow.writes), dtype=np.int64)
