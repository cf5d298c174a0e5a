"""Text of one output, as it comes, to reasoning, content and calls.

However the text is cut into pieces, what comes out adds up to the same: text is held back while it
may be the beginning of a mark, and blanks while it is open whether they belong to anything. A call
is given out when it is complete and valid; what is no call becomes content, marks included.

Blanks between reasoning, content and calls belong to neither. Text without any of them is passed
on as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

from headrace.dialects.formats import Unread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.dialects.formats import ToolFormat
    from headrace.dialects.tools import Call, Tool

_THINK_OPENS, _THINK_CLOSES = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that is certain.

    Attributes:
        kind: What it belongs to.
        text: Of reasoning or content.
        call: The call.
    """

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: Call | None = None


class _State(Enum):
    BEGINNING = 1
    REASONING = 2
    CONTENT = 3
    CALL = 4


class OutputParser:
    """Reads one output.

    Args:
        has_reasoning: Look for reasoning at the beginning.
        begins_in_reasoning: The prompt has opened it.
        format_: How calls are written; None to leave them as text.
        tools: Functions of the request.
        max_calls: Calls after these are left out.
    """

    def __init__(
        self,
        *,
        has_reasoning: bool = False,
        begins_in_reasoning: bool = False,
        format_: ToolFormat | None = None,
        tools: Sequence[Tool] = (),
        max_calls: int | None = None,
    ) -> None:
        self._format = format_
        self._tools = tools
        self._max_calls = max_calls
        self._buffer = ""
        self._state = _State.CONTENT
        if has_reasoning:
            self._state = _State.REASONING if begins_in_reasoning else _State.BEGINNING
        self._may_reopen = begins_in_reasoning  # The output may repeat the prompt's mark.
        self._blanks = ""
        self._drops_blanks = self._state is _State.REASONING
        self._search = 0
        self._pieces: list[Piece] = []
        self.num_calls = 0

    @property
    def is_plain(self) -> bool:
        """Whether everything from here on is content as it stands."""
        return self._state is _State.CONTENT and self._format is None and not self._drops_blanks

    def feed(self, text: str) -> list[Piece]:
        """Take more text in; returns what is certain now."""
        self._buffer += text
        return self._run(is_end=False)

    def finish(self) -> list[Piece]:
        """The output has ended: returns what was held back."""
        pieces = self._run(is_end=True)
        assert not self._buffer, f"{self._buffer=} is left in {self._state}"
        return pieces

    def _run(self, *, is_end: bool) -> list[Piece]:
        step = {
            _State.BEGINNING: self._begin,
            _State.REASONING: self._reason,
            _State.CONTENT: self._content,
            _State.CALL: self._call,
        }
        while step[self._state](is_end=is_end):
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    # Each returns whether the state has changed, so that the rest must be looked at again --------

    def _begin(self, *, is_end: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(_THINK_OPENS):
            self._buffer = text[len(_THINK_OPENS) :]
            self._enter(_State.REASONING)
            return True
        if _THINK_OPENS.startswith(text) and not is_end:
            return False
        self._state = _State.CONTENT
        return True

    def _reason(self, *, is_end: bool) -> bool:
        if self._may_reopen:
            text = self._buffer.lstrip()
            if not is_end and _THINK_OPENS.startswith(text):
                return False
            self._may_reopen = False
            if text.startswith(_THINK_OPENS):
                self._buffer = text[len(_THINK_OPENS) :]
        found = self._take_until((_THINK_CLOSES,), "reasoning", is_end=is_end)
        if found is None:
            return False
        self._blanks = ""
        self._enter(_State.CONTENT)
        return True

    def _content(self, *, is_end: bool) -> bool:
        if self._format is None:
            self._put("content", self._buffer, holds=False)
            self._buffer = ""
            return False
        found = self._take_until((self._format.opens,), "content", is_end=is_end)
        if found is None:
            if is_end and not self._drops_blanks:
                self._put("content", "", holds=False)
            return False
        self._state = _State.CALL
        self._search = 0
        return True

    def _call(self, *, is_end: bool) -> bool:
        assert self._format is not None
        closes = self._format.closes
        end = -1 if closes is None else self._buffer.find(closes, self._search)
        while end >= 0:
            assert closes is not None
            read = self._format.read(self._buffer[:end], self._tools)
            if read is not Unread.OPEN:
                self._settle(read, end, closes)
                return True
            self._search = end + 1
            end = self._buffer.find(closes, self._search)
        if is_end:
            # Ended without the closing mark: good enough if what is there is a call.
            self._settle(self._format.read(self._buffer, self._tools), len(self._buffer), "")
            return True
        if closes is not None:
            self._search = max(self._search, len(self._buffer) - len(closes) + 1)
        return False

    def _settle(self, read: list[Call] | Unread, end: int, closes: str) -> None:
        """Give out calls, or their text as content."""
        assert self._format is not None
        rest = self._buffer[end + len(closes) :]
        if isinstance(read, Unread):
            raw = self._format.opens + self._buffer[:end] + closes
            self._state = _State.CONTENT
            self._drops_blanks = False
            self._put("content", raw)
        else:
            for call in read:
                if self._max_calls is None or self.num_calls < self._max_calls:
                    self.num_calls += 1
                    self._pieces.append(Piece("call", call=call))
            self._blanks = ""
            self._enter(_State.CONTENT)
        self._buffer = rest

    def _enter(self, state: _State) -> None:
        """Go to a state whose leading blanks belong to nothing."""
        self._state = state
        self._drops_blanks = True

    def _take_until(
        self, marks: tuple[str, ...], kind: Literal["reasoning", "content"], *, is_end: bool
    ) -> str | None:
        """Give out text up to the first mark, which is taken too; None if there is none yet."""
        found = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._put(kind, self._buffer[:at])
            self._buffer = self._buffer[at + len(mark) :]
            return mark
        held = 0 if is_end else max(_num_held(self._buffer, mark) for mark in marks)
        cut = len(self._buffer) - held
        self._put(kind, self._buffer[:cut])
        self._buffer = self._buffer[cut:]
        return None

    def _put(self, kind: Literal["reasoning", "content"], text: str, *, holds: bool = True) -> None:
        """Give out text, without the blanks that may turn out to belong to nothing."""
        if self._drops_blanks:
            text = text.lstrip()
            if not text:
                return
            self._drops_blanks = False
        text = self._blanks + text
        self._blanks = ""
        if holds:
            body = text.rstrip()
            self._blanks = text[len(body) :]
            text = body
        if text:
            self._pieces.append(Piece(kind, text))


def _num_held(text: str, mark: str) -> int:
    """Characters at the end that may be the beginning of a mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0
