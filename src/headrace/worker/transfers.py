"""Prefixes on their way between the pools and host memory, in pieces.

A *piece* is what one key of the prefix cache stands for: the KV blocks of one state column, or the
states of all groups after one. In transit it is a row of bytes: its tensors one behind the other,
as `PieceLayout` says. The same bytes lie in the state store and in its files.

buffer               | shape, dtype       | written by                  | read by | until
---------------------|--------------------|-----------------------------|---------|------------
store.load.in.kv     | [pieces, bytes] u8 | Stage.commit, on `store.in` | unpack  | frame again
store.load.in.state  | [pieces, bytes] u8 | Stage.commit, on `store.in` | unpack  | frame again
store.save.out.kv    | [pieces, bytes] u8 | pack                        | fetch   | frame again
store.save.out.state | [pieces, bytes] u8 | pack                        | fetch   | frame again
*.in.kv_blocks       | [blocks] i64       | Stage.commit                | both    | frame again
*.in.state_blocks    | [blocks] i64       | Stage.commit                | both    | frame again

Pools are touched on the compute stream alone, behind the launches of the step that asks: whatever
a later step does with the same blocks comes after. Copies from and to the host have streams of
their own, so that neither the forward nor the step's tokens wait for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace import rt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.worker.step import PieceLoad, PieceSave

_ALIGNMENT = 16
"""Rows begin at multiples of this, so that a part of any dtype can be viewed as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTensor:
    """A tensor of a piece.

    Attributes:
        name: That of its pool.
        dtype: Of its elements.
        shape: [layers, tokens, heads, size] of keys and values, [tokens] of token ids, [layers,
            ...] of a state; windows have the W-1 inputs that count.
        offset: First byte in the row.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceLayout:
    """Where the tensors of a kind of piece lie: widest elements first, without gaps."""

    tensors: tuple[PieceTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Of a piece."""
        last = self.tensors[-1]
        return last.offset + last.num_bytes

    @property
    def row_bytes(self) -> int:
        """From one row to the next."""
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceLayouts:
    """Both kinds of pieces.

    Attributes:
        blocks_per_column: KV blocks of a KV piece.
        groups: Per state group, its tensors of a state piece in the order of its pools.
    """

    kv: PieceLayout
    state: PieceLayout
    blocks_per_column: int
    groups: tuple[tuple[PieceTensor, ...], ...]


@rt.op(role="checkpoint", kv=rt.Read, states=rt.Read, inputs=rt.Read, rows=rt.Write)
def pack(
    *,
    kv: dict[str, Tensor],
    states: tuple[dict[str, Tensor], ...],
    inputs: dict[str, Tensor],
    rows: dict[str, Tensor],
    num_kv: int,
    num_states: int,
    layouts: PieceLayouts,
    table_of: tuple[int, ...],
) -> None:
    """Copy pieces from the pools to rows.

    Args:
        kv: Pools by block; the dimension of blocks is 0 for token ids, else 1.
        states: Per group, its pools.
        inputs: Block ids, column by column, and per state table.
        rows: Where to, by kind, [pieces, bytes] u8.
        num_kv: KV pieces.
        num_states: State pieces.
        layouts: Of the rows.
        table_of: State table of each group.
    """
    if num_kv:
        per_column = layouts.blocks_per_column
        blocks = inputs["kv_blocks"][: num_kv * per_column]
        for part in layouts.kv.tensors:
            pool = kv[part.name]
            dim = _block_dim(part)
            picked = pool.index_select(dim, blocks).unflatten(dim, (num_kv, per_column))
            target = _part(rows["kv"], part, num_kv)
            target.copy_(picked.movedim(dim, 0).reshape(target.shape))
    if num_states:
        tables = inputs["state_blocks"].view(-1, rows["state"].shape[0])
        for group, table, parts in zip(states, table_of, layouts.groups, strict=True):
            blocks = tables[table, :num_states]
            for part, pool in zip(parts, group.values(), strict=True):
                picked = pool.index_select(1, blocks).movedim(1, 0)
                _part(rows["state"], part, num_states).copy_(picked[:, :, : part.shape[1]])


@rt.op(role="restore", kv=rt.ReadWrite, states=rt.ReadWrite, inputs=rt.Read)
def unpack(
    *,
    kv: dict[str, Tensor],
    states: tuple[dict[str, Tensor], ...],
    inputs: dict[str, Tensor],
    num_kv: int,
    num_states: int,
    layouts: PieceLayouts,
    table_of: tuple[int, ...],
) -> None:
    """Copy pieces from rows to the pools; see `pack`. The blocks are fresh ones."""
    if num_kv:
        per_column = layouts.blocks_per_column
        blocks = inputs["kv_blocks"][: num_kv * per_column]
        for part in layouts.kv.tensors:
            pool = kv[part.name]
            dim = _block_dim(part)
            rows = _part(inputs["kv"], part, num_kv)
            # [pieces, ..., tokens, ...] to [..., blocks, tokens per block, ...]
            split = rows.unflatten(1 + dim, (per_column, -1)).movedim(0, dim)
            pool.index_copy_(dim, blocks, split.flatten(dim, dim + 1))
    if num_states:
        tables = inputs["state_blocks"].view(-1, inputs["state"].shape[0])
        for group, table, parts in zip(states, table_of, layouts.groups, strict=True):
            blocks = tables[table, :num_states]
            for part, pool in zip(parts, group.values(), strict=True):
                rows = _part(inputs["state"], part, num_states).movedim(0, 1)
                pool.narrow(2, 0, part.shape[1]).index_copy_(1, blocks, rows)


def _block_dim(part: PieceTensor) -> int:
    """Dimension of a KV pool that counts blocks; a piece has its tokens there."""
    return 0 if len(part.shape) == 1 else 1


def _part(rows: Tensor, part: PieceTensor, count: int) -> Tensor:
    """One tensor of the first rows, [count, *shape]."""
    found = rows[:count, part.offset : part.offset + part.num_bytes].view(part.dtype)
    return found.unflatten(1, part.shape)


def make_layouts(
    kv: Mapping[str, rt.Buffer],
    states: Sequence[Mapping[str, rt.Buffer]],
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    *,
    blocks_per_column: int,
) -> PieceLayouts:
    """Lay out the pieces of a worker's pools.

    Args:
        kv: Pools by block.
        states: Per state group, its pools.
        shapes: Per state group, the shape of a state's tensors without the room for drafts.
        blocks_per_column: KV blocks of a state column.
    """
    kv_shapes = {}
    for name, buffer in kv.items():
        dim = buffer.row_dim
        tokens = blocks_per_column * buffer.shape[dim + 1]
        kv_shapes[name] = (*buffer.shape[:dim], tokens, *buffer.shape[dim + 2 :])
    kv_layout = _laid_out({name: (kv[name].dtype, shape) for name, shape in kv_shapes.items()})
    wanted = {
        buffer.name: (buffer.dtype, (buffer.shape[0], *shapes[group][name]))
        for group, buffers in enumerate(states) for name, buffer in buffers.items()
    }
    state_layout = _laid_out(wanted)
    by_name = {part.name: part for part in state_layout.tensors}
    return PieceLayouts(
        kv=kv_layout,
        state=state_layout,
        blocks_per_column=blocks_per_column,
        groups=tuple(
            tuple(by_name[buffer.name] for buffer in buffers.values()) for buffers in states
        ),
    )


def _laid_out(wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> PieceLayout:
    # Each tensor then begins at a multiple of its elements' size.
    names = sorted(wanted, key=lambda name: -wanted[name][0].itemsize)
    parts: list[PieceTensor] = []
    offset = 0
    for name in names:
        dtype, shape = wanted[name]
        part = PieceTensor(name=name, dtype=dtype, shape=shape, offset=offset)
        offset += part.num_bytes
        parts.append(part)
    return PieceLayout(tensors=tuple(parts))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedLoads:
    """Loads whose copies to the device have been enqueued.

    Attributes:
        frame: Where they land.
        event: When they have.
        num_kv, num_states: Pieces.
    """

    frame: rt.Frame
    event: rt.Event
    num_kv: int
    num_states: int


class Transfers:
    """Owner of the rows in transit.

    Args:
        runtime: The way to the device.
        kv: Pools by block: token ids, keys and values, those of a draft model too.
        states: Per state group, its pools.
        table_of: State table of each group.
        layouts: Of the pieces.
        depth: Steps in flight.
        max_pieces: Most KV pieces and most state pieces in one step.
    """

    def __init__(
        self,
        runtime: rt.Runtime,
        *,
        kv: rt.Bundle,
        states: tuple[rt.Bundle, ...],
        table_of: tuple[int, ...],
        layouts: PieceLayouts,
        depth: int,
        max_pieces: tuple[int, int],
    ) -> None:
        self.layouts = layouts
        self.max_pieces = max_pieces
        self._runtime = runtime
        self._kv = kv
        self._states = states
        self._table_of = table_of
        num_kv, num_states = max_pieces
        rows = {
            "kv": rt.Field((num_kv, layouts.kv.row_bytes), torch.uint8),
            "state": rt.Field((num_states, layouts.state.row_bytes), torch.uint8),
        }
        blocks = {
            "kv_blocks": rt.Field((num_kv * layouts.blocks_per_column,), torch.int64),
            "state_blocks": rt.Field((num_states * (1 + max(table_of)),), torch.int64),
        }
        self._loads = runtime.frames("store.load", depth=depth, inputs=rows | blocks, outputs={})
        # One more than the steps in flight: a copy may still run when its step has retired.
        self._saves = runtime.frames("store.save", depth=depth + 1, inputs=blocks, outputs=rows)
        self._in = runtime.stream("store.in")
        self._out = runtime.stream("store.out")

    def stage(self, loads: Sequence[PieceLoad]) -> StagedLoads:
        """Begin to copy pieces to the device.

        Args:
            loads: At most `max_pieces` of each kind.
        """
        kv = [load for load in loads if load.kind == "kv"]
        states = [load for load in loads if load.kind == "state"]
        frame = self._loads.next()
        with frame.stage() as opened:
            for name, pieces, layout in (
                ("kv", kv, self.layouts.kv), ("state", states, self.layouts.state)
            ):  # fmt: skip
                for place, piece in enumerate(pieces):
                    opened[name][place, : layout.num_bytes] = piece.data
            counts = self._put_blocks(opened, kv, states)
            opened.commit(self._in, rows={"kv": len(kv), "state": len(states), **counts})
        return StagedLoads(
            frame=frame, event=self._in.record(), num_kv=len(kv), num_states=len(states)
        )

    def unpack(self, staged: StagedLoads, stream: rt.Stream) -> None:
        """Bring staged pieces to their blocks; whoever reads those comes later on this stream."""
        stream.wait(staged.event)
        self._runtime.launch(
            unpack, stream, kv=self._kv, states=self._states, inputs=staged.frame.inputs,
            num_kv=staged.num_kv, num_states=staged.num_states, layouts=self.layouts,
            table_of=self._table_of,
        )

    def save(self, saves: Sequence[PieceSave], stream: rt.Stream) -> rt.Ticket:
        """Copy pieces to the host.

        Args:
            saves: At most `max_pieces` of each kind.
            stream: Where their blocks were written.

        Returns:
            Rows by kind, in the order of the saves of that kind.
        """
        kv = [save for save in saves if save.kind == "kv"]
        states = [save for save in saves if save.kind == "state"]
        frame = self._saves.next()
        with frame.stage() as opened:
            opened.commit(stream, rows=self._put_blocks(opened, kv, states))
        self._runtime.launch(
            pack, stream, kv=self._kv, states=self._states, inputs=frame.inputs,
            rows=frame.outputs, num_kv=len(kv), num_states=len(states), layouts=self.layouts,
            table_of=self._table_of,
        )
        views = {
            name: frame.outputs[name][: len(pieces)]
            for name, pieces in (("kv", kv), ("state", states)) if pieces
        }
        return self._runtime.fetch(views, on=self._out, after=stream.record())

    def _put_blocks(
        self,
        opened: rt.Stage,
        kv: Sequence[PieceLoad | PieceSave],
        states: Sequence[PieceLoad | PieceSave],
    ) -> dict[str, int]:
        """Write block ids; returns how many of each array are to be copied."""
        counts: dict[str, int] = {}
        if kv:
            blocks = np.array([piece.blocks for piece in kv], dtype=np.int64).reshape(-1)
            opened["kv_blocks"][: len(blocks)] = blocks
            counts["kv_blocks"] = len(blocks)
        if states:
            width = self.max_pieces[1]
            tables = np.array([piece.blocks for piece in states], dtype=np.int64).T
            for index, blocks in enumerate(tables):
                opened["state_blocks"][index * width : index * width + len(blocks)] = blocks
            counts["state_blocks"] = len(tables) * width
        return counts
