"""How one state tensor of a group is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StatePool:
    """One state tensor of all layers of a group.

    Attributes:
        tensor: [L, S, *shape], contiguous within a block, block 0 is the null block.
        kind: "recurrent" states are copied whole, from the column of the last kept token;
            "window" states are kept once per sequence and shifted by the rejected entries.
        entries: Where a window's entries lie: "first" for [E, ...] (channels last), "last" for
            [..., E] (channels first). Without meaning for recurrent states.
    """

    tensor: Tensor
    kind: Literal["window", "recurrent"]
    entries: Literal["first", "last"] = "first"

    def __post_init__(self) -> None:
        layers_and_blocks = 2
        if self.tensor.dim() <= layers_and_blocks:
            msg = f"a state pool has shape [L, S, *state], not {tuple(self.tensor.shape)}"
            raise ValueError(msg)
        if not self.tensor[0, 0].is_contiguous():
            msg = f"state blocks must be contiguous, strides are {self.tensor.stride()}"
            raise ValueError(msg)
