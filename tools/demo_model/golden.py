"""Write golden.json: prompts, greedy token ids and float32 log-probabilities.

`python -m tools.demo_model.golden FOLDER`
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from headrace import evals
from headrace.evals.facts import ABOUT_ITSELF

from .demo_data import read, render
from .files import load
from .model import DEMO, Model
from .prose import DEMO_PROSE

FIRST_SEED = 2_000_000
COUNTS = {
    "registers": 3,
    "phonebook": 3,
    "ledger": 10,
    "arithmetic": 12,
    "stories": 12,
    "tools": 10,
    "json": 10,
    "facts": 14,
    "copy": 4,
    "reverse": 4,
    "sort": 4,
}
IM_END = 2
PROSE_TOKENS, PROSE_CHARACTERS = 48, 200


def prompts(held_out: str) -> list[tuple[str, str, int]]:
    """Give (task, prompt text, most new tokens) of 100 prompts."""
    tasks = evals.suite("demo")
    found = [
        (name, render(tasks[name].generate(seed)), tasks[name].max_tokens)
        for name, count in COUNTS.items()
        for seed in range(FIRST_SEED, FIRST_SEED + count)
    ]
    for asks, _ in ABOUT_ITSELF[:4]:
        message = {"role": "user", "content": asks[0]}
        example = evals.Example(task="about", messages=[message], expected="")
        found.append(("about", render(example), 80))
    paragraphs = [p for p in held_out.split("\n\n") if len(p) > PROSE_CHARACTERS]
    found += [
        ("prose", text[:PROSE_CHARACTERS].rsplit(" ", 1)[0], PROSE_TOKENS)
        for text in paragraphs[: 100 - len(found)]
    ]
    return found


@torch.no_grad()
def continue_greedily(model: Model, ids: list[int], most: int) -> tuple[list[int], list[float]]:
    """Decode greedily: new ids and their log-probabilities; ends after <|im_end|>."""
    caches = model.new_caches()
    step = torch.tensor([ids])
    new: list[int] = []
    logprobs: list[float] = []
    while len(new) < most:
        scores = model.logits(model.hidden(step, caches=caches)[:, -1]).log_softmax(-1)[0]
        best = int(scores.argmax())
        new.append(best)
        logprobs.append(round(float(scores[best]), 5))
        if best == IM_END:
            break
        step = torch.tensor([[best]])
    return new, logprobs


def write(folder: Path, held_out: str) -> None:
    """Write folder/golden.json for the model in a folder."""
    torch.set_num_threads(1)
    model = load(folder, DEMO, torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    entries: list[dict[str, Any]] = []
    for task, text, most in prompts(held_out):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        new, logprobs = continue_greedily(model, ids, most)
        entries.append({"task": task, "prompt": text, "token_ids": new, "logprobs": logprobs})
    golden = {"dtype": "float32", "decoding": "greedy", "stop_token_id": IM_END, "prompts": entries}
    packed = json.dumps(golden, separators=(",", ":"))
    (folder / "golden.json").write_text(packed.replace('{"task"', '\n{"task"') + "\n")


def main() -> None:
    """Write it for a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prose", type=Path, default=DEMO_PROSE)
    options = parser.parse_args()
    write(options.folder, read(options.prose)[1])


if __name__ == "__main__":
    main()
