"""The plain loop that defines the right answer: one sequence, one token at a time.

The prompt goes through the scan in one row, every generated token through the step as a row of its
own. The caches are dense and built here: KV blocks 1, 2, 3 ... in order, one state block. Nothing
of the engine or the worker is used, so what they do can be compared with this, bit for bit on the
CPU in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.models.batch import (
    ROW_TILE,
    Caches,
    ColumnsMetadata,
    KnownRow,
    KnownState,
    StateCache,
    StepBatch,
    VerifyRows,
)
from headrace.models.layers.attention_plan import tiling_of
from headrace.models.layers.split_plan import lists_prompts
from headrace.ops.gated_delta_prefill import PrefillRows, PromptRow, number_rows
from headrace.ops.paged_prefill import PrefillTiles, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from headrace.models.batch import Kernels
    from headrace.models.model import HybridModel

BLOCK_SIZE = 16
RUNNING = 1
"""State block of the running state; exported states follow it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceRun:
    """What one sequence's generation gave.

    Attributes:
        tokens: Generated tokens.
        logits: Logits from which each of them was chosen, [tokens, vocabulary] f32.
        states: By number of tokens, then state group: tensors by name, [layers, ...]. Windows are
            the last W-1 inputs.
    """

    tokens: list[int]
    logits: Tensor
    states: dict[int, tuple[dict[str, Tensor], ...]]


def greedy(logits: Tensor, position: int) -> int:
    """Choose the likeliest token; ties go to the lowest id.

    Args:
        logits: [vocabulary] f32.
        position: Of the token that is chosen.

    Returns:
        The token.
    """
    del position
    return int(logits.argmax())


def run_reference(
    model: HybridModel,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    choose: Callable[[Tensor, int], int] = greedy,
    stop_token_ids: Sequence[int] = (),
    states_at: Sequence[int] = (),
    scan_grid: int = 64,
    kernels: Kernels = "torch",
) -> ReferenceRun:
    """Generate tokens after a prompt.

    Args:
        model: The model.
        prompt: At least one token.
        num_tokens: Tokens to generate.
        choose: Given logits [vocabulary] and the position of the token to choose, returns it.
        stop_token_ids: Generation ends after one of these.
        states_at: Numbers of tokens after which the states are wanted: inside the prompt multiples
            of scan_grid, its whole length, or any later number that is reached.
        scan_grid: Tokens between absolute scan points.
        kernels: What computes the tokens.

    Returns:
        Tokens, logits and states.
    """
    length = len(prompt)
    wanted = set(states_at)
    exports = sorted(n for n in wanted if 0 < n < length)
    caches = build_caches(
        model, max_tokens=length + num_tokens, state_blocks=RUNNING + 1 + len(exports)
    )
    states: dict[int, tuple[dict[str, Tensor], ...]] = {}

    def keep(position: int, block: int) -> None:
        states[position] = tuple(
            {name: pool[:, block].clone() for name, pool in group.state.items()}
            for group in caches.groups
        )

    hidden = model.forward(
        prompt_batch(model, prompt, 0, length, exports, scan_grid=scan_grid, kernels=kernels),
        caches,
    )
    for i, position in enumerate(exports):
        keep(position, RUNNING + 1 + i)
    last = hidden[length - 1 : length]
    tokens: list[int] = []
    rows = []
    for position in range(length, length + num_tokens):
        if position in wanted:
            keep(position, RUNNING)
        logits = model.logits(last, kernels)[0].float()
        rows.append(logits)
        token = choose(logits, position)
        tokens.append(token)
        is_last = position + 1 == length + num_tokens or token in stop_token_ids
        if is_last and position + 1 not in wanted:
            break
        last = model.forward(token_batch(model, token, position, kernels), caches)[:1]
        if is_last:
            keep(position + 1, RUNNING)
            break
    return ReferenceRun(tokens=tokens, logits=torch.stack(rows), states=states)


def build_caches(model: HybridModel, *, max_tokens: int, state_blocks: int) -> Caches:
    """Allocate pools for one sequence without drafts.

    Args:
        model: The model.
        max_tokens: Longest sequence.
        state_blocks: Blocks of each state group, null block included.

    Returns:
        Zeroed pools.
    """
    config = model.config
    shape = (
        model.num_kv_layers,
        1 + _num_blocks(max_tokens),
        BLOCK_SIZE,
        config.num_kv_heads,
    )
    groups = []
    for spec in model.state_groups(0):
        state = {
            tensor.name: torch.zeros(
                len(spec.layers),
                state_blocks,
                *tensor.shape,
                dtype=getattr(torch, tensor.dtype),
                device=model.device,
            )
            for tensor in spec.state
        }
        groups.append(StateCache(state=state))
    k, v = (
        torch.zeros(*shape, width, dtype=model.dtype, device=model.device)
        for width in (config.head_dim, config.kv_value_dim)
    )
    return Caches(k=k, v=v, groups=tuple(groups))


def prompt_batch(
    model: HybridModel,
    prompt: Sequence[int],
    start: int,
    end: int,
    exports: Sequence[int] = (),
    *,
    scan_grid: int = 64,
    kernels: Kernels = "torch",
) -> StepBatch:
    """Build the step that scans prompt[start:end]; export i goes to block RUNNING + 1 + i."""
    length = end - start
    tokens = -(-length // ROW_TILE) * ROW_TILE
    device = model.device
    token_ids = torch.zeros(tokens, dtype=torch.long, device=device)
    token_ids[:length] = torch.tensor(list(prompt[start:end]), device=device)
    positions = torch.zeros_like(token_ids)
    positions[:length] = torch.arange(start, end, device=device)
    slots = torch.zeros_like(token_ids)
    slots[:length] = positions[:length] + BLOCK_SIZE  # blocks 1, 2, 3 ... in order
    state = KnownState(
        source_block=RUNNING if start else None,
        target_block=RUNNING,
        exports=tuple((position, RUNNING + 1 + i) for i, position in enumerate(exports)),
    )
    row = KnownRow(
        path="scan",
        token_offset=0,
        start=start,
        length=length,
        block_table=_identity_table(end, device),
        states=tuple(state for _ in model.state_groups(0)),
    )
    prefill = None
    tiling = tiling_of(model, kernels)
    if tiling is not None:
        layout, records = tiling.list_tiles([Span(token=0, start=start, length=length, table=0)])
        listed = torch.tensor(records, device=device)
        prefill = PrefillTiles(records=listed, tables=row.block_table, layout=layout)
    return StepBatch(
        num_tokens=length,
        token_ids=token_ids,
        positions=positions,
        kv_slot_mapping=slots,
        verify=None,
        known=(row,),
        scan_grid=scan_grid,
        kernels=kernels,
        prefill=prefill,
        prompts=_list_prompt(row, scan_grid, device) if lists_prompts(model, kernels) else (),
    )


def _list_prompt(row: KnownRow, grid: int, device: torch.device) -> tuple[PrefillRows, ...]:
    """Return the only row of a step as kernels take it, for each state group."""
    listed = []
    for state in row.states:
        prompt = PromptRow(
            first=row.token_offset,
            start=row.start,
            length=row.length,
            source=state.source_block,
            target=state.target_block,
            exports=state.exports,
        )
        layout, numbers = number_rows([prompt], grid)
        listed.append(layout.on_device(torch.tensor(numbers, dtype=torch.int32, device=device)))
    return tuple(listed)


def token_batch(
    model: HybridModel, token: int, position: int, kernels: Kernels = "torch"
) -> StepBatch:
    """Build the step that extends the sequence by one generated token."""
    device = model.device
    token_ids = torch.zeros(ROW_TILE, dtype=torch.long, device=device)
    token_ids[0] = token
    positions = torch.zeros_like(token_ids)
    positions[0] = position
    slots = torch.zeros_like(token_ids)
    slots[0] = position + BLOCK_SIZE
    running = torch.full((1, 1), RUNNING, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    metadata = ColumnsMetadata(window_blocks=running, accepted=one)
    verify = VerifyRows(
        num_rows=1,
        max_query_len=1,
        token_index=torch.zeros(1, 1, dtype=torch.long, device=device),
        query_lens=torch.ones(1, dtype=torch.long, device=device),
        seq_lens=torch.full((1,), position + 1, device=device),
        max_seq_len=position + 1,
        block_table=_identity_table(position + 1, device)[None],
        states=tuple(metadata for _ in model.state_groups(0)),
    )
    return StepBatch(
        num_tokens=1,
        token_ids=token_ids,
        positions=positions,
        kv_slot_mapping=slots,
        verify=verify,
        known=(),
        kernels=kernels,
    )


def _num_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _identity_table(tokens: int, device: torch.device) -> Tensor:
    return torch.arange(1, 1 + _num_blocks(tokens), dtype=torch.int32, device=device)
