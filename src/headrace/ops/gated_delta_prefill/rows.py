"""What the op is told of the prompt rows of a step: three small tables of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MOST_TOKENS = 64
"""Tokens of a piece at most: a piece's products are matrices of that many rows and columns."""

LEAST_TOKENS = 16
"""Tokens that a piece is computed as at least: what tensor cores take."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillRows:
    """The prompt rows of a step. A row is cut into pieces at the absolute grid.

    Tokens of a row follow one another in the packed step. Block 0 is nobody's: as a source it
    stands for zeros, as an export for none.

    Attributes:
        piece_tokens: Most tokens of a piece.
        num_exports: Exports of all rows; their windows come first in `windows`.
        pieces: First packed token, tokens, row, block that gets the state after the piece or 0; the
            pieces of a row follow one another, [X, 4] i32.
        rows: First packed token, tokens, tokens of the first piece, block of the state before,
            block of the state after, first piece, [R, 6] i32.
        windows: Windows to write: a row's first packed token, block of the window before its
            tokens, tokens of the row before the new window's end, block that gets it, [Y, 4] i32.
    """

    piece_tokens: int
    num_exports: int
    pieces: Tensor
    rows: Tensor
    windows: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt row, as the host knows it.

    Attributes:
        first: First packed token.
        start: Its position in the sequence.
        length: Tokens, at least 1.
        source: Block of the state before the row, or None to start from zeros.
        target: Block of the state after it; may be `source`.
        exports: (position, block): blocks for states inside the row, on the grid, ascending. They
            are no row's source.
    """

    first: int
    start: int
    length: int
    source: int | None
    target: int
    exports: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLayout:
    """Which numbers of a list are the tables of `PrefillRows`: pieces, rows, windows.

    Attributes:
        num_pieces: X.
        num_rows: R.
        num_exports: Exports of all rows.
        piece_tokens: Most tokens of a piece.
    """

    num_pieces: int
    num_rows: int
    num_exports: int
    piece_tokens: int

    @property
    def num_numbers(self) -> int:
        """Numbers of the list."""
        return sum(self._parts)

    @property
    def _parts(self) -> tuple[int, int, int]:
        return 4 * self.num_pieces, 6 * self.num_rows, 4 * (self.num_exports + self.num_rows)

    def on_device(self, packed: Tensor) -> PrefillRows:
        """Take the tables out of the list's copy on the device, [num_numbers] i32."""
        pieces, rows, windows = packed.split_with_sizes(list(self._parts))
        return PrefillRows(
            piece_tokens=self.piece_tokens,
            num_exports=self.num_exports,
            pieces=pieces.view(-1, 4),
            rows=rows.view(-1, 6),
            windows=windows.view(-1, 4),
        )


def max_numbers(max_tokens: int, max_rows: int, grid: int) -> int:
    """Return the most numbers of a step of so many tokens and rows."""
    # A row has two pieces that are no whole ones at most, and an export behind each but its last.
    pieces = min(max_tokens, max_tokens // _piece_tokens(grid) + 2 * max_rows)
    layout = PrefillLayout(
        num_pieces=pieces, num_rows=max_rows, num_exports=pieces, piece_tokens=grid
    )
    return layout.num_numbers


def _piece_tokens(grid: int) -> int:
    """Most tokens of a piece: a coarser grid is cut further, at points of its own."""
    return grid if grid <= MOST_TOKENS else math.gcd(grid, MOST_TOKENS)


def number_rows(prompts: Sequence[PromptRow], grid: int) -> tuple[PrefillLayout, list[int]]:
    """Cut rows into pieces and say where each one's state and window come from and go to.

    Args:
        prompts: The rows, at least one.
        grid: Tokens between points of the absolute grid.

    Returns:
        What is where, and the numbers.

    Raises:
        ValueError: A row would write block 0, or exports off the grid or outside of it.
    """
    most = _piece_tokens(grid)
    pieces: list[int] = []
    rows: list[int] = []
    exported: list[int] = []
    last: list[int] = []
    for index, row in enumerate(prompts):
        source = row.source or 0
        blocks = _exports(row, grid)
        position, end = row.start, row.start + row.length
        head = min(end, (position // most + 1) * most) - position
        rows += (row.first, row.length, head, source, row.target, len(pieces) // 4)
        while position < end:
            stop = min(end, (position // most + 1) * most)
            first = row.first + position - row.start
            pieces += (first, stop - position, index, blocks.get(stop, 0))
            position = stop
        for at, block in blocks.items():
            exported += (row.first, source, at - row.start, block)
        last += (row.first, source, row.length, row.target)
    layout = PrefillLayout(
        num_pieces=len(pieces) // 4,
        num_rows=len(prompts),
        num_exports=len(exported) // 4,
        piece_tokens=most,
    )
    return layout, pieces + rows + exported + last


def _exports(row: PromptRow, grid: int) -> dict[int, int]:
    """Blocks by position, checked."""
    for position, block in (*row.exports, (row.start + row.length, row.target)):
        if block <= 0:
            msg = f"the state after {position} tokens would go to block {block}, which is nobody's"
            raise ValueError(msg)
    for position, _ in row.exports:
        if not row.start < position < row.start + row.length or position % grid:
            msg = f"export at {position} is not inside {row.start}..{row.start + row.length} "
            raise ValueError(msg + f"on the grid of {grid}")
    return dict(row.exports)
