"""The loop: schedule a step, hand it to the worker, take an earlier step's results in.

`Engine.step` is the whole architecture in a few lines. With asynchronous scheduling step n+1 is
handed over before the results of step n are read; without it every step is read at once. An engine
belongs to one thread.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping, Set, Sized
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.engine.follower import follow_if_launched
from headrace.engine.load import load_parts
from headrace.engine.prefix_cache import chain_keys, root_key
from headrace.engine.request import Request
from headrace.engine.sequence import Family, Sequence, Status
from headrace.engine.tally import Tally
from headrace.engine.timeline import Timeline
from headrace.errors import QueueFullError, RequestError
from headrace.grammar import Grammars
from headrace.sampling_params import MAX_LOGPROBS, OutputKind, completion_seed
from headrace.worker.buffers import MAX_PROMPT_LOGITS

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq
    from contextlib import AbstractContextManager

    from headrace.config import EngineConfig
    from headrace.engine.load import Parts
    from headrace.engine.scheduler import InFlightStep, SequenceUpdate
    from headrace.engine.state_store.prefixes import StoredPrefixes
    from headrace.grammar import CompiledGrammar, Grammar
    from headrace.outputs import RequestOutput
    from headrace.sampling_params import SamplingParams
    from headrace.worker.step import SampledTokens, SchedulerOutput
    from headrace.worker.worker import StepHandle

_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STORE_WAIT_S = 0.005
"""Between two looks at what clients want, where all sequences wait for the state store."""
_MAX_LISTED = 64
"""Sequences of a kind that `Engine.activity` lists."""


class Engine:
    """One model, its caches and the requests it serves.

    Args:
        config: Settings.
        parts: What the config resolves to, if it is built already.
    """

    def __init__(self, config: EngineConfig, *, parts: Parts | None = None) -> None:
        if parts is None:
            follow_if_launched(config)
            parts = load_parts(config)
        self.parts = parts
        self.config = self.parts.config
        self.scheduler = self.parts.scheduler
        self.worker = self.parts.worker
        self.tokenizer = self.parts.tokenizer
        self.grammars = None
        if self.tokenizer is not None:
            self.grammars = Grammars(
                self.tokenizer, self.parts.model_config.vocab_size,
                self.parts.generation_defaults.eos_token_ids,
                backend=self.config.grammar_backend,
            )
        self._in_flight: deque[tuple[InFlightStep, StepHandle]] = deque()
        self._requests: dict[str, Request] = {}
        self._owner: dict[int, tuple[Request, int]] = {}
        self._next_seq_id = 1
        self._seeds = random.Random(self.config.seed)  # noqa: S311 - sampling, no secret
        self.num_finished = 0
        self.num_generated_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_drafts = 0
        positions = max(1, self.parts.sizes.max_drafts)
        self.drafted_by_position = [0] * positions
        self.accepted_by_position = [0] * positions
        self._was_busy = False
        self.num_early_enqueues = 0
        self.num_steady_steps = 0
        self._stored = self.scheduler.stored
        self.timeline = Timeline()
        self.step_tokens = Tally(_STEP_TOKENS)

    # Requests --------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        arrival: float | None = None,
        grammar: Grammar | None = None,
        bad_words: tuple[tuple[int, ...], ...] | None = None,
    ) -> Request:
        """Queue a request.

        Args:
            request_id: The caller's name for it, unique among unfinished requests.
            prompt_token_ids: The prompt.
            params: How to sample.
            prompt: The prompt's text, handed back in outputs.
            arrival: When it arrived, on time.monotonic()'s clock.
            grammar: What params.structured_outputs compiles to, if that is known already.
            bad_words: What `bad_word_tokens` makes of params, if that is known already.

        Raises:
            RequestError: It cannot be served as asked; nothing was queued.
        """
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; choose another",
                               param="request_id")
        ids = _as_ids(prompt_token_ids)
        params = self._check(ids, params)
        eos = self.parts.generation_defaults.eos_token_ids
        if bad_words is None:
            bad_words = self.bad_word_tokens(params)
        _check_choices(params, eos, bad_words, self.parts.model_config.vocab_size)
        if grammar is None:
            grammar = self.compile_grammar(params)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        sequences = []
        for index in range(params.n):
            sequences.append(
                Sequence(
                    seq_id=self._next_seq_id,
                    prompt=list(prompt_token_ids),
                    params=params,
                    seed=completion_seed(seed, index),
                    num_groups=len(self.scheduler.state_pools),
                    eos_token_ids=eos,
                    arrival=time.monotonic() if arrival is None else arrival,
                    bad_words=bad_words,
                    prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                    grammar=None if grammar is None else grammar.start(),
                )
            )
            self._next_seq_id += 1
        if self.scheduler.cache.is_enabled:
            sequences[0].hash_prompt(ids, self.config.block_size)
        if params.n > 1:
            Family(sequences)
        if params.cache_pin is not None:
            self._hold(params.cache_pin, sequences[0])
        request = Request(
            request_id=request_id,
            prompt=prompt,
            params=params,
            sequences=sequences,
            tokenizer=self.tokenizer,
        )
        self._requests[request_id] = request
        for index, seq in enumerate(sequences):
            self._owner[seq.seq_id] = (request, index)
            self.scheduler.add(seq)
        return request

    def check_room(self, num_sequences: int) -> None:
        """Refuse sequences that the queue has no room for.

        For those who add requests of others, before they do: a server's queue is bounded so that
        clients hear early that they would wait for long. A batch that one caller holds already is
        not, since nobody else waits and refusing it would save no memory.

        Raises:
            RequestError: They are more than the queue ever takes.
            QueueFullError: Too many wait now.
        """
        limit, waiting = self.config.max_waiting, len(self.scheduler.waiting)
        if num_sequences > limit:
            raise RequestError(
                f"n is {num_sequences} but at most {limit} sequences may wait; lower n, or raise "
                "max_waiting", param="n",
            )
        if waiting + num_sequences > limit:
            more = f", and this request has {num_sequences}" if num_sequences > 1 else ""
            raise QueueFullError(
                f"{waiting} sequences wait and the limit is {limit}{more}; try again later, or "
                "raise max_waiting"
            )

    def compile_grammar(self, params: SamplingParams) -> CompiledGrammar | None:
        """Compile the form of output that a request asks for; any thread may do so.

        Raises:
            RequestError: The form is wrong, or there is no tokenizer to say what tokens mean.
        """
        if params.structured_outputs is None:
            return None
        if self.grammars is None:
            name = params.structured_outputs.param
            raise RequestError(
                f"{name} needs a tokenizer and this model has none; give one with --tokenizer",
                param=name,
            )
        return self.grammars.compile(params.structured_outputs)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; unknown ids are ignored.

        Returns:
            Its last output, or None if it is not known (any more).
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        for seq in request.sequences:
            if seq.status is not Status.FINISHED:
                self._finish(seq, "abort")
        self._close(request)
        # What was told already is not told again.
        return request.output(is_delta=request.params.output_kind is OutputKind.DELTA)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running sequences are computed again."""
        self.scheduler.reset_prefix_cache()

    def cached_prefixes(self, limit: int) -> list[bytes]:
        """Chain keys of prefixes that prompts can resume from, at most `limit`, newest first."""
        return self.scheduler.cache.resumable_keys(limit)

    def pins(self) -> dict[str, dict[str, int]]:
        """KV blocks and checkpoints that are spared from eviction, by the name of the pin."""
        held = self.scheduler.cache.held()
        return {
            name: {"kv_blocks": kv, "checkpoints": states} for name, (kv, states) in held.items()
        }

    def release_pin(self, name: str) -> bool:
        """Let what a pin spares be evicted again; returns whether there was one."""
        return self.scheduler.cache.release(name)

    def export_prefix(self, token_ids: Seq[int], cache_salt: str | None = None) -> bytes | None:
        """What the state store has of a prompt, for another engine with the same weights.

        Args:
            token_ids: The prompt.
            cache_salt: As in the request.

        Returns:
            An archive of its longest prefix (`headrace.engine.state_store.wire`), or None.

        Raises:
            RequestError: There is no state store.
        """
        stored = self._require_store()
        size = self.config.block_size
        keys = chain_keys(root_key(cache_salt), _as_ids(token_ids), size)
        per_column = self.config.state_block_size // size
        return stored.store.export(keys[per_column - 1 :: per_column])

    def import_prefix(self, archive: bytes) -> tuple[int, dict[str, int]]:
        """Take in what another engine's `export_prefix` gave: a request with its prompt then hits.

        Returns:
            Pieces taken, and pieces refused by reason: damaged, truncated, foreign, version.

        Raises:
            RequestError: There is no state store.
        """
        return self._require_store().store.take_archive(archive)

    def flush_store(self) -> None:
        """Wait until the state store has what the steps so far have copied for it.

        Raises:
            RequestError: There is no state store.
        """
        self._require_store().store.flush()

    def close(self) -> None:
        """End other ranks, and let what goes to the state store arrive; no step follows."""
        self.end_ranks()
        if self._stored is not None:
            self._stored.store.close()

    def _require_store(self) -> StoredPrefixes:
        if self._stored is None:
            raise RequestError(
                "there is no state store; start the engine with state_store or state_store_memory"
            )
        return self._stored

    def _hold(self, name: str, seq: Sequence) -> None:
        """Spare a prompt's checkpoints, if the bound allows it."""
        kv_keys, state_keys = self.scheduler.hold_keys(seq)
        cache = self.scheduler.cache
        short = cache.shortage(kv_keys, state_keys)
        if short is not None:
            raise RequestError(
                f"cache_pin {name!r} would spare {short.needed} more {short.what} blocks but "
                f"{short.left} of {short.limit} are left for that; release a pin, mark an earlier "
                "cache_checkpoint, or raise max_pinned_share", param="cache_pin",
            )
        cache.hold(name, kv_keys, state_keys)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._in_flight) or self.scheduler.has_work()

    @property
    def min_cacheable_prefix_tokens(self) -> int | None:
        """Shortest prefix that can hit; None without a prefix cache."""
        scheduler = self.scheduler
        return scheduler.scheme.unit if scheduler.cache.is_enabled else None

    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for one token."""
        return self.parts.max_model_len - 1

    # The loop ----------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Enqueue one step if there is one, and take in the oldest step that is due.

        Returns:
            Outputs of requests that have something new.
        """
        begin_s = self.timeline.now()
        planned = self.scheduler.schedule()
        was_busy, self._was_busy = self._was_busy, planned is not None
        if planned is not None:
            # A step right after another is steady; it is early if that one is still unread.
            self.num_steady_steps += was_busy
            self.num_early_enqueues += was_busy and bool(self._in_flight)
            handle = self._execute(planned.output)
            self.scheduler.on_enqueued(planned)
            if self._stored is not None and handle.saved is not None:
                self._stored.take(planned.output.saves, handle.saved)
            self.timeline.enqueued(planned.output, begin_s=begin_s)
            self._in_flight.append((planned, handle))
            if len(self._in_flight) < self.parts.depth:
                return []
        if not self._in_flight:
            if planned is None and self._stored is not None:
                # Whoever waits, waits for the state store.
                self._stored.store.wait(_STORE_WAIT_S)
            return []
        step, handle = self._in_flight.popleft()
        wait_s = self.timeline.now()
        sampled = self._land(handle)
        landed_s = self.timeline.now()
        before = self._num_useful_tokens()
        outputs = self._take_in(step, sampled)
        self.step_tokens.add(self._num_useful_tokens() - before)
        self.timeline.taken_in(step.output, wait_s=wait_s, landed_s=landed_s)
        if self.config.check_invariants:
            self.scheduler.check()
        return outputs

    def _execute(self, output: SchedulerOutput) -> StepHandle:
        """Enqueue a step, on all ranks if there are several."""
        with self._guard():
            if self.parts.others is not None:
                self.parts.others.send(output)
            return self.worker.execute(output)

    def _land(self, handle: StepHandle) -> SampledTokens:
        """Wait for a step's tokens."""
        with self._guard():
            if self.parts.others is not None:
                self.parts.others.land()
            return handle.result()

    def _guard(self) -> AbstractContextManager[None]:
        """Some work that needs all ranks: if one has ended, the error says which."""
        return nullcontext() if self.parts.others is None else self.parts.others.guard()

    def end_ranks(self) -> None:
        """End the processes that run other parts of the model, if there are any; idempotent."""
        if self.parts.others is not None:
            self.parts.others.stop()

    def check_ranks(self) -> None:
        """Raise if a process that runs a part of the model has ended; cheap, from any thread.

        Raises:
            RankError: It names the rank.
        """
        if self.parts.others is not None:
            self.parts.others.check()

    def _take_in(self, step: InFlightStep, sampled: SampledTokens) -> list[RequestOutput]:
        touched: dict[str, Request] = {}
        for part in sampled.prompt_logprobs:
            asker = self._owner.get(part.seq_id)
            if asker is not None:
                asker[0].append_prompt(part)
        updates = self.scheduler.update(step, sampled)
        now = time.monotonic()
        for update in updates:
            seq = update.seq
            owner = self._owner.get(seq.seq_id)
            if owner is None:
                continue
            request, index = owner
            self._count(update)
            stopped = request.append(index, update, sampled.logprobs, now)
            if stopped and seq.status is not Status.FINISHED:
                self.scheduler.finish(seq, "stop")
            if seq.status is Status.FINISHED:
                self._owner.pop(seq.seq_id, None)
                request.close(index, now)
            touched[request.request_id] = request
        outputs = []
        for request in touched.values():
            if request.is_finished:
                self._close(request)
            output = request.take_output()
            if output is not None:
                outputs.append(output)
        return outputs

    def _num_useful_tokens(self) -> int:
        """Prompt tokens computed and tokens generated, so far."""
        return self.scheduler.num_computed_prompt_tokens + self.num_generated_tokens

    def _count(self, update: SequenceUpdate) -> None:
        self.num_generated_tokens += len(update.token_ids)
        if update.num_drafts:
            self.num_draft_tokens += update.num_drafts
            self.num_accepted_drafts += update.num_accepted
            for position in range(update.num_drafts):
                self.drafted_by_position[position] += 1
            for position in range(update.num_accepted):
                self.accepted_by_position[position] += 1

    def _finish(self, seq: Sequence, reason: Any) -> None:  # noqa: ANN401
        self.scheduler.finish(seq, reason)
        owner = self._owner.pop(seq.seq_id, None)
        if owner is not None:
            owner[0].close(owner[1], time.monotonic())

    def _close(self, request: Request) -> None:
        if self._requests.pop(request.request_id, None) is not None:
            self.num_finished += 1

    # Checks ------------------------------------------------------------------------------------

    def _check(self, prompt: np.ndarray, params: SamplingParams) -> SamplingParams:
        """Check a request against this engine; returns it with max_tokens filled in."""
        limit, vocab = self.parts.max_model_len, self.parts.model_config.vocab_size
        wrong = prompt[(prompt < 0) | (prompt >= vocab)]
        if wrong.size:
            raise RequestError(
                f"prompt has token id {int(wrong[0])} but the vocabulary has ids 0..{vocab - 1}",
                param="prompt",
            )
        if len(prompt) >= limit:
            raise RequestError(
                f"prompt has {len(prompt)} tokens but max_model_len is {limit}, which must hold "
                "the prompt and at least one new token; shorten the prompt or raise max_model_len",
                param="prompt",
            )
        _check_ids(params, vocab)
        self._check_cache(prompt, params)
        if params.prompt_logprobs == -1 and len(prompt) * vocab > MAX_PROMPT_LOGITS:
            raise RequestError(
                f"prompt_logprobs is -1 for {len(prompt)} tokens and a vocabulary of {vocab}, but "
                f"at most {MAX_PROMPT_LOGITS} values are kept; ask for 0..{MAX_LOGPROBS}",
                param="prompt_logprobs",
            )
        for name, instead in (("stop", "stop_token_ids"), ("bad_words", "allowed_token_ids")):
            if getattr(params, name) and self.tokenizer is None:
                raise RequestError(
                    f"{name} strings need a tokenizer and this model has none; use {instead}",
                    param=name,
                )
        room = limit - len(prompt)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.max_tokens == max_tokens:
            return params
        return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))

    def _check_cache(self, prompt: np.ndarray, params: SamplingParams) -> None:
        """Refuse marks that the prompt does not have, and wishes to a cache that is off."""
        marks = params.cache_checkpoint
        assert isinstance(marks, tuple), f"{marks=} were made so"
        if marks and max(marks) > len(prompt):
            raise RequestError(
                f"cache_checkpoint has {max(marks)} but the prompt has {len(prompt)} tokens",
                param="cache_checkpoint",
            )
        for name in ("cache_checkpoint", "cache_pin"):
            if getattr(params, name) and not self.scheduler.cache.is_enabled:
                raise RequestError(
                    f"{name} needs the prefix cache, which is off; use --prefix-cache align, or "
                    f"leave {name} out", param=name,
                )

    def bad_word_tokens(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token runs of the bad words, in the middle of a text and at its start; in any thread."""
        if not params.bad_words or self.tokenizer is None:
            return ()  # Without a tokenizer they are refused.
        vocab = self.parts.model_config.vocab_size
        runs: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            bare = word.lstrip()
            for text in (word, bare, f" {bare}" if bare else ""):
                run = tuple(self.tokenizer.encode(text, add_special_tokens=False)) if text else ()
                # Padded vocabularies aside, a token that the model lacks cannot be generated.
                if run and max(run) < vocab:
                    runs[run] = None
        return tuple(runs)

    # Figures -----------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, as JSON values."""
        scheduler, worker = self.scheduler, self.worker
        cache = scheduler.cache
        kv = scheduler.kv_pool
        rt_stats = self.parts.runtime.stats
        computed = scheduler.num_computed_prompt_tokens
        cached = scheduler.num_cached_prompt_tokens
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            # Those of them that wait for a prompt which another one is computing. What was aborted
            # since the last pass is still in its count.
            "deferred": min(scheduler.num_deferred, len(scheduler.waiting)),
            "steps": worker.num_steps,
            "forward_tokens": worker.num_forward_tokens,
            # Each token of a prompt counts once, when it is first in the caches.
            "prompt_tokens": computed + cached,
            "computed_prompt_tokens": computed,
            "cached_prompt_tokens": cached,
            "step_tokens": self.step_tokens.figures(),
            "generated_tokens": self.num_generated_tokens,
            "finished_requests": self.num_finished,
            "preemptions": scheduler.num_preemptions,
            # Completions that began from another one's prompt, without computing it.
            "forks": scheduler.num_forks,
            "kv_blocks": _pool_stats(kv),
            "state_blocks": [_pool_stats(pool) for pool in scheduler.state_pools],
            "prefix_cache": {
                "enabled": cache.is_enabled,
                "min_cacheable_prefix_tokens": self.min_cacheable_prefix_tokens,
                "pins": len(cache.held()),
                "query_tokens": cache.num_query_tokens,
                "hit_tokens": cache.num_hit_tokens,
                "missed_tokens": dict(cache.missed),
            },
            "state_store": None if self._stored is None else self._stored.store.stats(),
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted_drafts,
            "drafted_by_position": list(self.drafted_by_position),
            "accepted_by_position": list(self.accepted_by_position),
            "acceptance_by_position": [
                round(kept / max(1, drafted), 4)
                for kept, drafted in zip(
                    self.accepted_by_position, self.drafted_by_position, strict=True
                )
            ],
            # Tokens through the forward that came to nothing: rejected drafts, and rows of
            # sequences that had ended when their step's results were read.
            "wasted_tokens": scheduler.num_wasted_tokens,
            "early_enqueues": self.num_early_enqueues,
            "host_waits": rt_stats.syncs,
            "host_waits_per_step": rt_stats.syncs / max(1, worker.num_steps),
        }

    def activity(self) -> dict[str, Any]:
        """What the engine is doing, as JSON values: too much to put together in every step.

        Returns:
            `sequences`, at most 64 that run and 64 that wait, oldest first, and `steps`, the times
            of the newest ones (`StepTimes`). Times are seconds.
        """
        now = time.monotonic()
        scheduler = self.scheduler
        running = sorted(scheduler.running, key=lambda seq: seq.arrival)[:_MAX_LISTED]
        waiting = list(islice(scheduler.waiting, _MAX_LISTED))
        return {
            "sequences": [_sequence_activity(seq, now) for seq in (*running, *waiting)],
            "steps": [asdict(step) for step in self.timeline.newest()],
        }


def _sequence_activity(seq: Sequence, now: float) -> dict[str, Any]:
    return {
        "id": seq.seq_id,
        "status": seq.status.value,
        "age_s": max(0.0, now - seq.arrival),
        "prompt_tokens": seq.num_prompt_tokens,
        "cached_tokens": seq.num_cached_tokens,
        "computed_tokens": seq.num_computed_tokens,
        "output_tokens": seq.num_output_tokens,
        "max_tokens": seq.params.max_tokens,
        "kv_blocks": len(seq.kv_blocks),
        "state_blocks": sum(block > 0 for table in seq.state_tables for block in table),
        "preemptions": seq.num_preemptions,
    }


def _pool_stats(pool: Any) -> dict[str, int]:  # noqa: ANN401
    if pool is None:
        return {"total": 0, "free": 0, "cached": 0, "used": 0, "pinned": 0, "evictions": 0}
    used = pool.num_usable - pool.num_free - pool.num_cached
    return {
        "total": pool.num_usable,
        "free": pool.num_free,
        "cached": pool.num_cached,
        "used": used,
        "pinned": pool.num_protected,
        "evictions": pool.num_evictions,
    }


def _as_ids(prompt: Any) -> np.ndarray:  # noqa: ANN401 - what a client sent
    """Token ids of a prompt, [n] of an integer type, n at least 1."""
    if isinstance(prompt, str | bytes | Mapping | Set) or not isinstance(prompt, Sized):
        raise RequestError(
            f"the prompt is of type {type(prompt).__name__}; give text or a list of token ids",
            param="prompt",
        )
    if not len(prompt):
        raise RequestError("the prompt is empty; give it at least one token", param="prompt")
    try:
        ids = np.asarray(prompt)
    except ValueError:  # Lists of unequal length.
        ids = np.asarray(None)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise RequestError("prompt token ids must be integers", param="prompt")
    return ids


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model does not have."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        largest = max(getattr(params, name) or (), default=0)
        if largest >= vocab_size:
            raise RequestError(
                f"{name} has {largest} but the vocabulary has ids 0..{vocab_size - 1}", param=name
            )


def _check_choices(
    params: SamplingParams,
    eos_token_ids: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
    vocab_size: int,
) -> None:
    """Refuse masks that could leave no token to choose."""
    allowed = params.allowed_token_ids
    banned = {word[-1] for word in bad_words}
    if params.min_tokens:
        banned.update(params.stop_token_ids, () if params.ignore_eos else eos_token_ids)
    if len(banned) == vocab_size if allowed is None else banned.issuperset(allowed):
        masks = [
            name for name, is_given in (
                ("allowed_token_ids", allowed is not None),
                ("bad_words", bad_words),
                ("min_tokens", params.min_tokens),
            ) if is_given
        ]
        raise RequestError(
            f"{' with '.join(masks)} can leave no token to choose; allow at least one that is "
            "neither the end of a bad word nor a stop before min_tokens",
            param=masks[0],
        )
