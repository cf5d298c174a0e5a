"""Grouped-query attention with normed heads, partial rotary embedding and an output gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.models.layers.attention_plan import AttentionPlan, FusedAttention, attend
from headrace.models.layers.product import product
from headrace.ops.activations import sigmoid
from headrace.ops.attention_inputs import attention_inputs
from headrace.ops.gated_product import sigmoid_product_
from headrace.ops.paged_attention import write_kv
from headrace.ops.rms_norm import rms_norm
from headrace.ops.rotary import rotate_

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import Kernels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionWeights:
    """Weights of one attention layer.

    Attributes:
        in_proj: Queries (H*D), keys, values (G*D each), output gate (H*D), [.., C].
        head_scale: Norm factors 1 + w of each query and key head, [H + G, D] f32.
        out_proj: [C, H*D].
    """

    in_proj: Tensor
    head_scale: Tensor
    out_proj: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionStep:
    """What the attention layers of a step share.

    Attributes:
        slots: Where each packed token's key and value go, [T] i64; 0 is nowhere.
        cos, signed_sin: Rotary factors of each packed token, both [T, 1, r] f32.
        plan: The step's indices.
        kernels: What computes between the projections and the attention.
    """

    slots: Tensor
    cos: Tensor
    signed_sin: Tensor
    plan: AttentionPlan | FusedAttention
    kernels: Kernels


def gated_attention(
    x: Tensor,
    weights: AttentionWeights,
    kv: tuple[Tensor, Tensor],
    step: AttentionStep,
    eps: float,
) -> Tensor:
    """Run one layer over the packed tokens of a step and write their keys and values.

    Args:
        x: Normed hidden states, [T, C].
        weights: The layer's weights.
        kv: The layer's keys and values, each [B, P, G, D].
        step: What the step's attention layers share.
        eps: Of the head norms.

    Returns:
        [T, C].
    """
    k_pool, v_pool = kv
    num_kv_heads, head_dim = k_pool.shape[2:]
    num_heads = weights.head_scale.shape[0] - num_kv_heads
    q_cols, kv_cols = num_heads * head_dim, num_kv_heads * head_dim
    projected = product(x, weights.in_proj, step.kernels)
    if step.kernels != "torch":
        query = attention_inputs(
            projected,
            weights.head_scale,
            step.cos,
            step.signed_sin,
            step.slots,
            k_pool,
            v_pool,
            eps,
        )
        out = attend(query, k_pool, v_pool, step.plan).view(-1, q_cols)
        gated = sigmoid_product_(out, projected[:, -q_cols:])
        return product(gated, weights.out_proj, step.kernels)
    heads, value, gate = projected.split_with_sizes((q_cols + kv_cols, kv_cols, q_cols), -1)
    normed = rms_norm(heads.view(-1, num_heads + num_kv_heads, head_dim), weights.head_scale, eps)
    rotated = rotate_(normed, step.cos, step.signed_sin)
    query, key = rotated.split_with_sizes((num_heads, num_kv_heads), 1)
    write_kv(k_pool, v_pool, key, value.view(-1, num_kv_heads, head_dim), step.slots)
    out = attend(query, k_pool, v_pool, step.plan)
    return product(out.view(-1, q_cols).mul_(sigmoid(gate)), weights.out_proj, step.kernels)
