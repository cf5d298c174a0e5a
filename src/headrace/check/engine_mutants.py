"""Faults put back into the real engine: its own worker, on the simulated device.

A detour replaces a few methods of one engine's worker; wrongly if `faulty`, else rightly through
the same calls. Both founding faults are here in the place where they were: the compact layout's
accepted counts. The kernel's half of the second one is in `kernel_mutants`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace import rt
from headrace.check.mutants import Mutant, MutantClass, Outcome, register
from headrace.check.real import (
    GRID,
    NUM_MTP_MODELS,
    RealWorkload,
    generate_real,
    make_engine,
    serve,
    wrong_answers,
)
from headrace.worker import launches
from headrace.worker.graphs import copy_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.engine.engine import Engine
    from headrace.worker.rows import CompactRows, ProducerMap
    from headrace.worker.worker import StepHandle

    Detour = Callable[[Engine, bool], None]

UNORDERED = ("UNORDERED-WRITE-READ", "UNORDERED-READ-WRITE", "UNORDERED-WRITE-WRITE")
WRONG = "WRONG-TOKENS"
SEEDS_TRIED = 10
SCHEDULES_TRIED = 24
_EVERY = 6
"""Steps between requests that share a prefix."""
_AGAIN = 80
"""Steps until all of them come once more: the engine has been idle before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFault:
    """A detour of the real engine and what it looks like.

    Attributes:
        detour: Changes one engine.
        settings: Of the engine, over those of the seed.
        kinds: Report kinds that count as seeing it.
        buffer: Part of the name of the memory that a report must name.
        sites: For value faults: where the value goes wrong, and where it is used.
        shares_prefix: Give every prompt the same beginning, so that later ones hit.
        num_completions: Of every prompt.
        has_rules: Let every output follow a grammar.
        has_extras: Let requests have logit rules and log-probabilities, as their seed says.
        has_store: Let all requests come once more, after the prefix cache was forgotten, so that
            they hit in the state store.
        has_files: The store keeps files, and nothing in memory.
    """

    detour: Detour
    settings: dict[str, Any]
    kinds: tuple[str, ...]
    buffer: str = ""
    sites: tuple[str, str] = ("", "")
    shares_prefix: bool = False
    num_completions: int = 1
    has_rules: bool = False
    has_extras: bool = False
    has_store: bool = False
    has_files: bool = False


def workload_of(fault: EngineFault, seed: int) -> RealWorkload:
    """A workload with many finishing rows, with the fault's own settings."""
    made = generate_real(seed, may_store=False)
    settings: dict[str, Any] = {
        "async_scheduling": True, "num_kv_blocks": 80, "num_state_blocks": 60, "max_num_seqs": 5,
        "max_num_batched_tokens": 128, "replay_interval": None, "graphs": "off",
    }
    if fault.has_store:
        settings |= {"state_store_memory": 2**20, "prefix_cache": "align"}
    config = replace(made.config, **(settings | fault.settings))
    requests = made.requests
    if fault.shares_prefix:
        beginning = tuple(2 + (7 * n + seed) % 40 for n in range(3 * GRID + 3))
        requests = tuple(
            replace(
                one, prompt=beginning + one.prompt[:GRID], arrival=_EVERY * at, abort_after=None
            )
            for at, one in enumerate(requests)
        )
    requests = tuple(replace(one, num_completions=fault.num_completions) for one in requests)
    requests = tuple(
        replace(one, rules=1 + one.seed % 1000 if fault.has_rules else 0) for one in requests
    )
    if fault.has_extras:
        requests = tuple(
            replace(one, bias=(at, 3.0), penalty=1.5, logprobs=-1, prompt_logprobs=-1)
            for at, one in enumerate(requests, start=2)
        )
    else:
        requests = tuple(
            replace(one, bias=None, penalty=0.0, logprobs=None, prompt_logprobs=None)
            for one in requests
        )
    if fault.num_completions > 1:
        # They part only after the prompt, so that it takes some tokens to tell them apart.
        requests = tuple(replace(one, num_tokens=9, abort_after=None) for one in requests)
    if fault.has_store:
        again = (replace(one, arrival=one.arrival + _AGAIN) for one in requests)
        requests = (*requests, *again)
    return replace(
        made, config=config, requests=requests, preempt_at=frozenset(),
        reset_at=frozenset([_AGAIN - 1] if fault.has_store else []),
        fork_at=frozenset(), has_files=fault.has_files,
        model_seed=made.model_seed % NUM_MTP_MODELS,
    )


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a detour."""

    reports: tuple[rt.Report, ...]
    wrong: list[str]
    failure: str


def run_once(
    fault: EngineFault,
    seed: int,
    policy: rt.Policy,
    *,
    is_faulty: bool,
    checks: bool,
    schedule: int,
) -> Run:
    """Serve one workload; errors end the run and are part of the result."""
    workload = workload_of(fault, seed)
    runtime = rt.Runtime.create("sim", seed=schedule, policy=policy, checks=checks)
    failure = ""
    wrong: list[str] = []
    with TemporaryDirectory() as folder:
        try:
            engine = make_engine(workload, runtime, folder)
            fault.detour(engine, is_faulty)
            answers = serve(workload, engine)
            engine.close()
            runtime.finish()
            wrong = wrong_answers(workload, answers)
        except (rt.RtError, AssertionError, IndexError, RuntimeError, ValueError) as error:
            failure = f"{type(error).__name__}: {error}"
    return Run(tuple(runtime.reports), wrong, failure)


def run_fault(fault: EngineFault, seed: int) -> Outcome:
    """Mutant, twin and effect, from one seed on."""
    kind, site_a, site_b, text, used = "", "", "", "", seed
    for used in range(seed, seed + SEEDS_TRIED):
        run = run_once(fault, used, "lazy", is_faulty=True, checks=True, schedule=used)
        if fault.kinds == (WRONG,):
            if run.wrong:
                kind, text = WRONG, run.wrong[0]
                site_a, site_b = fault.sites
                break
            continue
        found = [r for r in run.reports if r.kind in fault.kinds and fault.buffer in r.buffer]
        if found:
            kind, site_a, site_b = found[0].kind, found[0].site_a, found[0].site_b
            text = str(found[0])
            break
    twin = run_once(fault, used, "lazy", is_faulty=False, checks=True, schedule=used)
    return Outcome(
        killed=bool(kind and site_a and site_b),
        kind=kind,
        site_a=site_a,
        site_b=site_b,
        seed=used,
        twin_clean=not (twin.reports or twin.wrong or twin.failure),
        effect_shown=_shows_effect(fault, used, seed),
        report=text,
    )


def _shows_effect(fault: EngineFault, used: int, seed: int) -> bool:
    """Whether some schedule gives a wrong token, or ends the engine, when nothing is checked."""
    tries: list[tuple[int, rt.Policy, int]] = [(used, "lazy", used), (used, "eager", used)]
    tries += [(seed + n, "lazy", seed + n) for n in range(SEEDS_TRIED)]
    tries += [(seed + n % SEEDS_TRIED, "random", 1000 + n) for n in range(SCHEDULES_TRIED)]
    for number, policy, schedule in tries:
        run = run_once(fault, number, policy, is_faulty=True, checks=False, schedule=schedule)
        if run.wrong or run.failure:
            return True
    return False


def plant(
    name: str,
    letter: MutantClass,
    kinds: tuple[str, ...],
    *,
    buffer: str = "",
    sites: tuple[str, str] = ("", ""),
    shares_prefix: bool = False,
    num_completions: int = 1,
    has_rules: bool = False,
    has_extras: bool = False,
    has_store: bool = False,
    has_files: bool = False,
    **settings: Any,  # noqa: ANN401 - fields of EngineConfig
) -> Callable[[Detour], Detour]:
    """Register a detour as a mutant; see `EngineFault`."""

    def add(detour: Detour) -> Detour:
        one = EngineFault(
            detour=detour, settings=settings, kinds=kinds, buffer=buffer, sites=sites,
            shares_prefix=shares_prefix, num_completions=num_completions, has_rules=has_rules,
            has_extras=has_extras, has_store=has_store, has_files=has_files,
        )
        summary = (detour.__doc__ or "").strip().splitlines()[0]
        register(Mutant(name=name, letter=letter, run=partial(run_fault, one), summary=summary))
        return detour

    return add


class _Landed:
    """Counts of the compact layout, landed in memory of the worker's own beside the ticket."""

    def __init__(self, engine: Engine) -> None:
        self.worker = engine.worker
        self.runtime = engine.parts.runtime
        self.size = engine.parts.sizes.max_num_seqs
        self.events: dict[int, rt.Event] = {}
        self.landings = [self.new(f"batch landing {index}") for index in range(4)]

    def new(self, name: str) -> Any:  # noqa: ANN401 - host memory
        """Host memory that the device writes to."""
        return self.runtime.raw.host_array(name, (self.size,), torch.int64)

    def copy(self, handle: StepHandle, landing: Any) -> None:  # noqa: ANN401
        """Copy the step's counts after its own fetch, on the same stream."""
        ring = self.worker._frames  # noqa: SLF001 - a mutant takes back what is private
        frame = ring._frames[ring._current]  # noqa: SLF001
        stream = self.runtime.stream("d2h")
        self.runtime.raw.copy_to_host(landing, frame.outputs["accepted"], stream)
        self.events[handle.step_id] = stream.record()

    def after_each_step(self, landing_of: Callable[[StepHandle], Any]) -> None:
        """Land counts after every execute."""
        execute = self.worker.execute

        def detour(output: Any) -> StepHandle:  # noqa: ANN401
            handle = execute(output)
            self.copy(handle, landing_of(handle))
            return handle

        self.worker.execute = detour  # type: ignore[method-assign]

    def apply_with(self, read: Callable[[StepHandle], np.ndarray]) -> None:
        """Take accepted counts from `read` instead of the ticket."""
        compact = self.worker._compact  # noqa: SLF001

        def detour(previous: StepHandle) -> None:
            num_sampled, accepted = previous.counts()
            landed = read(previous)
            count = len(accepted)
            compact.apply(previous.produced, num_sampled, np.maximum(landed[:count], 1))

        self.worker._apply = detour  # type: ignore[method-assign]  # noqa: SLF001


@plant(
    "engine-counts-land-in-the-batch", "H", UNORDERED, buffer="batch counts",
    batch_layout="compact", state_scheme="columns", speculative="scripted:3",
)
def counts_land_in_the_batch(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """Accepted counts land in the batch's own array, whose rows the next step moves."""
    landed = _Landed(engine)
    live = landed.new("batch counts")
    compact: CompactRows = engine.worker._compact  # noqa: SLF001
    move = compact._move  # noqa: SLF001

    def moving(source: int, target: int) -> None:
        move(source, target)
        live.array[target] = live.array[source]

    compact._move = moving  # type: ignore[method-assign]  # noqa: SLF001
    landed.after_each_step(
        lambda handle: live if faulty else landed.landings[handle.step_id % 4]
    )

    def read(previous: StepHandle) -> np.ndarray:
        landed.events[previous.step_id].wait_host()
        source = live if faulty else landed.landings[previous.step_id % 4]
        return np.array([int(source.array[row]) for row in range(landed.size)])

    landed.apply_with(read)


@plant(
    "engine-landing-read-early", "H", UNORDERED, buffer="batch landing",
    batch_layout="compact", state_scheme="columns", speculative="scripted:3",
)
def landing_read_early(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """The compact layout reads a step's accepted counts before their event."""
    landed = _Landed(engine)
    landed.after_each_step(lambda handle: landed.landings[handle.step_id % 4])

    def read(previous: StepHandle) -> np.ndarray:
        if not faulty:
            landed.events[previous.step_id].wait_host()
        array = landed.landings[previous.step_id % 4].array
        return np.array([int(array[row]) for row in range(landed.size)])

    landed.apply_with(read)


@plant(
    "engine-counts-through-the-current-map", "V", (WRONG,),
    sites=("src/headrace/worker/rows.py in CompactRows.apply",
           "src/headrace/worker/launches.py in advance"),
    batch_layout="compact", state_scheme="columns", speculative="scripted:3",
)
def counts_through_the_current_map(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """Counts are applied to the rows of today instead of those of the step that made them."""
    compact: CompactRows = engine.worker._compact  # noqa: SLF001
    apply = compact.apply

    def detour(produced: ProducerMap, num_sampled: Any, accepted: Any) -> None:  # noqa: ANN401
        if faulty and accepted is not None:
            today = {seq_id: row for row, seq_id in enumerate(compact.seq_ids)}
            order = [today.get(seq_id, at) for at, seq_id in enumerate(produced.seq_ids)]
            order = [min(row, len(accepted) - 1) for row in order]
            num_sampled = np.maximum(num_sampled[order], 1)
            accepted = np.maximum(accepted[order], 1)
        apply(produced, num_sampled, accepted)

    compact.apply = detour  # type: ignore[method-assign]


@plant(
    "engine-fetch-does-not-wait", "H", UNORDERED, buffer="step[",
    speculative="scripted:3",
)
def fetch_does_not_wait(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """The results are copied on their stream without waiting for the step."""
    runtime = engine.parts.runtime
    fetch = runtime.fetch

    def detour(views: Any, *, on: rt.Stream, after: Any = None, rows: Any = None) -> rt.Ticket:  # noqa: ANN401
        return fetch(views, on=on, after=None if faulty else after, rows=rows)

    runtime.fetch = detour  # type: ignore[method-assign]


def _aside(engine: Engine, ops: tuple[Any, ...], *, faulty: bool) -> None:
    """Launch some operations on a side stream; the fault is that nobody waits for it."""
    runtime = engine.parts.runtime
    launch, compute, side = runtime.launch, runtime.stream("compute"), runtime.stream("side")

    def detour(op: Any, stream: rt.Stream, **arguments: Any) -> None:  # noqa: ANN401
        if op not in ops:
            launch(op, stream, **arguments)
            return
        side.wait(compute.record())
        launch(op, side, **arguments)
        if not faulty:
            compute.wait(side.record())

    runtime.launch = detour  # type: ignore[method-assign]


@plant(
    "engine-verify-on-a-side-stream", "H", UNORDERED, buffer="carry.",
    speculative="scripted:3", batch_layout="slots",
)
def verify_on_a_side_stream(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """Tokens are verified on a side stream that the next step does not wait for."""
    _aside(engine, (launches.verify,), faulty=faulty)


@plant(
    "engine-row-gather-on-a-side-stream", "H", UNORDERED, buffer="carry.last_token",
    batch_layout="compact", state_scheme="columns", speculative="none",
)
def row_gather_on_a_side_stream(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """The rows' last tokens are gathered on a side stream that the step does not wait for."""
    _aside(engine, (launches.gather_carry,), faulty=faulty)


@plant(
    "engine-graph-inputs-on-a-side-stream", "H", UNORDERED, buffer="graph.", graphs="on",
    speculative="none", batch_layout="slots",
)
def graph_inputs_on_a_side_stream(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """A captured step's inputs and outputs are copied on a stream that its replay ignores."""
    _aside(engine, (copy_fields,), faulty=faulty)


@plant(
    "engine-graph-inputs-overwritten-early", "H", UNORDERED, buffer="graph.in", graphs="on",
    speculative="none", batch_layout="slots",
)
def graph_inputs_overwritten_early(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """A stream of its own brings the next step's inputs while a replay still reads the last."""
    worker, runtime = engine.worker, engine.parts.runtime
    graphs = worker.graphs
    assert graphs is not None
    stage, load = worker._stager.stage, graphs.load  # noqa: SLF001
    side = runtime.stream("side")

    def staging(frame: Any, stream: rt.Stream, *arguments: Any, **more: Any) -> Any:  # noqa: ANN401
        staged = stage(frame, side, *arguments, **more)
        if staged.padded is None:
            stream.wait(side.record())
        return staged

    def loading(frame: rt.Frame, rows: Any) -> None:  # noqa: ANN401
        compute = graphs._stream  # noqa: SLF001
        if not faulty:
            side.wait(compute.record())
        graphs._stream = side  # noqa: SLF001
        load(frame, rows)
        graphs._stream = compute  # noqa: SLF001
        compute.wait(side.record())

    worker._stager.stage = staging  # type: ignore[method-assign]  # noqa: SLF001
    graphs.load = loading  # type: ignore[method-assign]


@plant(
    "engine-graph-outputs-fetched-in-place", "H", UNORDERED, buffer="graph.out", graphs="on",
    speculative="none", batch_layout="slots",
)
def graph_outputs_fetched_in_place(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """Results are read back from static memory, which the next replay writes."""
    runtime, graphs = engine.parts.runtime, engine.worker.graphs
    assert graphs is not None
    store, fetch = graphs.store, runtime.fetch
    static: dict[str, Any] = {}

    def storing(wanted: Any) -> None:  # noqa: ANN401
        if faulty:
            for name, view in wanted.items():
                static[name] = graphs.outputs[name][: len(view)]
        else:
            store(wanted)

    def fetching(views: Any, **more: Any) -> rt.Ticket:  # noqa: ANN401
        instead = dict(static)
        static.clear()
        return fetch(instead or views, **more)

    graphs.store = storing  # type: ignore[method-assign]
    runtime.fetch = fetching  # type: ignore[method-assign]


def _around_replays(engine: Engine, name: str, *, is_before: bool) -> None:
    """Let the replays of steps in one piece come right before or after a copy of their fields."""
    graphs = engine.worker.graphs
    assert graphs is not None
    copy, run = getattr(graphs, name), graphs.run
    copies: list[Any] = []
    runs: list[Any] = []

    def copying(*arguments: Any) -> None:  # noqa: ANN401
        copies.append(arguments)
        if name == "store":
            flush()

    def running(part: str, *arguments: Any) -> None:  # noqa: ANN401
        runs.append((part, *arguments))
        if name == "load":
            flush()

    def flush() -> None:
        steps = [(run, one) for one in runs], [(copy, one) for one in copies]
        for call, arguments in (*steps[not is_before], *steps[is_before]):
            call(*arguments)
        runs.clear()
        copies.clear()

    setattr(graphs, name, copying)
    graphs.run = running  # type: ignore[method-assign, assignment]


@plant(
    "engine-graph-reads-stale-inputs", "V", (WRONG,), graphs="on", speculative="none",
    batch_layout="slots",
    sites=("src/headrace/worker/graphs.py in StepGraphs.load",
           "src/headrace/worker/launches.py in advance"),
)
def graph_reads_stale_inputs(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """A step's inputs are copied to static memory behind its replay, which reads the last ones."""
    _around_replays(engine, "load", is_before=faulty)


@plant(
    "engine-graph-outputs-copied-early", "V", (WRONG,), graphs="on", speculative="none",
    batch_layout="slots",
    sites=("src/headrace/worker/graphs.py in StepGraphs.store",
           "src/headrace/worker/worker.py in Worker.execute"),
)
def graph_outputs_copied_early(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """A step's results are copied from static memory before its replay has made them."""
    _around_replays(engine, "store", is_before=not faulty)


@plant(
    "engine-padding-writes-a-live-block", "V", (WRONG,), graphs="on", speculative="scripted:3",
    batch_layout="slots", sites=("src/headrace/worker/launches.py in advance",
                                 "src/headrace/worker/launches.py in forward"),
)
def padding_writes_a_live_block(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """Tokens of padding keep the KV place of the first row's last token, and write there."""
    launch = engine.parts.runtime.launch

    def detour(op: Any, stream: rt.Stream, **arguments: Any) -> None:  # noqa: ANN401
        if op is launches.advance and faulty:
            arguments["shape"] = replace(arguments["shape"], is_padded=False)
        launch(op, stream, **arguments)

    engine.parts.runtime.launch = detour  # type: ignore[method-assign]


@plant(
    "engine-padding-with-a-live-row", "V", (WRONG,), graphs="on", speculative="none",
    batch_layout="slots", sites=("src/headrace/worker/graphs.py in StepGraphs.fill",
                                 "src/headrace/worker/launches.py in verify"),
)
def padding_with_a_live_row(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """Rows of padding have the carry row of the first slot, whose counts they write too."""
    graphs = engine.worker.graphs
    assert graphs is not None
    fill = graphs.fill

    def detour(verify: Any, kind: Any) -> Any:  # noqa: ANN401
        made = fill(verify, kind)
        if made is None:
            return None
        return replace(made, null_row=0 if faulty else made.null_row)

    graphs.fill = detour  # type: ignore[method-assign]


@plant(
    "engine-export-before-its-boundary", "V", (WRONG,),
    sites=("src/headrace/engine/scheduler.py in Scheduler._plan_known",
           "src/headrace/engine/prefix_cache.py in PrefixCache.match"),
    shares_prefix=True, prefix_cache="align", speculative="none", state_scheme="replay",
    state_block_size=16, checkpoint_retention="all",
)
def export_before_its_boundary(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """A checkpoint labelled n tokens holds the state one scan point earlier."""
    execute = engine.worker.execute

    def detour(output: Any) -> StepHandle:  # noqa: ANN401
        known = tuple(replace(row, states=_early(row, faulty=faulty)) for row in output.known)
        return execute(replace(output, known=known))

    engine.worker.execute = detour  # type: ignore[method-assign]


def _early(row: Any, *, faulty: bool) -> Any:  # noqa: ANN401
    def at(position: int) -> int:
        return position - GRID if faulty and position - GRID > row.start else position

    return tuple(
        replace(state, exports=tuple((at(position), block) for position, block in state.exports))
        for state in row.states
    )


def _with_forks(engine: Engine, change: Callable[[Any, Any], Any]) -> None:
    """Change the plans of forks; `change` gets the known row and one of its forks."""
    execute = engine.worker.execute

    def detour(output: Any) -> StepHandle:  # noqa: ANN401
        known = tuple(
            replace(row, forks=tuple(change(row, fork) for fork in row.forks))
            for row in output.known
        )
        return execute(replace(output, known=known))

    engine.worker.execute = detour  # type: ignore[method-assign]


_FORK_SITES = (
    "src/headrace/engine/scheduler.py in Scheduler._fork_family",
    "src/headrace/worker/launches.py in copy_blocks",
)


@plant(
    "engine-fork-without-its-last-block", "V", (WRONG,), sites=_FORK_SITES, num_completions=3,
    prefix_cache="none", speculative="none",
)
def fork_without_its_last_block(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """A fork goes on in a block of its own, but what the prompt left there is not copied."""
    _with_forks(
        engine, lambda _, fork: replace(fork, kv_copies=() if faulty else fork.kv_copies)
    )


@plant(
    "engine-fork-writes-the-shared-last-block", "V", (WRONG,), sites=_FORK_SITES,
    num_completions=3, prefix_cache="none", speculative="none", batch_layout="slots",
)
def fork_writes_the_shared_last_block(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """The partial last block is shared like a full one: each fork writes over the others."""
    blocks: dict[int, dict[int, int]] = {}
    execute = engine.worker.execute

    def detour(output: Any) -> StepHandle:  # noqa: ANN401
        for _, fork in output.forks:
            shared = {target: source for source, target in fork.kv_copies}
            blocks[fork.seq_id] = shared if faulty else {}
        known = tuple(
            replace(
                row,
                forks=tuple(
                    replace(fork, kv_copies=() if faulty else fork.kv_copies) for fork in row.forks
                ),
            )
            for row in output.known
        )
        verify = output.verify
        if verify is not None:
            table = verify.kv_table.copy()
            for line, seq_id in zip(table, verify.seq_ids, strict=True):
                for own, source in blocks.get(seq_id, {}).items():
                    line[line == own] = source
            verify = replace(verify, kv_table=table)
        return execute(replace(output, known=known, verify=verify))

    engine.worker.execute = detour  # type: ignore[method-assign]


@plant(
    "engine-fork-without-its-state", "V", (WRONG,), sites=_FORK_SITES, num_completions=3,
    prefix_cache="none", speculative="none", state_scheme="columns",
)
def fork_without_its_state(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """A fork's state column is taken but the running state is not copied into it."""
    launch = engine.parts.runtime.launch

    def detour(op: Any, stream: rt.Stream, **arguments: Any) -> None:  # noqa: ANN401
        if op is launches.copy_blocks and faulty:
            arguments["state_pairs"] = tuple(() for _ in arguments["state_pairs"])
        launch(op, stream, **arguments)

    engine.parts.runtime.launch = detour  # type: ignore[method-assign]


@plant(
    "engine-fork-copies-on-a-side-stream", "H", UNORDERED, buffer="", num_completions=3,
    prefix_cache="none", speculative="none",
)
def fork_copies_on_a_side_stream(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """Blocks of forks are copied on a side stream that their first step does not wait for."""
    _aside(engine, (launches.copy_blocks,), faulty=faulty)


@plant(
    "engine-grammar-not-rolled-back", "V", (WRONG,),
    sites=("src/headrace/engine/scheduler.py in Scheduler._masks",
           "src/headrace/engine/scheduler.py in Scheduler._append"),
    has_rules=True, speculative="scripted:3",
)
def grammar_not_rolled_back(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """The drafts that a grammar was tried on for masks stay in its state."""
    scheduler = engine.scheduler
    masks = scheduler._masks  # noqa: SLF001

    def detour(now: Any) -> Any:  # noqa: ANN401
        made = masks(now)
        rows = now.verify
        generating = () if rows is None else zip(rows.seqs, rows.num_drafts, strict=True)
        for seq, count in generating:
            if seq.grammar is not None:
                state = seq.grammar if faulty else seq.grammar.copy()
                for token in seq.drafts[:count]:
                    state.advance(token)
        return made

    scheduler._masks = detour  # type: ignore[method-assign]  # noqa: SLF001


@plant(
    "engine-masks-of-the-last-step", "V", (WRONG,),
    sites=("src/headrace/worker/token_masks.py in MasksStage.stage",
           "src/headrace/worker/launches.py in verify"),
    has_rules=True, speculative="none",
)
def masks_of_the_last_step(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """Rows are masked with what the step before allowed in the same places."""
    stage = engine.worker._masks_stage.stage  # noqa: SLF001
    last: list[np.ndarray] = []

    def detour(masks: Any, first: Any, stream: rt.Stream) -> Any:  # noqa: ANN401
        bits = masks.bits
        if faulty and last:
            count = min(len(bits), len(last[0]))
            bits = np.concatenate((last[0][:count], bits[count:]))
        last[:] = [masks.bits]
        return stage(replace(masks, bits=bits), first, stream)

    engine.worker._masks_stage.stage = detour  # type: ignore[method-assign]  # noqa: SLF001


@plant(
    "engine-masks-on-a-side-stream", "H", UNORDERED, buffer="masks",
    has_rules=True, speculative="scripted:3",
)
def masks_on_a_side_stream(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """Masks are copied on a side stream that verify does not wait for."""
    runtime = engine.parts.runtime
    stage, side = engine.worker._masks_stage.stage, runtime.stream("side")  # noqa: SLF001

    def detour(masks: Any, first: Any, stream: rt.Stream) -> Any:  # noqa: ANN401
        side.wait(stream.record())
        made = stage(masks, first, side)
        if not faulty:
            stream.wait(side.record())
        return made

    engine.worker._masks_stage.stage = detour  # type: ignore[method-assign]  # noqa: SLF001


@plant(
    "engine-logit-rules-on-a-side-stream", "H", UNORDERED, buffer="rules", has_extras=True,
    speculative="scripted:3",
)
def logit_rules_on_a_side_stream(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """Biases and penalties are copied on a side stream that verify does not wait for."""
    runtime = engine.parts.runtime
    stage, side = engine.worker._rules_stage.stage, runtime.stream("side")  # noqa: SLF001

    def detour(rows: Any, stream: rt.Stream) -> Any:  # noqa: ANN401
        side.wait(stream.record())
        made = stage(rows, side)
        if not faulty:
            stream.wait(side.record())
        return made

    engine.worker._rules_stage.stage = detour  # type: ignore[method-assign]  # noqa: SLF001


@plant(
    "engine-scores-overwritten-while-read-back", "H", UNORDERED, buffer="prompt.",
    has_extras=True, speculative="none",
)
def scores_overwritten_while_read_back(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """A prompt's log-probabilities are read back on a stream that the next ones do not wait for."""
    runtime = engine.parts.runtime
    fetch, compute, d2h = runtime.fetch, runtime.stream("compute"), runtime.stream("d2h")

    def detour(views: Any, *, on: rt.Stream, after: Any = None, rows: Any = None) -> rt.Ticket:  # noqa: ANN401
        if on is not compute:
            return fetch(views, on=on, after=after, rows=rows)
        ticket = fetch(views, on=d2h, after=compute.record(), rows=rows)
        if not faulty:
            compute.wait(d2h.record())
        return ticket

    runtime.fetch = detour  # type: ignore[method-assign]


@plant(
    "engine-drafts-landed-before-they-are-made", "H", UNORDERED, buffer="carry.drafts",
    has_rules=True, speculative="scripted:3",
)
def drafts_landed_before_they_are_made(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """Drafts are handed to the host on a side stream that does not wait for the drafter."""
    launch_aside(engine, launches.land_drafts, waits=not faulty)


def launch_aside(engine: Engine, aside: rt.Op[Any], *, waits: bool) -> None:
    """From now on launch an op on a side stream, which may wait for what was launched before it."""
    runtime = engine.parts.runtime
    launch, compute, side = runtime.launch, runtime.stream("compute"), runtime.stream("side")

    def detour(op: Any, stream: rt.Stream, **arguments: Any) -> None:  # noqa: ANN401
        if op is not aside:
            launch(op, stream, **arguments)
            return
        if waits:
            side.wait(compute.record())
        launch(op, side, **arguments)
        compute.wait(side.record())

    runtime.launch = detour  # type: ignore[method-assign]
