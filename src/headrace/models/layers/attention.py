"""Grouped-query attention without an output gate; head norms and rotary embedding are optional."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.models.layers.attention_plan import AttentionPlan, FusedAttention, attend
from headrace.ops.add_rms_norm import add_rms_norm
from headrace.ops.attention_inputs import attention_inputs
from headrace.ops.linear import linear
from headrace.ops.paged_attention import write_kv
from headrace.ops.rms_norm import rms_norm
from headrace.ops.rotary import rotate_

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import Kernels
    from headrace.models.checkpoint import CheckedTensors, Shapes
    from headrace.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainAttentionWeights:
    """Weights of one attention layer.

    Attributes:
        in_proj: Queries (H*D), keys, values (G*D each), [.., C].
        head_scale: Norm factors of each query and key head, [H + G, D] f32; None without norms.
        out_proj: [C, H*D].
        row_scale: Norm factors of all queries [H*D] and all keys [G*D] together, f32; None without.
        adapter: What a layer that shares in_proj adds to it, None for nothing: joined projections
            to a few columns, [3r, ..], and those from r columns each to queries, keys and values.
    """

    in_proj: Tensor
    head_scale: Tensor | None
    out_proj: Tensor
    row_scale: tuple[Tensor, Tensor] | None = None
    adapter: tuple[Tensor, tuple[Tensor, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainAttentionStep:
    """What the attention layers of a step share.

    Attributes:
        slots: Where each packed token's key and value go, [T] i64; 0 is nowhere.
        rotary: Cosines and signed sines of each packed token, both [T, 1, r] f32; None without
            rotary embedding.
        plan: The step's indices.
        kernels: What computes between the projections and the attention.
    """

    slots: Tensor
    rotary: tuple[Tensor, Tensor] | None
    plan: AttentionPlan | FusedAttention
    kernels: Kernels = "torch"


def plain_attention(
    x: Tensor,
    weights: PlainAttentionWeights,
    kv: tuple[Tensor, Tensor],
    step: PlainAttentionStep,
    *,
    eps: float,
    query_factor: float = 1.0,
) -> Tensor:
    """Run one layer over the packed tokens of a step and write their keys and values.

    Args:
        x: Normed hidden states, [T, C].
        weights: The layer's weights.
        kv: The layer's keys and values, each [B, P, G, D].
        step: What the step's attention layers share.
        eps: Of the norms of queries and keys.
        query_factor: Scale of the scores in units of the usual D^-1/2.

    Returns:
        [T, C].
    """
    k_pool, v_pool = kv
    num_kv_heads, head_dim = k_pool.shape[2:]
    kv_cols = num_kv_heads * head_dim
    q_cols = weights.in_proj.shape[0] - 2 * kv_cols
    num_heads = q_cols // head_dim
    projected = linear(x, weights.in_proj)
    if weights.adapter is not None:
        narrow, wide = weights.adapter
        parts = linear(x, narrow).chunk(len(wide), -1)
        changes = [linear(part, own) for part, own in zip(parts, wide, strict=True)]
        projected = projected + torch.cat(changes, -1)
    if step.kernels == "triton":
        query = _fused_inputs(projected, weights, kv, step, eps, query_factor)
        return linear(attend(query, k_pool, v_pool, step.plan).view(-1, q_cols), weights.out_proj)
    heads, value = projected.split_with_sizes((q_cols + kv_cols, kv_cols), -1)
    if weights.row_scale is not None:
        both = heads.split_with_sizes((q_cols, kv_cols), -1)
        normed = [rms_norm(x, own, eps) for x, own in zip(both, weights.row_scale, strict=True)]
        heads = torch.cat(normed, -1)
    heads = heads.view(-1, num_heads + num_kv_heads, head_dim)
    if weights.head_scale is not None:
        heads = rms_norm(heads, weights.head_scale, eps)
    if step.rotary is not None:
        heads = rotate_(heads, *step.rotary)
    query, key = heads.split_with_sizes((num_heads, num_kv_heads), 1)
    write_kv(k_pool, v_pool, key, value.view(-1, num_kv_heads, head_dim), step.slots)
    if query_factor != 1.0:
        query = query * query_factor
    return linear(attend(query, k_pool, v_pool, step.plan).view(-1, q_cols), weights.out_proj)


def _fused_inputs(
    projected: Tensor,
    weights: PlainAttentionWeights,
    kv: tuple[Tensor, Tensor],
    step: PlainAttentionStep,
    eps: float,
    query_factor: float,
) -> Tensor:
    """Make queries [T, H, D], and write keys and values, by kernels."""
    num_kv_heads, head_dim = kv[0].shape[2:]
    num_heads = projected.shape[1] // head_dim - 2 * num_kv_heads
    if weights.row_scale is not None:
        first = 0
        for scale in weights.row_scale:
            part = projected[:, first : first + scale.shape[0]]
            add_rms_norm(part, None, scale, eps, out=part)
            first += scale.shape[0]
    cos, signed_sin = step.rotary or (None, None)
    return attention_inputs(
        projected,
        weights.head_scale,
        cos,
        signed_sin,
        step.slots,
        *kv,
        eps,
        num_heads=num_heads,
        query_factor=query_factor,
    )


def attention_shapes(prefix: str, config: ModelConfig, in_width: int | None = None) -> Shapes:
    """List the tensors of one layer as most families name them, without head norms.

    Args:
        prefix: Of their names.
        config: The model's sizes.
        in_width: Width of the layer's input, if it is not the model's.

    Returns:
        Shape by name.
    """
    width = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    return {
        f"{prefix}q_proj.weight": (queries, in_width or width),
        f"{prefix}k_proj.weight": (keys, in_width or width),
        f"{prefix}v_proj.weight": (keys, in_width or width),
        f"{prefix}o_proj.weight": (width, queries),
    }


def load_attention(source: CheckedTensors, prefix: str) -> PlainAttentionWeights:
    """Take one layer's weights, as `attention_shapes` lists them, from a checkpoint."""
    return PlainAttentionWeights(
        in_proj=source.matrix(*(f"{prefix}{name}_proj.weight" for name in "qkv")),
        head_scale=None,
        out_proj=source.matrix(prefix + "o_proj.weight"),
    )
