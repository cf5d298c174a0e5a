"""Where counts are read from: the step's own snapshot and landing, never the batch's arrays.

The batch arrays are filled with decoys, numbers that no step can keep, just before decisions are
made. With the production path nothing changes.
"""

from __future__ import annotations

import functools
import random
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from conformance import (
    GREEDY,
    VOCAB,
    Job,
    assert_same_bits,
    drive,
    make_engine,
    script_for,
    small_model,
    solve,
)

from headrace import rt
from headrace.worker import launches
from headrace.worker.rows import CompactRows, ProducerMap
from headrace.worker.worker import StepHandle

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

DECOY = 7777


@pytest.fixture(params=["slots", "compact"])
def scene(request: pytest.FixtureRequest) -> tuple[Engine, list[Job]]:
    """An engine whose rows move, and jobs that keep 0 to 3 drafts."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = small_model(seed)
    engine = make_engine(
        model, speculative="scripted:3", batch_layout=request.param, state_scheme="columns"
    )
    jobs = []
    for length in (3, 12, 14, 20, 29):
        job = solve(model, Job([rng.randrange(2, VOCAB) for _ in range(length)], GREEDY))
        job.script = script_for(job, 3, rng)
        jobs.append(job)
    return engine, jobs


def check(scene: tuple[Engine, list[Job]]) -> None:
    engine, jobs = scene
    for job, output in zip(jobs, drive(engine, jobs), strict=True):
        assert_same_bits(job, output)


@pytest.mark.matrix
def test_the_save_decides_by_the_snapshot_of_the_step(
    scene: tuple[Engine, list[Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, real, real_save = scene[0].worker, launches.save, launches.save_columns
    snapshot = worker._work["kept"].device_tensor
    seen: list[int] = []

    @functools.wraps(real.fn)
    def with_decoys(**arguments: Any) -> None:  # noqa: ANN401
        rows = arguments["inputs"]["rows"][: arguments["shape"].num_verify]
        arguments["counts"]["accepted"][rows] = DECOY
        real.fn(**arguments)

    def spied(*pools_and_table: Any, accepted: Any, accepted_out: Any, **others: Any) -> None:  # noqa: ANN401
        assert accepted.data_ptr() == snapshot.data_ptr(), "decisions read something else"
        assert accepted_out.data_ptr() != snapshot.data_ptr(), "the snapshot would be written"
        kept = accepted.clone()
        real_save(*pools_and_table, accepted=accepted, accepted_out=accepted_out, **others)
        assert kept.equal(accepted), "the snapshot was written during the launch"
        seen.append(int(kept.max()))

    monkeypatch.setattr(launches, "save", rt.op(**real.effects)(with_decoys))
    monkeypatch.setattr(launches, "save_columns", spied)
    check(scene)
    assert seen
    assert max(seen) > 1


@pytest.mark.matrix
def test_counts_of_the_compact_layout_come_from_the_landing_of_their_step(
    scene: tuple[Engine, list[Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = scene[0]
    worker = engine.worker
    fetched: list[tuple[int, Any]] = []
    handles: dict[int, StepHandle] = {}
    applied: list[int] = []
    real_fetch, real_counts, real_apply = (
        engine.parts.runtime.fetch, StepHandle.counts, CompactRows.apply,
    )

    def fetch(views: Any, **others: Any) -> Any:  # noqa: ANN401
        ticket = real_fetch(views, **others)
        if "accepted" in views:
            outputs = [frame.outputs["accepted"] for frame in worker._frames._frames]
            assert any(views["accepted"].buffer is buffer for buffer in outputs), (
                "the counts are not fetched from a frame's outputs"
            )
            fetched.append((id(ticket), others["rows"]))
        return ticket

    def counts(self: StepHandle) -> tuple[np.ndarray, np.ndarray]:
        handles[id(self.produced)] = self
        return real_counts(self)

    def apply(
        self: CompactRows, produced: ProducerMap, sampled: np.ndarray | None,
        accepted: np.ndarray | None,
    ) -> None:
        for seq_id in produced.seq_ids[: produced.num_verify]:
            if seq_id in self._row:
                self.counts["accepted"][self._row[seq_id]] = DECOY
        if accepted is not None:
            handle = handles[id(produced)]
            landed = handle._ticket.result()
            assert accepted is landed["accepted"], "the counts are not the ticket's own"
            assert landed.rows is produced, "the map is not that of the producing step"
            assert not accepted.flags.writeable
            for array in self.counts.values():
                assert not np.shares_memory(array, accepted), "the batch is the copy's target"
            applied.append(int(accepted[: produced.num_verify].max(initial=0)))
        real_apply(self, produced, sampled, accepted)

    monkeypatch.setattr(engine.parts.runtime, "fetch", fetch)
    monkeypatch.setattr(StepHandle, "counts", counts)
    monkeypatch.setattr(CompactRows, "apply", apply)
    check(scene)
    assert fetched
    if worker.layout == "compact":
        assert max(applied) > 1
    else:
        assert not applied, "the slots layout reads no counts"
