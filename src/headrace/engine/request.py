"""One request: its sequences, their text, and the outputs its owner sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.sequence import Status
from headrace.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprob
from headrace.sampling_params import OutputKind
from headrace.text import TextStream

if TYPE_CHECKING:
    from headrace.engine.scheduler import SequenceUpdate
    from headrace.engine.sequence import Sequence
    from headrace.sampling_params import SamplingParams
    from headrace.text import Tokenizer
    from headrace.worker.step import PromptLogprobs
    from headrace.worker.worker import LogprobRows


class _Completion:
    """Text and figures of one sequence: all of them, or with OutputKind.DELTA the new ones."""

    __slots__ = (
        "cumulative", "ids", "is_reported", "logprobs", "stop_reason", "stream", "text",
    )

    def __init__(self, stream: TextStream | None) -> None:
        self.stream = stream
        self.ids: list[int] = []
        self.text = ""
        self.logprobs: list[dict[int, TokenLogprob]] = []
        self.cumulative = 0.0
        self.is_reported = False
        self.stop_reason: str | int | None = None


class Request:
    """What a client asked, in progress.

    Args:
        request_id: The caller's name for it.
        prompt: Text, if it came as text.
        params: Sampling, max_tokens resolved.
        sequences: One per completion.
        tokenizer: None if the model has none; then there is no text.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        sequences: list[Sequence],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.sequences = sequences
        self.metrics = RequestMetrics(arrival_time_s=sequences[0].arrival)
        self._tokenizer = tokenizer
        self._completions = [_Completion(self._stream(seq)) for seq in sequences]
        self._num_open = len(sequences)
        first = sequences[0]
        self._prompt_token_ids = first.token_ids[: first.num_prompt_tokens]
        self._prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]  # Nothing comes before the first token.

    def _stream(self, seq: Sequence) -> TextStream | None:
        if self._tokenizer is None:
            return None
        params = self.params
        return TextStream(
            self._tokenizer,
            prompt_token_ids=seq.token_ids[-16:],
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=params.shown_token_ids,
            min_tokens=params.min_tokens,
        )

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self._prompt_token_ids

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended."""
        return self._num_open == 0

    def append(
        self, index: int, update: SequenceUpdate, logprobs: LogprobRows | None, now: float
    ) -> bool:
        """Take new tokens of one sequence in.

        Returns:
            Whether a stop string ends it here; the sequence is then cut after the stop.
        """
        done = self._completions[index]
        seq = update.seq
        metrics = self.metrics
        if metrics.first_token_time_s is None:
            metrics.first_token_time_s = now
        if update.num_drafts:
            metrics.num_draft_tokens += update.num_drafts
            metrics.num_accepted_draft_tokens += update.num_accepted
        tokens = update.token_ids
        stopped = False
        if done.stream is not None and tokens:
            visible = tokens
            if seq.ends_in_stop_token and not self.params.include_stop_str_in_output:
                visible = tokens[:-1]  # The stop token is counted, its text is not wanted.
            match = done.stream.append(visible)
            if match is not None:
                stopped = True
                surplus = len(tokens) - match.num_tokens
                if surplus:
                    del seq.token_ids[len(seq.token_ids) - surplus :]
                    tokens = tokens[: match.num_tokens]
                done.stop_reason = match.stop
                seq.stop_reason = match.stop
                if seq.finish_reason is not None:
                    seq.finish_reason = "stop"
        done.ids.extend(tokens)
        if logprobs is not None and self.params.logprobs is not None:
            self._add_logprobs(done, update, tokens, logprobs)
        return stopped

    def close(self, index: int, now: float) -> None:
        """One sequence has ended."""
        self._num_open -= 1
        if self._num_open == 0:
            self.metrics.finished_time_s = now
            self.metrics.num_steps = sum(seq.num_steps for seq in self.sequences)
            self.metrics.num_preemptions = sum(seq.num_preemptions for seq in self.sequences)
        del index

    def take_output(self) -> RequestOutput | None:
        """What is new, in the kind of output that was asked for; None if there is nothing yet."""
        kind = self.params.output_kind
        if kind is OutputKind.FINAL_ONLY and not self.is_finished:
            return None
        return self.output(is_delta=kind is OutputKind.DELTA)

    def output(self, *, is_delta: bool = False) -> RequestOutput:
        """The request's state as an output."""
        outputs = []
        for index, done in enumerate(self._completions):
            part = self._part(index, done, is_delta=is_delta)
            if part is not None:
                outputs.append(part)
        first = self.sequences[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=self._num_open == 0,
            num_cached_tokens=first.num_cached_tokens,
            missed_tokens=first.missed,
            prompt_logprobs=self._prompt_logprobs,
            metrics=self.metrics,
        )

    def _part(self, index: int, done: _Completion, *, is_delta: bool) -> CompletionOutput | None:
        """One completion, or None if it has nothing new to tell."""
        seq = self.sequences[index]
        ended = seq.status is Status.FINISHED
        delta = done.stream.take_delta(final=ended) if done.stream is not None else ""
        wants_logprobs = self.params.logprobs is not None
        logprobs: list[dict[int, TokenLogprob]] | None = None
        if is_delta:
            # What was taken before is not kept: its owner has it.
            text, ids, done.ids = delta, done.ids, []
            if wants_logprobs:
                logprobs, done.logprobs = done.logprobs, []
            if not ids and not delta and (not ended or done.is_reported):
                return None
        else:
            done.text += delta
            text, ids = done.text, list(done.ids)
            if wants_logprobs:
                logprobs = list(done.logprobs)
        done.is_reported = ended
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=ids,
            cumulative_logprob=done.cumulative if wants_logprobs else None,
            logprobs=logprobs,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )

    def append_prompt(self, part: PromptLogprobs) -> None:
        """Take log-probabilities of the prompt in; parts that a preemption repeats are the same."""
        wanted, entries = self.params.prompt_logprobs, self._prompt_logprobs
        assert wanted is not None
        assert entries is not None
        for place, token in enumerate(part.token_ids.tolist()):
            if part.start + place == len(entries):
                entries.append(self._candidates(part, place, token, wanted)[0])

    def _add_logprobs(
        self, done: _Completion, update: SequenceUpdate, tokens: list[int], rows: LogprobRows
    ) -> None:
        wanted = self.params.logprobs
        assert wanted is not None
        start = rows.first[update.row]
        for offset, token in enumerate(tokens):
            entry, own = self._candidates(rows, start + offset, token, wanted)
            done.logprobs.append(entry)
            done.cumulative += own

    def _candidates(
        self, rows: LogprobRows | PromptLogprobs, place: int, token: int, wanted: int
    ) -> tuple[dict[int, TokenLogprob], float]:
        """The likeliest tokens and the actual one, and that one's log-probability."""
        own = float(rows.own[place])
        entry: dict[int, TokenLogprob] = {}
        if wanted == -1 and rows.logits is not None:
            row = rows.logits[place].astype(np.float32)
            top = row.max()
            values = row - (top + np.log(np.exp(row - top).sum(dtype=np.float64)))
            order = np.argsort(-values, kind="stable")
            for rank, candidate in enumerate(order.tolist()):
                entry[candidate] = self._entry(candidate, float(values[candidate]), rank + 1)
            return entry, float(values[token])
        ids = rows.ids[place, :wanted].tolist()
        for rank, candidate in enumerate(ids):
            value = float(rows.values[place, rank])
            entry[candidate] = self._entry(candidate, value, rank + 1)
        entry[token] = self._entry(token, own, int(rows.rank[place]))
        return entry, own

    def _entry(self, token: int, value: float, rank: int) -> TokenLogprob:
        text = self._tokenizer.decode_token(token) if self._tokenizer is not None else ""
        return TokenLogprob(logprob=value, rank=rank, decoded_token=text)
