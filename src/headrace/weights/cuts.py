"""Which part of a checkpoint's tensor a rank has.

A tensor is cut along the axis in which the rank's own model is smaller. Several matrices in one
tensor (queries, keys and values) are cut one by one: their sizes along the axis are its segments.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Shape = tuple[int, ...]
    Segments = Callable[[str], "tuple[int, ...] | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A part of a tensor.

    Attributes:
        shape: Of the part.
        axis: Along which it is cut.
        ranges: (start, length) of what it has of the whole, one after another; what they leave of
            the part is zeros.
    """

    shape: tuple[int, ...]
    axis: int
    ranges: tuple[tuple[int, int], ...]

    def take(self, whole: Tensor, out: Tensor) -> None:
        """Copy the part of a whole tensor to memory of the part's shape."""
        out.zero_()
        at = 0
        for start, length in self.ranges:
            out.narrow(self.axis, at, length).copy_(whole.narrow(self.axis, start, length))
            at += length


def cuts(
    whole: Mapping[str, Shape],
    own: Mapping[str, Shape],
    *,
    rank: int,
    size: int,
    segments: tuple[Segments, Segments],
) -> dict[str, Cut]:
    """Find what a rank reads of each tensor.

    Args:
        whole: Shape by name, of the whole model.
        own: The same, of the rank's model.
        rank: The rank.
        size: Ranks.
        segments: Of a tensor by its name, in the whole model and in the rank's; None for one.

    Returns:
        Cuts by name, of the tensors that are not read whole. Of a segment that is smaller in the
        rank's model, ranks have equal parts in order; where there are fewer parts than ranks,
        neighbours have the same one.
    """
    found = {}
    for name, shape in whole.items():
        mine = own[name]
        axes = [axis for axis, pair in enumerate(zip(shape, mine, strict=True)) if len({*pair}) > 1]
        if not axes:
            continue
        assert len(axes) == 1, f"{name} of {shape} would be cut to {mine} along {axes}"
        axis = axes[0]
        full = segments[0](name) or (shape[axis],)
        parts = segments[1](name) or (mine[axis],)
        assert sum(full) == shape[axis], f"{name}: {full} are not {shape[axis]}"
        assert sum(parts) == mine[axis], f"{name}: {parts} are not {mine[axis]}"
        ranges = []
        starts = itertools.accumulate(full, initial=0)
        for start, count, part in zip(starts, full, parts, strict=False):
            first = rank * _num_pieces(count, part, size) // size * part
            ranges.append((start + first, max(0, min(part, count - first))))
        found[name] = Cut(shape=mine, axis=axis, ranges=tuple(ranges))
    return found


def _num_pieces(count: int, part: int, size: int) -> int:
    """Parts of a segment: as many as ranks, or fewer, of which neighbours have copies."""
    if count % part == 0 and size % (count // part) == 0:
        return count // part
    # The rows of a vocabulary need not come out even: the last ranks have fewer, or none.
    return size


def cut_all(tensors: Mapping[str, Tensor], parts: Mapping[str, Cut]) -> dict[str, Tensor]:
    """Cut tensors that are in memory."""
    result = dict(tensors)
    for name, part in parts.items():
        result[name] = tensors[name].new_empty(part.shape)
        part.take(tensors[name], result[name])
    return result
