"""Read character vectors out of an R package's lazy-load database, without R.

Such a file is a row of records, each a serialised object: four bytes of uncompressed length
(big-endian), then a zlib stream, or the letter Z and an LZMA stream. A character vector inside is
type 16 (STRSXP): a count, then for each string a type 9 header (CHARSXP), its length and its bytes.
"""

from __future__ import annotations

import lzma
import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_CHARSXP, _NA = 9, -1
_HEADER = 5


def records(path: Path) -> list[bytes]:
    """Decompress every record of an `Rdata.rdb` file."""
    data = path.read_bytes()
    found = []
    while len(data) > _HEADER:
        (length,) = struct.unpack(">I", data[:4])
        if data[4:5] == b"Z":
            # A raw LZMA2 stream carries no magic, so the filter is spelled out.
            stream = lzma.LZMADecompressor(
                format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6}]
            )
            record, data = stream.decompress(data[5:]), stream.unused_data
        else:
            inflate = zlib.decompressobj()
            record, data = inflate.decompress(data[4:]), inflate.unused_data
        if len(record) != length:
            raise ValueError(f"{path}: a record has {len(record)} bytes, its header says {length}")
        found.append(record)
    return found


def longest_strings(record: bytes) -> list[str]:
    """Give the character vector with the most text in a serialised object; NA becomes ""."""
    best: list[str] = []
    # The second form is a vector with attributes, such as names.
    for header in (b"\x00\x00\x00\x10", b"\x00\x00\x02\x10"):
        at = record.find(header)
        while 0 <= at <= len(record) - 8:
            strings = _strings_at(record, at + 4)
            if sum(map(len, strings)) > sum(map(len, best)):
                best = strings
            at = record.find(header, at + 4)
    return best


def _strings_at(record: bytes, at: int) -> list[str]:
    """Read a count and that many strings; nothing if they are not all there."""
    (count,) = struct.unpack(">i", record[at : at + 4])
    strings: list[str] = []
    at += 4
    while len(strings) < count and at + 8 <= len(record):
        kind, size = struct.unpack(">ii", record[at : at + 8])
        if kind & 0xFF != _CHARSXP or size < _NA:
            return []
        at += 8
        strings.append(record[at : at + max(size, 0)].decode("utf-8", "replace"))
        at += max(size, 0)
    return strings if len(strings) == count else []
