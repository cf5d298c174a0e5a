"""Rounds to rows: what is measured, and what stands beside it.

Decode tok/s = batch * (n - 1) / (t(n tokens) - t(1 token)), each run with prompts of its own, so
that the prefix cache helps no run that it is not meant to help.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.engines import state_traffic
from headrace.bench.floors import Floor, costs_of, decode_floor, prefill_floor
from headrace.bench.rounds import Pace, Round, run_round
from headrace.bench.workload import arrival_times, percentiles, random_prompts, random_tokens

if TYPE_CHECKING:
    from headrace.bench.ceilings import Ceilings
    from headrace.engine.engine import Engine

Row = dict[str, Any]
"""One line of results; keys in docs/benchmarks.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement.

    Attributes:
        name: Of the row.
        batch: Requests at once.
        prompt_tokens: Own tokens of each prompt.
        output_tokens: Of each request.
        shared_prefix: Tokens that all prompts begin with, computed before the clock starts.
        repeats: Measured runs.
        warmup_tokens: Output tokens of the run before them; None: as many as measured.
        temperature: 0 is greedy.
        requests: Of an open run; None: one batch at once.
        arrival_rate: Requests per second; None: as fast as concurrency lets them.
        concurrency: Most unfinished requests of an open run.
        is_streamed: Note when each token arrives.
    """

    name: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix: int = 0
    repeats: int = 3
    warmup_tokens: int | None = None
    temperature: float = 0.0
    requests: int | None = None
    arrival_rate: float | None = None
    concurrency: int | None = None
    is_streamed: bool = False

    @property
    def max_tokens(self) -> int:
        """Tokens of a sequence at its end."""
        return self.shared_prefix + self.prompt_tokens + self.output_tokens


class Bench:
    """An engine under measurement.

    Args:
        engine: Idle, and used by nobody else.
        ceilings: Of its device; None leaves floors out.
        seed: Of prompts and arrival times.
        shares: Forced acceptance, noted in every row.
        deadline_s: On time.perf_counter()'s clock; what is not measured by then is left out.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        ceilings: Ceilings | None = None,
        seed: int = 0,
        shares: tuple[float, ...] = (),
        deadline_s: float | None = None,
    ) -> None:
        self.engine = engine
        self.deadline_s = deadline_s
        self._ceilings = ceilings
        self._rng = np.random.default_rng(seed)
        self._shares = shares
        self._costs = costs_of(engine.parts.model) if ceilings is not None else None
        self._vocab_size = engine.parts.model_config.vocab_size

    # Cases -----------------------------------------------------------------------------------

    def decode(self, case: Case) -> Row:
        """Measure decoding, and the prompts' computation on the way."""
        prefix = self._prefix(case)
        # The first run compiles, allocates and captures; without the second, so would the clock.
        self._round(case, prefix, case.warmup_tokens or case.output_tokens)
        pairs: list[tuple[Round, Round]] = []
        for _ in range(case.repeats):
            one, many = self._round(case, prefix, 1), self._round(case, prefix, case.output_tokens)
            if not (one.is_complete and many.is_complete):
                break
            pairs.append((one, many))
        if not pairs:
            return self._unmeasured(case)
        tokens = case.batch * (case.output_tokens - 1)
        rates = [_rate(tokens, many.seconds - one.seconds) for one, many in pairs]
        many = pairs[-1][1]
        row = self._row(case, [many for _, many in pairs])
        row["tokens_per_s"] = _median(rates)
        row["tokens_per_s_runs"] = rates
        one_s = statistics.median(one.seconds for one, _ in pairs)
        row["one_token_s"] = one_s
        computed = many.prompt_tokens - many.cached_tokens
        row["prefill_tokens_per_s"] = _rate(computed, one_s)
        self._add_decode_floor(row, case)
        return row

    def prefill(self, case: Case) -> Row:
        """Measure the time until every prompt has its first token; tok/s of computed tokens."""
        prefix = self._prefix(case)
        self._round(case, prefix, 1)
        runs: list[Round] = []
        for _ in range(case.repeats):
            run = self._round(case, prefix, 1)
            if not run.is_complete:
                break
            runs.append(run)
        if not runs:
            return self._unmeasured(case)
        row = self._row(case, runs)
        computed = runs[-1].prompt_tokens - runs[-1].cached_tokens
        rates = [_rate(computed, run.seconds) for run in runs]
        row["tokens_per_s"] = _median(rates)
        row["tokens_per_s_runs"] = rates
        if self._costs is not None and self._ceilings is not None:
            cached = runs[-1].cached_tokens // case.batch
            whole = case.shared_prefix + case.prompt_tokens
            floor = prefill_floor(
                self._costs, self._ceilings, batch=case.batch, tokens=whole - cached, cached=cached
            )
            _add_floor(row, floor)
        return row

    def paced(self, case: Case) -> Row:
        """Measure requests that come at random times or under a limit; every token is timed."""
        prefix = self._prefix(case)
        self._round(case, prefix, case.warmup_tokens or min(case.output_tokens, 8))
        runs: list[Round] = []
        count = case.requests or case.batch
        for _ in range(case.repeats):
            arrivals = arrival_times(self._rng, count, case.arrival_rate)
            pace = Pace(
                arrivals=arrivals,
                concurrency=case.concurrency,
                is_streamed=True,
                deadline_s=self.deadline_s,
            )
            run = self._round(case, prefix, case.output_tokens, pace=pace, count=count)
            if not run.is_complete:
                break
            runs.append(run)
        if not runs:
            return self._unmeasured(case)
        row = self._row(case, runs)
        rates = [_rate(run.completion_tokens, run.seconds) for run in runs]
        row["tokens_per_s"] = _median(rates)
        row["tokens_per_s_runs"] = rates
        row["requests"] = count
        row["requests_per_s"] = _median([_rate(count, run.seconds) for run in runs])
        row["arrival_rate"] = case.arrival_rate
        row["concurrency"] = case.concurrency
        self._add_decode_floor(row, case)
        return row

    # Parts -------------------------------------------------------------------------------------

    def prompts(self, case: Case, prefix: list[int], count: int | None = None) -> list[list[int]]:
        """Draw prompts that no earlier run had."""
        return random_prompts(
            self._rng, count or case.batch, case.prompt_tokens, self._vocab_size, prefix
        )

    def _prefix(self, case: Case) -> list[int]:
        """Draw the shared prefix and let the engine compute it."""
        prefix = random_tokens(self._rng, case.shared_prefix, self._vocab_size)
        if prefix:
            # One request more than the prefix: its state at the end is a checkpoint only where
            # prompts branch, which the cache learns from the second request.
            for _ in range(2):
                self._round(case, prefix, 1, count=1)
        return prefix

    def _round(
        self,
        case: Case,
        prefix: list[int],
        output_tokens: int,
        *,
        pace: Pace | None = None,
        count: int | None = None,
    ) -> Round:
        if pace is None:
            pace = Pace(is_streamed=case.is_streamed, deadline_s=self.deadline_s)
        return run_round(
            self.engine,
            self.prompts(case, prefix, count),
            output_tokens,
            temperature=case.temperature,
            pace=pace,
        )

    def _row(self, case: Case, runs: list[Round]) -> Row:
        last = runs[-1]
        shares = _shares_of(last)
        tokens_per_step = 1.0 + sum(shares)
        row: Row = {
            "case": case.name,
            "batch": case.batch,
            "prompt_tokens": last.prompt_tokens,
            "cached_tokens": last.cached_tokens,
            "completion_tokens": last.completion_tokens,
            "request": {
                "prompt_tokens": case.shared_prefix + case.prompt_tokens,
                "shared_prefix": case.shared_prefix,
                "output_tokens": case.output_tokens,
            },
            "seconds": statistics.median(run.seconds for run in runs),
            "time_to_first_token_s": _median([v for run in runs for v in run.first_token_s]),
            "time_to_first_token": percentiles([v for run in runs for v in run.first_token_s]),
            "inter_token_s": percentiles([v for run in runs for v in run.inter_token_s]),
            "request_s": percentiles([v for run in runs for v in run.request_s]),
            "steps": last.steps,
            "draft_tokens": sum(last.drafted),
            "accepted_tokens": sum(last.accepted),
            "acceptance_by_position": shares,
            "tokens_per_step": tokens_per_step,
            "host_waits_per_step": last.host_waits / max(1, last.steps),
            "device_waits_share": _share(last.device_waits, last.steady_steps),
            "preemptions": last.preemptions,
            "graphs": last.graphs,
            "repeats": len(runs),
            "floor_tokens_per_s": None,
            "share_of_floor": None,
        }
        if self._shares:
            row["forced_acceptance"] = list(self._shares)
        return row

    def _unmeasured(self, case: Case) -> Row:
        return {
            "case": case.name,
            "batch": case.batch,
            "tokens_per_s": None,
            "floor_tokens_per_s": None,
            "share_of_floor": None,
            "error": "time was up before a run was complete",
        }

    def _add_decode_floor(self, row: Row, case: Case) -> None:
        if self._costs is None or self._ceilings is None:
            return
        parts = self.engine.parts
        floor = decode_floor(
            self._costs,
            self._ceilings,
            state_traffic(self.engine),
            batch=min(case.batch, case.concurrency or case.batch),
            context=case.shared_prefix + case.prompt_tokens + case.output_tokens / 2,
            num_drafts=parts.sizes.max_drafts if row["draft_tokens"] else 0,
            tokens_per_step=row["tokens_per_step"],
            has_mtp=parts.worker.drafter == "mtp",
        )
        _add_floor(row, floor)


def _add_floor(row: Row, floor: Floor) -> None:
    row["floor_tokens_per_s"] = floor.tokens_per_s
    row["floor_s"] = floor.seconds
    row["floor_parts_ms"] = floor.parts_ms
    if row["tokens_per_s"] is not None:
        row["share_of_floor"] = row["tokens_per_s"] / floor.tokens_per_s


def _shares_of(run: Round) -> list[float]:
    """Share of rows that kept the draft at each place."""
    if not sum(run.drafted):
        return []
    return [kept / max(1, drafted) for kept, drafted in zip(run.accepted, run.drafted, strict=True)]


def _share(part: int | None, whole: int) -> float | None:
    return None if part is None or not whole else part / whole


def _rate(count: float, seconds: float) -> float | None:
    """Per second; None where the clock saw no time, as between two equal short runs."""
    return count / seconds if seconds > 0 else None


def _median(values: list[float | None] | list[float]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
