"""The launch that makes attention's inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.attention_inputs.kernel import attention_inputs_kernel
from headrace.rt.kernels import launch_kernel

if TYPE_CHECKING:
    from torch import Tensor


def attention_inputs(
    projected: Tensor,
    head_scale: Tensor | None,
    cos: Tensor | None,
    signed_sin: Tensor | None,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    eps: float,
    query_factor: float,
    query: Tensor,
) -> None:
    """Norm, rotate and write; see the package."""
    tokens, heads, head_dim = query.shape
    kv_heads = k_pool.shape[2]
    launch_kernel(
        attention_inputs_kernel,
        (tokens, heads + kv_heads),
        projected,
        head_scale,
        cos,
        signed_sin,
        slots,
        k_pool,
        v_pool,
        query,
        projected.stride(0),
        k_pool.stride(1),
        eps,
        query_factor,
        H=heads,
        G=kv_heads,
        D=head_dim,
        R=0 if cos is None else cos.shape[2],
        # A head is 16 bytes for each thread of a warp, or less.
        num_warps=1,
    )
