"""Choice and noise by PyTorch operations: the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.token_choice.rows import SampledRows

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64
NOISE_SHIFT, NOISE_MASK = 41, 2**23 - 1
"""The highest 23 bits of a hash are those of the noise."""


def _mix(value: Tensor) -> Tensor:
    """SplitMix64's finaliser on wrapping int64 (Steele, Lea, Flood 2014)."""
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * MIX_1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise keyed by (seed, position, entry).

    Args:
        seed: [R] i64.
        position: [R] i64.
        vocab_size: V.

    Returns:
        [R, V] f32, finite.
    """
    key = _mix(_mix(seed) + position * GOLDEN)
    entry = torch.arange(vocab_size, device=seed.device, dtype=torch.int64) * GOLDEN
    return _gumbel((_mix(key[:, None] + entry) >> NOISE_SHIFT) & NOISE_MASK)


def _gumbel(bits: Tensor) -> Tensor:
    """Gumbel noise of 23 random bits.

    The uniforms are odd multiples of 2**-24, all of which float32 holds. With one bit more the
    largest would round to 1, whose noise is infinite: one entry in 2**24 would win whatever its
    logit.
    """
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def choose_tokens(logits: Tensor, sampled: SampledRows | None) -> Tensor:
    """Choose; see the package."""
    logits = logits.float()
    if sampled is None:
        return logits.argmax(dim=-1)
    is_greedy = (sampled.temperature == 0.0)[:, None]
    scaled = logits / torch.where(is_greedy, 1.0, sampled.temperature[:, None])
    noise = gumbel_noise(sampled.seed, sampled.position, logits.shape[-1])
    return torch.where(is_greedy, logits, scaled + noise).argmax(dim=-1)
