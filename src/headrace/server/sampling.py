"""From a request's fields to sampling parameters, and refusals of what is not there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError
from headrace.sampling_params import (
    MAX_BIASES,
    MAX_COMPLETIONS,
    MAX_LOGPROBS,
    OutputKind,
    SamplingParams,
)
from headrace.server.form_fields import read_form

if TYPE_CHECKING:
    from headrace.server.forms import OutputForm
    from headrace.server.protocol import ChatBody, CompletionBody, SamplingBody
    from headrace.structured_outputs import StructuredOutputsParams
    from headrace.text import GenerationDefaults

_DEFAULT_COMPLETION_TOKENS = 16
_PASSED_ON = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens",
    "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "allowed_token_ids", "bad_words", "skip_special_tokens", "include_stop_str_in_output",
    "cache_salt", "cache_checkpoint", "cache_pin",
)
_MAX_BIAS = 100.0


def completion_params(body: CompletionBody, defaults: GenerationDefaults) -> SamplingParams:
    """Sampling parameters of a completions request; `max_tokens` is not yet cut to the context.

    Raises:
        RequestError: A value is out of range or asks for what the server does not do.
    """
    if body.suffix:
        raise RequestError("suffix is not supported; leave it out", param="suffix")
    num_samples = _num_samples(body)
    max_tokens = body.max_tokens
    if max_tokens == 0 and body.echo:
        # Scoring a prompt: the engine takes at least one step, its token is not returned.
        max_tokens = 1
    if max_tokens is None and defaults.max_new_tokens is None:
        max_tokens = _DEFAULT_COMPLETION_TOKENS
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = body.logprobs
    params = _params(
        body, defaults, max_tokens=max_tokens, logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs, structure=read_form(body),
    )
    if num_samples == params.n:
        return params
    # The best are found by the log-probabilities of their tokens, asked for or not.
    return dataclasses.replace(params, n=num_samples, logprobs=params.logprobs or 0)


def chat_params(body: ChatBody, defaults: GenerationDefaults) -> SamplingParams:
    """Sampling parameters of a chat request; `max_tokens` is not yet cut to the context.

    Raises:
        RequestError: A value is out of range or asks for what the server does not do.
    """
    _refuse_functions(body)
    if body.chat_template is not None:
        raise RequestError(
            "chat_template in a request is not accepted; put the template into the model's folder",
            param="chat_template",
        )
    begins_new = "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt
    if body.continue_final_message and begins_new:
        raise RequestError(
            "continue_final_message goes on with the last message and add_generation_prompt begins "
            "a new one; send one of them", param="continue_final_message",
        )
    logprobs = None
    if body.logprobs:
        logprobs = body.top_logprobs or 0
        if not 0 <= logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be in 0..{MAX_LOGPROBS}, got {logprobs}", param="top_logprobs"
            )
    elif body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    return _params(body, defaults, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=None)


def _num_samples(body: CompletionBody) -> int:
    """How many completions to draw; the best n of them are returned."""
    n = body.n or 1
    if body.best_of is None:
        return n
    if body.best_of < n:
        raise RequestError(
            f"best_of is {body.best_of} but n is {n}; best_of must be at least n, or left out",
            param="best_of",
        )
    if body.best_of > MAX_COMPLETIONS:
        raise RequestError(
            f"best_of must be at most {MAX_COMPLETIONS}, got {body.best_of}", param="best_of"
        )
    if body.stream and body.best_of > n:
        raise RequestError(
            f"best_of is {body.best_of} and n is {n}: the best are known at the end, so they "
            "cannot be streamed; leave out stream or best_of", param="best_of",
        )
    return body.best_of


def with_form(params: SamplingParams, form: OutputForm) -> SamplingParams:
    """Let an output have its form, and the marks that its parser needs.

    Raises:
        RequestError: The form does not go with other parameters.
    """
    if form.structure is None and not form.shown_token_ids:
        return params
    return dataclasses.replace(
        params, structured_outputs=form.structure, shown_token_ids=form.shown_token_ids
    )


def cut_to_context(params: SamplingParams, *, num_prompt_tokens: int, limit: int) -> SamplingParams:
    """Let no request ask for more tokens than the context has room for."""
    room = limit - num_prompt_tokens
    assert room >= 1, f"{num_prompt_tokens=} was checked against {limit=}"
    if params.max_tokens is not None and params.max_tokens <= room:
        return params
    if params.min_tokens > room:
        raise RequestError(
            f"min_tokens is {params.min_tokens} but the prompt leaves room for {room}; "
            "lower min_tokens or shorten the prompt",
            param="min_tokens",
        )
    return dataclasses.replace(params, max_tokens=room)


def _params(
    body: SamplingBody,
    defaults: GenerationDefaults,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structure: StructuredOutputsParams | None = None,
) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(body, name) for name in _PASSED_ON}
    return defaults.sampling_params(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(body.logit_bias),
        structured_outputs=structure,
        output_kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
    )


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    if len(given) > MAX_BIASES:
        raise RequestError(
            f"logit_bias has {len(given)} ids but at most {MAX_BIASES} are allowed",
            param="logit_bias",
        )
    biases = {}
    for key, value in given.items():
        if not key.isdecimal():
            raise RequestError(
                f"logit_bias has the key {key[:40]!r}, which is no token id", param="logit_bias"
            )
        if not abs(value) <= _MAX_BIAS:
            raise RequestError(
                f"logit_bias must be in [-100, 100], got {value} for token {key}",
                param="logit_bias",
            )
        biases[int(key)] = value
    return biases


def _refuse_functions(body: ChatBody) -> None:
    if body.functions:
        raise RequestError("functions is not supported; use tools", param="functions")
    if body.modalities and body.modalities != ["text"]:
        raise RequestError("modalities other than text are not supported", param="modalities")
