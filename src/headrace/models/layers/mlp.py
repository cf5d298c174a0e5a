"""The MLP, with a gate or without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headrace.models.layers.product import product
from headrace.ops.activations import gelu_mul, relu2, silu_mul
from headrace.ops.gated_product import silu_product

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from headrace.models.batch import Kernels
    from headrace.models.checkpoint import CheckedTensors, Shapes

Activation = Literal["silu_mul", "gelu_mul", "relu2"]
"""Between the products: the first half of the columns gates the second, or each is squared."""

_ACTIVATIONS = {"silu_mul": silu_mul, "gelu_mul": gelu_mul, "relu2": relu2}


def activation(name: Activation, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """Return what computes an activation; without a kernel for it, PyTorch operations."""
    if kernels != "torch" and name == "silu_mul":
        return silu_product
    return _ACTIVATIONS[name]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlpWeights:
    """Weights of one MLP.

    Attributes:
        gate_up: Gate and up, [2I, C]; up alone, [I, C], where the activation has no gate.
        down: [C, I].
        activation: What is between them.
    """

    gate_up: Tensor
    down: Tensor
    activation: Activation = "silu_mul"


def mlp(x: Tensor, weights: MlpWeights, kernels: Kernels = "torch") -> Tensor:
    """Return down(activation(gate_up(x))), [T, C]; with a gate silu(gate(x)) * up(x) or alike."""
    activate = activation(weights.activation, kernels)
    made = activate(product(x, weights.gate_up, kernels))
    return product(made, weights.down, kernels)


def mlp_shapes(prefix: str, width: int, inner: int) -> Shapes:
    """List the tensors of one gated MLP as most families name them.

    Args:
        prefix: Of their names.
        width: C.
        inner: I.

    Returns:
        Shape by name.
    """
    return {
        f"{prefix}gate_proj.weight": (inner, width),
        f"{prefix}up_proj.weight": (inner, width),
        f"{prefix}down_proj.weight": (width, inner),
    }


def load_mlp(source: CheckedTensors, prefix: str) -> MlpWeights:
    """Take one MLP's weights, as `mlp_shapes` lists them, from a checkpoint."""
    return MlpWeights(
        gate_up=source.matrix(prefix + "gate_proj.weight", prefix + "up_proj.weight"),
        down=source.matrix(prefix + "down_proj.weight"),
    )
