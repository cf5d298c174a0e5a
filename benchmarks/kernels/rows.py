"""Generating rows of a batch in either scheme, for the benchmarks of mixers."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace.ops.mixer_cases import Columns, Replay

if TYPE_CHECKING:
    from torch import Tensor

DRAFTS, INTERVAL, RING = 3, 16, 32


def rows_of(scheme: str, batch: int, query: int, device: str) -> tuple[Tensor, Tensor, Any]:
    """Token index, lengths and rows: columns with mixed accepted counts, replay in all phases."""
    index = torch.arange(batch * query, device=device).view(batch, query)
    lens = torch.full((batch,), query, device=device)
    if scheme == "columns":
        blocks = 1 + torch.arange(batch * (1 + DRAFTS), dtype=torch.int32, device=device)
        accepted = 1 + torch.arange(batch, dtype=torch.int32, device=device) % query
        return index, lens, Columns(window_blocks=blocks.view(batch, -1), accepted=accepted)
    block = 1 + torch.arange(batch, dtype=torch.int32, device=device)
    # Pending 1 .. 16: a sixteenth of the rows writes its base.
    pending = 1 + torch.arange(batch, device=device) % INTERVAL
    if batch == 1:
        pending += INTERVAL // 2 - 1
    base = torch.full((batch,), 4 * INTERVAL, device=device)
    rows = Replay(
        base_block=block,
        base_len=base,
        computed=base + pending,
        write_block=block,
        write_len=base + INTERVAL,
        ring_block=block,
    )
    return index, lens, rows


def moved(value: Any, device: str) -> Any:  # noqa: ANN401  whatever a mixer takes
    """Copy tensors to a device, also those inside tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    if is_dataclass(value):
        parts = {f.name: moved(getattr(value, f.name), device) for f in fields(value)}
        return type(value)(**parts)  # type: ignore[misc]  an instance has a class
    return value
