"""Faults put back between the real engine and its state store; see `engine_mutants`."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.check.engine_mutants import UNORDERED, WRONG, launch_aside, plant
from headrace.worker import transfers

if TYPE_CHECKING:
    from headrace import rt
    from headrace.engine.engine import Engine
    from headrace.engine.state_store.prefixes import StoredPrefixes
    from headrace.worker.step import PieceLoad


def _stored(engine: Engine) -> StoredPrefixes:
    stored = engine.scheduler.stored
    assert stored is not None, "the workload of these faults has a store"
    return stored


@plant(
    "engine-pieces-packed-on-a-side-stream", "H", UNORDERED, buffer="kv.tokens",
    has_store=True, shares_prefix=True, speculative="none",
)
def pieces_packed_on_a_side_stream(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """Checkpoints are packed on a side stream that does not wait for their step."""
    launch_aside(engine, transfers.pack, waits=not faulty)


@plant(
    "engine-pieces-unpacked-before-they-came", "H", UNORDERED, buffer="store.load",
    has_store=True, shares_prefix=True, speculative="none",
)
def pieces_unpacked_before_they_came(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """The blocks of a stored prefix are filled without waiting for its copy to the device."""
    assert engine.worker.transfers is not None
    unpack = engine.worker.transfers.unpack

    def detour(staged: transfers.StagedLoads, stream: rt.Stream) -> None:
        unpack(replace(staged, event=stream.record()) if faulty else staged, stream)

    engine.worker.transfers.unpack = detour  # type: ignore[method-assign]


@plant(
    "engine-first-chunk-before-its-loads", "V", (WRONG,),
    sites=("src/headrace/worker/transfers.py in unpack",
           "src/headrace/worker/launches.py in forward"),
    has_store=True, shares_prefix=True, speculative="none", state_store_step_bytes=1,
)
def first_chunk_before_its_loads(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """A sequence's first chunk runs when some of its pieces are there; the others come later."""
    scheduler = engine.scheduler
    plan, schedule = scheduler._plan_loads, scheduler._schedule_known  # noqa: SLF001
    late: deque[PieceLoad] = deque()

    def plan_loads(seq: Any, now: Any) -> None:  # noqa: ANN401
        plan(seq, now)
        if faulty:
            late.extend(seq.loads)
            seq.loads.clear()

    def schedule_known(now: Any, in_prompt: Any) -> None:  # noqa: ANN401
        while late and now.loads_left[late[0].kind]:
            now.loads_left[late[0].kind] -= 1
            now.loads.append(late.popleft())
        schedule(now, in_prompt)

    scheduler._plan_loads = plan_loads  # type: ignore[method-assign]  # noqa: SLF001
    scheduler._schedule_known = schedule_known  # type: ignore[method-assign]  # noqa: SLF001


@plant(
    "engine-pieces-packed-over-those-read-back", "H", UNORDERED, buffer="store.save",
    has_store=True, speculative="none", state_store_step_bytes=1, checkpoint_retention="all",
)
def pieces_packed_over_those_read_back(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """Pieces to save are packed over others whose copy to the host has not landed."""
    assert engine.worker.transfers is not None
    ring = engine.worker.transfers._saves  # noqa: SLF001 - a mutant takes back what is private
    take = ring.next
    # Else most of what comes is noticed by its tokens, and not used.
    _stored(engine)._fits = lambda *_: True  # type: ignore[method-assign]  # noqa: SLF001

    def detour() -> rt.Frame:
        ring._current = ring.depth - 1  # noqa: SLF001 - the same frame each time
        if faulty:
            for frame in ring._frames:  # noqa: SLF001
                frame.streams.clear()
                frame._last_use.clear()  # noqa: SLF001
        return take()

    ring.next = detour  # type: ignore[method-assign]


@plant(
    "engine-stored-pieces-not-checked", "V", (WRONG,),
    sites=("src/headrace/engine/state_store/wire.py in Wire.decode",
           "src/headrace/worker/transfers.py in unpack"),
    has_store=True, has_files=True, shares_prefix=True, speculative="none",
)
def stored_pieces_not_checked(engine: Engine, faulty: bool) -> None:  # noqa: FBT001
    """The states in files were damaged, and their digest is not looked at."""
    store = _stored(engine).store
    assert store.folder is not None
    read = store.folder.read

    def detour(kind: Any, key: bytes) -> bytes | None:  # noqa: ANN401
        raw = read(kind, key)
        if raw is None or kind != "state":
            return raw
        size = store.wire.num_bytes(kind)
        return raw[:-size] + bytes(size)

    store.folder.read = detour  # type: ignore[method-assign]
    if faulty:
        store.wire._check_digest = lambda raw: None  # type: ignore[method-assign]  # noqa: SLF001, ARG005
