"""Build the nano model: tokenizer, training, scores, files. `python -m tools.demo_model.nano`."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from headrace import evals

from . import tokenizer as tokenizers_
from .data import HERE, Feed, NanoMixture, read_prose, sentences
from .evaluate import prose_score, score
from .files import load, save
from .model import NANO, Model
from .training import Recipe, Stage, train

ASSETS = HERE.parents[1] / "src" / "headrace" / "assets" / "nano"
EVAL_SEED = 1_000_000
WEIGHT_SEED, FEED_SEED = 0, 1
RECIPE = Recipe(
    stages=(
        Stage(rows=96, length=256, share=0.35),
        Stage(rows=64, length=768, share=0.3),
        Stage(rows=40, length=1536, share=0.35),
    ),
    max_steps=8000,
    seconds=125.0,
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


def main() -> None:
    """Do everything, or only `--score` what is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ASSETS)
    parser.add_argument("--seconds", type=float, default=RECIPE.seconds)
    parser.add_argument("--max-steps", type=int, default=RECIPE.max_steps)
    parser.add_argument("--divide", type=int, default=1, help="divide the rows, for small machines")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--count", type=int, default=512, help="examples per task in the scores")
    parser.add_argument("--score", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out: Path = options.out
    if not options.score:
        begin = time.monotonic()
        tokenizer = build_tokenizer(out)
        mix, _ = mixture()
        stages = tuple(
            Stage(rows=max(1, s.rows // options.divide), length=s.length, share=s.share)
            for s in RECIPE.stages
        )
        recipe = Recipe(stages=stages, max_steps=options.max_steps, seconds=options.seconds)
        feed = Feed(
            tokenizer,
            mix,
            num_workers=options.workers,
            seed=FEED_SEED,
            rows=stages[0].rows,
            length=stages[0].length,
        )
        torch.manual_seed(WEIGHT_SEED)
        model = Model(NANO).to(device)
        print(f"ready after {time.monotonic() - begin:.0f}s", file=sys.stderr, flush=True)
        try:
            train(model, recipe, feed, device, each=lambda m, _: save(m, out))
        finally:
            feed.close()
        save(model, out)
    table = report(out, device, options.count)
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
