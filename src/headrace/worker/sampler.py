"""Choosing tokens: the token at position p is argmax(processed logits + Gumbel noise of (seed, p)).

The noise depends on the request's seed, the token's position and the vocabulary entry alone, so a
seeded request gives the same tokens whatever its batch mates, row, speculation or preemption.
Drafts are accepted while equal to the token so chosen, which is lossless.

All functions are row-wise: a row's bits do not depend on the other rows. So probabilities are added
as integers, whose sums have no order: a GPU chooses that of floats by the number of rows. No host
synchronisation.
R sample positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from headrace.ops.token_choice import choose_tokens, gumbel_noise

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import Kernels

_UNITS = 2.0**40
"""Parts of the largest weight: a sum of so small ones errs less than float32 rounds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingTensors:
    """Parameters of each sample position.

    Attributes:
        temperature: [R] f32, 0 for greedy rows.
        top_k: [R] i64, at least 1 (V keeps all).
        top_p: [R] f32.
        min_p: [R] f32.
        seed: [R] i64, the request's 64 bits.
        position: Position of the token that is chosen, [R] i64.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor


def lowest_argmax(values: Tensor) -> Tensor:
    """Index of the largest value per row, the lowest one on ties, [R] i64."""
    if values.device.type == "cuda":
        # The first of equal values there too, in one pass and without temporaries of their size.
        return values.argmax(dim=-1)
    best = values.amax(dim=-1, keepdim=True)
    entries = torch.arange(values.shape[-1], device=values.device)
    first = torch.where(values == best, entries, values.shape[-1]).amin(dim=-1)
    return first.clamp_(max=values.shape[-1] - 1)


def likeliest(logits: Tensor, kernels: Kernels) -> Tensor:
    """The greedy choice of each row.

    Args:
        logits: [R, V] f32 or bf16.
        kernels: What computes it.

    Returns:
        Token ids, [R] i64.
    """
    return lowest_argmax(logits) if kernels == "torch" else choose_tokens(logits)


def sample(
    logits: Tensor,
    params: SamplingTensors,
    *,
    is_all_greedy: bool,
    filters: bool,
    kernels: Kernels = "torch",
) -> Tensor:
    """Choose one token per row.

    Args:
        logits: Processed logits, [R, V] f32 or bf16; what is done to them is done in float32.
        params: Per row.
        is_all_greedy: Host's knowledge that every temperature is 0.
        filters: Whether any row has top_k, top_p or min_p.
        kernels: What computes it.

    Returns:
        Token ids, [R] i64.
    """
    if is_all_greedy:
        return likeliest(logits, kernels)
    if kernels != "torch" and not filters:
        return choose_tokens(logits, params)
    logits = logits.float()
    is_greedy = params.temperature == 0.0
    scaled = logits / torch.where(is_greedy, 1.0, params.temperature)[:, None]
    if filters:
        scaled = _filter(scaled, params)
    if kernels != "torch":
        values = torch.where(is_greedy[:, None], logits, scaled)
        # What is left to do with the others is to add noise.
        return choose_tokens(values, replace(params, temperature=(~is_greedy).float()))
    noise = gumbel_noise(params.seed, params.position, logits.shape[-1])
    return lowest_argmax(torch.where(is_greedy[:, None], logits, scaled + noise))


def _filter(scaled: Tensor, params: SamplingTensors) -> Tensor:
    """Drop entries by top_k, then top_p of what is left, then min_p; ties at a threshold stay."""
    ordered = scaled.sort(dim=-1, descending=True).values
    kth = ordered.gather(-1, (params.top_k[:, None] - 1).clamp(0, scaled.shape[-1] - 1))
    ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    weights = _weights(ordered, ordered[:, :1])
    up_to = weights.cumsum(dim=-1)
    limit = params.top_p.double()[:, None] * up_to[:, -1:].double()
    is_beyond = (up_to - weights).double() >= limit
    nucleus = ordered.masked_fill(is_beyond, torch.inf).amin(-1, keepdim=True)
    floor = ordered[:, :1] + torch.log(params.min_p[:, None])
    threshold = torch.maximum(torch.maximum(kth, nucleus), floor)
    return scaled.masked_fill(scaled < threshold, -torch.inf)


def _weights(values: Tensor, largest: Tensor) -> Tensor:
    """exp(values - largest) in units of 2^-40, [R, V] i64; 2^23 of them can be added."""
    return torch.exp(values - largest).mul_(_UNITS).to(torch.int64)


def count_accepted(chosen: Tensor, drafts: Tensor, lengths: Tensor) -> Tensor:
    """Tokens each verify row keeps: equal drafts from the left, and the token after them.

    Args:
        chosen: Tokens chosen after each input token, [N, Q] i64.
        drafts: Drafted tokens, [N, Q-1] i64; -1 where there is none.
        lengths: Tokens of each row, 1 + its drafts, [N] i64; 0 for padded rows.

    Returns:
        [N] i64, in 1..length; 0 for padded rows.
    """
    column = torch.arange(drafts.shape[1], device=drafts.device)
    equal = (chosen[:, :-1] == drafts) & (column < (lengths - 1)[:, None])
    kept = equal.to(torch.int64).cumprod(dim=1).sum(dim=1) + 1
    return torch.where(lengths > 0, kept, 0)


def top_logprobs(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, ...]:
    """Log-probabilities of the chosen and of the likeliest tokens.

    Args:
        logits: [R, V] f32.
        chosen: [R] i64.
        count: Likeliest tokens wanted.

    Returns:
        Chosen token's log-probability [R], its rank from 1 [R], the likeliest tokens'
        log-probabilities [R, count] and ids [R, count]. The chosen token's value is the same bits
        wherever it appears.
    """
    largest = logits.amax(dim=-1, keepdim=True)
    total = _weights(logits, largest).sum(dim=-1, keepdim=True).double() / _UNITS
    own = logits.gather(-1, chosen[:, None])
    rank = (logits > own).sum(dim=-1) + 1
    best = logits.topk(count, dim=-1)
    own, values = ((each - largest).sub_(total.log().float()) for each in (own, best.values))
    return own[:, 0], rank, values, best.indices
