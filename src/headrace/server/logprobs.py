"""Log-probabilities as OpenAI sends them; JSON has no infinity, so -9999.0 stands for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.outputs import TokenLogprob
    from headrace.text import Tokenizer

FLOOR = -9999.0


def finite(logprob: float) -> float:
    """A number that JSON can carry; every other value is unchanged to the bit."""
    return logprob if math.isfinite(logprob) else FLOOR


class CompletionLogprobs:
    """`logprobs` of /v1/completions: lists with one entry per token.

    Args:
        top: Candidates to list beside the chosen token.
        tokenizer: For texts of tokens without candidates; None if the model has none.
    """

    def __init__(self, *, top: int, tokenizer: Tokenizer | None) -> None:
        self._top = top
        self._tokenizer = tokenizer
        self._offset = 0

    def of(
        self,
        token_ids: Sequence[int],
        candidates: Sequence[Mapping[int, TokenLogprob] | None],
    ) -> dict[str, list[Any]]:
        """Entries of the next tokens; offsets go on from the tokens before."""
        entries: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }
        for token_id, options in zip(token_ids, candidates, strict=False):
            chosen = options.get(token_id) if options else None
            text = chosen.decoded_token if chosen else self._text(token_id)
            entries["tokens"].append(text)
            entries["text_offset"].append(self._offset)
            self._offset += len(text)
            entries["token_logprobs"].append(finite(chosen.logprob) if chosen else None)
            entries["top_logprobs"].append(self._top_of(options, chosen) if options else None)
        return entries

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode_token(token_id) if self._tokenizer else ""

    def _top_of(
        self, options: Mapping[int, TokenLogprob], chosen: TokenLogprob | None
    ) -> dict[str, float]:
        best = sorted(options.values(), key=lambda option: -option.logprob)[: self._top]
        if chosen is not None and chosen not in best:
            best.append(chosen)
        # Backwards, so that of two tokens with one text the likelier one stays.
        return {option.decoded_token: finite(option.logprob) for option in reversed(best)}


def chat_logprobs(
    token_ids: Sequence[int],
    candidates: Sequence[Mapping[int, TokenLogprob]],
    *,
    top: int,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions."""

    def entry(token_id: int, option: TokenLogprob | None) -> dict[str, Any]:
        text = option.decoded_token if option else ""
        data = tokenizer.token_bytes(token_id) if tokenizer else text.encode()
        return {
            "token": text,
            "logprob": finite(option.logprob) if option else FLOOR,
            "bytes": list(data),
        }

    content = []
    for token_id, options in zip(token_ids, candidates, strict=False):
        best = sorted(options.items(), key=lambda item: -item[1].logprob)[:top]
        content.append({
            **entry(token_id, options.get(token_id)),
            "top_logprobs": [entry(other, option) for other, option in best],
        })
    return {"content": content, "refusal": None}
