"""The tensors a model expects, read one by one when it asks, or what is wrong with the checkpoint.

A model asks for one tensor after another and each is read straight into its place. So loading takes
the memory of the finished weights and of the largest tensor, whatever the size of the files.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.errors import WeightsError
from headrace.text.files import read_json_object
from headrace.weights.quantization import (
    QUANTISED_DTYPE,
    SCALE_DTYPES,
    SCALE_SUFFIX,
    BlockScales,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.weights.cuts import Cut
    from headrace.weights.header import TensorEntry
    from headrace.weights.shards import Shards

_SHOWN = 5
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def read_config(path: str | Path) -> dict[str, Any]:
    """Read a model folder's config.json.

    Raises:
        ModelError: It is missing or damaged.
    """
    return read_json_object(Path(path) / "config.json")


class StoredWeights(Mapping[str, Tensor]):
    """A checkpoint's tensors by name: exactly the expected ones, each read anew at every access.

    Everything is checked before the first byte of data is read. FP8 matrices with scales come
    multiplied out, all others as they are stored.

    Args:
        shards: The checkpoint.
        expected: Name to shape of every tensor of the checkpoint.
        device: Where tensors go.
        ignore: Shell patterns of names on disk that the model does without.
        quantization: How FP8 matrices are scaled, if the checkpoint has them.
        cuts: Tensors of which a part alone is read: what is given out has the part's shape.

    Attributes:
        device: Where tensors go.

    Raises:
        WeightsError: A tensor is missing, unexpected, or of the wrong shape or dtype.
    """

    def __init__(
        self,
        shards: Shards,
        expected: Mapping[str, tuple[int, ...]],
        *,
        device: torch.device | str = "cpu",
        ignore: Sequence[str] = (),
        quantization: BlockScales | None = None,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._shards = shards
        self._expected = {name: tuple(shape) for name, shape in expected.items()}
        self._quantization = quantization
        self._cuts = cuts or {}
        # What is read and converted at once goes through one piece of memory: thousands of short
        # allocations between lasting ones would leave holes that add up to the weights' own size.
        self._scratch = torch.empty(0, dtype=torch.uint8)
        _check(shards, self._expected, ignore, quantization)

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor into memory of its own; float32 if it had to be multiplied out.

        Raises:
            WeightsError: The file cannot be read, or has shrunk since its head was read.
        """
        shape = self.shape(name)
        dtype = torch.float32 if self._is_scaled(name) else _DTYPES[self._entry(name).dtype]
        out = torch.empty(shape, dtype=dtype, device=self.device)
        self.copy_to(name, out)
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self._expected)

    def __len__(self) -> int:
        return len(self._expected)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, or of the part that is wanted of it; nothing is read."""
        cut = self._cuts.get(name)
        return self._expected[name] if cut is None else cut.shape

    def copy_to(self, name: str, out: Tensor) -> None:
        """Read one tensor into place, in the dtype of the place.

        Args:
            name: One of the expected names.
            out: Of `shape(name)`, contiguous.

        Raises:
            WeightsError: The file cannot be read, or has shrunk since its head was read.
        """
        cut = self._cuts.get(name)
        if cut is None:
            self._copy_whole(name, out)
        elif self._is_scaled(name):
            # Its blocks may lie across the cut.
            whole = torch.empty(self._expected[name], dtype=out.dtype, device=out.device)
            self._copy_whole(name, whole)
            cut.take(whole, out)
        elif cut.axis == 0:
            self._copy_rows(name, cut, out)
        else:
            # The file has it row by row: the whole passes through the host's memory.
            cut.take(self._through_scratch(name), out)

    def _copy_rows(self, name: str, cut: Cut, out: Tensor) -> None:
        """Read a part that is some rows of a tensor: no other byte of it."""
        entry = self._entry(name)
        dtype, row_shape = _DTYPES[entry.dtype], entry.shape[1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        out.zero_()
        at = 0
        for start, length in cut.ranges:
            rows = self._scratch_of(length * row_bytes).view(dtype).view(length, *row_shape)
            self._read(name, rows, offset=start * row_bytes)
            out[at : at + length].copy_(rows)
            at += length

    def _copy_whole(self, name: str, out: Tensor) -> None:
        entry = self._entry(name)
        if self._is_scaled(name):
            assert self._quantization is not None
            scale = self._entry(name + SCALE_SUFFIX)
            scales = torch.empty(scale.shape, dtype=_DTYPES[scale.dtype])
            self._read(name + SCALE_SUFFIX, scales)
            stored = self._through_scratch(name).to(out.device)
            self._quantization.dequantise(stored, scales.to(out.device), out)
        elif out.device.type == "cpu" and out.dtype is _DTYPES[entry.dtype]:
            self._read(name, out)
        else:
            out.copy_(self._through_scratch(name))

    def _is_scaled(self, name: str) -> bool:
        return self._quantization is not None and name + SCALE_SUFFIX in self._shards.tensors

    def _entry(self, name: str) -> TensorEntry:
        return self._shards.tensors[name][1]

    def _through_scratch(self, name: str) -> Tensor:
        """Read a tensor; the next one overwrites it."""
        entry = self._entry(name)
        scratch = self._scratch_of(entry.num_bytes)
        place = scratch.view(_DTYPES[entry.dtype]).view(entry.shape)
        self._read(name, place)
        return place

    def _scratch_of(self, num_bytes: int) -> Tensor:
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes]

    def _read(self, name: str, out: Tensor, offset: int = 0) -> None:
        """Fill contiguous memory of a tensor's dtype with its bytes from an offset on."""
        file, entry = self._shards.tensors[name]
        data = out.view(-1).view(torch.uint8).numpy()  # lint-rt: in memory of the host
        view, done, wanted = data.data, 0, data.size
        try:
            with file.open("rb", buffering=0) as stream:
                stream.seek(entry.offset + offset)
                while done < wanted:
                    # One call reads at most 2 GiB.
                    count = stream.readinto(view[done:])
                    if not count:
                        raise WeightsError(
                            f"{file} ends inside tensor {name!r}: it was cut off while it was "
                            "read; fetch the file again"
                        )
                    done += count
        except OSError as error:
            raise WeightsError(
                f"{file} cannot be read: {error.strerror or error}; fetch the file again"
            ) from error


def _check(
    shards: Shards,
    expected: Mapping[str, tuple[int, ...]],
    ignore: Sequence[str],
    quantization: BlockScales | None,
) -> None:
    present = shards.tensors
    scales = {name + SCALE_SUFFIX for name in expected} if quantization is not None else set()
    unused = [
        name
        for name in present
        if name not in expected
        and name not in scales
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)
    ]
    missing = [name for name in expected if name not in present]
    if missing:
        raise WeightsError(_missing(shards, missing, unused))
    for name, shape in expected.items():
        _check_entry(shards.folder, name, present[name][1], shape)
        if quantization is not None:
            _check_scales(shards, name, quantization)
    if unused:
        raise WeightsError(_unexpected(shards, unused))


def _check_entry(folder: Path, name: str, entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if not entry.is_float:
        raise WeightsError(
            f"tensor {name!r} of {folder} has dtype {entry.dtype}; weights quantised so are not "
            "supported, use a checkpoint in bfloat16, float16, float32 or FP8 with block scales"
        )
    if entry.shape != shape:
        raise WeightsError(
            f"tensor {name!r} of {folder} has shape {list(entry.shape)}, but config.json makes it "
            f"{list(shape)}; weights and config are of different models"
        )


def _check_scales(shards: Shards, name: str, quantization: BlockScales) -> None:
    """An FP8 tensor has scales of the right shape, any other has none."""
    entry = shards.tensors[name][1]
    found = shards.tensors.get(name + SCALE_SUFFIX)
    if entry.dtype != QUANTISED_DTYPE:
        if found is not None:
            raise WeightsError(
                f"tensor {name!r} of {shards.folder} has dtype {entry.dtype} and yet scales, "
                f"{name + SCALE_SUFFIX!r}; only {QUANTISED_DTYPE} tensors have them: fetch the "
                "checkpoint again"
            )
        return
    if found is None:
        raise WeightsError(
            f"tensor {name!r} of {shards.folder} is {QUANTISED_DTYPE} but its scales "
            f"{name + SCALE_SUFFIX!r} are missing; fetch the checkpoint again, or use one in "
            "bfloat16"
        )
    scale = found[1]
    is_matrix = len(entry.shape) > 1
    wanted = quantization.scale_shape(entry.shape) if is_matrix else ()
    if not is_matrix or scale.shape != wanted or scale.dtype not in SCALE_DTYPES:
        raise WeightsError(
            f"tensor {name + SCALE_SUFFIX!r} of {shards.folder} has shape {list(scale.shape)} and "
            f"dtype {scale.dtype}, but blocks of {quantization.rows} x {quantization.columns} of "
            f"{list(entry.shape)} make it {list(wanted)} in one of {', '.join(SCALE_DTYPES)}; "
            "weights and config are of different checkpoints"
        )


def _missing(shards: Shards, missing: list[str], unused: list[str]) -> str:
    message = f"{shards.folder} lacks {_count(missing)}: {_some(missing)}"
    close = difflib.get_close_matches(missing[0], unused, n=1, cutoff=0.7)
    if close:
        return f"{message}; it has {close[0]!r} instead: the names follow another convention"
    return f"{message}; fetch the checkpoint again, or check the config"


def _unexpected(shards: Shards, unused: list[str]) -> str:
    message = f"{shards.folder} has {_count(unused)} that the model has no use for: {_some(unused)}"
    if all(name.endswith(SCALE_SUFFIX) for name in unused):
        return (
            f"{message}; they are scales of FP8 weights, but config.json has no "
            "quantization_config: fetch the config of the same checkpoint"
        )
    return f"{message}; the config describes another model than the weights"


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
