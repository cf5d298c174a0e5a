"""Choosing a token: the largest logit, or the largest after temperature and noise, in one read.

The noise depends on the request's seed, the token's position and the vocabulary entry alone. The
lowest of equal entries wins; NaN counts as larger than any number, so the first NaN wins. A row's
choice depends on the row alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.token_choice import reference
from headrace.ops.token_choice.reference import gumbel_noise
from headrace.ops.token_choice.rows import SampledRows
from headrace.rt.kernels import can_launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_ENTRIES", "SampledRows", "choose_tokens", "gumbel_noise"]

MAX_ENTRIES = 2**31 - 1
"""Vocabulary entries that a kernel counts."""


def choose_tokens(logits: Tensor, sampled: SampledRows | None = None) -> Tensor:
    """Choose one entry of each row.

    Args:
        logits: [R, V] f32 or bf16; rows may be strided. They are compared as float32.
        sampled: How rows are sampled; None for the largest entry of each.

    Returns:
        Token ids, [R] i64.

    Raises:
        ValueError: Sizes that do not fit each other, or too many entries.
    """
    rows, entries = logits.shape
    if entries > MAX_ENTRIES:
        msg = f"{entries} entries, and a kernel counts {MAX_ENTRIES}; use kernels torch"
        raise ValueError(msg)
    if logits.stride(1) != 1:
        msg = f"entries must be adjacent, strides are {logits.stride()}"
        raise ValueError(msg)
    for name in ("temperature", "seed", "position") if sampled is not None else ():
        shape = tuple(getattr(sampled, name).shape)
        if shape != (rows,):
            msg = f"{name} has shape {shape} where logits have {rows} rows"
            raise ValueError(msg)
    run = reference.choose_tokens
    if can_launch(logits):
        from headrace.ops.token_choice import fused  # noqa: PLC0415  needs Triton

        run = fused.choose_tokens
    return run(logits, sampled)
