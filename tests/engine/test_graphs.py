"""Captured steps give the bits of launched ones, and padding touches nothing that is anybody's.

On the CPU a replay is the captured launches once more, with the values that stand in memory then.
All else is as it was captured: what a step needs besides would be that of another step.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conformance import (
    GREEDY,
    MAX_LEN,
    VOCAB,
    Job,
    assert_balanced,
    assert_checkpoints,
    assert_same_bits,
    assert_same_outputs,
    drive,
    make_engine,
    make_jobs,
    script_for,
    small_model,
    solve,
)

from headrace import rt
from headrace.config import EngineConfig
from headrace.engine.load import load_parts, resolve_graphs
from headrace.errors import ConfigError
from headrace.testing import KERNEL_SIZES
from headrace.worker import graphs as step_graphs
from headrace.worker import launches
from headrace.worker.graphs import row_sizes

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.worker.step import SchedulerOutput
    from headrace.worker.worker import StepHandle

LAYOUTS, SCHEMES = ("slots", "compact"), ("columns", "replay")
DRAFTS = ("none", "scripted:3", "mtp:2", "ngram:2", "draft:x:2")
SENTINEL = 77


def engine_with_graphs(model: Any, drafts: str, scheme: str, **options: Any) -> Engine:  # noqa: ANN401
    """An engine that always proposes drafts, and captures steps."""
    engine = make_engine(
        model, draft_model=model if drafts.startswith("draft") else None, speculative=drafts,
        state_scheme=scheme, replay_interval=4 if scheme == "replay" else None,
        **{"graphs": "on", **options},
    )  # fmt: skip
    engine.scheduler.policy = None
    return engine


def jobs_for(model: Any, rng: random.Random, drafts: str) -> list[Job]:  # noqa: ANN401
    """Greedy requests whose logits are asked for, or are not, and sampled ones."""
    jobs = make_jobs(model, rng, [5, 17, 33, 9, 12])
    jobs += [
        solve(model, Job([rng.randrange(2, VOCAB) for _ in range(length)],
                         replace(GREEDY, logprobs=None)), states=True)
        for length in (4, 20, 31, 7)
    ]  # fmt: skip
    for job in jobs:
        if drafts.startswith("scripted"):
            job.script = script_for(job, int(drafts[-1]), rng)
    return jobs


@pytest.mark.thinned
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["cpu", "sim"])
def test_captured_steps_give_the_bits_of_the_plain_loop(
    backend: str, layout: str, scheme: str, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences come, grow past the room of a captured step, are preempted and end."""
    seed = secrets.randbits(32)
    print(f"{seed=}")
    rng = random.Random(seed)
    model = small_model(seed)
    monkeypatch.setattr(step_graphs, "FIRST_LENGTH", 24)
    engine = engine_with_graphs(
        model, drafts, scheme, rt_backend=backend, batch_layout=layout, max_num_seqs=5
    )
    jobs = jobs_for(model, rng, drafts)
    for job, output in zip(
        jobs, drive(engine, jobs, rng, preempt=0.03, stagger=0.3), strict=True
    ):  # fmt: skip
        assert job.run is not None
        assert output.outputs[0].token_ids == job.run.tokens
        if output.outputs[0].logprobs is not None:
            assert_same_bits(job, output)
    assert_checkpoints(engine, jobs)
    assert_balanced(engine)
    assert engine.parts.runtime.finish() == ()
    graphs = engine.worker.graphs
    assert graphs is not None
    assert graphs.num_replays > 0


def test_rows_may_be_filled_up_to_more_tokens_than_a_step_may_hold() -> None:
    """All rows with all drafts are more than the budget, which then bounds their drafts."""
    seed = secrets.randbits(32)
    print(f"{seed=}")
    rng = random.Random(seed)
    model = small_model(seed)
    engine = engine_with_graphs(
        model, "scripted:3", "columns", max_num_seqs=6, max_num_batched_tokens=16
    )
    params = replace(GREEDY, max_tokens=60, logprobs=None)
    jobs = [solve(model, Job([2 + index], params), states=True) for index in range(6)]
    for index, job in enumerate(jobs):
        # Two propose, in vain, so that all go on together: 2 * 4 + 4 tokens, filled up to 6 * 4.
        tokens, keep = script_for(job, 3, rng)
        job.script = tokens, np.full_like(keep, 0 if index < 2 else -1)
    for job, output in zip(jobs, drive(engine, jobs, rng, stagger=0.0), strict=True):
        assert job.run is not None
        assert output.outputs[0].token_ids == job.run.tokens
    graphs = engine.worker.graphs
    assert graphs is not None
    assert max(size[0] * size[1] for _, size, _ in graphs._graphs) == 24


@pytest.mark.parametrize("drafts", ["ngram:2", "scripted:3"])
def test_steps_without_drafts_capture_no_part_that_launches_nothing(drafts: str) -> None:
    """A sampled step is two parts; CUDA complains of an empty one."""
    model = small_model(0)
    engine = engine_with_graphs(model, drafts, "replay", max_num_seqs=2)
    engine.scheduler.policy = Mock(choose=lambda _: 0)
    job = solve(model, Job([2, 3], replace(GREEDY, max_tokens=9, temperature=1.0, seed=1)))
    if drafts.startswith("scripted"):
        job.script = script_for(job, 3, random.Random(0))
    (output,) = drive(engine, [job], random.Random(0), stagger=0.0)
    assert job.run is not None
    assert output.outputs[0].token_ids == job.run.tokens
    graphs = engine.worker.graphs
    assert graphs is not None
    assert {part for part, _, _ in graphs._graphs} == {"logits"}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_that_captured_steps_complete_are_those_of_a_plain_pass(
    layout: str, scheme: str
) -> None:
    """Where bits are promised such states are not cached: here they are, to be compared."""
    rng = random.Random(11)
    model = small_model(1)
    engine = engine_with_graphs(
        model, "scripted:3", scheme, batch_layout=layout, deterministic=False
    )
    jobs = make_jobs(model, rng, [5, 13, 9, 11])
    for job in jobs:
        job.script = script_for(job, 3, rng)
    drive(engine, jobs, rng)
    assert any(
        entry.is_generated
        for pool in engine.scheduler.state_pools for entry in pool._entries.values()
    )
    assert_checkpoints(engine, jobs)
    graphs = engine.worker.graphs
    assert graphs is not None
    assert graphs.num_replays > graphs.num_launches


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rules_forks_and_aborts_are_the_same_with_graphs(layout: str) -> None:
    seed = secrets.randbits(32)
    print(f"{seed=}")
    model = small_model(seed)
    outputs = []
    for graphs in ("off", "on"):
        rng = random.Random(seed)
        engine = engine_with_graphs(model, "mtp:2", "columns", graphs=graphs, batch_layout=layout)
        done = {}
        for index in range(8):
            params = replace(
                GREEDY, max_tokens=14, n=2 if index == 3 else 1, seed=index,
                temperature=1.0 if index == 3 else 0.0,
                logit_bias={5: 2.0} if index == 1 else None,
                repetition_penalty=1.3 if index == 4 else 1.0,
            )  # fmt: skip
            prompt = [rng.randrange(2, VOCAB) for _ in range(4 + 3 * index)]
            engine.add_request(str(index), prompt, params)
        for turn in range(200):
            if turn == 5:
                engine.abort("2")
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output
            if not engine.has_work():
                break
        assert_balanced(engine)
        outputs.append(done)
        if graphs == "on":
            assert engine.worker.graphs is not None
            assert engine.worker.graphs.num_replays > 0
    for request in "013456" + "7":
        assert_same_outputs(outputs[0][request], outputs[1][request])


@pytest.mark.parametrize("drafts", ["mtp:3", "ngram:2", "draft:x:2"])
def test_drafts_are_the_same_with_graphs(drafts: str) -> None:
    """Outputs do not show what was proposed. Three rows of different lengths, in steps of four."""
    model = small_model(0)
    engines = [
        engine_with_graphs(model, drafts, "columns", graphs=graphs, async_scheduling=False)
        for graphs in ("off", "on")
    ]
    for engine in engines:
        for index, length in enumerate((5, 9, 13)):
            params = replace(GREEDY, logprobs=None, max_tokens=30 + index)
            engine.add_request(str(index), [7, 8, 9] * length, params)
    compared = 0
    while engines[0].has_work():
        proposed = []
        for engine in engines:
            engine.step()
            slots = [seq.slot for seq in engine.scheduler.running]
            proposed.append(engine.parts.runtime.read(engine.worker._drafts[0])[slots])
        assert torch.equal(*proposed)
        compared += len(proposed[0])
    assert not engines[1].has_work()
    assert compared > 10
    graphs = engines[1].worker.graphs
    assert graphs is not None
    assert graphs.num_replays > 3


def poison(engine: Engine) -> dict[str, rt.Buffer]:
    """Fill everything that nobody has yet; returns the buffers by name. Null blocks stay."""
    worker, runtime = engine.worker, engine.parts.runtime
    pools = [worker.pools] if worker.draft_pools is None else [worker.pools, worker.draft_pools]
    buffers = {"tokens": worker._tokens}
    for index, each in enumerate(pools):
        buffers |= {f"{index}.k": each.k, f"{index}.v": each.v}
        for group in (*each.states, *each.rings):
            buffers |= {buffer.name: buffer for buffer in group.values()}
    for buffer in buffers.values():
        value = torch.full(buffer.shape, SENTINEL, dtype=buffer.dtype)
        value.select(buffer.row_dim, 0).zero_()
        runtime.write(buffer, value)
    return buffers


def note_plans(engine: Engine) -> dict[str, set[int]]:
    """Blocks that plans name from now on, null blocks included."""
    named: dict[str, set[int]] = {"kv": {0}, "state": {0}}
    execute = engine.worker.execute

    def note(output: SchedulerOutput) -> StepHandle:
        verify = output.verify
        tables = [] if verify is None else [verify.kv_table]
        states = [] if verify is None else list(verify.state_tables)
        for row in output.known:
            tables.append(row.kv_table)
            for state in row.states:
                ends = [state.target_block, *(block for _, block in state.exports)]
                states.append(np.array(ends))
        named["kv"].update(block for table in tables for block in table.reshape(-1).tolist())
        named["state"].update(block for table in states for block in table.reshape(-1).tolist())
        return execute(output)

    engine.worker.execute = note  # type: ignore[method-assign]
    return named


@pytest.mark.parametrize(
    ("layout", "scheme", "drafts"),
    [("slots", "columns", "mtp:2"), ("compact", "replay", "draft:x:2"),
     ("slots", "replay", "scripted:3"), ("compact", "columns", "draft:x:2")],
)  # fmt: skip
def test_padding_writes_nothing_that_is_anybodys(layout: str, scheme: str, drafts: str) -> None:
    """Three rows in steps of eight: blocks and carry rows that no plan named are as they were."""
    model = small_model(secrets.randbits(32))
    engine = engine_with_graphs(
        model, drafts, scheme, batch_layout=layout, max_num_seqs=8, num_kv_blocks=60,
        num_state_blocks=60, max_num_batched_tokens=64,
    )  # fmt: skip
    buffers = poison(engine)
    worker, runtime = engine.worker, engine.parts.runtime
    sizes, assigned = worker.sizes, worker.graphs
    assert assigned is not None
    assigned._row_sizes = (8,)
    free = torch.arange(3, 8) if layout == "slots" else torch.arange(0)
    carry = [*worker._counts.values(), *worker._last_token, *worker._drafts]
    for buffer in carry:
        value = torch.zeros(buffer.shape, dtype=buffer.dtype)
        value[free] = SENTINEL
        runtime.write(buffer, value)
    named = note_plans(engine)
    jobs = [solve(model, Job([3 + n] * n, replace(GREEDY, logprobs=None))) for n in (4, 15, 18)]
    for job in jobs:
        if drafts.startswith("scripted"):
            job.script = script_for(job, 3, random.Random(0))
    for job, output in zip(jobs, drive(engine, jobs), strict=True):
        assert job.run is not None
        assert output.outputs[0].token_ids == job.run.tokens
    assert assigned.num_replays > 3
    for name, buffer in buffers.items():
        rows = runtime.read(buffer).movedim(buffer.row_dim, 0)
        assert not rows[0].any(), f"the null block of {name} was written"
        scratch = range(sizes.num_state_blocks, len(rows))
        kind = "ring" if "ring" in name else "state" if "state" in name else "kv"
        owned = {"ring": {0, 1, 2, 3}, "state": named["state"] | set(scratch), "kv": named["kv"]}
        others = sorted(set(range(len(rows))) - owned[kind])
        assert len(others) > 3, name
        assert (rows[others] == SENTINEL).all(), f"{name}: padding wrote to a block of nobody"
    for buffer in carry:
        assert (runtime.read(buffer)[free] == SENTINEL).all(), buffer.name
    for name in ("computed", "accepted", "base_len"):
        assert runtime.read(worker._counts[name])[sizes.max_num_seqs] == 0


def test_a_step_is_launched_once_then_captured_then_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_with_graphs(small_model(0), "none", "replay", async_scheduling=False)
    runtime = engine.parts.runtime
    seen: list[str] = []
    graph, replay, launch = runtime.graph, rt.Graph.replay, runtime.launch

    def note_graph(*args: Any, **options: Any) -> rt.Graph:  # noqa: ANN401
        seen.append("captured")
        assert options["on"] is runtime.stream("compute")
        return graph(*args, **options)

    def note_launch(op: rt.Op[Any], stream: rt.Stream, **arguments: Any) -> None:  # noqa: ANN401
        if op is launches.forward and runtime._capturing is None and "replayed" not in seen[-1:]:
            seen.append("launched")
        launch(op, stream, **arguments)

    def note_replay(graph: rt.Graph, stream: rt.Stream, rows: Any = None) -> None:  # noqa: ANN401
        seen.append("replayed")
        replay(graph, stream, rows)

    engine.add_request("a", [5, 6, 7], replace(GREEDY, logprobs=None, max_tokens=6))
    engine.step()
    monkeypatch.setattr(runtime, "graph", note_graph)
    monkeypatch.setattr(runtime, "launch", note_launch)
    monkeypatch.setattr(rt.Graph, "replay", note_replay)
    for _ in range(4):
        seen.append("step")
        engine.step()
    assert " ".join(seen) == (
        "step launched step captured replayed step replayed step replayed"
    )


def test_a_capture_without_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with_graphs(small_model(0), "none", "replay", async_scheduling=False)

    def fail(graph: rt.Graph) -> None:
        raise torch.OutOfMemoryError(f"for {graph.key}")

    monkeypatch.setattr(engine.parts.runtime, "graph_captured", fail)
    engine.add_request("a", [5, 6, 7], replace(GREEDY, logprobs=None))
    engine.step()
    engine.step()
    with pytest.raises(ConfigError, match=r"a step of 1 rows; lower gpu_memory.* graphs off"):
        engine.step()


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 8, 9, 40, 200, 256, 300])
def test_sizes_of_steps_end_at_the_most_rows(most: int) -> None:
    sizes = row_sizes(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    padding = [min(size for size in sizes if size >= rows) - rows for rows in range(1, most + 1)]
    assert max(padding) < 32
    assert len(sizes) <= 20


def test_an_empty_place_of_a_captured_step_is_never_a_second_capture() -> None:
    """Steps with as many rows, drafts and columns share one graph."""
    model = small_model(0)
    engine = engine_with_graphs(model, "none", "replay", max_num_seqs=4)
    for name, length in (("a", 5), ("b", 9), ("c", 13)):
        engine.add_request(name, [7] * length, replace(GREEDY, logprobs=None, max_tokens=30))
    while engine.has_work():
        engine.step()
    graphs = engine.worker.graphs
    assert graphs is not None
    assert len(graphs._graphs) == 1
    assert graphs.num_replays >= 27


def test_steps_with_too_much_room_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "FIRST_LENGTH", 16)
    monkeypatch.setattr(step_graphs, "MOST_ROOM", 4 * 32)
    model = small_model(0)
    engine = engine_with_graphs(model, "none", "replay")
    jobs = [
        solve(model, Job([7 + n] * 5, replace(GREEDY, logprobs=None, max_tokens=40)))
        for n in range(4)
    ]
    for job, output in zip(jobs, drive(engine, jobs), strict=True):
        assert job.run is not None
        assert output.outputs[0].token_ids == job.run.tokens
    graphs = engine.worker.graphs
    assert graphs is not None
    # 16 tokens of room each, then 32; the steps behind that are as many again.
    assert {key[1][2] for key in graphs._graphs} == {1, 2}
    assert graphs.num_replays < engine.worker.num_steps - 12


def test_a_captured_size_stands_in_for_those_that_pass_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows end one after another; what is left runs as four rows until it is worth a capture."""
    monkeypatch.setattr(step_graphs, "PATIENCE", 3)
    model = small_model(0)
    engine = engine_with_graphs(model, "none", "replay", async_scheduling=False)
    graphs = engine.worker.graphs
    assert graphs is not None
    used: list[int] = []
    run = graphs.run

    def note(part: str, size: Any, kind: Any, enqueue: Any) -> None:  # noqa: ANN401
        used.append(size[0])
        run(part, size, kind, enqueue)

    monkeypatch.setattr(graphs, "run", note)
    jobs = [
        solve(model, Job([7 + n] * 5, replace(GREEDY, logprobs=None, max_tokens=tokens)))
        for n, tokens in enumerate((5, 7, 9, 18))
    ]
    for job, output in zip(jobs, drive(engine, jobs), strict=True):
        assert job.run is not None
        assert output.outputs[0].token_ids == job.run.tokens
    # Four rows, then three and two; one row has its own size after three steps. It is launched
    # first, then captured.
    assert used == [4] * 8 + [4] * 3 + [1] * 6
    assert sorted(key[1][0] for key in graphs._graphs) == [1, 4]


def test_which_size_a_step_has() -> None:
    """Its own if that is captured; else a captured one for a while; else with all drafts."""
    graphs = engine_with_graphs(small_model(0), "scripted:3", "columns").worker.graphs
    assert graphs is not None
    kind = ("a kind",)
    assert graphs._choose((8, 1, 32), kind) == (8, 1, 32)
    assert graphs._choose((8, 2, 32), kind) == (8, 4, 32)
    graphs._captured[kind] |= {(256, 4, 32), (64, 4, 64)}
    assert graphs._choose((256, 4, 32), kind) == (256, 4, 32)
    # 256 tokens are close to 100; 1,024 are not.
    close = [graphs._choose((25, 4, 64), kind) for _ in range(17)]
    assert close == [(64, 4, 64)] * 16 + [(25, 4, 64)]
    far = [graphs._choose((65, 1, 32), kind) for _ in range(5)]
    assert far == [(256, 4, 32)] * 4 + [(65, 1, 32)]
    assert graphs._choose((256, 4, 64), kind) == (256, 4, 64)
    assert graphs._choose((8, 3, 32), ("another",)) == (8, 4, 32)


# Settings ---------------------------------------------------------------------------------------


def test_graphs_are_off_on_a_cpu_unless_asked_for() -> None:
    config = EngineConfig(model="tiny", device="cpu", max_model_len=MAX_LEN, max_num_seqs=2)
    model = small_model(0, **KERNEL_SIZES)
    assert load_parts(config, model=model).config.graphs == "off"
    parts = load_parts(replace(config, graphs="on"), model=model)
    assert parts.config.graphs == "on"
    assert parts.worker.graphs is not None


def test_graphs_are_on_where_kernels_serve_a_cuda_device() -> None:
    config = EngineConfig(device="cuda")
    assert resolve_graphs(config, has_kernels=True)
    assert not resolve_graphs(config, has_kernels=False)
    assert not resolve_graphs(replace(config, graphs="off"), has_kernels=True)
    assert resolve_graphs(replace(config, graphs="on"), has_kernels=True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("yes", "graphs is 'yes'; choose auto, on or off"),
        ("on", "graphs is 'on' but PyTorch operations compute.*; use graphs auto or off"),
    ],
)
def test_graphs_that_cannot_be_had_are_refused_with_the_remedy(value: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=message):
        resolve_graphs(EngineConfig(device="cuda", graphs=value), has_kernels=False)
