"""Answers that are lists of items: reasoning, text and calls, one after the other.

The Responses API and Anthropic's Messages API both tell an answer so; what an item's events look
like is theirs.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.server.sse import event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.dialects import Call, OutputParser, Piece
    from headrace.outputs import CompletionOutput, RequestOutput
    from headrace.server.forms import OutputForm
    from headrace.server.generation import Work
    from headrace.text import Tokenizer


@dataclass(slots=True, kw_only=True)
class Item:
    """One part of an answer.

    Attributes:
        kind: reasoning, content or call.
        index: Its place in the answer.
        name: Unique name, told to clients.
        text: Of reasoning and content, as far as it came; of a call its arguments.
        call: The call, which comes in one piece.
    """

    kind: str
    index: int
    text: str = ""
    call: Call | None = None
    name: str = field(default_factory=lambda: uuid.uuid4().hex)


class ItemAnswer(ABC):
    """One answer of one choice.

    Args:
        request_id: Shown to the client.
        model: Name shown to the client.
        work: The prompt.
        form: How the output is written.
        tokenizer: The model's.

    Attributes:
        request_id: As given.
        items: What came so far.
        last: The choice's last output, or None.
    """

    def __init__(
        self, *, request_id: str, model: str, work: Work, form: OutputForm, tokenizer: Tokenizer
    ) -> None:
        self.request_id = request_id
        self._model = model
        self._work = work
        self._parser: OutputParser = form.parser()
        self._closes_reasoning = tokenizer.token_id("</think>")
        self.items: list[Item] = []
        self.last: CompletionOutput | None = None
        self._open: Item | None = None
        self._begun = False
        self._num_tokens = 0
        self._num_reasoning: int | None = None
        self._num_cached = 0

    # Streamed ----------------------------------------------------------------------------------

    def chunks(self, place: int, output: RequestOutput) -> bytes:
        """Events for one output of a stream; may be none.

        Args:
            place: 0, as there is one prompt.
            output: What is new.
        """
        assert place == 0, f"{place=} of an answer to one prompt"
        self._num_cached = output.num_cached_tokens
        events = b""
        if not self._begun:
            self._begun = True
            events = self._begin_events()
        (choice,) = output.outputs
        if self.last is not None and self.last.finish_reason is not None:
            return events
        self._count(choice)
        for piece in self._pieces(choice):
            events += self._piece_events(piece)
        if choice.finish_reason is not None:
            events += self._close_events()
        return events

    def end(self) -> bytes:
        """Events that end a stream."""
        return self._end_events()

    def error(self, body: dict[str, Any]) -> bytes:
        """The last event of a stream that fails."""
        return event(body)

    # In one piece --------------------------------------------------------------------------------

    def whole(self, outputs: Sequence[tuple[int, RequestOutput]]) -> dict[str, Any]:
        """The answer in one piece.

        Args:
            outputs: The prompt's outputs; the last one has everything.
        """
        _, output = outputs[-1]
        self._num_cached = output.num_cached_tokens
        (choice,) = output.outputs
        self._count(choice)
        for piece in self._pieces(choice):
            self._take(piece)
        self._open = None
        return self._body()

    # Shared --------------------------------------------------------------------------------------

    @property
    def _has_calls(self) -> bool:
        return any(item.kind == "call" for item in self.items)

    @property
    def _num_reasoning_tokens(self) -> int:
        if not any(item.kind == "reasoning" for item in self.items):
            return 0
        return self._num_tokens if self._num_reasoning is None else self._num_reasoning

    def _count(self, choice: CompletionOutput) -> None:
        self.last = choice
        if self._num_reasoning is None and self._closes_reasoning in choice.token_ids:
            assert self._closes_reasoning is not None
            end = choice.token_ids.index(self._closes_reasoning) + 1
            self._num_reasoning = self._num_tokens + end
        self._num_tokens += len(choice.token_ids)

    def _pieces(self, choice: CompletionOutput) -> list[Piece]:
        pieces = self._parser.feed(choice.text)
        if choice.finish_reason is not None:
            pieces += self._parser.finish()
        return pieces

    def _take(self, piece: Piece) -> Item:
        """Add a piece to the item it belongs to, which may be a new one."""
        item = self._open
        if item is None or item.kind != piece.kind or piece.call is not None:
            item = Item(kind=piece.kind, index=len(self.items), call=piece.call)
            self.items.append(item)
            self._open = item
        item.text += piece.text if piece.call is None else piece.call.arguments
        return item

    def _piece_events(self, piece: Piece) -> bytes:
        before = self._open
        item = self._take(piece)
        events = b""
        if item is not before:
            if before is not None:
                events += self._item_end(before)
            events += self._item_begin(item)
        text = piece.text if piece.call is None else piece.call.arguments
        return events + self._item_text(item, text)

    def _close_events(self) -> bytes:
        item, self._open = self._open, None
        return b"" if item is None else self._item_end(item)

    @abstractmethod
    def _begin_events(self) -> bytes: ...

    @abstractmethod
    def _item_begin(self, item: Item) -> bytes: ...

    @abstractmethod
    def _item_text(self, item: Item, text: str) -> bytes: ...

    @abstractmethod
    def _item_end(self, item: Item) -> bytes: ...

    @abstractmethod
    def _end_events(self) -> bytes: ...

    @abstractmethod
    def _body(self) -> dict[str, Any]: ...
