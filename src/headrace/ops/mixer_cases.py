"""Generating rows in either state scheme, for tests and benchmarks of fused mixers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from headrace.ops.gated_delta_decode.rows import Ring

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.rt.detector import Detector


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Rows of the columns scheme; see `ColumnsRows`."""

    window_blocks: Tensor
    accepted: Tensor

    @classmethod
    def of(cls, blocks: list[list[int]], accepted: list[int]) -> Columns:
        """Make them from numbers."""
        return cls(
            window_blocks=torch.tensor(blocks, dtype=torch.int32),
            accepted=torch.tensor(accepted, dtype=torch.int32),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """Rows of the replay scheme; see `ReplayRows`."""

    base_block: Tensor
    base_len: Tensor
    computed: Tensor
    write_block: Tensor
    write_len: Tensor
    ring_block: Tensor

    @classmethod
    def of(cls, **values: list[int]) -> Replay:
        """Make them from numbers."""
        return cls(
            **{
                name: torch.tensor(value, dtype=torch.int32 if "block" in name else torch.int64)
                for name, value in values.items()
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pools:
    """One layer's pools."""

    window: Tensor
    state: Tensor
    ring: Ring

    def clone(self) -> Pools:
        """Copy them."""
        ring = Ring(
            inputs=self.ring.inputs.clone(),
            updates=self.ring.updates.clone(),
            interval=self.ring.interval,
        )
        return Pools(window=self.window.clone(), state=self.state.clone(), ring=ring)

    def tensors(self) -> tuple[Tensor, ...]:
        """Give windows, states and both parts of the ring."""
        return self.window, self.state, self.ring.inputs, self.ring.updates


def case_of(scheme: str) -> tuple[list[list[int]], list[int], Columns | Replay]:
    """Give places and numbers of tokens of three live rows, and of others that change nothing."""
    if scheme == "columns":
        # Without tokens; with accepted 0; with null blocks.
        index = [[0, 1, 2], [3, 0, 0], [4, 5, 0], [0, 0, 0], [6, 0, 0], [7, 0, 0]]
        blocks = [[3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14], [15, 16, 17], [0, 0, 0]]
        return index, [3, 1, 2, 0, 1, 1], Columns.of(blocks, [1, 3, 2, 1, 0, 1])
    # None, some and many pending tokens; a base written in place and into another block.
    rows = Replay.of(
        base_block=[3, 6, 9, 0],
        base_len=[10, 8, 16, 0],
        computed=[10, 13, 22, 0],
        write_block=[3, 6, 10, 0],
        write_len=[12, 12, 20, 4],
        ring_block=[1, 2, 3, 0],
    )
    return [[0, 1, 2], [3, 0, 0], [4, 5, 0], [0, 0, 0]], [3, 1, 2, 0], rows


def assert_close(a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    """Compare up to rounding: a bfloat16 state may come out one unit away, with all that follows.

    That unit is one of the largest values that went in, so small results are judged by the scale of
    all of them: a few units of the largest at any place, and one part in a hundred altogether.
    """
    if dtype == torch.float32:
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, equal_nan=True)
        return
    assert torch.equal(a.isnan(), b.isnan())
    a, b = a.float().nan_to_num(), b.float().nan_to_num()
    error = a - b
    assert float(error.abs().max()) <= float(b.abs().max()) / 32
    assert float(error.norm()) <= 1e-2 * float(b.norm())


def assert_others_untouched(
    rows: Columns | Replay,
    tokens: Sequence[Tensor],
    pools: Pools,
    before: Pools,
    out: Tensor,
    detector: Detector,
) -> None:
    """Check what a run of `case_of` wrote and read, and that its launches declare it.

    Args:
        rows: Of the case.
        tokens: What the mixer was given of the tokens.
        pools: After the run.
        before: Before it.
        out: NaN where nothing was written, [T, ...].
        detector: What watched the run.
    """
    # Benchmarks take rows from here too, and need no detector.
    from headrace.rt import Effect  # noqa: PLC0415
    from headrace.rt.detector import RowBound, assert_effects  # noqa: PLC0415

    assert out[6:].isnan().all()
    assert not out[:6].isnan().any()
    if isinstance(rows, Columns):
        windows, states, rings = {3, 6, 9}, {3, 4, 5, 6, 9, 10}, set[int]()
    else:
        windows, states, rings = {6, 10}, {6, 10}, {1, 2, 3}
    touched = (windows, states, rings, rings)
    for new, old, blocks in zip(pools.tensors(), before.tensors(), touched, strict=True):
        changed = (new != old).flatten(1).any(1).nonzero().flatten()
        assert {int(block) for block in changed} == blocks
    names = [field.name for field in fields(rows)]
    assert_effects(
        detector.launches,
        dict.fromkeys((*names, "tokens"), Effect.READ)
        | {"window": Effect.READ_WRITE, "state": Effect.READ_WRITE}
        | ({"ring": Effect.READ_WRITE} if rings else {}),
        {name: getattr(rows, name) for name in names}
        | {"tokens": tokens, "window": pools.window, "state": pools.state}
        | {"ring": [pools.ring.inputs, pools.ring.updates]},
        rows={
            "window": RowBound(reads={3, 6, 9}, writes=windows),
            "state": RowBound(reads={3, 8, 10} if not rings else {3, 6, 9}, writes=states),
            "ring": RowBound(reads=rings, writes=rings),
        },
    )
