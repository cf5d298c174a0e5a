"""The one place where Triton kernels are launched."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def launch_kernel(
    kernel: Any,  # noqa: ANN401  Triton has no types
    grid: tuple[int, ...],
    *args: object,
    **kwargs: object,
) -> None:
    """Run a kernel's programs, in no order, on the current stream.

    A grid without programs is no launch: the driver would refuse it. Whether a multiply and an add
    become one instruction changes bits, and Triton's default changes with its version: it is set
    here for all kernels, and to fused.

    Args:
        kernel: Function made by `triton.jit`.
        grid: Programs in each of up to three directions.
        *args: Tensors and numbers.
        **kwargs: The same, and Triton's options, for example num_warps.
    """
    if 0 in grid:
        return
    kernel[grid](*args, **{"enable_fp_fusion": True, **kwargs})


def has_triton() -> bool:
    """Whether there is a Triton to launch kernels with."""
    return find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU and slowly."""
    if not has_triton():
        return False
    # Not at the top: Triton must be imported after TRITON_INTERPRET is set.
    import triton  # noqa: PLC0415

    return bool(triton.knobs.runtime.interpret)


def can_launch(tensor: Tensor) -> bool:
    """Whether a kernel can work on a tensor where it is: on a device, or interpreted on the CPU."""
    return tensor.device.type != "cpu" or is_interpreted()
