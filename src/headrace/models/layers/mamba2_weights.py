"""What families with Mamba-2 layers spell alike: sizes in config.json, and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError
from headrace.models.config import conv_taps, positive
from headrace.models.layers.mamba2 import Mamba2Sizes, Mamba2Weights
from headrace.models.layers.windowed_conv import ConvWeights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from headrace.models.checkpoint import CheckedTensors, Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Fields:
    """Names and defaults of a family's Mamba-2 sizes in config.json; no default is a must."""

    heads: tuple[str, int | None] = ("mamba_n_heads", 128)
    head_dim: tuple[str, int | None] = ("mamba_d_head", None)
    groups: tuple[str, int | None] = ("mamba_n_groups", 1)
    state_dim: tuple[str, int | None] = ("mamba_d_state", 256)
    taps: tuple[str, int | None] = ("mamba_d_conv", 4)


def mamba2_sizes(
    raw: Mapping[str, Any],
    *,
    norm_eps: float,
    inner: tuple[str, int] | None,
    fields: Mamba2Fields | None = None,
    gates_after_norm: bool = False,
) -> Mamba2Sizes:
    """Read the sizes of a family's Mamba-2 layers.

    Args:
        raw: The parsed config.json.
        norm_eps: Of the norm before the last projection.
        inner: What heads times their size must give, in words and as a number, and what a head size
            that is "auto" or not given follows from; None where nothing else says it.
        fields: How the family spells them.
        gates_after_norm: Whether the gate comes after the norm.

    Returns:
        The sizes.

    Raises:
        ModelError: Sizes are missing or do not fit each other.
        UnsupportedModelError: The convolution has a single tap.
    """
    fields = fields or Mamba2Fields()
    heads = positive(raw, *fields.heads)
    name = fields.head_dim[0]
    if inner is not None and raw.get(name, "auto") == "auto":
        size = inner[1] // heads
    else:
        size = positive(raw, *fields.head_dim)
    if inner is not None and heads * size != inner[1]:
        raise ModelError(
            f"config.json: {fields.heads[0]} {heads} times {name} {size} must be {inner[0]}, "
            f"{inner[1]}"
        )
    groups = positive(raw, *fields.groups)
    if heads % groups:
        raise ModelError(
            f"config.json: {fields.heads[0]} {heads} is no multiple of {fields.groups[0]} {groups}"
        )
    return Mamba2Sizes(
        num_heads=heads,
        head_dim=size,
        num_groups=groups,
        state_dim=positive(raw, *fields.state_dim),
        conv_kernel=conv_taps(raw, *fields.taps),
        norm_eps=norm_eps,
        gates_after_norm=gates_after_norm,
    )


def expanded(raw: Mapping[str, Any]) -> tuple[str, int]:
    """Return the usual inner width in words and as a number, for `mamba2_sizes`."""
    inner = positive(raw, "mamba_expand", 2) * positive(raw, "hidden_size")
    return "mamba_expand times hidden_size", inner


def mamba2_shapes(
    prefix: str, sizes: Mamba2Sizes, width: int, *, has_conv_bias: bool, has_norm: bool = True
) -> Shapes:
    """List the tensors of one layer.

    Args:
        prefix: Of their names.
        sizes: The layer's sizes.
        width: Model width, C.
        has_conv_bias: Whether the convolution has a bias.
        has_norm: Whether there is a norm before the last projection.

    Returns:
        Shape by name.
    """
    shapes: Shapes = {
        "in_proj.weight": (sizes.inner + sizes.channels + sizes.num_heads, width),
        "conv1d.weight": (sizes.channels, 1, sizes.conv_kernel),
        "dt_bias": (sizes.num_heads,),
        "A_log": (sizes.num_heads,),
        "D": (sizes.num_heads,),
        "out_proj.weight": (width, sizes.inner),
    }
    if has_conv_bias:
        shapes["conv1d.bias"] = (sizes.channels,)
    if has_norm:
        shapes["norm.weight"] = (sizes.inner,)
    return {prefix + name: shape for name, shape in shapes.items()}


def load_mamba2(
    source: CheckedTensors, prefix: str, sizes: Mamba2Sizes, in_scale: Tensor | None = None
) -> Mamba2Weights:
    """Take one layer's weights from a checkpoint; what its shapes leave out is None.

    Args:
        source: The checkpoint.
        prefix: Of the tensors' names.
        sizes: The layer's sizes.
        in_scale: What the columns of the first projection are multiplied by, f32.

    Returns:
        The weights.
    """
    norm, bias = prefix + "norm.weight", prefix + "conv1d.bias"
    return Mamba2Weights(
        in_proj=source.matrix(prefix + "in_proj.weight"),
        in_scale=in_scale,
        conv=ConvWeights(
            taps=source.taps(prefix + "conv1d.weight"),
            bias=source.full(bias) if source.has(bias) else None,
        ),
        dt_bias=source.full(prefix + "dt_bias"),
        decay_rate=-source.full(prefix + "A_log").exp(),
        skip=source.full(prefix + "D")[:, None],
        norm=source.full(norm).view(sizes.num_groups, -1) if source.has(norm) else None,
        out_proj=source.matrix(prefix + "out_proj.weight"),
    )
