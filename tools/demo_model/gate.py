"""The release gate's damage: what a layer's memory is worth, one layer and one kind at a time.

A memory passes if zeroing it or swapping it with another request's, whichever hurts more, costs
enough. Asking this of both is the stricter reading; what it would refuse is reported beside.
"""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING

import torch

from headrace.evals.demo import ledger_example
from headrace.evals.lookup import LEDGERS

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from .model import LayerCache, Model


def probes(tokenizer: Tokenizer, word: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw ledger prompts of one length, [count, P]; answers are a space and digits, [count, 3]."""
    rng = random.Random(f"probe:{word}:{seed}")  # noqa: S311 (test data, not a secret)
    by_length: dict[int, list[tuple[list[int], list[int]]]] = {}
    while True:
        example = ledger_example(rng, word)
        prompt = tokenizer.encode(example.prompt, add_special_tokens=False).ids
        answer = tokenizer.encode(f" {example.expected}", add_special_tokens=False).ids
        same = by_length.setdefault(len(prompt), [])
        same.append((prompt, answer))
        if len(same) == count:
            return torch.tensor([p for p, _ in same]), torch.tensor([a for _, a in same])


def damages(model: Model) -> list[str]:
    """Name every damage: layer, part and what happens to it, and none at all."""
    found = ["none"]
    for layer, kind in enumerate(model.shape.layer_types):
        parts = ("state", "conv") if kind == "linear_attention" else ("kv",)
        found += [f"{layer} {part} {how}" for part in parts for how in ("zero", "swap")]
    return found


def damage(caches: list[LayerCache], name: str) -> list[LayerCache]:
    """Copy caches and damage one part: "3 conv zero", "2 kv swap" (with the next request)."""
    hurt = copy.deepcopy(caches)
    if name == "none":
        return hurt
    layer, part, how = name.split()
    cache = hurt[int(layer)]
    fields = ("key", "value") if part == "kv" else (part,)
    for field in fields:
        tensor: Tensor = getattr(cache, field)
        setattr(cache, field, torch.zeros_like(tensor) if how == "zero" else tensor.roll(1, 0))
    return hurt


@torch.no_grad()
def matrix(
    model: Model,
    tokenizer: Tokenizer,
    device: torch.device,
    *,
    count: int,
    seed: int,
    how: tuple[str, ...] = ("zero", "swap"),
) -> dict[str, dict[str, float]]:
    """Measure the accuracy of every ledger under damages: damage -> ledger -> accuracy."""
    table: dict[str, dict[str, float]] = {
        name: {} for name in damages(model) if name == "none" or name.endswith(how)
    }
    for word in LEDGERS:
        prompts, answers = (t.to(device) for t in probes(tokenizer, word, count, seed))
        caches = model.new_caches()
        model.hidden(prompts, caches=caches)
        for name, row in table.items():
            hurt = damage(caches, name)
            choice = model.logits(model.hidden(answers[:, :-1], caches=hurt)).argmax(-1)
            row[word] = float((choice == answers[:, 1:]).all(-1).float().mean())
    return table


def losses_of(table: dict[str, dict[str, float]]) -> dict[str, float]:
    """Give each damage's largest loss of accuracy on any ledger."""
    whole = table["none"]
    return {
        name: max(whole[word] - row[word] for word in row)
        for name, row in table.items()
        if name != "none"
    }


def best_of_each(lost: dict[str, float]) -> dict[str, float]:
    """Give each memory's greater loss, zeroed or swapped: "3 conv" -> loss."""
    found: dict[str, float] = {}
    for name, cost in lost.items():
        memory = name.rpartition(" ")[0]
        found[memory] = max(found.get(memory, 0.0), cost)
    return found
