"""What the op is told of a batch's rows, by either state scheme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class ColumnsRows(Protocol):
    """Columns scheme; `models.batch.ColumnsMetadata` is one."""

    @property
    def window_blocks(self) -> Tensor:
        """State blocks of columns c .. c+s, [N, 1+s] i32."""

    @property
    def accepted(self) -> Tensor:
        """Tokens the last verify kept, [N] i32."""


class ReplayRows(Protocol):
    """Replay scheme; `models.batch.ReplayMetadata` is one."""

    @property
    def base_block(self) -> Tensor:
        """Block of the base state, [N] i32."""

    @property
    def base_len(self) -> Tensor:
        """Tokens in the base, [N] i64."""

    @property
    def computed(self) -> Tensor:
        """Committed tokens, [N] i64."""

    @property
    def write_block(self) -> Tensor:
        """Block of the next base, [N] i32; may be base_block."""

    @property
    def write_len(self) -> Tensor:
        """Tokens in the next base, [N] i64."""

    @property
    def ring_block(self) -> Tensor:
        """Block of the ring, [N] i32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ring:
    """Inputs of the latest tokens, by position modulo R.

    Attributes:
        inputs: Conv inputs, [RB, R, F].
        updates: [RB, R, HK*K + HV*V + 2*HV] f32: key of unit length, *change* of the state (the
            rate times what the value adds to what the state says already), rate, decay. With the
            change kept, a replay needs no product with the state.
        interval: Tokens between base writes, L.
    """

    inputs: Tensor
    updates: Tensor
    interval: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixerWeights:
    """Weights of the mixer between its projections.

    Attributes:
        conv: [W, F], oldest tap first.
        gate_bias: 0 for the rates, dt_bias for the decays, [2*HV] f32.
        gate_factor: -1 for the rates, -exp(A_log) for the decays, [2*HV] f32.
        unit_scale: Length of queries (K^-1/2) and keys (1), [2*HK] f32.
        norm: [V] f32.
        norm_eps: Added to the mean square.
    """

    conv: Tensor
    gate_bias: Tensor
    gate_factor: Tensor
    unit_scale: Tensor
    norm: Tensor
    norm_eps: float
