"""What the op is told of rows that are sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class SampledRows(Protocol):
    """How each row is sampled; `worker.sampler.SamplingTensors` is one."""

    @property
    def temperature(self) -> Tensor:
        """[R] f32, 0 for greedy rows."""

    @property
    def seed(self) -> Tensor:
        """The request's 64 bits, [R] i64."""

    @property
    def position(self) -> Tensor:
        """Position of the token that is chosen, [R] i64."""
