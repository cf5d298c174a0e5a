"""A step of recurrent layers whose rows go through kernels, by where their tokens come from.

Generating rows have a kernel, and prompts in some families. Generated tokens that are computed
again after a preemption are few steps of many tokens; those go through PyTorch operations, and so
do prompts of the other families. With kernels "fixed" such tokens go through the kernel of
generating rows again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from headrace.models.layers.recomputed import (
    filled_up,
    plan_recomputed_states,
    recomputed_rows,
)
from headrace.models.layers.state_plan import plan_states

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import (
        ColumnsMetadata,
        Kernels,
        KnownRow,
        ReplayMetadata,
        StateCache,
        StepBatch,
    )
    from headrace.models.layers.recomputed import RecomputedStates
    from headrace.models.layers.state_plan import StatePlan
    from headrace.models.model import HybridModel
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
class OtherRows:
    """Rows that PyTorch operations compute.

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
        kernels: What computes the step; not "torch".
        generating: Rows of the kernel for generated tokens, or None.
        prompts: Rows of the kernel for prompts, or None.
        others: Rows without a kernel, or None.
        recomputed: Rows of generated tokens that must have the bits of the first time, or None.
        out: What each layer of the group in turn writes its real tokens' outputs to, [T, O]. Made
            once a step, as zeros: those of padding stay.
    """

    kernels: Kernels
    generating: GeneratingRows | None
    prompts: PrefillRows | None
    others: OtherRows | None
    recomputed: RecomputedStates | None
    out: Tensor


def lists_prompts(model: HybridModel, kernels: Kernels) -> bool:
    """Return whether a model takes `StepBatch.prompts`: whether a group's prompts have a kernel."""
    return kernels != "torch" and any(
        group.kind == "gated_delta_net" for group in model.state_groups(0)
    )


def plan_split(
    batch: StepBatch, group: int, cache: StateCache, conv_kernel: int, out: Tensor
) -> SplitPlan:
    """Compute a group's indices once for all its layers, whose prompts have a kernel.

    Args:
        batch: The step.
        group: Place of the state group in the model's list.
        cache: Its pools.
        conv_kernel: Taps of the convolution, W.
        out: Zeros, [T, O].

    Returns:
        The plan.
    """
    again, recomputed = recomputed_rows(batch), None
    has_prompts = len(again) < len(batch.known)
    assert bool(batch.prompts) == has_prompts, f"{len(batch.known)} known rows, no list of prompts"
    if batch.kernels == "fixed":
        again, recomputed = (), plan_recomputed_states(batch, group)
    return SplitPlan(
        kernels=batch.kernels,
        generating=_plan_generating(batch, group),
        prompts=batch.prompts[group] if has_prompts else None,
        others=_plan_others(batch, again, group, cache, conv_kernel) if again else None,
        recomputed=recomputed,
        out=out,
    )


def plan_generating_split(
    batch: StepBatch, group: int, cache: StateCache, conv_kernel: int, out: Tensor
) -> SplitPlan:
    """Compute a group's indices where generating rows have a kernel and prompts have none.

    The arguments are those of `plan_split`.
    """
    known = batch.known
    assert batch.kernels == "triton", "PyTorch's operations on prompts follow the step's rows"
    return SplitPlan(
        kernels=batch.kernels,
        generating=_plan_generating(batch, group),
        prompts=None,
        others=_plan_others(batch, known, group, cache, conv_kernel) if known else None,
        recomputed=None,
        out=out,
    )


def _plan_generating(batch: StepBatch, group: int) -> GeneratingRows | None:
    rows = batch.verify
    if rows is None:
        return None
    index = filled_up(rows).token_index if batch.kernels == "fixed" else rows.token_index
    return GeneratingRows(
        token_index=index, query_lens=rows.query_lens, states=rows.states[group]
    )


def _plan_others(
    batch: StepBatch,
    rows: tuple[KnownRow, ...],
    group: int,
    cache: StateCache,
    conv_kernel: int,
) -> OtherRows:
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
    return OtherRows(tokens=tokens, plan=plan)
