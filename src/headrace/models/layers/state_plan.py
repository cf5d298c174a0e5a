"""Where a step's recurrent layers read and write: indices shared by a group's layers.

A layer's convolution reads from one source: the step's inputs (packed, [T, F]), then a window for
each generating row, then a window for each known row. Everything about offsets, ring positions and
ragged rows is turned into indices into that source here, once a step; the layers only gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.models.batch import ColumnsMetadata

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.batch import KnownRow, ReplayMetadata, StateCache, StepBatch
    from headrace.models.layers.row_plan import RowPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnsPlan:
    """Generating rows of the columns scheme.

    Attributes:
        window_block: Block of the conv window, [N] i64.
        source_block: Block of the recurrent state, [N] i64.
        target_blocks: Block of the state after each token, [Q, N] i64.
        is_valid: Tokens that count, [Q, N] bool.
        new_window: Source row of each entry of the new window, [N * (W-1+s)] i64.
    """

    window_block: Tensor
    source_block: Tensor
    target_blocks: Tensor
    is_valid: Tensor
    new_window: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayPlan:
    """Generating rows of the replay scheme.

    Attributes:
        base_block: [N] i64.
        num_pending: Most tokens to replay, host-known.
        pending: Ring row of each pending token, [N * num_pending] i64.
        is_pending: [N, num_pending] bool.
        window_ring, window_base: Ring row and base-window row of the inputs before this step and
            before the new base, [N * 2 * (W-1)] i64.
        is_window_ring: Which of the two holds the input, [N * 2 * (W-1), 1] bool.
        is_write: Rows that write a new base, [N] bool.
        is_write_at: After which pending token, [num_pending, N] bool.
        write_block: [N] i64, 0 where nothing is written.
        ring_rows: Ring row of each of the step's tokens, [N * Q] i64, 0 where nothing is written.
        is_valid: [N * Q, 1] bool.
    """

    base_block: Tensor
    num_pending: int
    pending: Tensor
    is_pending: Tensor
    window_ring: Tensor
    window_base: Tensor
    is_window_ring: Tensor
    is_write: Tensor
    is_write_at: Tensor
    write_block: Tensor
    ring_rows: Tensor
    is_valid: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScanPlan:
    """Prompt rows, sorted by their number of pieces.

    Attributes:
        rows: Places in the step's list of known rows, most pieces first, [..] i64.
        tokens: Packed token of each place of each piece, round by round, [X * g] i64.
        is_real: [X, g, 1] bool, or None if every piece is full.
        rows_per_round: Rows in each round.
        snapshots: (round, row) of each exported state.
        snapshot_blocks: Its block.
    """

    rows: Tensor
    tokens: Tensor
    is_real: Tensor | None
    rows_per_round: tuple[int, ...]
    snapshots: tuple[tuple[int, int], ...]
    snapshot_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownPlan:
    """Known rows of one group.

    Attributes:
        source_blocks: Blocks of the rows that have a state, or None if none has.
        sourced: Those rows, [..] i64.
        num_rows: Known rows, R.
        window_blocks: Blocks that get a conv window, [Y] i64.
        new_windows: Source rows of their entries, [Y * (W-1)] i64.
        target_blocks: Block of each row's last state, [R] i64.
        scan: The prompt rows, or None.
        steps: (place among known rows, first packed token, length) of recomputed rows.
        places: Where each known token's output lies, in packed order, among the scan's X * g places
            and then the tokens of `steps`, [tokens] i64.
    """

    source_blocks: Tensor | None
    sourced: Tensor
    num_rows: int
    window_blocks: Tensor
    new_windows: Tensor
    target_blocks: Tensor
    scan: ScanPlan | None
    steps: tuple[tuple[int, int, int], ...]
    places: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StatePlan:
    """One step's indices of one state group.

    Attributes:
        taps: Source row of each token's conv taps, [T, W] i64.
        rows: Generating rows, or None.
        verify: What they read and write, or None.
        known: Known rows, or None.
    """

    taps: Tensor
    rows: RowPlan | None
    verify: ColumnsPlan | ReplayPlan | None
    known: KnownPlan | None


def plan_states(
    batch: StepBatch, rows: RowPlan | None, group: int, cache: StateCache, conv_kernel: int
) -> StatePlan:
    """Compute a group's indices once for all its layers.

    Args:
        batch: The step.
        rows: Its generating rows.
        group: Place of the state group in the model's list.
        cache: Its pools.
        conv_kernel: Taps of the convolution, W; 1 for layers without, whose group has no window.

    Returns:
        The plan.
    """
    tokens = batch.token_ids.shape[0]
    device = batch.token_ids.device
    carried = conv_kernel - 1
    taps = []
    num_windows = 0  # rows of the source that hold the generating rows' windows
    verify: ColumnsPlan | ReplayPlan | None = None
    if rows is not None:
        assert batch.verify is not None
        metadata = batch.verify.states[group]
        if isinstance(metadata, ColumnsMetadata):
            entries = _window_entries(cache)
            verify, history = _plan_columns(batch, metadata, entries, carried)
            num_windows = rows.shape[0] * entries
        else:
            verify = _plan_replay(batch, metadata, cache, carried)
            num_windows = rows.shape[0] * carried
            window = torch.arange(num_windows, device=device).view(rows.shape[0], carried) + tokens
            history = torch.cat((window, batch.verify.token_index), 1)
        row_taps = history.unfold(1, conv_kernel, 1).reshape(-1, conv_kernel)
        taps.append(row_taps.index_select(0, rows.places))
    known = None
    if batch.known:
        known, known_taps = _plan_known(batch, group, tokens + num_windows, carried)
        taps.append(known_taps)
    if tokens > batch.num_tokens:
        taps.append(
            torch.zeros(tokens - batch.num_tokens, conv_kernel, dtype=torch.long, device=device)
        )
    return StatePlan(
        taps=taps[0] if len(taps) == 1 else torch.cat(taps),
        rows=rows,
        verify=verify,
        known=known,
    )


def _window_entries(cache: StateCache) -> int:
    """Entries of a conv window, W-1+s; 0 for layers without a convolution."""
    window = cache.state.get("window")
    return 0 if window is None else window.shape[2]


def _plan_columns(
    batch: StepBatch, metadata: ColumnsMetadata, entries: int, carried: int
) -> tuple[ColumnsPlan, Tensor]:
    """Return the plan and the source rows of each row's window and tokens, [N, W-1+Q]."""
    rows = batch.verify
    assert rows is not None
    n, q_len = rows.token_index.shape
    device = rows.token_index.device
    tokens = batch.token_ids.shape[0]
    blocks = metadata.window_blocks.long()
    accepted = metadata.accepted.long()
    is_row = (rows.query_lens > 0) & (accepted > 0) & (blocks[:, 0] > 0)
    bias = (accepted - 1).clamp_(min=0)[:, None]

    first_entry = torch.arange(n, device=device)[:, None] * entries + tokens
    window = first_entry + bias + torch.arange(carried, device=device)
    history = torch.cat((window, rows.token_index), 1)
    # The new window drops the oldest input; entries that the row does not reach keep their bytes.
    place = torch.arange(entries, device=device)
    kept = first_entry + place
    moved = kept.clone()
    if entries:
        moved[:, : carried - 1 + q_len] = history[:, 1:]
    is_moved = is_row[:, None] & (place < carried - 1 + rows.query_lens[:, None])

    targets = blocks[:, :q_len].t().contiguous()
    step = torch.arange(q_len, device=device)[:, None]
    is_valid = is_row & (step < rows.query_lens) & (targets > 0)
    plan = ColumnsPlan(
        window_block=blocks[:, 0],
        source_block=blocks.gather(1, bias).view(-1),
        target_blocks=targets,
        is_valid=is_valid,
        new_window=moved.where(is_moved, kept).view(-1),
    )
    return plan, history


def _plan_replay(
    batch: StepBatch, metadata: ReplayMetadata, cache: StateCache, carried: int
) -> ReplayPlan:
    rows = batch.verify
    assert rows is not None
    q_len = rows.token_index.shape[1]
    device = rows.token_index.device
    ring_len = next(iter(cache.ring.values())).shape[2]
    entries = _window_entries(cache)
    base_block, ring_block = metadata.base_block.long(), metadata.ring_block.long()
    base_len, computed = metadata.base_len, metadata.computed
    is_row = (rows.query_lens > 0) & (base_block > 0) & (ring_block > 0)
    ring_start = (ring_block * ring_len)[:, None]
    write_block = metadata.write_block.long()
    is_write = is_row & (computed >= metadata.write_len) & (write_block > 0)

    pending_at = torch.arange(metadata.max_pending, device=device)
    pending_position = base_len[:, None] + pending_at
    ends = (computed[:, None], metadata.write_len[:, None])
    before = torch.arange(-carried, 0, device=device)
    window_position = torch.cat([end + before for end in ends], 1)  # [N, 2 (W-1)]
    from_base = window_position - base_len[:, None] + carried  # entry of the base's window
    new_position = computed[:, None] + torch.arange(q_len, device=device)
    is_valid = is_row[:, None] & (torch.arange(q_len, device=device) < rows.query_lens[:, None])
    ring_rows = ring_start + new_position.remainder(ring_len)
    return ReplayPlan(
        base_block=base_block,
        num_pending=metadata.max_pending,
        pending=(ring_start + pending_position.remainder(ring_len)).view(-1),
        is_pending=is_row[:, None] & (pending_position < computed[:, None]),
        window_ring=(ring_start + window_position.remainder(ring_len)).view(-1),
        window_base=(base_block[:, None] * entries + from_base.clamp(0, carried - 1)).view(-1),
        is_window_ring=(from_base >= carried).view(-1, 1),
        is_write=is_write,
        is_write_at=is_write & (pending_position.t() + 1 == metadata.write_len),
        write_block=write_block.where(is_write, write_block.new_zeros(())),
        ring_rows=ring_rows.where(is_valid, ring_rows.new_zeros(())).view(-1),
        is_valid=is_valid.view(-1, 1),
    )


def _plan_known(
    batch: StepBatch, group: int, first_window: int, carried: int
) -> tuple[KnownPlan, Tensor]:
    """Return the plan and the source rows of the known tokens' taps, [tokens, W]."""
    device = batch.token_ids.device
    taps, window_blocks, new_windows = [], [], []
    sources, sourced, targets, steps = [], [], [], []
    for i, row in enumerate(batch.known):
        state = row.states[group]
        window = torch.arange(carried, device=device) + (first_window + i * carried)
        own = torch.arange(row.token_offset, row.token_offset + row.length, device=device)
        history = torch.cat((window, own))
        taps.append(history.unfold(0, carried + 1, 1))
        for position, block in (*state.exports, (row.start + row.length, state.target_block)):
            assert block > 0, f"known row {i} would write the null block"
            window_blocks.append(block)
            done = position - row.start
            new_windows.append(history[done : done + carried])
        if state.source_block is not None:
            sources.append(state.source_block)
            sourced.append(i)
        targets.append(state.target_block)
        if row.path == "step":
            steps.append((i, row.token_offset, row.length))
    scan, first_places, num_scan_places = _plan_scan(batch, group)
    return (
        KnownPlan(
            source_blocks=torch.tensor(sources, device=device) if sources else None,
            sourced=torch.tensor(sourced, dtype=torch.long, device=device),
            num_rows=len(batch.known),
            window_blocks=torch.tensor(window_blocks, device=device),
            new_windows=torch.cat(new_windows),
            target_blocks=torch.tensor(targets, device=device),
            scan=scan,
            steps=tuple(steps),
            places=_known_places(batch.known, first_places, num_scan_places, device),
        ),
        torch.cat(taps),
    )


def _pieces(row: KnownRow, grid: int) -> list[tuple[int, int]]:
    """Cut a row at the absolute grid: (first packed token, tokens) of each piece."""
    pieces = []
    position, end = row.start, row.start + row.length
    while position < end:
        stop = min(end, (position // grid + 1) * grid)
        pieces.append((row.token_offset + position - row.start, stop - position))
        position = stop
    return pieces


def _known_places(
    rows: tuple[KnownRow, ...],
    first_places: dict[int, list[tuple[int, int]]],
    num_scan_places: int,
    device: torch.device,
) -> Tensor:
    """Return where each known token's output lies: among the scan's places, then the steps'."""
    places = []
    next_step = num_scan_places
    for i, row in enumerate(rows):
        if row.path == "step":
            places.append(torch.arange(next_step, next_step + row.length, device=device))
            next_step += row.length
        else:
            places.extend(
                torch.arange(first, first + length, device=device)
                for first, length in first_places[i]
            )
    return torch.cat(places)


def _plan_scan(
    batch: StepBatch, group: int
) -> tuple[ScanPlan | None, dict[int, list[tuple[int, int]]], int]:
    """Plan the prompt rows.

    Returns:
        The plan or None, (first place, tokens) of each row's pieces, and the number of places.
    """
    grid = batch.scan_grid
    pieces = {i: _pieces(row, grid) for i, row in enumerate(batch.known) if row.path == "scan"}
    if not pieces:
        return None, {}, 0
    # A stable sort: equal rows keep their order.
    order = sorted(pieces, key=lambda i: -len(pieces[i]))
    rounds = len(pieces[order[0]])
    rows_per_round = tuple(sum(len(p) > j for p in pieces.values()) for j in range(rounds))
    offsets: list[int] = []
    lengths: list[int] = []
    first_places: dict[int, list[tuple[int, int]]] = {i: [] for i in order}
    for j, rows in enumerate(rows_per_round):
        for i in order[:rows]:
            offset, length = pieces[i][j]
            first_places[i].append((len(offsets) * grid, length))
            offsets.append(offset)
            lengths.append(length)
    snapshots = []
    for at, i in enumerate(order):
        row = batch.known[i]
        for position, block in row.states[group].exports:
            assert row.start < position < row.start + row.length, f"{position=} is not inside"
            assert position % grid == 0, f"export at {position} is off the grid of {grid}"
            snapshots.append((position // grid - row.start // grid - 1, at, block))
    snapshots.sort()
    device = batch.token_ids.device
    within = torch.arange(grid, device=device)
    length_column = torch.tensor(lengths, device=device)[:, None]
    tokens = torch.tensor(offsets, device=device)[:, None]
    tokens = tokens + torch.minimum(within, length_column - 1)
    all_full = all(length == grid for length in lengths)
    plan = ScanPlan(
        rows=torch.tensor(order, device=device),
        tokens=tokens.view(-1),
        is_real=None if all_full else (within < length_column)[..., None],
        rows_per_round=rows_per_round,
        snapshots=tuple((j, at) for j, at, _ in snapshots),
        snapshot_blocks=tuple(block for _, _, block in snapshots),
    )
    return plan, first_places, len(offsets) * grid
