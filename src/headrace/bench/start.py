"""From the start of a process to its first token, with no cache on disk.

Triton, torch and the driver keep compiled code in folders; the child gets empty ones. The clock
runs from before the child is started until it says that it has the token, so it includes Python,
imports, the device's context, weights, pools, compilation and the first step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from headrace.config import EngineConfig

if TYPE_CHECKING:
    from headrace.bench.measure import Row

_MARK = "headrace-first-token "
_MOST_OF_AN_ERROR = 2000
_SERVED_SEQUENCES = 256
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


def cold_start(
    config: EngineConfig, *, shape: Path | None, prompt_tokens: int, timeout_s: float = 600.0
) -> Row:
    """Start a process that answers one request, and time it.

    Args:
        config: Its engine's settings.
        shape: Of random weights; None loads config.model.
        prompt_tokens: Of the request.
        timeout_s: When to give up.

    Returns:
        The row; without a time but with an `error` if the child failed.
    """
    given = {
        "config": asdict(config),
        "shape": None if shape is None else str(shape.resolve()),
        "prompt_tokens": prompt_tokens,
    }
    row: dict[str, Any] = {
        "case": "process start to first token",
        "batch": 1,
        "prompt_tokens": prompt_tokens,
        "tokens_per_s": None,
        "floor_tokens_per_s": None,
        "share_of_floor": None,
        "time_to_first_token_s": None,
    }
    command = [sys.executable, "-m", "headrace.bench", "first-token", json.dumps(given)]
    package = str(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory(prefix="headrace-start-") as folder:
        environ = dict(os.environ)  # Passed on whole; nothing in it is a setting of this process.
        environ |= {name: str(Path(folder) / name.lower()) for name in _CACHES}
        environ["PYTHONPATH"] = os.pathsep.join(
            [package, *filter(None, [environ.get("PYTHONPATH")])]
        )
        with (Path(folder) / "stderr").open("w+") as errors:
            stages, seconds = _run(command, environ, errors, timeout_s)
            errors.seek(0)
            message = errors.read()[-_MOST_OF_AN_ERROR:]
    if stages is None:
        ended = f"no token after {seconds:.0f} s (limit {timeout_s:g} s)"
        row["error"] = f"{message.rstrip()}\n{ended}" if message.strip() else ended
        return row
    row["time_to_first_token_s"] = seconds
    row["stages_s"] = stages
    return row


def _run(
    command: list[str], environ: dict[str, str], errors: IO[str], timeout_s: float
) -> tuple[dict[str, float] | None, float]:
    """Run the child until it has its token; its stages, and seconds since it was started."""
    begin = time.perf_counter()
    with subprocess.Popen(  # noqa: S603 - this interpreter, our own module
        command, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as child:
        killer = threading.Timer(timeout_s, child.kill)
        killer.start()
        stages = None
        for line in child.stdout or ():
            if line.startswith(_MARK):
                # Stamped when it is read: how long the process takes to end does not count.
                seconds = time.perf_counter() - begin
                stages = json.loads(line.removeprefix(_MARK))
                break
        else:
            seconds = time.perf_counter() - begin
        killer.cancel()
        if stages is not None:
            child.kill()
        return stages, seconds


def first_token(argument: str) -> None:
    """Be the child: answer one request and say so."""
    begin = time.perf_counter()
    # The imports are part of what is measured.
    import numpy as np  # noqa: PLC0415

    from headrace.bench.engines import Load, open_engine, shape_model, sized  # noqa: PLC0415
    from headrace.bench.rounds import run_round  # noqa: PLC0415
    from headrace.bench.workload import random_prompts  # noqa: PLC0415

    given = json.loads(argument)
    config = EngineConfig(**given["config"])
    prompt_tokens = int(given["prompt_tokens"])
    imported = time.perf_counter()
    load = Load(max_batch=_SERVED_SEQUENCES, max_requests=1, max_tokens=prompt_tokens + 2)
    config = sized(config, load)
    model = None if given["shape"] is None else shape_model(config, Path(given["shape"]))
    weights = time.perf_counter()
    engine = open_engine(config, model=model)
    opened = time.perf_counter()
    vocab = engine.parts.model_config.vocab_size
    prompts = random_prompts(np.random.default_rng(0), 1, prompt_tokens, vocab, [])
    run_round(engine, prompts, 1)
    token = time.perf_counter()
    stages = {
        "imports": imported - begin,
        "weights": weights - imported,
        "engine": opened - weights,
        "first_token": token - opened,
    }
    sys.stdout.write(f"{_MARK}{json.dumps(stages)}\n")
    sys.stdout.flush()
