"""What a request gets back; the names are vLLM's, so that code written for it goes on working."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]

#: Why tokens of a prompt were computed instead of taken from the prefix cache.
MissReason = Literal[
    "below_unit", "no_checkpoint", "evicted", "salt", "in_flight", "last_token",
    "prompt_logprobs", "disabled", "generated_checkpoint", "damaged",
]


@dataclass(slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one candidate token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a request.

    Attributes:
        index: Which of the request's n completions.
        text: Text so far, or the new part with OutputKind.DELTA.
        token_ids: Tokens so far, or the new ones with OutputKind.DELTA.
        logprobs: Per token, candidate id to log-probability, if asked for.
        finish_reason: None while running.
        stop_reason: The stop string or token id that ended it, else None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, TokenLogprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Times in seconds on time.monotonic()'s clock; counts over the whole request."""

    arrival_time_s: float = 0.0
    first_scheduled_time_s: float | None = None
    first_token_time_s: float | None = None
    finished_time_s: float | None = None
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The state of one request, as yielded to its owner.

    Attributes:
        num_cached_tokens: Prompt tokens taken from the prefix cache.
        missed_tokens: Reason to number of prompt tokens that were computed; with
            num_cached_tokens they add up to the prompt's length. Filled once scheduled.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    missed_tokens: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
