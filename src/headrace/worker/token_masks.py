"""Which tokens the grammars of requests allow, at every sample position of constrained rows.

The host makes the masks, since it alone follows a grammar; they are staged like the other rules of
a step, just before its verify launch. A row is constrained only with tokens that the host has seen,
so a mask never guesses. Steps without constrained rows pay nothing.

R sample positions, M of them masked, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace import rt

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.worker.step import TokenMasks

_MASKED_AT_ONCE = 32
"""Rows whose bits are spread over the vocabulary together: bounds the [rows, V] integers."""
_MIN_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MasksShape:
    """What the host knows about the masks of a step.

    Attributes:
        num_masks: M.
        num_words: W.
    """

    num_masks: int
    num_words: int


class MasksStage:
    """Frames that carry masks to the device; made when a request first has a grammar.

    Args:
        runtime: The way to the device.
        depth: Steps in flight.
        vocab_size: V.
    """

    def __init__(self, runtime: rt.Runtime, *, depth: int, vocab_size: int) -> None:
        self._runtime = runtime
        self._depth = depth
        self._num_words = (vocab_size + 31) // 32
        self._num_lines = 0
        self._ring: rt.FrameRing | None = None
        self._num_rings = 0

    def stage(
        self, masks: TokenMasks, first: tuple[int, ...], stream: rt.Stream
    ) -> tuple[dict[str, rt.Buffer], MasksShape]:
        """Copy a step's masks to the device.

        Args:
            masks: Of at least one row.
            first: First sample position of each row of the step.
            stream: Of the copies.

        Returns:
            Device arrays for `apply_masks`, and what the host knows about them.
        """
        count, words = masks.bits.shape
        assert words == self._num_words, f"{masks.bits.shape=} but {self._num_words=}"
        sample = np.concatenate(
            [
                np.arange(first[row], first[row] + lines)
                for row, lines in zip(masks.rows, masks.num_lines, strict=True)
            ]
        )
        assert len(sample) == count, f"{len(sample)=} but {count=}"
        frame = self._frame(count)
        with frame.stage() as w:
            w["sample"][:count] = sample
            w["bits"][: count * words] = masks.bits.reshape(-1)
            w.commit(stream, rows={"sample": count, "bits": count * words})
        return frame.inputs, MasksShape(num_masks=count, num_words=words)

    def _frame(self, count: int) -> rt.Frame:
        if self._ring is None or count > self._num_lines:
            self._num_lines = max(_MIN_LINES, 1 << (count - 1).bit_length())
            fields = {
                "sample": rt.Field((self._num_lines,), torch.int64),
                "bits": rt.Field((self._num_lines * self._num_words,), torch.int32),
            }
            self._ring = self._runtime.frames(
                f"masks{self._num_rings}", depth=self._depth, inputs=fields, outputs={}
            )
            self._num_rings += 1
        return self._ring.next()


def apply_masks(logits: Tensor, masks: dict[str, Tensor], shape: MasksShape) -> Tensor:
    """Rule out what the grammars do not allow.

    Args:
        logits: [R, V] f32. Not changed.
        masks: Arrays of MasksStage.
        shape: Their shape.

    Returns:
        [R, V] f32 with -inf where a mask forbids; other rows are the same bits.
    """
    entry = torch.arange(logits.shape[1], device=logits.device)
    word, shift = entry >> 5, (entry & 31).to(torch.int32)
    bits = masks["bits"][: shape.num_masks * shape.num_words].view(-1, shape.num_words)
    out = logits.clone()
    for start in range(0, shape.num_masks, _MASKED_AT_ONCE):
        stop = min(start + _MASKED_AT_ONCE, shape.num_masks)
        sample = masks["sample"][start:stop]
        is_allowed = (bits[start:stop][:, word] >> shift) & 1
        out.index_copy_(0, sample, logits[sample].masked_fill(is_allowed == 0, -torch.inf))
    return out
