"""A steady step of the real engine waits for one thing: the ticket that it reads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headrace import rt
from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.load import load_parts
from headrace.sampling_params import SamplingParams
from headrace.testing import tiny_model

NUM_STEPS = 8


class Waits:
    """What a runtime's host waits for, and which tickets are read."""

    def __init__(self, runtime: rt.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited: list[rt.Event] = []
        self.read: list[rt.Event] = []
        wait_host, result = runtime.wait_host, rt.Ticket.result

        def wait(event: rt.Event) -> None:
            self.waited.append(event)
            wait_host(event)

        def read(ticket: rt.Ticket) -> rt.Result:
            if ticket.landing is not None:
                self.read.append(ticket.event)
            return result(ticket)

        monkeypatch.setattr(runtime, "wait_host", wait)
        monkeypatch.setattr(rt.Ticket, "result", read)


def make_engine(runtime: rt.Runtime, seed: int, **settings: Any) -> Engine:  # noqa: ANN401
    config = EngineConfig(
        model="tiny",
        rt_backend=runtime.backend,
        dtype="float32",
        max_num_seqs=4,
        max_model_len=96,
        max_num_batched_tokens=64,
        block_size=8,
        num_kv_blocks=80,
        num_state_blocks=48,
        **settings,
    )
    model = tiny_model(seed=seed)
    return Engine(config, parts=load_parts(config, model=model, runtime=runtime))


@pytest.mark.parametrize("layout", ["slots", "compact"])
@pytest.mark.parametrize(("speculative", "graphs"), [("none", "off"), ("ngram:2", "on")])
@pytest.mark.parametrize("backend", ["cpu", "sim"])
def test_a_steady_step_waits_for_its_ticket_alone(
    backend: str, speculative: str, graphs: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")
    runtime = rt.Runtime.create(backend, seed=seed, policy="random")
    engine = make_engine(
        runtime, seed, speculative=speculative, batch_layout=layout, async_scheduling=True,
        graphs=graphs,
    )
    rng = random.Random(seed)
    for index in range(3):
        # A rule for some rows stages frames of a second ring in the middle of the step.
        bias = {5: 1.5} if index == 1 else None
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logit_bias=bias)
        engine.add_request(str(index), [rng.randrange(2, 40) for _ in range(9)], params)
    for _ in range(4):
        engine.step()
    waits = Waits(runtime, monkeypatch)
    before = runtime.stats.syncs, engine.worker.num_steps
    for _ in range(NUM_STEPS):
        engine.step()
    num_steps = engine.worker.num_steps - before[1]
    assert num_steps == NUM_STEPS
    assert runtime.stats.syncs - before[0] == len(waits.read) == num_steps
    assert [id(event) for event in waits.waited] == [id(event) for event in waits.read]


def test_a_frame_that_is_still_in_use_is_waited_for() -> None:
    runtime = rt.Runtime.create("cpu")
    compute, d2h = runtime.stream("compute"), runtime.stream("d2h")
    field = {"x": rt.Field((4,), torch.float32)}
    ring = runtime.frames("step", depth=2, inputs=field, outputs={})
    tickets = []
    for _ in range(3):
        frame = ring.next()
        with frame.stage() as w:
            w["x"][:] = 1
            w.commit(compute)
        done = compute.record()
        tickets.append(runtime.fetch(frame.inputs, on=d2h, after=done))
    # The third step took the first one's frame before anybody had read its ticket: its commit and
    # its fetch are on two streams, and the second wait implies no third.
    assert runtime.stats.syncs == 2
    tickets[2].result()
    assert runtime.stats.syncs == 3
    for _ in range(2):
        ring.next()
    assert runtime.stats.syncs == 3
