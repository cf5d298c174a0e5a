"""Time from process start to the first token, beyond what `import torch` takes.

Each run is a process of its own, as a user would start it. Prints JSON; exit 1 above the limit.

    python benchmarks/first_token.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

IMPORT = "import torch"
FIRST = """
from headrace import LLM, SamplingParams
llm = LLM({model!r}, max_num_seqs=8)
stream = llm.stream({prompt!r}, SamplingParams(temperature=0.0, max_tokens=4))
next(stream)
"""


def seconds_of(code: str) -> tuple[float, float]:
    """Wall and processor seconds of a fresh Python process that runs `code`."""
    before = os.times()
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - code of this file
    wall = time.perf_counter() - start
    after = os.times()
    worked = after.children_user + after.children_system
    return wall, worked - before.children_user - before.children_system


def main() -> int:
    """Measure both kinds of processes in turns, so that both see the same machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt", default="Hello")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=2.5)
    args = parser.parse_args()
    first = FIRST.format(model=args.model, prompt=args.prompt)
    seconds_of(IMPORT)
    torch_runs, token_runs = [], []
    for _ in range(args.runs):
        torch_runs.append(seconds_of(IMPORT))
        token_runs.append(seconds_of(first))
    wall, worked = (
        min(run[kind] for run in token_runs) - min(run[kind] for run in torch_runs)
        for kind in (0, 1)
    )
    print(
        json.dumps(
            {
                "import_torch_s": round(statistics.median(run[0] for run in torch_runs), 3),
                "first_token_s": round(statistics.median(run[0] for run in token_runs), 3),
                "beyond_torch_s": round(wall, 3),
                "beyond_torch_cpu_s": round(worked, 3),
                "limit_s": args.limit_s,
            }
        )
    )
    return int(wall > args.limit_s)


if __name__ == "__main__":
    sys.exit(main())
