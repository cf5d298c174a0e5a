"""Products with a gate in one launch: silu(gate) * up of an MLP, sigmoid(gate) * x of attention.

Everything between the loads and the store is float32. The bits of an element depend on its gate and
its value alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.gated_product import reference
from headrace.rt.kernels import can_launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sigmoid_product_", "silu_product"]


def silu_product(gate_up: Tensor) -> Tensor:
    """Gate one half of the columns by the other.

    Args:
        gate_up: Gate, then values, [T, 2I]; rows may be strided.

    Returns:
        silu(gate) * values, [T, I].

    Raises:
        ValueError: The columns are no two halves.
    """
    rows, columns = gate_up.shape
    if columns % 2:
        msg = f"{columns} columns are no gate and values of one width"
        raise ValueError(msg)
    gate, value = gate_up[:, : columns // 2], gate_up[:, columns // 2 :]
    out = gate_up.new_empty(rows, columns // 2)
    _run(gate, value, out, is_silu=True)
    return out


def sigmoid_product_(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply with the sigmoid of a gate, in place.

    Args:
        x: [T, W]; rows may be strided. Overwritten.
        gate: [T, W]; rows may be strided.

    Returns:
        x.

    Raises:
        ValueError: The two differ in shape.
    """
    _run(gate, x, x, is_silu=False)
    return x


def _run(gate: Tensor, value: Tensor, out: Tensor, *, is_silu: bool) -> None:
    if gate.shape != value.shape:
        msg = f"gate {tuple(gate.shape)} and values {tuple(value.shape)} differ in shape"
        raise ValueError(msg)
    if gate.stride(1) != 1 or value.stride(1) != 1:
        msg = f"columns must be adjacent, strides are {gate.stride()} and {value.stride()}"
        raise ValueError(msg)
    run = reference.gated_product
    if can_launch(gate):
        from headrace.ops.gated_product import fused  # noqa: PLC0415  needs Triton

        run = fused.gated_product
    run(gate, value, out, is_silu=is_silu)
