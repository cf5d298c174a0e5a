"""How the packed tokens of generating rows and their places in a [N, Q] grid relate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPlan:
    """The generating rows of a step.

    Attributes:
        shape: (N, Q).
        token_index: Packed token at each place n * Q + t, 0 where the row is shorter, [N * Q] i64.
        num_tokens: Packed tokens that belong to these rows; they come first.
        places: Place of each of those tokens, [num_tokens] i64.
    """

    shape: tuple[int, int]
    token_index: Tensor
    num_tokens: int
    places: Tensor


def count_verify_tokens(batch: StepBatch) -> int:
    """Return how many packed tokens belong to the generating rows; they come first."""
    if batch.verify is None:
        return 0
    return batch.known[0].token_offset if batch.known else batch.num_tokens


def plan_rows(batch: StepBatch) -> RowPlan | None:
    """Invert the rows' token index, without waiting for the device.

    Args:
        batch: The step.

    Returns:
        The plan, or None if the step has no generating rows.
    """
    rows = batch.verify
    if rows is None:
        return None
    n, q_len = rows.token_index.shape
    num_tokens = count_verify_tokens(batch)
    device = rows.token_index.device
    is_used = torch.arange(q_len, device=device) < rows.query_lens[:, None]
    # Places without a token are sent behind the end.
    target = rows.token_index.masked_fill(~is_used, num_tokens).view(-1)
    places = torch.zeros(num_tokens + 1, dtype=torch.long, device=device)
    places.scatter_(0, target, torch.arange(n * q_len, device=device))
    return RowPlan(
        shape=(n, q_len),
        token_index=rows.token_index.view(-1),
        num_tokens=num_tokens,
        places=places[:num_tokens],
    )
