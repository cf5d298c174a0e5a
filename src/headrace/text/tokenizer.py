"""The tokenizer of a model folder, on the `tokenizers` library."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from headrace.errors import ModelError, RequestError
from headrace.text.files import read_json_object_if_present

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MAX_UTF8 = 4


def _byte_alphabet() -> dict[str, int]:
    """Map the printable characters of byte-level vocabularies to the bytes they stand for.

    Printable Latin-1 stands for itself; the others are numbered from U+0100 up.

    Source: GPT-2's encoder, which all byte-level vocabularies follow.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update((chr(0x100 + place), byte) for place, byte in enumerate(rest))
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    except KeyError:
        # An added token is written as it is, not in the byte alphabet.
        return token.encode()


def _fixed_bytes_rule(backend: tokenizers.Tokenizer) -> Callable[[str], bytes] | None:
    """How a token's name becomes bytes, or None where that depends on its neighbours."""
    decoder = backend.decoder
    if decoder is None:
        return None
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    parts: list[dict[str, Any]] = state.get("decoders", [state])
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes
    if "ByteFallback" not in kinds:
        return None
    replacements: list[tuple[str, str]] = []
    for part in parts:
        if part["type"] == "Replace" and "String" in part["pattern"]:
            replacements.append((part["pattern"]["String"], part["content"]))
        elif part["type"] == "Strip" and part["stop"] == 0:
            # Concerns the first character of the whole text, which is the prompt's.
            continue
        elif part["type"] not in ("ByteFallback", "Fuse"):
            return None
    return functools.partial(_byte_fallback_bytes, tuple(replacements))


def _byte_fallback_bytes(replacements: tuple[tuple[str, str], ...], token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes.fromhex(byte[1])
    for old, new in replacements:
        token = token.replace(old, new)
    return token.encode()


class _ByteTable(dict[int, bytes]):
    """Token id to the bytes it adds to the text, filled when an id is first seen."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        rule: Callable[[str], bytes],
        skipped: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._backend = backend
        self._rule = rule
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
        # Ids without a token are the padding of the model's vocabulary; they have no text.
        value = self._rule(token) if token else b""
        self[token_id] = value
        return value


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        bos_token_id: Id that starts a text, or None.
        eos_token_id: Id that ends a text, or None. Generation stops at `GenerationDefaults`' ids.
        vocab_size: Tokens known here; the model's own vocabulary may be padded beyond it.
        special_ids: Ids whose text `skip_special_tokens` leaves out.
        special_tokens: Texts by the names chat templates use, such as `bos_token`.
        has_fixed_bytes: Whether every token stands for the same bytes, whatever its neighbours.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, config: dict[str, Any] | None = None
    ) -> None:
        config = config or {}
        backend.no_truncation()
        backend.no_padding()
        _add_tokens_of_config(backend, config)
        self._backend = backend
        self.special_tokens = _named_special_tokens(config)
        self.bos_token_id = self._id_of(self.special_tokens.get("bos_token"))
        self.eos_token_id = self._id_of(self.special_tokens.get("eos_token"))
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        rule = _fixed_bytes_rule(backend)
        self.has_fixed_bytes = rule is not None
        self._adds_bos = config.get("add_bos_token")
        self._text_bytes = _ByteTable(backend, rule, self.special_ids) if rule else {}
        self._all_bytes = _ByteTable(backend, rule) if rule else {}
        self._rule = rule
        self._tables: dict[frozenset[int], dict[int, bytes]] = {}
        self._max_token_bytes: int | None = None

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read `tokenizer.json` with `tokenizer_config.json` and `special_tokens_map.json`.

        Raises:
            ModelError: There is no tokenizer.json, or a file is damaged.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json; pass token ids instead of text, "
                "or name a folder that has one with --tokenizer"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{file} cannot be read: {error}; fetch the file again") from error
        config = read_json_object_if_present(folder / "special_tokens_map.json")
        config.update(
            (key, value)
            for key, value in read_json_object_if_present(folder / "tokenizer_config.json").items()
            if value is not None or key not in config
        )
        return cls(backend, config=config)

    @classmethod
    def from_folder_if_present(cls, path: str | Path) -> Tokenizer | None:
        """Read the folder's tokenizer, or return None where it has none: token ids still work.

        Raises:
            ModelError: There is one, and it is damaged.
        """
        return cls.from_folder(path) if (Path(path) / "tokenizer.json").is_file() else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenise one text.

        Other Python threads run meanwhile: the batch call of the library lets go of the
        interpreter lock, the single one does not.

        Args:
            text: The text; special tokens written in it are recognised.
            add_special_tokens: Add what the tokenizer puts around a text, such as BOS; off for
                rendered chats, whose template wrote them. BOS is never doubled.

        Raises:
            RequestError: Some of the text is no character, such as a byte that was no UTF-8.
        """
        try:
            encoding = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )[0]
        except TypeError:
            # The library's answer to half of a surrogate pair, which is also what the command line
            # makes of bytes that it cannot read.
            wrong = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
            if wrong is None:
                raise
            raise RequestError(
                f"the text has U+{ord(wrong):04X} at {text.index(wrong)}, half of a surrogate "
                "pair, which is no character; send UTF-8"
            ) from None
        ids: list[int] = encoding.ids
        bos = self.bos_token_id
        if not add_special_tokens or bos is None:
            return ids
        if self._adds_bos and ids[:1] != [bos]:
            return [bos, *ids]
        # Doubled: the text began with BOS itself. Unwanted: the config overrules tokenizer.json.
        is_doubled = ids[:2] == [bos, bos]
        is_unwanted = self._adds_bos is False and ids[:1] == [bos] and not self._starts_bos(text)
        return ids[1:] if is_doubled or is_unwanted else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids without a token have none."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """Text of one token by itself, special ones included, as shown beside log-probabilities."""
        if self.has_fixed_bytes:
            return self._all_bytes[token_id].decode(errors="replace")
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token adds, special ones included."""
        if self.has_fixed_bytes:
            return self._all_bytes[token_id]
        return self.decode_token(token_id).encode()

    def bytes_table(
        self, *, skip_special_tokens: bool, shown: Sequence[int] = ()
    ) -> dict[int, bytes]:
        """Table from token id to its bytes in the text; only where they are fixed.

        It fills itself: look up with `[]`, never with `get` or `in`.

        Args:
            skip_special_tokens: Special tokens have no bytes.
            shown: Special tokens that have theirs all the same.
        """
        assert self.has_fixed_bytes, "tokens of this vocabulary depend on their neighbours"
        assert self._rule is not None
        if not skip_special_tokens:
            return self._all_bytes
        kept = self.special_ids.intersection(shown)
        if not kept:
            return self._text_bytes
        if kept not in self._tables:
            self._tables[kept] = _ByteTable(self._backend, self._rule, self.special_ids - kept)
        return self._tables[kept]

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens beside the trained vocabulary, special or not: text to id."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    @property
    def max_token_id(self) -> int:
        """Largest id that has a token."""
        return max(self._backend.get_vocab(with_added_tokens=True).values())

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def min_tokens_of(self, num_bytes: int) -> int:
        """Fewest tokens that a text of so many UTF-8 bytes can have.

        Tells a hopeless prompt from its size alone, before it is tokenised. A normaliser may
        shorten a text, so half is taken off where there is one. The bound is loose; it is for sizes
        that no limit would let through.
        """
        if self._max_token_bytes is None:
            # A name has at least one character per byte (byte-level) or per four bytes.
            vocab = self._backend.get_vocab(with_added_tokens=True)
            self._max_token_bytes = max(map(len, vocab), default=1) * _MAX_UTF8
            if self._backend.normalizer is not None:
                self._max_token_bytes *= 2
        return num_bytes // max(1, self._max_token_bytes)

    def to_json(self) -> str:
        """The tokenizer.json text this was read from."""
        return self._backend.to_str()

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def _starts_bos(self, text: str) -> bool:
        bos = self.special_tokens.get("bos_token")
        return bos is not None and text.startswith(bos)


def _token_text(value: object) -> str | None:
    """A special token stands in the config as text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _named_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {}
    for name, value in config.items():
        text = _token_text(value) if name.endswith("_token") else None
        if text is not None:
            named[name] = text
    return named


_ID_DIGITS = 10
"""Of a token id at most."""


def _add_tokens_of_config(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add tokens that stand in tokenizer_config.json only, under the ids it names."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    for key in listed:
        if not key.isdecimal() or len(key) > _ID_DIGITS:
            raise ModelError(
                f"tokenizer_config.json: added_tokens_decoder has the key {key[:40]!r}, which is "
                "no token id; fetch the file again"
            )
    for key, value in sorted(listed.items(), key=lambda item: int(item[0])):
        content = _token_text(value)
        flags = value if isinstance(value, dict) else {}
        if content is None or backend.token_to_id(content) is not None:
            continue
        token = tokenizers.AddedToken(
            content,
            lstrip=bool(flags.get("lstrip")),
            rstrip=bool(flags.get("rstrip")),
            single_word=bool(flags.get("single_word")),
            normalized=bool(flags.get("normalized")),
            special=bool(flags.get("special")),
        )
        backend.add_tokens([token])
        if backend.token_to_id(content) != int(key):
            raise ModelError(
                f"tokenizer_config.json gives {content!r} the id {key}, but tokenizer.json leaves "
                f"{backend.token_to_id(content)} for it; fetch both files from one revision"
            )
