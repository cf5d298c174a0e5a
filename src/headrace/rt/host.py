"""Host memory of the release backends: a tensor and the numpy array of the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.rt.errors import RtError

if TYPE_CHECKING:
    from torch import Tensor


MAX_SLICES = 1024
"""Slices that a memory keeps for use again."""


class PlainHostMemory:
    """Host memory without checks.

    Attributes:
        name: For messages.
        tensor: The memory, pinned where the backend copies asynchronously.
        array: The same memory as a numpy array.
        leading: Its leading rows as tensors, by how many.
    """

    __slots__ = ("array", "leading", "name", "tensor")

    def __init__(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype is torch.bfloat16:
            raise RtError(f"host array {name!r} is bfloat16, which numpy lacks; use float32")
        self.name = name
        self.tensor = tensor
        self.array = tensor.numpy()
        self.leading = Leading(tensor)


class Leading(dict[int, "Tensor"]):
    """Leading rows of a tensor, each slice made once."""

    __slots__ = ("_whole",)

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self._whole = whole

    def __missing__(self, count: int) -> Tensor:
        if len(self) >= MAX_SLICES:
            self.clear()
        part = self[count] = self._whole[:count]
        return part
