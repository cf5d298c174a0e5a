"""The launches of one step: torch functions whose effects are declared once, here.

Order on the compute stream: copy, advance, forward, verify, save, draft; where sequences fork off
the end of a prompt, then copy and draft again for them. Each function gets plain tensors in place
of buffers, and host-known integers; none of them waits for the device.

Index spaces, kept apart by name: a *carry row* is a sequence's place in the carry arrays (its slot,
or its batch row in the compact layout); a *row* is a place in this step's list of verify rows; a
*token* is a packed place; a *block* is a place in a pool; a *column* is a place in a state table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from headrace import rt
from headrace.models.batch import (
    Caches,
    ColumnsMetadata,
    KnownRow,
    ReplayMetadata,
    StateCache,
    StepBatch,
    VerifyRows,
)
from headrace.ops.paged_prefill import PrefillTiles
from headrace.ops.state_columns import StatePool, premove
from headrace.ops.state_columns import save as save_columns
from headrace.worker.forced_acceptance import forced_counts
from headrace.worker.logit_rules import RulesShape, apply_rules
from headrace.worker.sampler import (
    SamplingTensors,
    count_accepted,
    sample,
    top_logprobs,
)
from headrace.worker.token_masks import MasksShape, apply_masks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from headrace.models.batch import Kernels, KnownState
    from headrace.ops.gated_delta_prefill import PrefillLayout, PrefillRows
    from headrace.ops.paged_prefill import TileLayout


Kinds = tuple[tuple[str, Literal["window", "recurrent", "ring"]], ...]
"""Tensors of one state group: name and kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownShape:
    """The host-known numbers of one known row.

    Attributes:
        path: scan or step.
        start: Tokens before the row.
        length: Tokens in the row.
        samples: Whether its last position is sampled.
        table: Where its KV table lies in the flat tables: (offset, width).
        states: Per state table.
    """

    path: Literal["scan", "step"]
    start: int
    length: int
    samples: bool
    table: tuple[int, int]
    states: tuple[KnownState, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepShape:
    """Everything the host knows about the shape of a step.

    Attributes:
        num_verify: Verify rows.
        num_verify_tokens: Their tokens, drafts included.
        max_query_len: Longest verify row.
        num_tokens: Real tokens, known ones included.
        num_padded: T of this step, a multiple of ROW_TILE.
        kv_width: Columns of the verify rows' KV table.
        state_width: Columns of their state tables.
        may_cross: Whether states may have to move between columns.
        max_seq_len: Upper bound of the verify rows' lengths.
        known: The known rows.
        num_ending: Known rows whose sequence generates from now on, and their forks.
        num_forked: The forks among them, which come last.
        num_samples: Sample positions.
        is_all_greedy, filters: What the sampler needs to do.
        num_logprobs: Likeliest tokens to report, -1 if none are asked for; the same number
            whatever rows ask, so that ties do not depend on neighbours.
        num_drafts: Drafts to propose per generating row.
        draft_width: Columns of the draft rows' KV table.
        is_padded: Some of the verify rows and their tokens may be padding, as graphs.py says; the
            numbers above count it.
        tiles: Of the known rows, for kernels: by the field of the inputs that lists them.
        prompts: Of the prompts, for kernels: per state table, what is where in its part of the
            field of that name; the parts follow one another.
    """

    num_verify: int
    num_verify_tokens: int
    max_query_len: int
    num_tokens: int
    num_padded: int
    kv_width: int
    state_width: int
    may_cross: bool
    max_seq_len: int
    known: tuple[KnownShape, ...]
    num_ending: int
    num_forked: int
    num_samples: int
    is_all_greedy: bool
    filters: bool
    num_logprobs: int
    num_drafts: int
    draft_width: int
    is_padded: bool = False
    tiles: Mapping[str, TileLayout] = field(default_factory=dict)
    prompts: tuple[PrefillLayout, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fixed:
    """What never changes while a worker lives.

    Attributes:
        model: The model (weights are constants, not buffers).
        scheme: columns or replay.
        unit: Tokens per state column, bs.
        interval: Tokens between base writes of the replay scheme.
        max_pending: Most committed tokens outside the base.
        max_drafts: s.
        block_size: P.
        grid: Tokens between scan points.
        kinds: Per state group, its tensors' names and kinds: the model's groups, then the draft
            model's.
        table_of: Per state group, the state table that names its blocks.
        num_tables: State tables, one per group of the model.
        draft_kinds: The draft model's part of kinds.
        forced_acceptance: Benchmarks: share of rows that keep each draft, whatever was sampled.
        kernels: What computes the model's generating rows.
        draft_kernels: What computes the draft model's.
    """

    model: Any
    scheme: str
    unit: int
    interval: int
    max_pending: int
    max_drafts: int
    block_size: int
    grid: int
    kinds: tuple[Kinds, ...]
    table_of: tuple[int, ...]
    num_tables: int
    draft_kinds: tuple[Kinds, ...] = ()
    forced_acceptance: tuple[float, ...] = ()
    kernels: Kernels = "torch"
    draft_kernels: Kernels = "torch"


@rt.op(
    kv=rt.ReadWrite,
    tokens=rt.ReadWrite,
    states=rt.ReadWrite,
    rings=rt.ReadWrite,
    carry=rt.ReadWrite,
)
def copy_blocks(
    *,
    kv: tuple[Tensor, ...],
    tokens: Tensor,
    states: tuple[dict[str, Tensor], ...],
    rings: tuple[dict[str, Tensor], ...],
    carry: dict[str, Tensor],
    kv_pairs: tuple[tuple[int, int], ...],
    state_pairs: tuple[tuple[tuple[int, int], ...], ...],
    table_of: tuple[int, ...],
    slot_pairs: tuple[tuple[int, int], ...],
) -> None:
    """Copy the blocks of forks. Targets are fresh blocks, so the order does not matter."""
    for source, target in kv_pairs:
        tokens[target] = tokens[source]
        for tensor in kv:
            tensor[:, target] = tensor[:, source]
    for table, group in zip(table_of, states, strict=True):
        for tensor in group.values():
            for source, target in state_pairs[table]:
                tensor[:, target] = tensor[:, source]
    for source, target in slot_pairs:
        for ring in rings:
            for tensor in ring.values():
                tensor[:, target + 1] = tensor[:, source + 1]
        for tensor in carry.values():
            tensor[target] = tensor[source]


@rt.op(
    inputs=rt.Read,
    counts=rt.ReadWrite,
    last_token=rt.Read,
    drafts=rt.Read,
    states=rt.ReadWrite,
    tokens=rt.Write,
    work=rt.Write,
)
def advance(
    *,
    inputs: dict[str, Tensor],
    counts: dict[str, Tensor],
    last_token: Tensor,
    drafts: Tensor,
    states: tuple[dict[str, Tensor], ...],
    tokens: Tensor,
    work: dict[str, Tensor],
    shape: StepShape,
    fixed: Fixed,
) -> None:
    """Fill in what only the device knows, and move states whose column changes (align.md §4)."""
    first, total = shape.num_verify_tokens, shape.num_tokens
    for name in ("token_ids", "positions", "kv_slots"):
        work[name][first:total] = inputs[name][first:total]
        work[name][total : shape.num_padded] = 0
    if shape.num_verify:
        _advance_verify(inputs, counts, last_token, drafts, states, work, shape, fixed)
    tokens.view(-1).index_copy_(0, work["kv_slots"][:total], work["token_ids"][:total])


def _advance_verify(
    inputs: dict[str, Tensor],
    counts: dict[str, Tensor],
    last_token: Tensor,
    drafts: Tensor,
    states: tuple[dict[str, Tensor], ...],
    work: dict[str, Tensor],
    shape: StepShape,
    fixed: Fixed,
) -> None:
    n, tokens = shape.num_verify, shape.num_verify_tokens
    rows = inputs["rows"][:n]
    lengths = inputs["lengths"][:n]
    computed = counts["computed"][rows]
    work["computed"][:n] = computed
    row = inputs["token_row"][:tokens]
    column = inputs["token_column"][:tokens]
    if shape.max_query_len > 1:
        carry = rows[row]
        drafted = drafts[carry, (column - 1).clamp(min=0)].clamp(min=0)
        work["token_ids"][:tokens] = torch.where(column == 0, last_token[carry], drafted)
        positions = computed[row] + column
    else:
        work["token_ids"][:tokens] = last_token[rows]
        positions = computed
    work["positions"][:tokens] = positions
    table = inputs["tables"][: n * shape.kv_width].view(n, shape.kv_width)
    block = table[row, positions // fixed.block_size].to(torch.int64)
    work["kv_slots"][:tokens] = block * fixed.block_size + positions % fixed.block_size
    if shape.is_padded:
        is_real = column >= 0
        for name in ("token_ids", "positions", "kv_slots"):
            work[name][:tokens].mul_(is_real)
    if not fixed.num_tables:
        return
    base = inputs["state_base"][:n]
    if fixed.scheme == "replay":
        _advance_base(counts, rows, computed, work, n, fixed)
        return
    tables = inputs["state_tables"][: fixed.num_tables * n * shape.state_width]
    tables = tables.view(fixed.num_tables, n, shape.state_width)
    accepted = counts["accepted"][rows]
    if not shape.may_cross:
        work["accepted"][:n] = accepted
        work["window_blocks"][:, :n] = tables[:, :, : 1 + fixed.max_drafts]
        return
    column_now = counts["state_column"][rows] - base
    accepted_out, column_out = accepted.clone(), column_now.clone()
    for group, kinds in enumerate(fixed.kinds):
        premove(
            _pools(states[group], kinds),
            tables[fixed.table_of[group]],
            computed=computed - base * fixed.unit,
            scheduled=lengths,
            accepted=accepted,
            state_column=column_now,
            accepted_out=accepted_out,
            state_column_out=column_out,
            block_size=fixed.unit,
            max_accepted=fixed.max_drafts + 1,
        )
    work["accepted"][:n] = accepted_out
    counts["accepted"].index_copy_(0, rows, accepted_out)
    counts["state_column"].index_copy_(0, rows, column_out + base)
    window = column_out[:, None] + torch.arange(1 + fixed.max_drafts, device=rows.device)
    inside = window < shape.state_width
    window = window.clamp(0, shape.state_width - 1)
    for index in range(fixed.num_tables):
        blocks = torch.where(inside, tables[index].gather(1, window), 0)
        work["window_blocks"][index, :n] = blocks


def _advance_base(
    counts: dict[str, Tensor],
    rows: Tensor,
    computed: Tensor,
    work: dict[str, Tensor],
    n: int,
    fixed: Fixed,
) -> None:
    """Replay: this step's base, and the one that it leaves behind."""
    base_len = counts["base_len"][rows]
    write_len = torch.div(base_len, fixed.interval, rounding_mode="floor") * fixed.interval
    write_len = write_len + fixed.interval
    work["base_len"][:n] = base_len
    work["write_len"][:n] = write_len
    after = torch.where(computed >= write_len, write_len, base_len)
    counts["base_len"].index_copy_(0, rows, after)


@rt.op(
    inputs=rt.Read,
    work=rt.Read,
    k=rt.ReadWrite,
    v=rt.ReadWrite,
    states=rt.ReadWrite,
    rings=rt.ReadWrite,
    hidden=rt.Write,
    logits=rt.Write,
    exchange=rt.ReadWrite,
)
def forward(
    *,
    inputs: dict[str, Tensor],
    work: dict[str, Tensor],
    k: Tensor,
    v: Tensor,
    states: tuple[dict[str, Tensor], ...],
    rings: tuple[dict[str, Tensor], ...],
    hidden: Tensor,
    logits: Tensor,
    exchange: Tensor | None,
    shape: StepShape,
    fixed: Fixed,
) -> None:
    """Run the model over the step's tokens, and the head over its sample positions.

    `exchange` stands for the collectives that the model makes through its shard; None without.
    """
    del exchange
    batch = make_batch(inputs, work, shape, fixed)
    caches = make_caches(k, v, states, rings)
    out = fixed.model.forward(batch, caches)
    hidden[: shape.num_padded] = out
    if shape.num_samples:
        chosen = out[inputs["sample_index"][: shape.num_samples]]
        fixed.model.logits(chosen, fixed.kernels, out=logits)


@rt.op(
    inputs=rt.Read,
    work=rt.ReadWrite,
    logits=rt.Read,
    counts=rt.ReadWrite,
    last_token=rt.ReadWrite,
    drafts=rt.Read,
    tokens=rt.Read,
    rules=rt.Read,
    masks=rt.Read,
    outputs=rt.Write,
)
def verify(  # noqa: PLR0915 - every carry array, written in one place
    *,
    inputs: dict[str, Tensor],
    work: dict[str, Tensor],
    logits: Tensor,
    counts: dict[str, Tensor],
    last_token: Tensor,
    drafts: Tensor,
    tokens: Tensor,
    rules: dict[str, Tensor] | None,
    masks: dict[str, Tensor] | None,
    outputs: dict[str, Tensor],
    shape: StepShape,
    rules_shape: RulesShape | None,
    masks_shape: MasksShape | None,
    fixed: Fixed,
) -> None:
    """Choose a token at every sample position, keep equal drafts, update the carry arrays."""
    n, ending, known = shape.num_verify, shape.num_ending, len(shape.known)
    outputs["num_sampled"][: n + known + shape.num_forked].zero_()
    if not shape.num_samples and not ending:
        return
    logits = logits[: shape.num_samples]
    position = work["positions"][inputs["sample_index"][: shape.num_samples]] + 1
    processed = logits
    if rules is not None and rules_shape is not None:
        raw = logits.float()
        processed = apply_rules(raw, position, tokens, inputs["tables"], rules, rules_shape)
    if masks is not None and masks_shape is not None:
        processed = apply_masks(processed, masks, masks_shape)
    chosen = _sample(inputs, processed, position, shape, fixed)
    if shape.num_logprobs >= 0:
        _put_logprobs(outputs, logits, chosen, shape)
    if n:
        rows = inputs["rows"][:n]
        lengths = inputs["lengths"][:n]
        length = shape.max_query_len
        index = inputs["token_index"][: n * length].view(n, length)
        matrix = chosen[index]
        if length > 1:
            kept = count_accepted(matrix, drafts[rows, : length - 1], lengths)
            if fixed.forced_acceptance:
                kept = forced_counts(
                    kept, lengths, inputs["slots"][:n], work["computed"][:n],
                    fixed.forced_acceptance,
                )
        else:
            kept = lengths.clamp(max=1)
        last = matrix.gather(1, (kept - 1).clamp(min=0)[:, None])[:, 0]
        computed = work["computed"][:n] + kept
        outputs["tokens"][:n, :length] = matrix
        outputs["num_sampled"][:n] = kept
        outputs["accepted"][:n] = kept
        work["kept"][:n] = kept
        work["draft_last"][:n] = index.gather(1, (kept - 1).clamp(min=0)[:, None])[:, 0]
        counts["computed"].index_copy_(0, rows, computed)
        counts["accepted"].index_copy_(0, rows, kept)
        last_token.index_copy_(0, rows, last)
    if ending:
        rows = inputs["known_rows"][:ending]
        ends = inputs["known_ends"][:ending]
        given = inputs["known_next"][:ending]
        if shape.num_samples:
            sampled = chosen[inputs["known_sample"][:ending]]
            given = torch.where(given >= 0, given, sampled)
        counts["computed"].index_copy_(0, rows, ends)
        counts["accepted"].index_copy_(0, rows, torch.ones_like(ends))
        column = torch.div(ends - 1, fixed.unit, rounding_mode="floor")
        counts["state_column"].index_copy_(0, rows, column)
        counts["base_len"].index_copy_(0, rows, ends)
        last_token.index_copy_(0, rows, given)
        work["draft_last"][n : n + ending] = inputs["known_last"][:ending]
    _put_known(outputs, chosen, shape)
    work["chosen"][: shape.num_samples] = chosen


def _put_known(outputs: dict[str, Tensor], chosen: Tensor, shape: StepShape) -> None:
    """First tokens of the sequences whose prompts end here, and of their forks."""
    sample_at = shape.num_verify_tokens
    for place, plan in enumerate(shape.known, start=shape.num_verify):
        if plan.samples:
            outputs["tokens"][place, 0] = chosen[sample_at]
            outputs["num_sampled"][place] = 1
            sample_at += 1
    first, count = shape.num_verify + len(shape.known), shape.num_forked
    outputs["tokens"][first : first + count, 0] = chosen[sample_at : sample_at + count]
    outputs["num_sampled"][first : first + count] = 1


def _put_logprobs(
    outputs: dict[str, Tensor], logits: Tensor, chosen: Tensor, shape: StepShape
) -> None:
    """Log-probabilities at every sample position, of the raw logits."""
    count = shape.num_samples
    own, rank, values, ids = top_logprobs(logits.float(), chosen, max(1, shape.num_logprobs))
    outputs["logprob"][:count] = own
    outputs["rank"][:count] = rank
    outputs["top_values"][:count, : values.shape[1]] = values
    outputs["top_ids"][:count, : ids.shape[1]] = ids


def _sample(
    inputs: dict[str, Tensor], logits: Tensor, position: Tensor, shape: StepShape, fixed: Fixed
) -> Tensor:
    """Tokens chosen at the sample positions, [num_samples] i64."""
    count = shape.num_samples
    row = inputs["sample_row"][:count]
    floats = inputs["row_float"].view(-1, 3)
    ints = inputs["row_int"].view(-1, 2)
    params = SamplingTensors(
        temperature=floats[row, 0],
        top_p=floats[row, 1],
        min_p=floats[row, 2],
        top_k=ints[row, 0],
        seed=ints[row, 1],
        position=position,
    )
    return sample(
        logits, params, is_all_greedy=shape.is_all_greedy, filters=shape.filters,
        kernels=fixed.kernels,
    )


@rt.op(inputs=rt.Read, drafts=rt.Read, outputs=rt.Write)
def land_drafts(
    *,
    inputs: dict[str, Tensor],
    drafts: Tensor,
    outputs: dict[str, Tensor],
    shape: StepShape,
) -> None:
    """Hand the new drafts of the verify rows, the known rows that end and forks to the host."""
    count = shape.num_verify + shape.num_ending
    if not count:
        return
    outputs["drafts"][:count] = drafts[inputs["draft_rows"][:count]]


@rt.op(
    inputs=rt.Read, hidden=rt.Read, scores=rt.Write, logits=rt.Write, exchange=rt.ReadWrite
)
def score_prompt(
    *,
    inputs: dict[str, Tensor],
    hidden: Tensor,
    scores: dict[str, Tensor],
    logits: Tensor | None,
    exchange: Tensor | None,
    start: int,
    count: int,
    at: int,
    fixed: Fixed,
) -> None:
    """Log-probabilities of the tokens that follow packed tokens start .. start+count of a prompt.

    Args:
        inputs: The frame's inputs; next_tokens are the tokens to score.
        hidden: The forward's output.
        scores: own, rank, values, ids, each by packed token.
        logits: Gets the raw logits, if they are wanted.
        exchange: As in `forward`.
        start: First packed token.
        count: Packed tokens; few enough that [count, V] may be held.
        at: Where in `logits`.
        fixed: The worker's constants.
    """
    del exchange
    stop = start + count
    raw = fixed.model.logits(hidden[start:stop], fixed.kernels).float()
    width = scores["ids"].shape[1]
    own, rank, values, ids = top_logprobs(raw, inputs["next_tokens"][start:stop], width)
    scores["own"][start:stop] = own
    scores["rank"][start:stop] = rank
    scores["values"][start:stop] = values
    scores["ids"][start:stop] = ids
    if logits is not None:
        logits[at : at + count] = raw


@rt.op(
    inputs=rt.Read,
    work=rt.Read,
    counts=rt.ReadWrite,
    states=rt.ReadWrite,
    outputs=rt.Write,
)
def save(
    *,
    inputs: dict[str, Tensor],
    work: dict[str, Tensor],
    counts: dict[str, Tensor],
    states: tuple[dict[str, Tensor], ...],
    outputs: dict[str, Tensor],
    shape: StepShape,
    fixed: Fixed,
) -> None:
    """Columns: bring the state at a boundary inside the kept tokens to its column (align.md §6).

    Decisions read work.kept, the immutable snapshot of this step's counts.
    """
    n = shape.num_verify
    rows = inputs["rows"][:n]
    base = inputs["state_base"][:n]
    kept = work["kept"][:n]
    tables = inputs["state_tables"][: fixed.num_tables * n * shape.state_width]
    tables = tables.view(fixed.num_tables, n, shape.state_width)
    accepted_out = kept.clone()
    column = counts["state_column"][rows] - base
    new_computed = work["computed"][:n] + kept - base * fixed.unit
    for group, kinds in enumerate(fixed.kinds):
        save_columns(
            _pools(states[group], kinds),
            tables[fixed.table_of[group]],
            scheduled=inputs["lengths"][:n],
            accepted=kept,
            state_column=column,
            accepted_out=accepted_out,
            block_size=fixed.unit,
            max_accepted=fixed.max_drafts + 1,
            new_computed=new_computed,
        )
    counts["accepted"].index_copy_(0, rows, accepted_out)
    outputs["accepted"][:n] = accepted_out


@rt.op(
    row_map=rt.Read,
    source_token=rt.Read,
    source_drafts=rt.Read,
    last_token=rt.Write,
    drafts=rt.Write,
)
def gather_carry(
    *,
    row_map: Tensor,
    source_token: Tensor,
    source_drafts: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    num_rows: int,
) -> None:
    """Compact layout: bring the device's own values to this step's batch rows."""
    source = row_map[:num_rows].clamp(min=0)
    last_token[:num_rows] = source_token[source]
    drafts[:num_rows] = source_drafts[source]


def _pools(states: dict[str, Tensor], kinds: Kinds) -> tuple[StatePool, ...]:
    return tuple(
        StatePool(tensor=states[name], kind=kind)  # type: ignore[arg-type]
        for name, kind in kinds
    )


def make_caches(
    k: Tensor,
    v: Tensor,
    states: tuple[dict[str, Tensor], ...],
    rings: tuple[dict[str, Tensor], ...],
) -> Caches:
    """Hand a model its pools."""
    groups = tuple(
        StateCache(state=state, ring=ring) for state, ring in zip(states, rings, strict=True)
    )
    return Caches(k=k, v=v, groups=groups)


def make_batch(
    inputs: dict[str, Tensor],
    work: dict[str, Tensor],
    shape: StepShape,
    fixed: Fixed,
    tables: tuple[int, ...] | None = None,
) -> StepBatch:
    """Describe the step to a model.

    Args:
        inputs: The frame's inputs.
        work: What `advance` filled in.
        shape: The step's shape.
        fixed: The worker's constants.
        tables: The state table of each of the draft model's groups; None for the served model.
    """
    kernels = fixed.kernels if tables is None else fixed.draft_kernels
    prefill = _prefill_tiles(inputs, shape, "tiles" if tables is None else "draft_tiles")
    if tables is None:
        tables = tuple(range(fixed.num_tables))
    known: list[KnownRow] = []
    offset = shape.num_verify_tokens
    for plan in shape.known:
        start, width = plan.table
        known.append(
            KnownRow(
                path=plan.path,
                token_offset=offset,
                start=plan.start,
                length=plan.length,
                block_table=inputs["tables"][start : start + width],
                states=tuple(plan.states[table] for table in tables),
            )
        )
        offset += plan.length
    return StepBatch(
        num_tokens=shape.num_tokens,
        token_ids=work["token_ids"][: shape.num_padded],
        positions=work["positions"][: shape.num_padded],
        kv_slot_mapping=work["kv_slots"][: shape.num_padded],
        verify=_verify_rows(inputs, work, shape, fixed, tables) if shape.num_verify else None,
        known=tuple(known),
        scan_grid=fixed.grid,
        kernels=kernels,
        prefill=prefill,
        prompts=_prefill_rows(inputs, shape, tables) if kernels != "torch" else (),
    )


def _prefill_tiles(
    inputs: dict[str, Tensor], shape: StepShape, name: str
) -> PrefillTiles | None:
    """Take a model's tiles of the known rows from the field that lists them, if there are any."""
    layout = shape.tiles.get(name)
    if layout is None:
        return None
    records = inputs[name][: layout.num_records]
    return PrefillTiles(records=records, tables=inputs["tables"], layout=layout)


def _prefill_rows(
    inputs: dict[str, Tensor], shape: StepShape, tables: tuple[int, ...]
) -> tuple[PrefillRows, ...]:
    """Take the prompts for each group of a model out of their field, if there are any."""
    if not shape.prompts:
        return ()
    sizes = [layout.num_numbers for layout in shape.prompts]
    packed = inputs["prompts"][: sum(sizes)].split_with_sizes(sizes)
    return tuple(shape.prompts[table].on_device(packed[table]) for table in tables)


def _verify_rows(
    inputs: dict[str, Tensor],
    work: dict[str, Tensor],
    shape: StepShape,
    fixed: Fixed,
    tables: tuple[int, ...],
) -> VerifyRows:
    n, length = shape.num_verify, shape.max_query_len
    lengths = inputs["lengths"][:n]
    return VerifyRows(
        num_rows=n,
        max_query_len=length,
        token_index=inputs["token_index"][: n * length].view(n, length),
        query_lens=lengths,
        seq_lens=work["computed"][:n] + lengths,
        max_seq_len=shape.max_seq_len,
        block_table=inputs["tables"][: n * shape.kv_width].view(n, shape.kv_width),
        states=tuple(_metadata(inputs, work, shape, fixed, table) for table in tables),
    )


def _metadata(
    inputs: dict[str, Tensor],
    work: dict[str, Tensor],
    shape: StepShape,
    fixed: Fixed,
    table_index: int,
) -> ColumnsMetadata | ReplayMetadata:
    n = shape.num_verify
    if fixed.scheme == "columns":
        return ColumnsMetadata(
            window_blocks=work["window_blocks"][table_index, :n], accepted=work["accepted"][:n]
        )
    table, base = state_table(inputs, shape, fixed, table_index)
    base_len, write_len = work["base_len"][:n], work["write_len"][:n]

    return ReplayMetadata(
        base_block=column_block(table, base, base_len, fixed.unit),
        base_len=base_len,
        computed=work["computed"][:n],
        write_block=column_block(table, base, write_len, fixed.unit),
        write_len=write_len,
        ring_block=(inputs["slots"][:n] + 1).to(torch.int32),
        max_pending=fixed.max_pending,
        interval=fixed.interval,
    )


def state_table(
    inputs: dict[str, Tensor], shape: StepShape, fixed: Fixed, index: int
) -> tuple[Tensor, Tensor]:
    """One state table of the verify rows, [N, width] i32, and each row's first column, [N]."""
    n = shape.num_verify
    tables = inputs["state_tables"][: fixed.num_tables * n * shape.state_width]
    table = tables.view(fixed.num_tables, n, shape.state_width)[index]
    return table, inputs["state_base"][:n]


def column_block(table: Tensor, base: Tensor, length: Tensor, unit: int) -> Tensor:
    """Block of the column that holds the state after `length` tokens, null if it has none."""
    column = torch.div(length - 1, unit, rounding_mode="floor") - base
    inside = (column >= 0) & (column < table.shape[1])
    column = column.clamp(0, table.shape[1] - 1)
    return torch.where(inside, table.gather(1, column[:, None])[:, 0], 0)
