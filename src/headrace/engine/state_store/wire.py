"""A piece as bytes: how it lies in a file and travels between machines.

    8 bytes    magic and version of the format, "HRPIECE1"
    32 bytes   BLAKE2b-256 of everything behind them
    8 bytes    length of the header, little endian
    header     JSON, padded with spaces: tensors by name, and `__metadata__`
    data       the tensors, without gaps

From byte 40 on it is a safetensors file. Heads are all there, however many devices share a layer.
The header follows from what is asked for, so it is compared, not parsed: one that differs under a
right digest is a whole piece of something else. Several pieces together are an *archive*: magic
"HRPIECES", then each piece behind its length (8 bytes, little endian).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.worker.step import PieceKind
    from headrace.worker.transfers import PieceLayout, PieceLayouts

MAGIC = b"HRPIECE1"
ARCHIVE_MAGIC = b"HRPIECES"
_DIGEST_BYTES = 32
_BODY = len(MAGIC) + _DIGEST_BYTES
_LENGTH_BYTES = 8
_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
}  # fmt: skip

Fault = Literal["truncated", "damaged", "version", "foreign"]
"""What may be wrong: it ends early; its digest is not right; another version of the format wrote
it; it is whole, and a piece of other weights, settings or tokens."""


@dataclass(frozen=True, slots=True)
class BadPieceError(Exception):
    """Bytes that are not the piece that was asked for."""

    fault: Fault


class Wire:
    """Writes and reads the pieces of one context.

    Args:
        context: What determines their bytes beside the tokens, in hexadecimal.
        layouts: Their tensors.
    """

    def __init__(self, context: str, layouts: PieceLayouts) -> None:
        self.context = context
        self._layouts: dict[PieceKind, PieceLayout] = {"kv": layouts.kv, "state": layouts.state}

    def num_bytes(self, kind: PieceKind) -> int:
        """Of a piece's data."""
        return self._layouts[kind].num_bytes

    def encode(self, kind: PieceKind, key: bytes, data: np.ndarray) -> tuple[bytes, np.ndarray]:
        """Make a piece.

        Args:
            kind: What it is.
            key: The prefix cache's.
            data: Its tensors, [num_bytes] u8.

        Returns:
            Everything before the data, and the data.
        """
        header = self._header(kind, key)
        digest = blake2b(header, digest_size=_DIGEST_BYTES)
        digest.update(data.data)
        return MAGIC + digest.digest() + header, data

    def decode(self, kind: PieceKind, key: bytes, raw: bytes | memoryview) -> np.ndarray:
        """Check a piece.

        Returns:
            Its data, [num_bytes] u8, read-only, a view of `raw`.

        Raises:
            BadPieceError: It is not the piece of this kind and key, unharmed.
        """
        self._check_digest(raw)
        header = self._header(kind, key)
        begin = _BODY + len(header)
        if bytes(raw[_BODY:begin]) != header or len(raw) != begin + self.num_bytes(kind):
            raise BadPieceError("foreign")
        return np.frombuffer(raw, dtype=np.uint8, offset=begin)

    def name_of(self, raw: bytes | memoryview) -> tuple[PieceKind, bytes]:
        """Kind and key that a piece says it has; `decode` proves them.

        Raises:
            BadPieceError: It is damaged, or says nothing that is understood.
        """
        self._check_digest(raw)
        size = int.from_bytes(raw[_BODY : _BODY + _LENGTH_BYTES], "little")
        try:
            header = json.loads(bytes(raw[_BODY + _LENGTH_BYTES : _BODY + _LENGTH_BYTES + size]))
            metadata = header["__metadata__"]
            kind, key = metadata["kind"], bytes.fromhex(metadata["key"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadPieceError("foreign") from error
        if kind not in self._layouts:
            raise BadPieceError("foreign")
        return kind, key

    def _check_digest(self, raw: bytes | memoryview) -> None:
        if len(raw) < _BODY + _LENGTH_BYTES:
            raise BadPieceError("truncated")
        if bytes(raw[: len(MAGIC)]) != MAGIC:
            is_ours = bytes(raw[: len(MAGIC) - 1]) == MAGIC[:-1]
            raise BadPieceError("version" if is_ours else "damaged")
        digest = blake2b(memoryview(raw)[_BODY:], digest_size=_DIGEST_BYTES).digest()
        if digest != bytes(raw[len(MAGIC) : _BODY]):
            raise BadPieceError("damaged")

    def _header(self, kind: PieceKind, key: bytes) -> bytes:
        """Length and JSON, so long that the data begins at a multiple of 64 bytes of the piece."""
        entries: dict[str, object] = {
            "__metadata__": {"context": self.context, "key": key.hex(), "kind": kind}
        }
        for part in self._layouts[kind].tensors:
            entries[part.name] = {
                "dtype": _DTYPES[part.dtype],
                "shape": list(part.shape),
                "data_offsets": [part.offset, part.offset + part.num_bytes],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(_BODY + _LENGTH_BYTES + len(text)) % 64)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def join(pieces: Iterable[tuple[bytes, np.ndarray]]) -> bytes:
    """Make an archive of pieces as `Wire.encode` gives them."""
    parts = [ARCHIVE_MAGIC]
    for head, data in pieces:
        parts += [(len(head) + len(data)).to_bytes(_LENGTH_BYTES, "little"), head, data.tobytes()]
    return b"".join(parts)


def split(archive: bytes) -> Iterator[memoryview]:
    """Yield the pieces of an archive, unchecked; what is cut off at its end comes as it is.

    Raises:
        BadPieceError: It is none.
    """
    if not archive.startswith(ARCHIVE_MAGIC):
        raise BadPieceError("damaged")
    at, whole = len(ARCHIVE_MAGIC), memoryview(archive)
    while at < len(archive):
        size = int.from_bytes(whole[at : at + _LENGTH_BYTES], "little")
        at += _LENGTH_BYTES
        yield whole[at : at + size]
        at += size
