"""The text of a growing sequence: characters split over tokens, and stop strings.

Runs for every sequence in every step, so one call takes all new tokens of the sequence and the
common case does one table look-up per token.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
"""Prompt tokens that can still matter for the first characters after them."""
_MAX_UTF8 = 4


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found.

    Attributes:
        num_tokens: Tokens kept of those given to the `append` that found it, at least 1; the
            last of them completed the match.
        stop: The stop string.
    """

    num_tokens: int
    stop: str


class _Decoder(Protocol):
    """Turns tokens into characters that no later token can change."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...

    def save(self) -> object: ...

    def restore(self, saved: object) -> None: ...


class _ByteDecoder:
    """For tokens that stand for fixed bytes: those bytes through an incremental UTF-8 decoder."""

    def __init__(self, table: dict[int, bytes], prompt_token_ids: Sequence[int]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        context = b"".join([table[token] for token in prompt_token_ids[-_CONTEXT_TOKENS:]])
        # The prompt may end inside a character, which the first tokens then complete. Restarting
        # at a lead byte keeps the decoder from taking a cut-off head for the pending character.
        context = context[_last_lead_byte(context) :]
        self._utf8.decode(context)
        # What the prompt's own broken end looks like if the first tokens do not complete it.
        self._broken = self._utf8.getstate()[0].decode(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._table
        data = b"".join([table[token] for token in token_ids])
        return self._settle(self._utf8.decode(data)) if data else ""

    def flush(self) -> str:
        return self._settle(self._utf8.decode(b"", final=True))

    def save(self) -> object:
        return self._utf8.getstate(), self._broken

    def restore(self, saved: object) -> None:
        assert isinstance(saved, tuple)
        state, self._broken = saved
        self._utf8.setstate(state)

    def _settle(self, text: str) -> str:
        """Leave out the replacement characters that stand for the prompt's own broken end."""
        if self._broken and text:
            text = text.removeprefix(self._broken)
            self._broken = ""
        return text


def _last_lead_byte(data: bytes) -> int:
    """Index of the last byte that is not a UTF-8 continuation, looking back four bytes at most."""
    for back in range(1, min(len(data), _MAX_UTF8) + 1):
        if data[-back] & 0xC0 != 0x80:  # noqa: PLR2004 - 10xxxxxx marks a continuation
            return len(data) - back
    return max(0, len(data) - _MAX_UTF8)


class _WindowDecoder:
    """For vocabularies whose tokens depend on their neighbours: decode a short window again.

    What a window of the last tokens adds to the window before them is new text, unless it ends in
    a replacement character, which more tokens may complete.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool,
        shown: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids.difference(shown) if skip_special_tokens else ()
        self._settled = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._fresh: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._fresh.extend(token_ids)
        text = self._difference()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._settled, self._fresh = self._fresh, []
        return text

    def flush(self) -> str:
        text = self._difference()
        self._settled, self._fresh = self._fresh, []
        return text

    def save(self) -> object:
        return self._settled, list(self._fresh)

    def restore(self, saved: object) -> None:
        assert isinstance(saved, tuple)
        self._settled, self._fresh = saved

    def _difference(self) -> str:
        before, after = self._decode(self._settled), self._decode(self._settled + self._fresh)
        common = 0
        for old, new in zip(before, after, strict=False):
            if old != new:
                break
            common += 1
        return after[common:]

    def _decode(self, ids: list[int]) -> str:
        if self._skipped:
            ids = [token for token in ids if token not in self._skipped]
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class TextStream:
    """Text of one sequence, grown by tokens, cut at the first stop string.

    The deltas of a stream add up to the same text however tokens are grouped into calls. Of several
    stop strings the one that is complete first wins, the longest among those complete at the same
    character; so the result does not depend on the grouping either.

    A stop *token* is the engine's business: it ends the sequence and is not appended here, unless
    its text is wanted.

    Args:
        tokenizer: The model's tokenizer.
        prompt_token_ids: The prompt; its last tokens are context for the first characters.
        stop: Stop strings, none empty.
        include_stop_str_in_output: Deliver the stop string too.
        skip_special_tokens: Leave special tokens out of the text.
        shown_token_ids: Special tokens that are kept in it all the same.
        min_tokens: Stop strings completed by the first so many tokens are passed over.
    """

    __slots__ = (
        "_decoder", "_hold", "_include_stop", "_min_tokens", "_num_tokens", "_parts",
        "_stop", "_stopped", "_tail", "_tail_chars",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        shown_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._decoder: _Decoder
        if tokenizer.has_fixed_bytes:
            table = tokenizer.bytes_table(
                skip_special_tokens=skip_special_tokens, shown=shown_token_ids
            )
            self._decoder = _ByteDecoder(table, prompt_token_ids)
        else:
            self._decoder = _WindowDecoder(
                tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens,
                shown=shown_token_ids,
            )
        self._stop = tuple(stop)
        self._hold = frozenset(text[:size] for text in self._stop for size in range(1, len(text)))
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        # Characters before the new ones that a match may begin in.
        self._tail_chars = max((len(text) for text in self._stop), default=1) - 1
        self._tail = ""
        self._parts: list[str] = []
        self._stopped = False

    def append(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Take the sequence's next tokens.

        Returns:
            The match if a stop string is now complete; tokens after it are ignored, and nothing
            may be appended any more. None otherwise.
        """
        assert not self._stopped, "tokens appended after a stop string"
        if not self._stop:
            text = self._decoder.push(token_ids)
            if text:
                self._parts.append(text)
            return None
        return self._append_watching(token_ids)

    def take_delta(self, *, final: bool) -> str:
        """Take the text that is certain and was not taken before.

        Args:
            final: The sequence has ended: also give text held back for a possible stop string, and
                a replacement character for bytes that never became a character.
        """
        if final and not self._stopped:
            self._parts.append(self._decoder.flush())
        if not self._parts:
            return ""
        text = "".join(self._parts)
        self._parts.clear()
        if self._hold and not final and not self._stopped:
            held = self._num_held(text)
            if held:
                self._parts.append(text[-held:])
                return text[:-held]
        return text

    def _num_held(self, text: str) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        for size in range(min(self._tail_chars, len(text)), 0, -1):
            if text[-size:] in self._hold:
                return size
        return 0

    def _append_watching(self, token_ids: Sequence[int]) -> StopMatch | None:
        if self._num_tokens < self._min_tokens:
            return self._append_singly(token_ids)
        saved = self._decoder.save() if len(token_ids) > 1 else None
        text = self._decoder.push(token_ids)
        found = self._find(text)
        if found is None:
            self._num_tokens += len(token_ids)
            self._accept(text)
            return None
        if saved is None:
            return self._finish(text, found, 1)
        # Rare: once in the life of a sequence. Find out which token completed the match.
        self._decoder.restore(saved)
        return self._append_singly(token_ids)

    def _append_singly(self, token_ids: Sequence[int]) -> StopMatch | None:
        for place, token in enumerate(token_ids):
            text = self._decoder.push((token,))
            self._num_tokens += 1
            found = self._find(text) if self._num_tokens > self._min_tokens else None
            if found is not None:
                return self._finish(text, found, place + 1)
            self._accept(text)
        return None

    def _accept(self, text: str) -> None:
        if text:
            self._parts.append(text)
            if self._tail_chars:
                self._tail = (self._tail + text)[-self._tail_chars :]

    def _find(self, text: str) -> tuple[int, int, str] | None:
        """Find the stop string complete first.

        Returns:
            Start and end of the match, counted from the beginning of `text` (the start may be
            negative), and the stop string.
        """
        if not text:
            return None
        window = self._tail + text
        known = len(self._tail)
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            # Matches that end before the new text were passed over because of min_tokens.
            start = window.find(stop, max(0, known - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, start) < (best[1] + known, best[0] + known):
                best = start - known, end - known, stop
        return best

    def _finish(self, text: str, found: tuple[int, int, str], num_tokens: int) -> StopMatch:
        start, end, stop = found
        whole = "".join(self._parts) + text
        keep = len(whole) - len(text) + (end if self._include_stop else start)
        # A match cannot begin in text already taken: take_delta holds every beginning of a stop.
        # Only where min_tokens let a stop pass may part of it be gone.
        self._parts = [whole[: max(0, keep)]]
        self._stopped = True
        return StopMatch(num_tokens, stop)
