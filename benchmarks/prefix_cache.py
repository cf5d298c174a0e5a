"""What the prefix cache costs the host: 256 running sequences, 100,000 cached blocks.

The engine is the real one with its launches left out (see host_work.py): steps are planned, staged
and taken in, but nothing is computed, so what is timed is the host's work. Requests come as others
end, so that there are always as many; three of four prompts begin with one that is in the cache.
Everything that exists for the cache is timed: keys, lookups, reasons of misses, references to hit
blocks, publications, evictions, and what waiting prompts share. Prints JSON; exit 1 if its share of
all that the host does in a step is above the limit.

    python benchmarks/prefix_cache.py --sequences 256 --cached-blocks 100000 --limit 0.1
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from host_work import loop_ns, torch_full

from headrace.config import EngineConfig
from headrace.engine.block_pool import BlockPool
from headrace.engine.engine import Engine
from headrace.engine.load import load_parts
from headrace.engine.prefix_cache import PrefixCache, chain_keys, root_key
from headrace.engine.request import Request
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.sampling_params import OutputKind, SamplingParams
from headrace.testing import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 16
UNIT = 64
VOCAB = 160
Functions = tuple[tuple[type, tuple[str, ...]], ...]
BOOKKEEPING: Functions = (
    (PrefixCache, ("match", "pin", "unpin", "record", "note_generated", "promote")),
    (Sequence, ("keys", "unsalted_keys", "hash_prompt")),
    (
        BlockPool,
        (
            "publish", "publish_run", "publish_rung", "lookup", "lookup_run", "fork",
            "was_any_evicted", "unpublish", "_forget", "_evict",
        ),
    ),
    (
        Scheduler,
        (
            "_publish_kv", "_note_generated", "_note_passed", "_count_waiting",
            "_shared_boundaries", "_wanted", "_is_pending", "_drop_pending", "_take_hit",
            "_rungs", "_rung_room", "_place_rungs",
        ),
    ),
)
"""What exists for the cache alone; allocation and release of blocks would be there anyway."""


class Meter:
    """Seconds inside the outermost of the timed functions, and by name, less the clock's own."""

    def __init__(self) -> None:
        self.by_name: dict[str, float] = {}
        self.num_calls = 0
        self._is_inside = False
        self._cost = 0.0
        nothing = self.wrap("", lambda: None)
        for _ in range(20_000):
            nothing()
        self._cost = self.by_name.pop("") / 20_000
        start = time.thread_time()
        for _ in range(20_000):
            nothing()
        self._overhead = (time.thread_time() - start) / 20_000
        self.by_name.clear()
        self.num_calls = 0

    @property
    def overhead(self) -> float:
        """Seconds that the measuring itself took."""
        return self._overhead * self.num_calls

    @property
    def seconds(self) -> float:
        """All of them."""
        return sum(self.by_name.values())

    def wrap(self, name: str, function: Any) -> Any:  # noqa: ANN401
        """Time a function; one that runs inside another is part of that."""

        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside = True
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - start - self._cost
                self._is_inside = False
                self.num_calls += 1
                self.by_name[name] = self.by_name.get(name, 0.0) + spent

        return timed

    @contextmanager
    def on(self, functions: Functions) -> Iterator[None]:
        """Wrap functions for a while."""
        old = [(owner, name, owner.__dict__[name]) for owner, names in functions for name in names]
        for owner, name, function in old:
            setattr(owner, name, self.wrap(f"{owner.__name__}.{name}", function))
        try:
            yield
        finally:
            for owner, name, function in old:
                setattr(owner, name, function)


class Load:
    """An engine in which `count` sequences always run, and a cache that is full of prompts."""

    def __init__(self, args: argparse.Namespace, options: dict[str, Any]) -> None:
        self.args = args
        self.rng = random.Random(args.seed)  # noqa: S311 - a workload
        self.engine = self._build(options)
        self.prefixes = [
            [self.rng.randrange(2, VOCAB) for _ in range(args.prompt_tokens)]
            for _ in range(-(-args.cached_blocks * BLOCK // args.prompt_tokens))
        ]
        self._fill()
        self.num_added = 0

    def _build(self, options: dict[str, Any]) -> Engine:
        args = self.args
        length = args.prompt_tokens + args.output_tokens + UNIT
        config = EngineConfig(
            model="tiny", max_num_seqs=args.sequences, max_model_len=length,
            max_num_batched_tokens=8192,
            num_kv_blocks=args.cached_blocks + args.sequences * -(-length // BLOCK),
            num_state_blocks=len(range(0, args.cached_blocks, 32)) + 8 * args.sequences,
            **options,
        )
        model = tiny_model(
            hidden_size=16, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, mtp_num_hidden_layers=0,
            linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=4,
            linear_value_head_dim=4, intermediate_size=16,
        )
        engine = Engine(config, parts=load_parts(config, model=model))
        runtime = engine.parts.runtime
        runtime.launch = lambda *_args, **_kwargs: None  # type: ignore[method-assign]
        for frame in engine.worker._frames._frames:  # noqa: SLF001 - results without a device
            for name, value in (("num_sampled", 1), ("accepted", 1), ("tokens", 5)):
                runtime.write(frame.outputs[name], torch_full(frame.outputs[name], value))
        return engine

    def _fill(self) -> None:
        """Publish the prefixes as if they had been served."""
        kv, states = self.engine.scheduler.kv_pool, self.engine.scheduler.state_pools
        for prefix in self.prefixes:
            keys = chain_keys(root_key(None), prefix, BLOCK)
            for key in keys:
                self._put(kv, key)
            for pool in states:
                self._put(pool, keys[len(prefix) // UNIT * (UNIT // BLOCK) - 1])
        assert kv is not None
        assert kv.num_cached >= self.args.cached_blocks, f"{kv.num_cached=}"

    def _put(self, pool: Any, key: bytes) -> None:  # noqa: ANN401
        (block,) = pool.allocate(1)
        pool.publish(block, key, is_generated=False)
        pool.free([block])

    def prompt(self) -> list[int]:
        """A prompt that begins with a cached one, or, one in four, a new one."""
        args, rng = self.args, self.rng
        if rng.random() < 0.25:  # noqa: PLR2004
            prompt = [rng.randrange(2, VOCAB) for _ in range(args.prompt_tokens)]
        else:
            prompt = rng.choice(self.prefixes) + [rng.randrange(2, VOCAB) for _ in range(40)]
        return prompt

    def arrive(self, prompt: list[int]) -> None:
        """Add a request of a length of its own."""
        args, rng = self.args, self.rng
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, output_kind=OutputKind.DELTA,
            max_tokens=rng.randint(args.output_tokens // 2, args.output_tokens * 3 // 2),
        )
        self.engine.add_request(f"r{self.num_added}", prompt, params)
        self.num_added += 1

    def run(self, num_steps: int) -> tuple[float, int]:
        """Serve; returns the host's seconds and the requests that came."""
        scheduler, before = self.engine.scheduler, self.num_added
        spent = 0.0
        for _ in range(num_steps):
            missing = self.args.sequences - len(scheduler.running) - len(scheduler.waiting)
            prompts = [self.prompt() for _ in range(missing)]
            start = time.thread_time()
            for prompt in prompts:
                self.arrive(prompt)
            self.engine.step()
            spent += time.thread_time() - start
        return spent, self.num_added - before


def measure(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """Run one setting: first with nothing wrapped, then with the bookkeeping timed."""
    load = Load(args, options)
    # Until lengths are mixed: at first all sequences are equally old.
    load.run(args.output_tokens * 2)
    plain, _ = load.run(args.steps)
    meter, outputs = Meter(), Meter()
    with outputs.on(((Request, ("append", "take_output")),)), meter.on(BOOKKEEPING):
        timed, arrived = load.run(args.steps)
    timed -= outputs.overhead + meter.overhead
    kv = load.engine.scheduler.kv_pool
    assert kv is not None
    cache = load.engine.scheduler.cache
    names = sorted(meter.by_name.items(), key=lambda pair: -pair[1])
    return {
        **options,
        "step_ms": round(1000 * plain / args.steps, 3),
        "bookkeeping_ms": round(1000 * meter.seconds / args.steps, 4),
        "outputs_ms": round(1000 * outputs.seconds / args.steps, 3),
        "timed_ms": round(1000 * timed / args.steps, 3),
        "share": round(meter.seconds / timed, 4),
        "share_without_outputs": round(meter.seconds / (timed - outputs.seconds), 4),
        "arrivals_per_step": round(arrived / args.steps, 3),
        "hit_share": round(cache.num_hit_tokens / cache.num_query_tokens, 3),
        "cached_blocks": kv.num_cached,
        "evictions": kv.num_evictions,
        "us_per_arrival": {
            name: round(1e6 * seconds / max(1, arrived), 1) for name, seconds in names
        },
    }


def main() -> int:
    """Measure without drafts and with them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--cached-blocks", type=int, default=100_000)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=0.1)
    parser.add_argument("--json", type=Path, default=None, help="also write the result here")
    args = parser.parse_args()
    rows = [measure(args, options) for options in ({}, {"batch_layout": "compact"})]
    worst = max(row["share"] for row in rows)
    found = {
        "command": " ".join(["OMP_NUM_THREADS=1 python benchmarks/prefix_cache.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": {
            "sequences": args.sequences, "prompt_tokens": args.prompt_tokens,
            "output_tokens": args.output_tokens, "steps": args.steps, "seed": args.seed,
        },
        "rows": rows, "worst_share": worst, "limit": args.limit, "loop_ns": round(loop_ns(), 1),
    }
    text = json.dumps(found, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    return int(worst > args.limit)


if __name__ == "__main__":
    sys.exit(main())
