"""What a forward pass is told of one step: the only way from the worker into a model.

Two sorts of rows are in a step:

* A *verify row* extends a generating sequence by its last sampled token and 0 to s drafts. Its
  length is known to the host, its position perhaps only to the device (`slots` layout).
* A *known row* holds tokens that the host knows with their positions: a chunk of a prompt, computed
  by the scan, or generated tokens that are recomputed after a preemption, computed by the step.
  Each token is always computed by the path of its origin, so that results are the same bits.

Tokens are packed: verify rows first, then known rows, then padding up to a multiple of ROW_TILE.
Shapes use the legend of docs/glossary.md; T is the padded number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.gated_delta_prefill import PrefillRows
    from headrace.ops.paged_prefill import PrefillTiles

ROW_TILE = 16
"""Rows of every matrix product on the CPU; T is a multiple of it."""

Kernels = Literal["torch", "triton", "fixed"]
"""What computes a step: PyTorch operations, or fused kernels where there are some.

With "triton", operations on single tokens are kernels for all tokens of a step, in every step: so a
prompt's bits do not depend on whether a generating row is beside it. With "fixed", no kernel's
shape follows from the step and products are kernels too: a token's bits are those of its sequence,
whatever else is in the step. That is what the setting `deterministic` makes of "triton".
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnsMetadata:
    """Columns scheme: what the step kernels need of one state group (align.md, section 5).

    Attributes:
        window_blocks: State blocks of columns c .. c+s, [N, 1+s] i32; null (0) for empty rows.
        accepted: Tokens the last verify kept, [N] i32 in 1..s+1. The recurrent state is read from
            column accepted-1, the conv window (in column 0) at offset accepted-1; the state after
            the row's token t goes to column t, the new window to column 0.
    """

    window_blocks: Tensor
    accepted: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayMetadata:
    """Replay scheme: base state plus a ring of recent inputs (align.md, section 16).

    A base may sit at any position (after a prompt); base *writes* land on multiples of `interval`.

    Attributes:
        base_block: Block that holds the base state, [N] i32.
        base_len: Tokens in the base state, [N] i64.
        computed: Committed tokens before this step, [N] i64; computed - base_len are pending.
        write_block: Block for the base write at write_len, [N] i32; may equal base_block.
        write_len: Smallest multiple of interval above base_len, [N] i64. The write happens in this
            step exactly if computed >= write_len, while the pending tokens are applied.
        ring_block: Block of the ring pool, [N] i32.
        max_pending: Host-known upper bound of computed - base_len.
        interval: Tokens between base writes, L.
    """

    base_block: Tensor
    base_len: Tensor
    computed: Tensor
    write_block: Tensor
    write_len: Tensor
    ring_block: Tensor
    max_pending: int
    interval: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyRows:
    """The generating rows of a step.

    Attributes:
        num_rows: Rows, N. Rows of a padded batch have query_lens 0 and write nowhere.
        max_query_len: Q, the longest row: 1 + drafts.
        token_index: Packed index of each row's tokens, [N, Q] i64; entries past a row's length
            point at 0 and are masked.
        query_lens: [N] i64.
        seq_lens: Tokens in the sequence after this step, drafts included, [N] i64.
        max_seq_len: Host-known upper bound of seq_lens.
        block_table: KV blocks, [N, M] i32, M * P >= max_seq_len; unused entries are 0.
        states: Per state group.
    """

    num_rows: int
    max_query_len: int
    token_index: Tensor
    query_lens: Tensor
    seq_lens: Tensor
    max_seq_len: int
    block_table: Tensor
    states: tuple[ColumnsMetadata | ReplayMetadata, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownState:
    """One state group's part of a known row.

    Attributes:
        source_block: Block with the state before the row, or None to start from zeros. Its conv
            window is read at offset 0: the last W-1 inputs.
        target_block: Block that gets the state after the row's last token (window at offset 0).
        exports: (position, block): also write the state after `position` tokens, where
            start < position < start + length, ascending. For "scan" rows on the grid.
    """

    source_block: int | None
    target_block: int
    exports: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownRow:
    """One row whose tokens and positions the host knows.

    Attributes:
        path: "scan" for prompt tokens (pieces cut at multiples of the absolute grid), "step" for
            generated tokens that are computed again.
        token_offset: First packed token of the row.
        start: Tokens before the row; the row's tokens have positions start .. start+length-1.
        length: Tokens in the row, at least 1.
        block_table: KV blocks, [M] i32.
        states: Per state group.
    """

    path: Literal["scan", "step"]
    token_offset: int
    start: int
    length: int
    block_table: Tensor
    states: tuple[KnownState, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """One step's input to a model.

    Attributes:
        num_tokens: Real tokens; the tokens after them are padding and write nowhere.
        token_ids: [T] i64, padding 0.
        positions: [T] i64, padding 0.
        kv_slot_mapping: block * P + offset of each token, [T] i64; padding 0 (never written).
        verify: Generating rows, or None.
        known: Known rows.
        scan_grid: Tokens between absolute scan points.
        kernels: What computes the step. "triton" only for a model whose `kernel_obstacle` is None.
        prefill: How the kernel attends from the known rows: the model's tiles of them. None without
            such rows, without attention and with PyTorch operations.
        prompts: Per state group, the known rows whose path is "scan" as the kernels take them.
            Empty without such rows and with PyTorch operations.
    """

    num_tokens: int
    token_ids: Tensor
    positions: Tensor
    kv_slot_mapping: Tensor
    verify: VerifyRows | None
    known: tuple[KnownRow, ...]
    scan_grid: int = 64
    kernels: Kernels = "torch"
    prefill: PrefillTiles | None = None
    prompts: tuple[PrefillRows, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensorSpec:
    """One tensor of a state block (or of a ring entry).

    Attributes:
        kind: "window" tensors hold W-1+s entries along their first axis (entry = oldest first) and
            are rolled back by an offset; "recurrent" tensors are one state after n tokens.
        shape: Without the leading [layers, blocks] (state) or [layers, ring blocks, R] (ring).
        dtype: torch dtype name.
    """

    name: str
    kind: Literal["window", "recurrent", "ring"]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroupSpec:
    """Recurrent layers of one kind and shape that share one state table.

    Attributes:
        kind: For example "gated_delta_net".
        layers: Model layer indices, in order; a layer's place here is its first index in the pools.
        state: Tensors of one state block, allocated as [layers, S, *shape].
        ring: Tensors of one ring entry, allocated as [layers, ring blocks, R, *shape] (replay).
        replay_interval: Tokens between base writes that suit the kind where memory traffic counts.
    """

    kind: str
    layers: tuple[int, ...]
    state: tuple[StateTensorSpec, ...]
    ring: tuple[StateTensorSpec, ...]
    replay_interval: int = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateCache:
    """Pools of one state group.

    Attributes:
        state: Name to [layers, S, *shape].
        ring: Name to [layers, RB, R, *shape]; empty without a ring.
    """

    state: dict[str, Tensor]
    ring: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Caches:
    """All device memory that outlives a step and that a forward may touch.

    Attributes:
        k, v: Keys after RoPE and values, [attention layers (+ MTP layers last), B, P, G, D].
        groups: Per state group of the model, in its order.
    """

    k: Tensor
    v: Tensor
    groups: tuple[StateCache, ...]
