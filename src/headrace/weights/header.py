"""The head of a safetensors file: names, dtypes, shapes and places, checked against the file.

Reading the head and the data ourselves lets an error name the file, the tensor and the remedy, and
maps nothing: a mapped file counts as memory of the process while it is read, and reading it faults
if the file shrinks.

Source: the safetensors format description, huggingface/safetensors README.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from headrace.errors import WeightsError

if TYPE_CHECKING:
    from pathlib import Path

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_FLOAT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
}
_OTHER_BYTES = {
    "F8_E8M0": 1,  # Scales of a quantised tensor, no weights.
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        shape: As stored.
        dtype: The format's name, such as BF16.
        is_float: Whether weights may have this dtype: it is a floating-point one.
        num_bytes: Bytes of data.
        offset: Of the data from the file's start, in bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    is_float: bool
    num_bytes: int
    offset: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read the tensors that a file holds.

    Raises:
        WeightsError: The file is missing, truncated or damaged.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise WeightsError(
                    f"{file} has {size} bytes but its header claims {length}: the file is "
                    "truncated or no safetensors file; fetch it again"
                )
            raw = stream.read(length)
    except OSError as error:
        raise WeightsError(
            f"{file} cannot be read: {error.strerror or error}; fetch the file again"
        ) from error
    try:
        header = json.loads(raw)
        data_start = _LENGTH_BYTES + length
        entries = {
            name: _entry(file, name, fields, data_start, size)
            for name, fields in header.items()
            if name != "__metadata__"
        }
    except WeightsError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{file} has a damaged header ({type(error).__name__}: {error}); fetch the file again"
        ) from error
    _check_places(file, entries, data_start, size)
    return entries


def _check_places(
    file: Path, entries: dict[str, TensorEntry], data_start: int, file_bytes: int
) -> None:
    """Tensors lie one behind another and fill the file: whatever else is there is damage."""
    at = data_start
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        if entry.offset != at:
            raise WeightsError(
                f"{file}: tensor {name!r} begins at byte {entry.offset} of the file but the one "
                f"before it ends at {at}; the header is damaged, fetch the file again"
            )
        at += entry.num_bytes
    if at != file_bytes:
        raise WeightsError(
            f"{file} has {file_bytes} bytes but its tensors end at {at}; fetch the file again"
        )


def _entry(
    file: Path, name: str, fields: dict[str, object], data_start: int, file_bytes: int
) -> TensorEntry:
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not (
        isinstance(dtype, str) and _is_sizes(shape) and _is_sizes(offsets) and len(offsets) == 2  # noqa: PLR2004 - begin and end
    ):
        raise WeightsError(f"{file}: the header of tensor {name!r} is damaged; fetch it again")
    data_bytes = file_bytes - data_start
    item_bytes = _FLOAT_BYTES.get(dtype) or _OTHER_BYTES.get(dtype)
    begin, end = offsets
    if end > data_bytes:
        raise WeightsError(
            f"{file} is truncated: tensor {name!r} ends at byte {end} of the data, "
            f"but the file holds {data_bytes}; fetch it again"
        )
    if begin > end or (item_bytes and end - begin != math.prod(shape) * item_bytes):
        raise WeightsError(
            f"{file}: tensor {name!r} of shape {list(shape)} and dtype {dtype} has "
            f"{end - begin} bytes; the header is damaged, fetch the file again"
        )
    return TensorEntry(tuple(shape), dtype, dtype in _FLOAT_BYTES, end - begin, data_start + begin)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in value
    )
