"""A step of recurrent layers whose rows go through kernels, by where their tokens come from.

Generating rows and prompts have a kernel each. Generated tokens that are computed again after a
preemption are few steps of many tokens; those go through PyTorch operations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from headrace.models.layers.state_plan import plan_states
from headrace.ops.gated_delta_prefill import PromptRow, number_rows

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import (
        ColumnsMetadata,
        KnownRow,
        ReplayMetadata,
        StateCache,
        StepBatch,
    )
    from headrace.models.layers.state_plan import StatePlan
    from headrace.ops.gated_delta_prefill import PrefillRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GeneratingRows:
    """Rows that extend generating sequences.

    Attributes:
        token_index: Packed index of each row's tokens, [N, Q] i64.
        query_lens: [N] i64.
        states: Where those rows' states are.
    """

    token_index: Tensor
    query_lens: Tensor
    states: ColumnsMetadata | ReplayMetadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecomputedRows:
    """Rows of generated tokens that are computed again.

    Attributes:
        tokens: Their packed tokens, [..] i64.
        plan: Of a step that holds those tokens alone.
    """

    tokens: Tensor
    plan: StatePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitPlan:
    """One step's indices of one state group.

    Attributes:
        generating: Rows of the kernel for generated tokens, or None.
        prompts: Rows of the kernel for prompts, or None.
        recomputed: Rows without a kernel, or None.
        out: What each layer of the group in turn writes its real tokens' outputs to, [T, O]. Made
            once a step, as zeros: those of padding stay.
    """

    generating: GeneratingRows | None
    prompts: PrefillRows | None
    recomputed: RecomputedRows | None
    out: Tensor


def plan_split(
    batch: StepBatch, group: int, cache: StateCache, conv_kernel: int, out: Tensor
) -> SplitPlan:
    """Compute a group's indices once for all its layers.

    Args:
        batch: The step.
        group: Place of the state group in the model's list.
        cache: Its pools.
        conv_kernel: Taps of the convolution, W.
        out: Zeros, [T, O].

    Returns:
        The plan.
    """
    generating = None
    if batch.verify is not None:
        generating = GeneratingRows(
            token_index=batch.verify.token_index,
            query_lens=batch.verify.query_lens,
            states=batch.verify.states[group],
        )
    again = tuple(row for row in batch.known if row.path == "step")
    return SplitPlan(
        generating=generating,
        prompts=_plan_prompts(batch, group),
        recomputed=_plan_recomputed(batch, again, group, cache, conv_kernel) if again else None,
        out=out,
    )


def _plan_prompts(batch: StepBatch, group: int) -> PrefillRows | None:
    prompts = [
        PromptRow(
            first=row.token_offset,
            start=row.start,
            length=row.length,
            source=row.states[group].source_block,
            target=row.states[group].target_block,
            exports=row.states[group].exports,
        )
        for row in batch.known
        if row.path == "scan"
    ]
    if not prompts:
        return None
    made = number_rows(prompts, batch.scan_grid)
    device = batch.token_ids.device
    return made.on_device(torch.tensor(made.numbers, dtype=torch.int32, device=device))


def _plan_recomputed(
    batch: StepBatch,
    rows: tuple[KnownRow, ...],
    group: int,
    cache: StateCache,
    conv_kernel: int,
) -> RecomputedRows:
    device = batch.token_ids.device
    tokens = torch.cat(
        [
            torch.arange(row.token_offset, row.token_offset + row.length, device=device)
            for row in rows
        ]
    )
    packed, offset = [], 0
    for row in rows:
        packed.append(replace(row, token_offset=offset))
        offset += row.length
    alone = replace(
        batch,
        num_tokens=offset,
        token_ids=batch.token_ids.index_select(0, tokens),
        positions=batch.positions.index_select(0, tokens),
        kv_slot_mapping=batch.kv_slot_mapping.index_select(0, tokens),
        verify=None,
        known=tuple(packed),
    )
    plan = plan_states(alone, None, group, cache, conv_kernel)
    return RecomputedRows(tokens=tokens, plan=plan)
