"""Fetch the demo model's prose again: `python -m tools.demo_model.prose OUT.xz`.

What it writes lies beside, in `prose/demo.txt.xz`, so that nothing need be fetched to train. The
sources are packages of Debian 12, fetched with `apt-get download`. All of the text may be
redistributed; `prose/NOTICE.md` and the model card name each source.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from . import rdb

DEMO_PROSE = Path(__file__).parent / "prose" / "demo.txt.xz"
TEXT_SHA256 = "4ebd58ca08a1ed03eee6c32579cad4dcbf6e60e2d741bde3966e63b31eb4199c"
"""Of the text, unpacked: other versions of the packages, or of the extraction, are noticed."""
PACKAGES = ("r-cran-janeaustenr", "r-cran-tokenizers", "wordnet-base", "dict-devil")
MARK = "\x1d"
"""Stands between sources in the file written."""


def _clean(text: str) -> str:
    text = text.replace("``", '"').replace("''", '"').replace("--", " - ").replace("_", "")
    return text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2014: " - "})


def _paragraphs(text: str, shortest: int) -> list[str]:
    joined = (" ".join(p.split()) for p in re.split(r"\n\s*\n", _clean(text)))
    return [p for p in joined if len(p) >= shortest and p.isascii() and not p.isupper()]


def austen(root: Path) -> list[str]:
    """Give the paragraphs of six novels."""
    (path,) = root.glob("**/janeaustenr/data/Rdata.rdb")
    found: list[str] = []
    for record in rdb.records(path):
        found += _paragraphs("\n".join(rdb.longest_strings(record)), 120)
    return found


def melville(root: Path) -> list[str]:
    """Give the paragraphs of Moby-Dick."""
    (path,) = root.glob("**/tokenizers/data/Rdata.rdb")
    (record,) = rdb.records(path)
    return _paragraphs("\n".join(rdb.longest_strings(record)), 120)


def wordnet(root: Path) -> list[str]:
    """Give the example sentences of WordNet, some twenty to a paragraph."""
    examples: list[str] = []
    for kind in ("noun", "verb", "adj", "adv"):
        (path,) = root.glob(f"**/wordnet/data.{kind}")
        for line in path.read_text(encoding="latin-1").splitlines():
            gloss = line.partition(" | ")[2]
            for quoted in re.findall(r'"([^"]{12,160})"', gloss):
                sentence = quoted.strip().rstrip(";,")
                if sentence.isascii() and " " in sentence:
                    ended = sentence if sentence[-1] in ".!?" else sentence + "."
                    examples.append(ended[0].upper() + ended[1:])
    return [" ".join(examples[i : i + 20]) for i in range(0, len(examples), 20)]


def devil(root: Path) -> list[str]:
    """Give the entries of The Devil's Dictionary."""
    (path,) = root.glob("**/dictd/devil.dict.dz")
    return _paragraphs(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"), 60)


def main() -> None:
    """Fetch, extract and write."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        fetch = ["/usr/bin/apt-get", "download", *PACKAGES]
        subprocess.run(fetch, cwd=root, check=True)  # noqa: S603 (fixed words)
        for package in root.glob("*.deb"):
            unpack = ["/usr/bin/dpkg-deb", "-x", package, root / package.stem]
            subprocess.run(unpack, check=True)  # noqa: S603 (our own download)
        parts = [source(root) for source in (austen, melville, wordnet, devil)]
    for part in parts:
        print(len(part), sum(map(len, part)), part[len(part) // 2][:90], file=sys.stderr)
    text = f"\n\n{MARK}\n\n".join("\n\n".join(part) for part in parts)
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != TEXT_SHA256:
        print(f"the text's SHA-256 is {found}, not {TEXT_SHA256}", file=sys.stderr)
    Path(sys.argv[1]).write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
