"""What a restart costs with the state store: many prompts with one long prefix, four times over.

    computed   nothing is known: the prefix is computed
    device     warm: the device has it
    memory     the device has forgotten it, host memory has it
    restart    another engine on the same folder: it is in files, and they are read and checked

Each time is from the first request to the last token of the last one; making an engine is not in
it. Before each of them a short prompt runs, so that nothing is timed that is done once. Prints
JSON; exit 1 if the restart takes more than --limit times what the warm device takes.

    python benchmarks/state_store.py --model nano --prefix-tokens 3072
    python benchmarks/state_store.py --random-weights benchmarks/shapes/qwen3.5-9b-text.json
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from headrace import LLM, EngineConfig, SamplingParams
from headrace.bench.random_weights import random_model, read_shape, release_memory
from headrace.engine.engine import Engine
from headrace.engine.load import load_parts

_DTYPES = {"cuda": ("bfloat16", "float32"), "cpu": ("float32", "float32")}


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--random-weights", type=Path, help="a config.json; no weights are needed")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prefix-tokens", type=int, default=16384)
    parser.add_argument("--own-tokens", type=int, default=32, help="of each prompt, after it")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--folder", help="where the files go; a temporary folder by default")
    parser.add_argument("--limit", type=float, default=2.0)
    parser.add_argument("--drop-page-cache", action="store_true",
                        help="let files be read from the disk itself (needs root)")
    return parser.parse_args()


def make_llm(args: argparse.Namespace, folder: str, model: Any) -> LLM:  # noqa: ANN401
    """Make an engine on the folder; random weights are the same ones in each of them."""
    longest = args.prefix_tokens + args.own_tokens + args.max_tokens + 1
    config = EngineConfig(
        model=args.model,
        max_model_len=longest,
        max_num_seqs=args.prompts,
        state_store=folder,
        state_store_memory=8 << 30,
        state_store_disk=64 << 30,
    )
    if model is None:
        return LLM(config=config)
    parts = load_parts(config, model=model, has_text=False, fingerprints=("random weights",))
    return LLM(engine=Engine(config, parts=parts))


def timed(llm: LLM, prefix: list[int], args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Serve all prompts at once."""
    rng = random.Random(seed)  # noqa: S311 - prompts, no secret
    vocab = llm.engine.parts.model_config.vocab_size
    greedy = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    llm.generate([[rng.randrange(vocab) for _ in range(16)]], greedy)
    prompts = [
        prefix + [rng.randrange(vocab) for _ in range(args.own_tokens)]
        for _ in range(args.prompts)
    ]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, greedy)
    seconds = time.perf_counter() - begin
    return {
        "seconds": round(seconds, 4),
        "first_token_s": round(
            min((o.metrics.first_token_time_s or begin) - o.metrics.arrival_time_s
                for o in outputs), 4,
        ),
        "cached_tokens": [
            min(output.num_cached_tokens for output in outputs),
            max(output.num_cached_tokens for output in outputs),
        ],
    }


def main() -> int:
    """Run all four, print, compare."""
    args = options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = None
    if args.random_weights is not None:
        dtype, state_dtype = _DTYPES[device]
        config = read_shape(args.random_weights)
        model = random_model(config, device=device, dtype=dtype, state_dtype=state_dtype)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or temporary
        llm = make_llm(args, folder, model)
        vocab = llm.engine.parts.model_config.vocab_size
        rng = random.Random(time.time_ns())  # noqa: S311 - a folder that was used knows it not
        prefix = [rng.randrange(vocab) for _ in range(args.prefix_tokens)]
        rows = {"computed": timed(llm, prefix, args, 1)}
        rows["device"] = timed(llm, prefix, args, 2)
        llm.engine.flush_store()
        llm.reset_prefix_cache()
        rows["memory"] = timed(llm, prefix, args, 3)
        saved = llm.stats()["state_store"]
        llm.shutdown()
        del llm
        gc.collect()
        release_memory()
        if args.drop_page_cache:
            Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
        llm = make_llm(args, folder, model)
        rows["restart"] = timed(llm, prefix, args, 4)
        read = llm.stats()["state_store"]
        llm.shutdown()
    ratio = rows["restart"]["seconds"] / rows["device"]["seconds"]
    print(json.dumps({
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "model": str(args.random_weights or args.model),
        "prompts": args.prompts,
        "prefix_tokens": args.prefix_tokens,
        "own_tokens": args.own_tokens,
        "max_tokens": args.max_tokens,
        "from_disk": args.drop_page_cache,
        "rows": rows,
        "restart_over_device": round(ratio, 3),
        "limit": args.limit,
        "saved": saved,
        "read": read,
    }, indent=2))
    return 0 if ratio <= args.limit else 1


if __name__ == "__main__":
    sys.exit(main())
