"""The bodies of requests. Names are OpenAI's and vLLM's.

Fields that no class lists are accepted and warned about once; fields that are listed only to be
refused would change the answer if they were ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field

# Fields of OpenAI's API that do not concern a local server or only label a request.
_LABELS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "verbosity", "prediction", "priority",
    "request_id", "return_tokens_as_token_ids", "spaces_between_special_tokens",
    "detokenize", "length_penalty", "early_stopping", "include_reasoning",
)
KNOWN_WITHOUT_EFFECT = frozenset(_LABELS)


class _FirstFault(FailFast):
    """Stop at the first wrong item: describing a million of them takes a minute.

    The library's own cannot stand in a union, whose parts are hashed.
    """

    def __hash__(self) -> int:
        return hash(type(self))


T = TypeVar("T")
Listed = Annotated[list[T], _FirstFault()]


def _first_fault(value: object) -> object:
    """Leave nothing of a dictionary with a fault but the first, for the same reason."""
    if isinstance(value, dict):
        for name, one in value.items():
            if type(one) not in (int, float):
                return {name: one}
    return value


class Body(BaseModel):
    """Any request: exact types, unknown fields kept aside."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=True)

    model: str | None = None


class StreamOptions(BaseModel):
    """How a stream is sent."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingBody(Body):
    """What completions and chats have in common."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_first_fault)] = None
    allowed_token_ids: Listed[int] | None = None
    bad_words: Listed[str] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    cache_checkpoint: int | Listed[int] | None = None
    cache_pin: str | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    json_schema: Any = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Any = Field(
        default=None,
        description="Text, token ids, or a list of either.",
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        },
    )
    echo: bool | None = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Listed[dict[str, Any]] = Field(
        min_length=1,
        json_schema_extra={
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {"role": {"type": "string"}},
            }
        },
    )
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Listed[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    documents: Listed[dict[str, Any]] | None = None
    modalities: Listed[str] | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or a conversation."""

    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Listed[dict[str, Any]] | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Listed[int]


class TraceBody(Body):
    """POST /trace."""

    steps: int = Field(default=50, ge=1, le=10_000)
    timeout_s: float = Field(default=30.0, gt=0, le=600)
