"""Build every shipped model from nothing, gate included: `python -m tools.demo_model.build`.

Each model is built by a process of its own (a GPU's context and forked workers do not mix). The
prose lies beside, so no network is needed; batches and weights begin from fixed seeds. Writes one
folder per model, each with its gate.json, and build.json, which has them all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .data import HERE

ASSETS = HERE.parents[1] / "src" / "headrace" / "assets"
MODELS = ("demo", "nano", "parity")
AROUND_S = {"demo": 190.0, "nano": 50.0, "parity": 120.0}
"""Seconds that a model takes beside its training loop: tokenizer, drafts, scores, gate, engine."""
LEAST_S = 30.0
"""Less training than this is not worth beginning."""
TINY = {
    "demo": ("--steps=6", "--sharpen-steps=2", "--divide=8", "--count=2", "--no-compile"),
    "nano": ("--steps=6", "--divide=16", "--count=4"),
    "parity": ("--steps=6", "--count=4"),
}
"""Flags of a run that only shows that everything works."""


def build(name: str, out: Path, flags: list[str]) -> dict[str, Any]:
    """Build one model; returns its gate.json, or why there is none."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    gate = folder / "gate.json"
    gate.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"tools.demo_model.{name}", "--out", str(folder), *flags]
    print("$", " ".join(command), flush=True)
    code = subprocess.run(command, check=False).returncode  # noqa: S603 (our own modules)
    if not gate.exists():
        return {"failures": [f"ended with code {code} and no gate.json"]}
    result: dict[str, Any] = json.loads(gate.read_text())
    return result


def main() -> None:
    """Build the models asked for; exit 1 if a gate refuses one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ASSETS)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="most wall time, about")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it runs")
    options = parser.parse_args()
    begin = time.monotonic()
    results: dict[str, Any] = {}
    for name in options.models.split(","):
        left = options.limit_s - (time.monotonic() - begin) - AROUND_S[name]
        if left < LEAST_S:
            results[name] = {"failures": [f"not begun: {left:.0f} s left to train in"]}
            continue
        flags = list(TINY[name]) if options.tiny else []
        if left != float("inf"):
            flags.append(f"--seconds={left:.0f}")
        results[name] = build(name, options.out, flags)
    seconds = time.monotonic() - begin
    (options.out / "build.json").write_text(
        json.dumps({"minutes": round(seconds / 60, 2), **results}, indent=1) + "\n"
    )
    for name, result in results.items():
        print(name, "passed" if not result["failures"] else f"REFUSED: {result['failures']}")
    print(f"{seconds / 60:.1f} minutes, {options.out}")
    sys.exit(any(result["failures"] for result in results.values()))


if __name__ == "__main__":
    main()
