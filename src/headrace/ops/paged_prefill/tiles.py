"""How the known rows of a step are cut into tiles: on the host, once a step, for all layers.

A tile is a run of tokens of one row with the query heads of a KV head, so many that a matrix
product is filled. A program takes one tile and KV head, and all keys of it in turn. A row of few
tiles behind many keys would leave most of a GPU idle: its tiles are split over the keys. Whether
and where follows from the row's own sizes, so the bits of its tokens do not depend on the rows
beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

FIELDS = 8
"""Numbers of a record, those unused 0.

Of a tile: first packed token, tokens, position of the first, where the row's blocks begin in the
tables, first key, end of the keys, and for a part of a split tile its place among the parts.
Of a split tile, for adding its parts: first packed token, tokens, first part, parts.
"""

MAX_HEAD = 256
"""Largest head whose tiles fit in the memory of a program."""

_PROGRAMS = 128
"""Programs that fill a GPU: a row with fewer is split, if it has the keys."""

_SPLIT_KEYS = 4096
"""Fewest keys of a split: with these, writing and adding parts costs a twentieth of the time."""

_PART_BYTES = 128 << 20
"""Most memory for parts; more are made and added in rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSizes:
    """How a program works.

    Attributes:
        rows: Tokens times query heads of a tile.
        keys: Keys loaded at a time.
        num_warps, num_stages: As Triton has them.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def tile_sizes(head_dim: int, element_size: int) -> TileSizes:
    """Return the sizes for heads of `head_dim` numbers of `element_size` bytes."""
    if element_size > 2:  # noqa: PLR2004  float32 is multiplied outside the tensor cores
        return TileSizes(rows=32, keys=32, num_warps=8, num_stages=2)
    # Queries, two runs of keys and of values of 256 fill the memory of a program.
    return TileSizes(rows=128, keys=64, num_warps=8, num_stages=2 if head_dim > 128 else 3)  # noqa: PLR2004


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a known row's tiles depend on.

    Attributes:
        token: First packed token.
        start: Its position.
        length: Tokens.
        table: Where the row's blocks begin in the tables.
    """

    token: int
    start: int
    length: int
    table: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLayout:
    """What the host knows of a list of tiles.

    The list holds whole tiles, then for each round its parts and the tiles that these add up to.

    Attributes:
        sizes: Of a program.
        num_whole: Tiles that one program takes whole.
        rounds: Numbers of (parts, split tiles).
        is_fixed: As the tiling's.
    """

    sizes: TileSizes
    num_whole: int
    rounds: tuple[tuple[int, int], ...]
    is_fixed: bool = False

    @property
    def num_records(self) -> int:
        """Records of the list."""
        return self.num_whole + sum(map(sum, self.rounds))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillTiles:
    """A list of tiles on the device.

    Attributes:
        records: [R, FIELDS] i32.
        tables: KV blocks of all rows, one after another, [W] i32.
        layout: What is where in the list.
    """

    records: Tensor
    tables: Tensor
    layout: TileLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Cuts the rows of one model.

    Attributes:
        num_heads: H.
        num_kv_heads: G.
        head_dim: D.
        sizes: Of a program.
        is_fixed: No row is split, so that a token's bits do not depend on where its chunk begins.

    Raises:
        ValueError: A token's heads do not fit into a tile.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sizes: TileSizes
    is_fixed: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1:
            msg = (
                f"{self.num_heads // self.num_kv_heads} query heads for each KV head exceed the "
                f"{self.sizes.rows} rows of a tile"
            )
            raise ValueError(msg)

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return self.sizes.rows // (self.num_heads // self.num_kv_heads)

    @property
    def most_parts(self) -> int:
        """Parts of a round."""
        part = self.num_kv_heads * self.sizes.rows * self.head_dim * 4
        return max(_PART_BYTES // part, self._wanted(1))

    def max_records(self, max_tokens: int, max_rows: int) -> int:
        """Return the most records of a step of so many tokens and rows."""
        tiles = max_tokens // self.tokens + max_rows
        # Rows that are split have no whole tiles, and few: each is one of those that are added.
        return tiles + max_rows * self._wanted(1)

    def list_tiles(self, spans: Iterable[Span]) -> tuple[TileLayout, np.ndarray]:
        """Cut the rows of a step.

        Args:
            spans: The rows, in any order.

        Returns:
            What is where, and the records, [R, FIELDS] i32: the longest rows and the last tiles of
            a row first, as the work of a tile grows with its keys.
        """
        whole: list[np.ndarray] = []
        split: list[np.ndarray] = []
        for span in sorted(spans, key=lambda span: -(span.start + span.length)):
            tiles = self._tiles_of(span)
            num_splits = self._num_splits(span, len(tiles))
            if num_splits == 1:
                whole.append(tiles)
            else:
                split.extend(self._parts_of(tile, num_splits, tiles[0, 5]) for tile in tiles)
        rounds, records = self._rounds(split)
        none = np.zeros((0, FIELDS), dtype=np.int32)
        layout = TileLayout(
            sizes=self.sizes,
            num_whole=sum(map(len, whole)),
            rounds=rounds,
            is_fixed=self.is_fixed,
        )
        return layout, np.concatenate((none, *whole, *records))

    def _tiles_of(self, span: Span) -> np.ndarray:
        """Whole tiles of a row, the last one first."""
        done = np.arange(0, span.length, self.tokens, dtype=np.int32)[::-1]
        records = np.zeros((len(done), FIELDS), dtype=np.int32)
        records[:, 0] = span.token + done
        records[:, 1] = np.minimum(span.length - done, self.tokens)
        records[:, 2] = span.start + done
        records[:, 3] = span.table
        records[:, 5] = records[:, 2] + records[:, 1]
        return records

    def _wanted(self, num_tiles: int) -> int:
        return max(1, _PROGRAMS // (num_tiles * self.num_kv_heads))

    def _num_splits(self, span: Span, num_tiles: int) -> int:
        if self.is_fixed:
            return 1
        most = max(1, (span.start + span.length) // _SPLIT_KEYS)
        return min(self._wanted(num_tiles), most)

    def _parts_of(self, tile: np.ndarray, num_splits: int, num_keys: int) -> np.ndarray:
        """Records of a tile's parts: the keys of its row are cut at multiples of the same number.

        Parts of which the tile sees nothing are left out.
        """
        run = self.sizes.keys
        width = -(-num_keys // (num_splits * run)) * run
        first = np.arange(0, tile[5], width, dtype=np.int32)
        parts = np.repeat(tile[None], len(first), 0)
        parts[:, 4] = first
        parts[:, 5] = np.minimum(first + width, tile[5])
        return parts

    def _rounds(
        self, split: Sequence[np.ndarray]
    ) -> tuple[tuple[tuple[int, int], ...], list[np.ndarray]]:
        """Number the parts of as many tiles as there is memory for at a time."""
        rounds, records = [], []
        rest = list(split)
        while rest:
            totals = np.cumsum([len(parts) for parts in rest])
            count = int((totals <= self.most_parts).sum())
            parts = np.concatenate(rest[:count])
            parts[:, 6] = np.arange(len(parts))
            added = np.stack([tile[0] for tile in rest[:count]])
            added[:, 2] = totals[:count] - [len(tile) for tile in rest[:count]]
            added[:, 3] = [len(tile) for tile in rest[:count]]
            rounds.append((len(parts), count))
            records += [parts, added]
            rest = rest[count:]
        return tuple(rounds), records


def tiling(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_size: int,
    *,
    is_fixed: bool = False,
) -> Tiling:
    """Return the tiling for heads of a model; raises ValueError as `Tiling`."""
    return Tiling(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        sizes=tile_sizes(head_dim, element_size),
        is_fixed=is_fixed,
    )
