"""Multi-head latent attention without rotary embedding: one latent vector is all a token keeps.

A head's key is made of the latent and a part that all heads share, its value of the latent:

    k = [W_k norm(c); s],  v = W_v norm(c),  out = softmax(q k / (|k|)^1/2) v

Here queries are multiplied by W_k and outputs by W_v instead, so every head attends to the same
[norm(c); s] and no key or value of a head is ever stored. The value of a token is the beginning of
its key: there is one pool.

Source: DeepSeek-V2, arXiv:2405.04434, as Kimi Linear (arXiv:2510.26692) uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.models.layers.attention_plan import attend
from headrace.ops.linear import head_linear, linear
from headrace.ops.paged_attention import write_rows
from headrace.ops.rms_norm import rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.layers.attention import PlainAttentionStep


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Sizes of one layer: H heads.

    Attributes:
        num_heads: H.
        latent: Size of the latent, R.
        shared: Size of the part of the keys that all heads share.
        own: Size of the part of a key that is the head's own.
        value: Size of a head's value.
        norm_eps: Of the latent's norm.
    """

    num_heads: int
    latent: int
    shared: int
    own: int
    value: int
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentAttentionWeights:
    """Weights of one layer.

    Attributes:
        in_proj: Queries, H * (own + shared), latent, shared part, [.., C].
        latent_norm: [R] f32.
        key_up: W_k^T of each head, [H, R, own].
        value_up: W_v of each head, [H, value, R].
        out_proj: [C, H * value].
    """

    in_proj: Tensor
    latent_norm: Tensor
    key_up: Tensor
    value_up: Tensor
    out_proj: Tensor


def latent_attention(
    x: Tensor,
    weights: LatentAttentionWeights,
    sizes: LatentSizes,
    pool: Tensor,
    step: PlainAttentionStep,
) -> Tensor:
    """Run one layer over the packed tokens of a step and write their latents.

    Args:
        x: Normed hidden states, [T, C].
        weights: The layer's weights.
        sizes: The layer's sizes.
        pool: The layer's latents and shared parts, [B, P, 1, R + shared].
        step: What the step's attention layers share.

    Returns:
        [T, C].
    """
    tokens, key_dim = x.shape[0], sizes.own + sizes.shared
    query, latent, shared = linear(x, weights.in_proj).split_with_sizes(
        (sizes.num_heads * key_dim, sizes.latent, sizes.shared), -1
    )
    normed = rms_norm(latent, weights.latent_norm, sizes.norm_eps)
    write_rows(pool, torch.cat((normed, shared), -1)[:, None], step.slots)
    own, rest = query.view(tokens, -1, key_dim).split_with_sizes((sizes.own, sizes.shared), -1)
    wide = torch.cat((head_linear(own, weights.key_up), rest), -1)
    # `attend` scales by the size of what it is given.
    wide.mul_((wide.shape[-1] / key_dim) ** 0.5)
    seen = attend(wide, pool, pool, step.plan)[..., : sizes.latent]
    return linear(head_linear(seen, weights.value_up).reshape(tokens, -1), weights.out_proj)
