"""Build the demo model: tokenizer, training, scores, release gate, files.

`python -m tools.demo_model.demo` does it all; `--score` only measures what is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from headrace import evals

from . import engine_gate, gate, twin
from . import tokenizer as tokenizers_
from .data import HERE, NUM_STREAMS, Feed
from .demo_data import SWAP_SPLIT, DemoMixture, read, render
from .evaluate import generated_acceptance, prose_score, score
from .files import about, load, save
from .model import DEMO, Model
from .prose import DEMO_PROSE
from .sharpen import sharpen
from .training import Recipe, Stage, plan_of, train

ASSETS = HERE.parents[1] / "src" / "headrace" / "assets" / "demo"
EVAL_SEED = 1_000_000
WEIGHT_SEED, FEED_SEED = 0, 1
RECIPE = Recipe(
    stages=(
        Stage(rows=17, length=2560, share=0.86, compiled=True),
        Stage(rows=5, length=8192, share=0.14),
    ),
    steps=3600,
    seconds=330.0,
    deadline_s=370.0,
    muon_rate=0.015,
    adam_rate=3e-3,
    draft_weight=0.3,
    swap_weight=0.3,
    swap_split=SWAP_SPLIT,
)
SHARPEN_STEPS, SHARPEN_SECONDS = 1500, 50.0
LEAST_LOSS = 0.3
LEAST_ACCEPTANCE = {"prose_draft_acceptance": 0.6, "copy_draft_acceptance": 0.9}
"""Drafts on prose are counted on the text of held-out chapters."""
STRICTER_ACCEPTANCE = {"prose_generated_acceptance": 0.6}
"""Drafts on what the model itself says when it goes on from them: reported, not required."""


def build_tokenizer(mixture: DemoMixture, folder: Path) -> Tokenizer:
    """Train the tokenizer on a sample of the mixture."""
    rng = random.Random("tokenizer")  # noqa: S311 (training data, not a secret)
    texts = []
    for _ in range(6000):
        document = mixture.draw(rng, 0.4, 2048)
        text = "".join(piece for piece, _, _ in document.pieces)
        for marker in (*tokenizers_.SPECIAL_TOKENS, *tokenizers_.MARKER_TOKENS):
            text = text.replace(marker, "\n")
        texts.append(text)
    for source in mixture.sources:
        texts += source[:1200]
    # Names and ledger words should be one token each: a key of many pieces is harder to look up.
    texts += ["".join(f" {name}" for name in evals.FIRST_NAMES + evals.LAST_NAMES)] * 3000
    texts += ["\nseat\nlocker\nroom\nbadge\ntable\ngate"] * 3000
    tokenizer = tokenizers_.train(texts, DEMO.vocab_size)
    tokenizers_.save(tokenizer, folder, DEMO.max_position_embeddings)
    return tokenizer


def report(folder: Path, held_out: str, device: torch.device, count: int) -> dict[str, Any]:
    """Score the saved files and run the gate."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = load(folder, DEMO, device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    scores: dict[str, float] = {}
    failures: list[str] = []
    for name, task in evals.suite("demo").items():
        examples = count // 2 if name == "registers_8k" else count
        result = score(
            model,
            tokenizer,
            task,
            count=max(1, examples),
            first_seed=EVAL_SEED,
            device=device,
            render=render,
            batch=8 if name == "registers_8k" else 32,
        )
        scores[name] = result.accuracy
        scores[f"{name}_draft_acceptance"] = result.acceptance
        if result.accuracy < task.threshold:
            failures.append(f"{name} {result.accuracy:.3f} < {task.threshold}")
    bits, acceptance = prose_score(model, tokenizer, held_out, device)
    scores["prose_bits_per_byte"], scores["prose_draft_acceptance"] = bits, acceptance
    scores["prose_generated_acceptance"] = generated_acceptance(model, tokenizer, held_out, device)
    failures += _short(scores, LEAST_ACCEPTANCE)
    table = gate.matrix(model, tokenizer, device, count=min(count, 128), seed=EVAL_SEED)
    lost = gate.losses_of(table)
    failures += _cheap(gate.best_of_each(lost))
    moved = twin.moved_by(WEIGHT_SEED, device)
    failures += twin.failures(moved)
    return {
        "scores": scores,
        "matrix": table,
        "lost": lost,
        "twin": moved,
        "failures": failures,
        "stricter_reading_refuses": _short(scores, STRICTER_ACCEPTANCE) + _cheap(lost),
    }


def _short(scores: dict[str, float], least: dict[str, float]) -> list[str]:
    """Name the scores below their least value."""
    return [f"{n} {scores[n]:.3f} < {bound}" for n, bound in least.items() if scores[n] < bound]


def _cheap(lost: dict[str, float]) -> list[str]:
    """Name the damages that cost too little."""
    return [
        f"damage {name} costs {cost:.2f} < {LEAST_LOSS}"
        for name, cost in lost.items()
        if cost < LEAST_LOSS
    ]


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    for name, figure in result["scores"].items():
        print(f"{name:34s} {figure:.4f}")
    words = list(result["matrix"]["none"])
    print(f"{'damage':16s} " + " ".join(f"{w:>7s}" for w in words) + "    lost   twin's move")
    for name, row in result["matrix"].items():
        cells = " ".join(f"{row[w]:7.2f}" for w in words)
        print(
            f"{name:16s} {cells} {result['lost'].get(name, 0.0):7.2f} {result['twin'][name]:13.4f}"
        )
    engine_gate.show(result["engine"], sys.stdout)
    for key in ("device", "minutes", "training_minutes", "seeds", "is_shortened"):
        if key in result:
            print(f"{key} {result[key]}")
    print("stricter reading refuses", result["stricter_reading_refuses"])
    print("GATE", "passed" if not result["failures"] else result["failures"], flush=True)


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Build the files from nothing and measure them."""
    out: Path = options.out
    begin = time.monotonic()
    mixture, held_out = read(options.prose)
    facts: dict[str, Any] = {}
    golden_run = None
    if not options.score:
        tokenizer = build_tokenizer(mixture, out)
        recipe = dataclasses.replace(
            RECIPE.divided(options.divide, compiled=not options.no_compile),
            steps=options.steps,
            seconds=min(RECIPE.seconds, options.seconds),
        )
        feed = Feed(
            tokenizer,
            mixture,
            plan=plan_of(recipe),
            num_workers=options.workers,
            seed=FEED_SEED,
        )
        torch.manual_seed(WEIGHT_SEED)
        model = Model(DEMO).to(device)
        print(f"ready after {time.monotonic() - begin:.0f}s", file=sys.stderr, flush=True)
        try:
            trained = train(model, recipe, feed, each=lambda m, _: save(m, out))
        finally:
            feed.close()
        save(model, out)
        is_shortened = sharpen(
            model,
            mixture,
            tokenizer,
            device,
            steps=options.sharpen_steps,
            seconds=SHARPEN_SECONDS,
            rows=max(2, 20 // options.divide),
        )
        save(model, out)
        # On the CPU, while the gate runs on the GPU.
        command = [sys.executable, "-m", "tools.demo_model.golden", str(out), "--prose"]
        golden_run = subprocess.Popen([*command, str(options.prose)])  # noqa: S603 (our own module)
        facts = {
            "training": dataclasses.asdict(trained),
            "is_shortened": trained.is_shortened or is_shortened,
            "is_pinned": (options.steps, options.sharpen_steps, options.divide)
            == (RECIPE.steps, SHARPEN_STEPS, 1),
            "training_minutes": round((time.monotonic() - begin) / 60, 2),
        }
    asked = engine_gate.begin("demo", out, options.count)
    result = report(out, held_out, device, options.count)
    result["engine"] = engine_gate.end(asked)
    result["failures"] += result["engine"].pop("failures")
    result["seeds"] = {"weights": WEIGHT_SEED, "data": FEED_SEED, "evaluation": EVAL_SEED}
    if golden_run is not None and golden_run.wait() != 0:
        raise RuntimeError(f"golden.json was not written: exit code {golden_run.returncode}")
    return {
        **about(device),
        **facts,
        "minutes": round((time.monotonic() - begin) / 60, 2),
        **result,
    }


def main() -> None:
    """Do everything, or only `--score` what is there; exit 1 if the gate refuses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prose", type=Path, default=DEMO_PROSE)
    parser.add_argument("--out", type=Path, default=ASSETS)
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    parser.add_argument("--sharpen-steps", type=int, default=SHARPEN_STEPS)
    parser.add_argument("--seconds", type=float, default=RECIPE.seconds, help="most, of training")
    parser.add_argument("--divide", type=int, default=1, help="divide the rows, for small machines")
    parser.add_argument("--workers", type=int, default=NUM_STREAMS)
    parser.add_argument("--count", type=int, default=256, help="examples per task in the scores")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--score", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = run(options, device)
    (options.out / "gate.json").write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    sys.exit(bool(result["failures"]))


if __name__ == "__main__":
    main()
