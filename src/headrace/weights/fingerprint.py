"""Telling two checkpoints apart without reading all of them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from headrace.weights.shards import Shards

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 64


def weights_fingerprint(path: str | Path) -> str:
    """Name a folder's weights and config for keys of caches and reports.

    Covers config.json, every file's size and head, and 64 evenly spaced samples of 64 KiB of each
    file (all of a file up to 4 MiB). Training moves every tensor, so two checkpoints of one shape
    differ in any sample; it is no seal against tampering.

    Returns:
        32 hexadecimal digits.

    Raises:
        WeightsError: The folder's weights cannot be read.
    """
    shards = Shards.of_folder(path)
    digest = hashlib.sha256()
    config = shards.folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for file in shards.files:
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            _sample(digest, stream, size)
    return digest.hexdigest()[:32]


def _sample(digest: hashlib._Hash, stream: BinaryIO, size: int) -> None:
    # Past the start, where the header is, samples are spread so that the last ends at the end.
    stride = max(_SAMPLE_BYTES, (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
    for begin in range(0, size, stride):
        stream.seek(begin)
        digest.update(stream.read(_SAMPLE_BYTES))
