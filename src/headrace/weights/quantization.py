"""Checkpoints whose matrices are stored in FP8 with one scale per block, dequantised on loading.

Such a checkpoint says so in config.json:

    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]}

and holds, beside a matrix `X.weight` in F8_E4M3, `X.weight_scale_inv` with a factor per block:
W[i, j] = weight[i, j] * scale_inv[i // 128, j // 128]. What is not stored so (norms, embedding,
head, routers) stands there in its own dtype. The published engines compute such products in FP8,
with activations rounded too; here they are computed in the engine's dtype.

Every other scheme is refused by its name.

Source: the published checkpoints of DeepSeek-V3 and Qwen3, and their `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

SCALE_SUFFIX = "_scale_inv"
QUANTISED_DTYPE = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_REMEDY = "use a checkpoint in bfloat16, float16, float32 or FP8 with weight_block_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScales:
    """How a checkpoint's FP8 matrices are scaled.

    Attributes:
        rows: Rows of a block.
        columns: Columns of a block.
    """

    rows: int
    columns: int

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a matrix [.., rows, columns]."""
        *outer, rows, columns = shape
        return (*outer, -(-rows // self.rows), -(-columns // self.columns))

    def dequantise(self, stored: Tensor, scales: Tensor, out: Tensor) -> None:
        """Multiply each block by its scale, in float32, and round once to the dtype of `out`.

        Args:
            stored: [.., R, C] float8_e4m3fn.
            scales: [.., ceil(R / rows), ceil(C / columns)], any floating dtype.
            out: [.., R, C], contiguous. Overwritten. Beside it, the rows of one block of one matrix
                exist in float32 at a time.
        """
        *_, num_rows, num_columns = stored.shape
        wide = scales.float().repeat_interleave(self.columns, -1)[..., :num_columns]
        matrices = (part.flatten(0, -3) if part.dim() > 2 else part[None]  # noqa: PLR2004
                    for part in (stored, wide, out))
        for matrix, factors, place in zip(*matrices, strict=True):
            for band, start in enumerate(range(0, num_rows, self.rows)):
                rows = slice(start, start + self.rows)
                place[rows] = matrix[rows].float().mul_(factors[band])


def quantization_of(raw: Mapping[str, Any]) -> BlockScales | None:
    """Read what config.json says about how weights are stored.

    Args:
        raw: The parsed config.json, or the text model's part of one.

    Returns:
        The block scales, or None for a checkpoint that is not quantised.

    Raises:
        UnsupportedModelError: The checkpoint is quantised in another way; the way is named.
        ModelError: The entry makes no sense.
    """
    nested = raw.get("text_config")
    places = (raw, nested if isinstance(nested, Mapping) else {})
    for place in places:
        for key in ("compression_config", "quantization_config"):
            entry = place.get(key)
            if entry is None:
                continue
            if not isinstance(entry, Mapping):
                raise ModelError(
                    f"config.json: {key} is {entry!r}, it must be an object; fetch the file again"
                )
            return _parse(entry, key)
    return None


def _parse(entry: Mapping[str, Any], key: str) -> BlockScales:
    method = entry.get("quant_method")
    if method != "fp8" or key == "compression_config":
        raise UnsupportedModelError(
            f"config.json: {key}.quant_method is {method!r}, which is not supported; {_REMEDY}"
        )
    if entry.get("fmt", "e4m3") != "e4m3":
        raise UnsupportedModelError(
            f"config.json: {key}.fmt is {entry['fmt']!r}; supported is 'e4m3'; {_REMEDY}"
        )
    if entry.get("activation_scheme", "dynamic") != "dynamic":
        raise UnsupportedModelError(
            f"config.json: {key}.activation_scheme is {entry['activation_scheme']!r}; supported is "
            f"'dynamic'; {_REMEDY}"
        )
    block = entry.get("weight_block_size")
    if block is None:
        raise UnsupportedModelError(
            f"config.json: {key} is FP8 without weight_block_size (one scale per tensor or row), "
            f"which is not supported; {_REMEDY}"
        )
    is_pair = isinstance(block, list) and len(block) == 2  # noqa: PLR2004 - rows, columns
    if not is_pair or not all(type(size) is int and size > 0 for size in block):
        raise ModelError(
            f"config.json: {key}.weight_block_size is {block!r}, it must be two positive integers; "
            "fetch the file again"
        )
    return BlockScales(rows=block[0], columns=block[1])
