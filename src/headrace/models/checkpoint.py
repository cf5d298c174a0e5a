"""A checkpoint's tensors under their published names, checked against what a model expects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.errors import WeightsError
from headrace.weights import StoredWeights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def outer_shapes(
    config: ModelConfig, final_norm: str, embedding: str = "model.embed_tokens.weight"
) -> Shapes:
    """List the tensors outside the layers: embedding, last norm, and the head if it is not tied.

    Args:
        config: The model's sizes.
        final_norm: Name of the last norm.
        embedding: Name of the embedding.

    Returns:
        Shape by name.
    """
    shapes: Shapes = {
        embedding: (config.vocab_rows, config.hidden_size),
        final_norm: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_rows, config.hidden_size)
    return shapes


class CheckedTensors:
    """Tensors by name, complete and of the right shapes, read and converted on the way out.

    Each is asked for once and not kept, so that of a checkpoint on disk no more is in memory than
    the finished weights and what is being joined.

    Args:
        config: The model's sizes.
        expected: Every tensor's shape.
        tensors: What there is. A copy of a tied head is left out.
        dtype: Compute dtype of the matrices.
        names: Expected name to the name in `tensors`, where they differ; others are left out.

    Raises:
        WeightsError: A tensor is missing, unexpected or of the wrong shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        expected: Shapes,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._dtype = dtype
        self._tensors = tensors
        self._names: dict[str, str] = {}
        self._shapes = expected
        for name, given in (names or {name: name for name in tensors}).items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            shape = _shape(tensors, given)
            if name not in expected:
                raise WeightsError(
                    f"tensor {name!r} of shape {shape} is unexpected for "
                    f"{config.architecture}; config.json and the weight files do not belong "
                    "together"
                )
            if shape != expected[name]:
                raise WeightsError(
                    f"tensor {name!r} has shape {shape}, config.json asks for {expected[name]}; "
                    "config.json and the weight files do not belong together"
                )
            self._names[name] = given
        missing = sorted(expected.keys() - self._names.keys())
        if missing:
            raise WeightsError(
                f"{len(missing)} tensors are missing, the first is {missing[0]!r}; the weight "
                "files are incomplete or belong to another config.json"
            )

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._names

    def matrix(self, *names: str) -> Tensor:
        """Return tensors joined along their first axis, in the compute dtype."""
        if len(names) == 1:
            return self._single(names[0], self._dtype)
        return self._fill([names])[0]

    def stack(self, *parts: tuple[str, ...]) -> Tensor:
        """Return what `matrix` makes of each tuple of names, stacked along a new first axis."""
        return self._fill(parts)

    def full(self, name: str) -> Tensor:
        """Return a tensor in float32."""
        return self._single(name, torch.float32)

    def _single(self, name: str, dtype: torch.dtype) -> Tensor:
        if not isinstance(self._tensors, StoredWeights):
            return self._tensors[self._names[name]].detach().to(dtype).contiguous()
        out = torch.empty(self._shapes[name], dtype=dtype, device=self._tensors.device)
        self._tensors.copy_to(self._names[name], out)
        return out

    def _fill(self, parts: Sequence[tuple[str, ...]]) -> Tensor:
        """Put one tensor after another into its place in the result."""
        rows = sum(self._shapes[name][0] for name in parts[0])
        shape = (len(parts), rows, *self._shapes[parts[0][0]][1:])
        if isinstance(self._tensors, StoredWeights):
            device = self._tensors.device
        else:
            device = self._tensors[self._names[parts[0][0]]].device
        result = torch.empty(shape, dtype=self._dtype, device=device)
        for place, names in zip(result, parts, strict=True):
            start = 0
            for name in names:
                end = start + self._shapes[name][0]
                if isinstance(self._tensors, StoredWeights):
                    self._tensors.copy_to(self._names[name], place[start:end])
                else:
                    place[start:end] = self._tensors[self._names[name]].detach()
                start = end
        return result

    def centred_norm(self, name: str) -> Tensor:
        """Return a zero-centred norm's factors 1 + w, f32."""
        return 1.0 + self.full(name)

    def taps(self, name: str) -> Tensor:
        """Return a depthwise convolution [F, 1, W] as [W, F] f32, oldest tap first."""
        return self.full(name).squeeze(1).t().contiguous()


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    if isinstance(tensors, StoredWeights):
        return tensors.shape(name)
    return tuple(tensors[name].shape)
