"""Drafters: launches that propose the tokens a step's generating rows verify next.

A drafter writes `drafts` for every row that generates after this step: the verify rows, then the
known rows that end. -1 means "no draft here"; the token is then fed as 0 and rejected. Whatever a
drafter proposes, outputs stay the same; only their speed changes. None waits for the device.

Sequences that fork off the end of a known row come last. A drafter is launched again for them,
`is_fork`, once their blocks have been filled: with what the first launch wrote, among other things.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace import rt
from headrace.models.batch import (
    ROW_TILE,
    ColumnsMetadata,
    ReplayMetadata,
    StepBatch,
    VerifyRows,
)
from headrace.worker.launches import column_block, make_batch, make_caches, state_table
from headrace.worker.sampler import likeliest

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import Kernels
    from headrace.worker.launches import Fixed, Kinds, StepShape

NO_DRAFT = -1
MAX_NGRAM = 3
_NEVER = 2**40


def _draft_part(shape: StepShape, *, is_fork: bool) -> slice:
    """The draft rows of one launch."""
    count = shape.num_verify + shape.num_ending
    first_fork = count - shape.num_forked
    return slice(first_fork, count) if is_fork else slice(0, first_fork)


def _real_rows(inputs: dict[str, Tensor], shape: StepShape) -> Tensor | None:
    """Which draft rows are no padding, [rows] bool; None if all are real."""
    return inputs["lengths"][: shape.num_verify] > 0 if shape.is_padded else None


def _draft_table(inputs: dict[str, Tensor], shape: StepShape, part: slice) -> Tensor:
    """Their KV blocks, [rows, M] i32."""
    count = shape.num_verify + shape.num_ending
    flat = inputs["draft_tables"][: count * shape.draft_width]
    return flat.view(count, shape.draft_width)[part]


@rt.op(
    inputs=rt.Read,
    work=rt.Read,
    hidden=rt.Read,
    last_token=rt.Read,
    k=rt.ReadWrite,
    v=rt.ReadWrite,
    drafts=rt.ReadWrite,
    exchange=rt.ReadWrite,
)
def draft_mtp(
    *,
    inputs: dict[str, Tensor],
    work: dict[str, Tensor],
    hidden: Tensor,
    last_token: Tensor,
    k: Tensor,
    v: Tensor,
    drafts: Tensor,
    exchange: Tensor | None,
    shape: StepShape,
    fixed: Fixed,
    is_fork: bool,
) -> None:
    """Propose drafts with the model's MTP head, applied again to its own output for each.

    `exchange` stands for the collectives of its layers, as in `launches.forward`.
    """
    del exchange
    caches = make_caches(k, v, (), ())
    model = fixed.model
    part = _draft_part(shape, is_fork=is_fork)
    rows = inputs["draft_rows"][part]
    last = work["draft_last"][part]
    newest = last_token[rows]
    table = _draft_table(inputs, shape, part)
    position = work["positions"][last]
    is_real = _real_rows(inputs, shape)

    def apply(token: Tensor, state: Tensor, at: Tensor) -> Tensor:
        """The head's output [rows, C] after a token, from the hidden state before it."""
        count = len(token)
        padded = -(-count // ROW_TILE) * ROW_TILE
        wide = torch.zeros(padded, state.shape[1], dtype=state.dtype, device=state.device)
        wide[:count] = state
        batch = _one_token_batch(token, at, table, (), fixed, fixed.kernels, is_real)
        return model.mtp(batch, caches, wide, batch.token_ids)[:count]

    # Also without drafts to propose: the head's own KV must cover every token.
    if is_fork:
        # The last position once more: the token after it is the fork's own.
        state = apply(newest, hidden[last], position)
    else:
        tokens, total = shape.num_verify_tokens, shape.num_tokens
        following = torch.zeros(shape.num_padded, dtype=torch.int64, device=hidden.device)
        following[:tokens] = work["chosen"][:tokens]
        following[tokens:total] = inputs["next_tokens"][tokens:total].clamp(min=0)
        if len(rows):
            following.index_copy_(0, last, newest)
        batch = make_batch(inputs, work, shape, fixed)
        state = model.mtp(batch, caches, hidden[: shape.num_padded], following)[last]
    if not len(rows) or not shape.num_drafts:
        return
    draft = likeliest(model.logits(state, fixed.kernels), fixed.kernels)
    proposals = [draft]
    for step in range(1, shape.num_drafts):
        state = apply(draft, state, position + step)
        draft = likeliest(model.logits(state, fixed.kernels), fixed.kernels)
        proposals.append(draft)
    _propose(drafts, rows, torch.stack(proposals, dim=1))


def _propose(drafts: Tensor, rows: Tensor, proposals: Tensor) -> None:
    """Write proposals [rows, k] to the carry array, [N, s]; the places past k hold no draft."""
    wide = torch.full(
        (proposals.shape[0], drafts.shape[1]), NO_DRAFT, dtype=torch.int64, device=drafts.device
    )
    wide[:, : proposals.shape[1]] = proposals
    drafts.index_copy_(0, rows, wide)


def _one_token_batch(
    tokens: Tensor,
    positions: Tensor,
    table: Tensor,
    states: tuple[ColumnsMetadata | ReplayMetadata, ...],
    fixed: Fixed,
    kernels: Kernels,
    is_real: Tensor | None = None,
) -> StepBatch:
    """A step of one token a row, for drafts after the first.

    Args:
        tokens: [rows] i64.
        positions: [rows] i64; the KV block of each must be in the table.
        table: [rows, M] i32.
        states: Per state group.
        fixed: The worker's constants.
        kernels: What computes the rows.
        is_real: Rows that are no padding, [rows] bool; None if all are real.
    """
    count = tokens.shape[0]
    padded = -(-count // ROW_TILE) * ROW_TILE

    def pad(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, padded - count))

    block = table.gather(1, (positions // fixed.block_size)[:, None])[:, 0].to(torch.int64)
    index = torch.arange(count, device=tokens.device)
    slots = block * fixed.block_size + positions % fixed.block_size
    lengths, ends = torch.ones_like(index), positions + 1
    if is_real is not None:
        slots, lengths, ends = slots * is_real, lengths * is_real, ends * is_real
    return StepBatch(
        num_tokens=count,
        token_ids=pad(tokens),
        positions=pad(positions),
        kv_slot_mapping=pad(slots),
        verify=VerifyRows(
            num_rows=count,
            max_query_len=1,
            token_index=index[:, None],
            query_lens=lengths,
            seq_lens=ends,
            max_seq_len=table.shape[1] * fixed.block_size,
            block_table=table,
            states=states,
        ),
        known=(),
        scan_grid=fixed.grid,
        kernels=kernels,
    )


@rt.op(
    inputs=rt.Read,
    work=rt.Read,
    counts=rt.Read,
    last_token=rt.Read,
    k=rt.ReadWrite,
    v=rt.ReadWrite,
    states=rt.ReadWrite,
    rings=rt.ReadWrite,
    drafts=rt.ReadWrite,
)
def draft_model(
    *,
    inputs: dict[str, Tensor],
    work: dict[str, Tensor],
    counts: dict[str, Tensor],
    last_token: Tensor,
    k: Tensor,
    v: Tensor,
    states: tuple[dict[str, Tensor], ...],
    rings: tuple[dict[str, Tensor], ...],
    drafts: Tensor,
    shape: StepShape,
    fixed: Fixed,
    model: Any,  # noqa: ANN401 - any class of headrace.models
    tables: tuple[int, ...],
    num_state_blocks: int,
    is_fork: bool,
) -> None:
    """Run a second model over the step's tokens, then let it go on alone for the drafts.

    Its KV and states lie in pools of their own under the served model's block ids, so tables,
    rollback, prefix hits and preemption are the same for both. Its own continuation must not reach
    those states: `columns` copies them to scratch blocks num_state_blocks .. + rows - 1, `replay`
    only adds ring entries that the next step overwrites. Ranks that share the served model have
    all of this one each: it is small, and makes no collectives.
    """
    caches = make_caches(k, v, states, rings)
    if not is_fork:
        model.forward(make_batch(inputs, work, shape, fixed, tables), caches)
    part = _draft_part(shape, is_fork=is_fork)
    rows = inputs["draft_rows"][part]
    count = len(rows)
    if not count or not shape.num_drafts:
        return
    table = _draft_table(inputs, shape, part)
    computed = counts["computed"][rows]
    token = last_token[rows]
    blocks = [_running_blocks(inputs, work, counts, shape, fixed, t)[part] for t in tables]
    if fixed.scheme == "columns":
        # Padding has accepted nothing, and copies from the null block.
        accepted = counts["accepted"][rows].clamp(min=1)
        for block, group, kinds in zip(blocks, states, fixed.draft_kinds, strict=True):
            _to_scratch(group, kinds, block, accepted, num_state_blocks)
    is_real = _real_rows(inputs, shape)
    proposals = []
    for step in range(shape.num_drafts):
        at = computed + step
        metadata = tuple(
            _chain_metadata(inputs, counts, shape, fixed, part, block, at, num_state_blocks)
            for block in blocks
        )
        batch = _one_token_batch(token, at, table, metadata, fixed, fixed.draft_kernels, is_real)
        hidden = model.forward(batch, caches)
        token = likeliest(model.logits(hidden[:count], fixed.draft_kernels), fixed.draft_kernels)
        proposals.append(token)
    _propose(drafts, rows, torch.stack(proposals, dim=1))


def _running_blocks(
    inputs: dict[str, Tensor],
    work: dict[str, Tensor],
    counts: dict[str, Tensor],
    shape: StepShape,
    fixed: Fixed,
    table_index: int,
) -> Tensor:
    """Blocks that hold each draft row's state: [all rows, 1+s] columns, or the base repeated."""
    n, ending = shape.num_verify, shape.num_ending
    width = 1 + fixed.max_drafts
    stacked = inputs["known_blocks"][: fixed.num_tables * ending].view(fixed.num_tables, ending)
    known = stacked[table_index][:, None].expand(ending, width)
    if fixed.scheme == "columns":
        own = work["window_blocks"][table_index, :n]
    elif n:
        table, base = state_table(inputs, shape, fixed, table_index)
        base_len = counts["base_len"][inputs["draft_rows"][:n]]
        own = column_block(table, base, base_len, fixed.unit)[:, None]
    else:
        own = known[:0]
    return torch.cat((own, known))


def _to_scratch(
    group: dict[str, Tensor],
    kinds: Kinds,
    columns: Tensor,
    accepted: Tensor,
    first_scratch: int,
) -> None:
    """Copy each row's state after its accepted tokens to its scratch block."""
    count = columns.shape[0]
    scratch = torch.arange(first_scratch, first_scratch + count, device=columns.device)
    state_block = columns.gather(1, (accepted - 1)[:, None])[:, 0].to(torch.int64)
    window_block = columns[:, 0].to(torch.int64)
    for name, kind in kinds:
        pool = group[name]
        if kind == "recurrent":
            pool[:, scratch] = pool[:, state_block]
            continue
        entries = pool.shape[2]
        index = torch.arange(entries, device=columns.device) + (accepted - 1)[:, None]
        index = index.clamp(max=entries - 1).view(1, count, entries, 1)
        old = pool[:, window_block]
        pool[:, scratch] = old.gather(2, index.expand(old.shape))


def _chain_metadata(
    inputs: dict[str, Tensor],
    counts: dict[str, Tensor],
    shape: StepShape,
    fixed: Fixed,
    part: slice,
    blocks: Tensor,
    computed: Tensor,
    first_scratch: int,
) -> ColumnsMetadata | ReplayMetadata:
    """State metadata of one token after `computed`, none of which may be kept."""
    rows = inputs["draft_rows"][part]
    count = rows.shape[0]
    if fixed.scheme == "columns":
        scratch = torch.arange(first_scratch, first_scratch + count, device=rows.device)
        ones = torch.ones_like(rows).to(torch.int32)
        return ColumnsMetadata(window_blocks=scratch[:, None].to(torch.int32), accepted=ones)
    slots = torch.cat(
        (inputs["slots"][: shape.num_verify], inputs["known_slots"][: shape.num_ending])
    )
    return ReplayMetadata(
        base_block=blocks[:, 0].to(torch.int32),
        base_len=counts["base_len"][rows],
        computed=computed,
        write_block=blocks[:, 0].to(torch.int32),
        write_len=torch.full_like(computed, _NEVER),
        ring_block=(slots[part] + 1).to(torch.int32),
        max_pending=fixed.max_pending + shape.num_drafts,
        interval=fixed.interval,
    )



@rt.op(
    inputs=rt.Read,
    tokens=rt.Read,
    counts=rt.Read,
    last_token=rt.Read,
    drafts=rt.ReadWrite,
)
def draft_ngram(
    *,
    inputs: dict[str, Tensor],
    tokens: Tensor,
    counts: dict[str, Tensor],
    last_token: Tensor,
    drafts: Tensor,
    shape: StepShape,
    fixed: Fixed,
    is_fork: bool,
) -> None:
    """Prompt lookup: propose what followed the latest earlier occurrence of the last n tokens.

    The longest n in MAX_NGRAM..1 that occurs wins. The sequence's tokens are read from the token
    pool through its KV table, so cached prefixes are part of it.
    """
    part = _draft_part(shape, is_fork=is_fork)
    rows = inputs["draft_rows"][part]
    count = len(rows)
    if not count or not shape.num_drafts:
        return
    table = _draft_table(inputs, shape, part)
    width = shape.draft_width * fixed.block_size
    history = tokens[table.to(torch.int64)].view(count, width)
    length = counts["computed"][rows][:, None]  # The newest token stands at this position.
    history = history.scatter(1, length.clamp(max=width - 1), last_token[rows][:, None])
    places = torch.arange(width, device=rows.device)
    found = torch.full_like(length, -1)
    for size in range(MAX_NGRAM, 0, -1):
        equal = (places >= size - 1) & (places < length)
        for back in range(size):
            wanted = history.gather(1, (length - back).clamp(min=0))
            equal &= history.roll(back, dims=1) == wanted
        equal &= length >= size
        latest = torch.where(equal, places, -1).amax(dim=1, keepdim=True)
        found = torch.where(found >= 0, found, latest)
    following = found + 1 + torch.arange(shape.num_drafts, device=rows.device)
    proposal = history.gather(1, following.clamp(0, width - 1))
    known = (found >= 0) & (following <= length)
    _propose(drafts, rows, torch.where(known, proposal, NO_DRAFT))


@rt.op(
    inputs=rt.Read,
    counts=rt.Read,
    script=rt.Read,
    keep=rt.Read,
    drafts=rt.ReadWrite,
)
def draft_scripted(
    *,
    inputs: dict[str, Tensor],
    counts: dict[str, Tensor],
    script: Tensor,
    keep: Tensor,
    drafts: Tensor,
    shape: StepShape,
    vocab_size: int,
    is_fork: bool,
) -> None:
    """Tests: propose the true continuation for the first `keep` drafts and a wrong one after.

    Args:
        inputs: The frame's inputs.
        counts: Carry counts.
        drafts: Carry drafts, overwritten for the generating rows.
        shape: The step's shape.
        vocab_size: For wrong drafts.
        script: Token at each position, by slot, [N, max_model_len + s + 1] i64.
        keep: By slot and number of computed tokens: correct drafts, or -1 for no proposal.
        is_fork: Propose for the forks only; else for all others.
    """
    part = _draft_part(shape, is_fork=is_fork)
    rows = inputs["draft_rows"][part]
    if not len(rows) or not shape.num_drafts:
        return
    slots = torch.cat(
        (inputs["slots"][: shape.num_verify], inputs["known_slots"][: shape.num_ending])
    )[part]
    computed = counts["computed"][rows]
    column = torch.arange(shape.num_drafts, device=rows.device)
    places = (computed[:, None] + 1 + column).clamp(max=script.shape[1] - 1)
    truth = script[slots[:, None], places]
    correct = keep[slots, computed.clamp(max=keep.shape[1] - 1)][:, None]
    wrong = (truth + 1 + column) % vocab_size
    proposal = torch.where(column < correct, truth, wrong)
    _propose(drafts, rows, torch.where(correct < 0, NO_DRAFT, proposal))
