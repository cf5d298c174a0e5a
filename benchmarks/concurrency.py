"""Tokens per second of 1 and of 32 concurrent requests, on the shipped model.

Prints JSON; exit 1 if 32 requests are less than --goal times as fast as one.

    python benchmarks/concurrency.py
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from headrace import LLM, SamplingParams


def tokens_per_s(llm: LLM, count: int, num_tokens: int) -> dict[str, Any]:
    """Generate for `count` requests together; prompts differ, nothing is cached."""
    vocab = llm.engine.parts.model_config.vocab_size
    prompts = [
        [1 + (index * 31 + place * 7) % (vocab - 1) for place in range(24)]
        for index in range(count)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    before = llm.stats()
    llm.reset_prefix_cache()
    start, worked = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params)
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "requests": count,
        "tokens": tokens,
        "steps": llm.stats()["steps"] - before["steps"],
        "tokens_per_s": round(tokens / seconds, 1),
        # Less noisy where other processes share the processor.
        "tokens_per_cpu_s": round(tokens / worked, 1),
    }


def main() -> int:
    """Measure, print, compare with the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--speculative", default="none")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--goal", type=float, default=5.0)
    args = parser.parse_args()
    llm = LLM(args.model, max_num_seqs=32, max_model_len=256, speculative=args.speculative)
    tokens_per_s(llm, 2, 8)  # Warm up.
    rows = [tokens_per_s(llm, count, args.tokens) for count in (1, 32)]
    ratio = rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"]
    by_work = rows[1]["tokens_per_cpu_s"] / rows[0]["tokens_per_cpu_s"]
    print(
        json.dumps(
            {
                "model": args.model,
                "speculative": args.speculative,
                "rows": rows,
                "ratio": round(ratio, 2),
                "ratio_by_cpu_time": round(by_work, 2),
                "goal": args.goal,
            }
        )
    )
    return int(max(ratio, by_work) < args.goal)


if __name__ == "__main__":
    sys.exit(main())
