"""Build the nano model: tokenizer, training, scores, files. `python -m tools.demo_model.nano`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from headrace import evals

from . import engine_gate
from . import tokenizer as tokenizers_
from .data import HERE, NUM_STREAMS, Feed, NanoMixture, read_prose, sentences
from .evaluate import prose_score, score
from .files import about, load, save
from .model import NANO, Model
from .training import Recipe, Stage, plan_of, train

ASSETS = HERE.parents[1] / "src" / "headrace" / "assets" / "nano"
EVAL_SEED = 1_000_000
WEIGHT_SEED, FEED_SEED = 0, 1
LEAST_ACCEPTANCE = 0.5
RECIPE = Recipe(
    stages=(
        Stage(rows=96, length=256, share=0.35),
        Stage(rows=64, length=768, share=0.3),
        Stage(rows=40, length=1536, share=0.35),
    ),
    steps=2400,
    seconds=100.0,
)


def mixture() -> tuple[NanoMixture, str]:
    """Give the training mixture and held-out prose."""
    paragraphs = read_prose(HERE / "prose" / "persuasion.txt.xz")
    kept = paragraphs[: len(paragraphs) * 19 // 20]
    return NanoMixture(kept, sentences(kept)), "\n\n".join(paragraphs[len(kept) :])


def build_tokenizer(folder: Path) -> Tokenizer:
    """Train the tokenizer on a sample of the mixture."""
    mix, _ = mixture()
    rng = random.Random("tokenizer")  # noqa: S311 (training data, not a secret)
    texts = []
    for _ in range(3000):
        document = mix.draw(rng, 1.0, 1536)
        text = "".join(piece for piece, _, _ in document.pieces)
        for marker in tokenizers_.SPECIAL_TOKENS:
            text = text.replace(marker, "\n")
        texts.append(text)
    # Names should be one token each: a key of many pieces is harder to look up.
    names = evals.NANO_FIRST_NAMES + evals.NANO_LAST_NAMES
    texts += ["".join(f" {name}" for name in names)] * 6000
    tokenizer = tokenizers_.train(texts, NANO.vocab_size)
    tokenizers_.save(tokenizer, folder, NANO.max_position_embeddings)
    return tokenizer


def report(folder: Path, device: torch.device, count: int) -> dict[str, float]:
    """Score the saved files: a flat table of names and figures."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = load(folder, NANO, device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    table: dict[str, float] = {}
    for name, task in evals.suite("nano").items():
        result = score(model, tokenizer, task, count=count, first_seed=EVAL_SEED, device=device)
        table[name] = result.accuracy
        table[f"{name}_draft_acceptance"] = result.acceptance
        table[f"{name}_longest_prompt"] = result.longest
    _, held_out = mixture()
    table["prose_bits_per_byte"], table["prose_draft_acceptance"] = prose_score(
        model, tokenizer, held_out, device
    )
    return table


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Build the files from nothing and measure them."""
    out: Path = options.out
    begin = time.monotonic()
    facts: dict[str, Any] = {}
    if not options.score:
        tokenizer = build_tokenizer(out)
        mix, _ = mixture()
        recipe = dataclasses.replace(
            RECIPE.divided(options.divide, compiled=False),
            steps=options.steps,
            seconds=min(RECIPE.seconds, options.seconds),
        )
        feed = Feed(
            tokenizer, mix, plan=plan_of(recipe), num_workers=options.workers, seed=FEED_SEED
        )
        torch.manual_seed(WEIGHT_SEED)
        model = Model(NANO).to(device)
        print(f"ready after {time.monotonic() - begin:.0f}s", file=sys.stderr, flush=True)
        try:
            trained = train(model, recipe, feed, each=lambda m, _: save(m, out))
        finally:
            feed.close()
        save(model, out)
        facts = {
            "training": dataclasses.asdict(trained),
            "is_shortened": trained.is_shortened,
            "is_pinned": (options.steps, options.divide) == (RECIPE.steps, 1),
            "training_minutes": round((time.monotonic() - begin) / 60, 2),
        }
    asked = engine_gate.begin("nano", out, options.count)
    scores = report(out, device, options.count)
    engine = engine_gate.end(asked)
    failures = [
        f"{name} {scores[name]:.3f} < {task.threshold}"
        for name, task in evals.suite("nano").items()
        if scores[name] < task.threshold
    ]
    failures += [
        f"{name} {scores[f'{name}_draft_acceptance']:.3f} < {LEAST_ACCEPTANCE}"
        for name in evals.suite("nano")
        if scores[f"{name}_draft_acceptance"] < LEAST_ACCEPTANCE
    ]
    failures += engine.pop("failures")
    return {
        **about(device),
        **facts,
        "minutes": round((time.monotonic() - begin) / 60, 2),
        "seeds": {"weights": WEIGHT_SEED, "data": FEED_SEED, "evaluation": EVAL_SEED},
        "scores": scores,
        "engine": engine,
        "failures": failures,
    }


def main() -> None:
    """Do everything, or only `--score` what is there; exit 1 if a score is too low."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ASSETS)
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    parser.add_argument("--seconds", type=float, default=RECIPE.seconds, help="most, of training")
    parser.add_argument("--divide", type=int, default=1, help="divide the rows, for small machines")
    parser.add_argument("--workers", type=int, default=NUM_STREAMS)
    parser.add_argument("--count", type=int, default=512, help="examples per task in the scores")
    parser.add_argument("--score", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = run(options, device)
    packed = json.dumps(result, indent=1)
    (options.out / "gate.json").write_text(packed + "\n")
    print(packed)
    print("GATE", "passed" if not result["failures"] else result["failures"], flush=True)
    sys.exit(bool(result["failures"]))


if __name__ == "__main__":
    main()
