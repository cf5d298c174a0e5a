"""Host work of one step with many running sequences: schedule, stage, take results in.

The worker is the real one, with its launches left out: inputs are staged and committed, results are
fetched, but nothing is computed and every row keeps one token. So what is timed is what the host
does while the device runs. Prints JSON; exit 1 above the limit.

    python benchmarks/host_work.py --sequences 256 --limit-ms 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.load import load_parts
from headrace.sampling_params import OutputKind, SamplingParams
from headrace.testing import tiny_model


def idle_engine(num_seqs: int, num_steps: int, options: dict[str, Any]) -> Engine:
    """An engine whose worker launches nothing and finds one kept token per row."""
    prompt_len = 40
    config = EngineConfig(
        model="tiny",
        max_num_seqs=num_seqs,
        max_model_len=prompt_len + num_steps + 64,
        max_num_batched_tokens=8192,
        **options,
    )
    engine = Engine(config, parts=load_parts(config, model=tiny_model()))
    runtime = engine.parts.runtime
    runtime.launch = lambda *_args, **_kwargs: None  # type: ignore[method-assign]
    for frame in engine.worker._frames._frames:  # noqa: SLF001 - results without a device
        for name, value in (("num_sampled", 1), ("accepted", 1), ("tokens", 5)):
            runtime.write(frame.outputs[name], torch_full(frame.outputs[name], value))
    params = SamplingParams(
        temperature=0.0, max_tokens=num_steps + 32, ignore_eos=True, output_kind=OutputKind.DELTA
    )
    for index in range(num_seqs):
        prompt = [2 + (index * 7 + place) % 150 for place in range(prompt_len)]
        engine.add_request(f"r{index}", prompt, params)
    while engine.scheduler.waiting or any(
        seq.num_computed_tokens < seq.known_end for seq in engine.scheduler.running
    ):
        engine.step()
    return engine


def torch_full(buffer: Any, value: int) -> Any:  # noqa: ANN401 - a tensor like the buffer
    """A tensor of the buffer's shape, filled."""
    import torch  # noqa: PLC0415

    return torch.full(buffer.shape, value, dtype=buffer.dtype)


def measure(engine: Engine, num_steps: int) -> dict[str, float]:
    """Time each part of each step.

    Returns:
        Medians in milliseconds.
    """
    parts: dict[str, list[float]] = {"schedule": [], "stage": [], "update": [], "outputs": []}
    clock = time.thread_time  # What the host works, not how long it waits for a processor.
    scheduler, worker = engine.scheduler, engine.worker
    pending: list[Any] = []
    for _ in range(num_steps):
        start = clock()
        planned = scheduler.schedule()
        assert planned is not None
        scheduled = clock()
        handle = worker.execute(planned.output)
        scheduler.on_enqueued(planned)
        staged = clock()
        pending.append((planned, handle))
        if len(pending) < engine.parts.depth:
            continue
        step, landed = pending.pop(0)
        sampled = landed.result()
        taken = clock()
        updates = scheduler.update(step, sampled)
        updated = clock()
        for update in updates:
            request, index = engine._owner[update.seq.seq_id]  # noqa: SLF001
            request.append(index, update, None, updated)
            request.take_output()
        done = clock()
        for name, seconds in (
            ("schedule", scheduled - start),
            ("stage", taken - scheduled),
            ("update", updated - taken),
            ("outputs", done - updated),
        ):
            parts[name].append(1000 * seconds)
        del staged
    medians = {name: statistics.median(values) for name, values in parts.items()}
    whole = [sum(values) for values in zip(*parts.values(), strict=True)]
    working = [a + b + c for a, b, c in zip(*list(parts.values())[:3], strict=True)]
    return {
        **medians, "without_outputs": statistics.median(working), "step": statistics.median(whole)
    }


def loop_ns() -> float:
    """Nanoseconds of one turn of a plain loop here: 30 to 50 on an idle processor of 2024."""
    start, total = time.thread_time(), 0
    for number in range(1_000_000):
        total += number
    return (time.thread_time() - start) * 1e3


def main() -> int:
    """Measure both layouts, with and without drafts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--limit-ms", type=float, default=1.0)
    args = parser.parse_args()
    rows = []
    for layout in ("slots", "compact"):
        for drafts in ("none", "ngram:3"):
            options = {"batch_layout": layout, "speculative": drafts}
            engine = idle_engine(args.sequences, args.steps, options)
            engine.scheduler.policy = None
            found = measure(engine, args.steps)
            rows.append({**options, **{name: round(ms, 3) for name, ms in found.items()}})
    worst = max(row["step"] for row in rows)
    found = {"sequences": args.sequences, "unit": "ms", "rows": rows, "worst": worst}
    print(json.dumps({**found, "limit": args.limit_ms, "loop_ns": round(loop_ns(), 1)}))
    return int(worst > args.limit_ms)


if __name__ == "__main__":
    sys.exit(main())
