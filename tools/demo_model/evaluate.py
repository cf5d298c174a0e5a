"""Scores of a model on the tasks, by one forward pass over prompt and right answer.

Greedy decoding gives exactly the right answer if and only if each of its tokens is the likeliest
after those before it, so nothing need be generated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer
    from torch import Tensor

    from headrace.evals import Example, Task

    from .model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a task's examples showed.

    Args:
        accuracy: Share of examples answered exactly.
        acceptance: Share of answer tokens whose draft equals the model's own choice.
        longest: Tokens of the longest prompt.
        right: Seeds of the examples answered exactly.
    """

    accuracy: float
    acceptance: float
    longest: int
    right: frozenset[int]


def prompt_text(example: Example) -> str:
    """Write an example's prompt as the chat template does (no tools)."""
    if example.prompt:
        return example.prompt
    turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in example.messages)
    return "".join(turns) + "<|im_start|>assistant\n"


def question_and_answer(
    example: Example, tokenizer: Tokenizer, render: Callable[[Example], str] = prompt_text
) -> tuple[list[int], list[int]]:
    """Give the tokens of an example's prompt and of its right answer, its end included."""
    answer = f" {example.expected}" if example.prompt else f"{example.expected}<|im_end|>"
    prompt_ids, answer_ids = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in (render(example), answer)
    )
    return prompt_ids, answer_ids


@torch.no_grad()
def score(
    model: Model,
    tokenizer: Tokenizer,
    task: Task,
    *,
    count: int,
    first_seed: int,
    device: torch.device,
    render: Callable[[Example], str] = prompt_text,
    batch: int = 64,
) -> Score:
    """Score one task on `count` examples, seeds from first_seed on."""
    items = []
    for seed in range(first_seed, first_seed + count):
        prompt, answer = question_and_answer(task.generate(seed), tokenizer, render)
        items.append((prompt, answer, seed))
    items.sort(key=lambda item: len(item[0]))
    right: set[int] = set()
    accepted = drafted = 0
    for start in range(0, count, batch):
        part = items[start : start + batch]
        width = max(len(p) + len(a) for p, a, _ in part)
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        answers = torch.zeros(len(part), width, dtype=torch.bool)
        for row, (prompt, answer, _) in enumerate(part):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            answers[row, len(prompt) : len(prompt) + len(answer)] = True
        ids, answers = ids.to(device), answers.to(device)
        hidden = model.hidden(ids)
        choice = model.logits(hidden).argmax(-1)[:, :-1]
        wrong = (choice != ids[:, 1:]) & answers[:, 1:]
        is_wrong = wrong.any(-1).tolist()
        right |= {seed for (_, _, seed), miss in zip(part, is_wrong, strict=True) if not miss}
        hits, total = _drafts(model, ids, hidden, choice, answers)
        accepted += hits
        drafted += total
    return Score(
        accuracy=len(right) / count,
        acceptance=accepted / max(drafted, 1),
        longest=len(items[-1][0]),
        right=frozenset(right),
    )


def _drafts(
    model: Model, ids: Tensor, hidden: Tensor, choice: Tensor, answers: Tensor
) -> tuple[int, int]:
    """Count drafts that equal the model's choice, among answer tokens after the first."""
    drafted = model.logits(model.draft_hidden(ids[:, 1:-1], hidden[:, :-2])).argmax(-1)
    counted = answers[:, 2:] & answers[:, 1:-1]
    hits = (drafted == choice[:, 1:]) & counted
    return int(hits.sum()), int(counted.sum())


@torch.no_grad()
def prose_score(
    model: Model, tokenizer: Tokenizer, text: str, device: torch.device, length: int = 512
) -> tuple[float, float]:
    """Give bits per byte of a text, and how many drafts equal the model's choice."""
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    ids = ids[: len(ids) // length * length].view(-1, length).to(device)
    hidden = model.hidden(ids)
    logits = model.logits(hidden)
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"
    )
    size = sum(len(tokenizer.decode(row[1:].tolist()).encode()) for row in ids)
    answers = torch.ones_like(ids, dtype=torch.bool)
    hits, total = _drafts(model, ids, hidden, logits.argmax(-1)[:, :-1], answers)
    return float(loss) / math.log(2) / size, hits / total


@torch.no_grad()
def generated_acceptance(
    model: Model,
    tokenizer: Tokenizer,
    text: str,
    device: torch.device,
    *,
    rows: int = 32,
    prompt: int = 192,
    new: int = 64,
) -> float:
    """Let the model go on greedily from pieces of a text; say how many drafts it would accept."""
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    rows = min(rows, len(ids) // prompt)
    ids = ids[: rows * prompt].view(rows, prompt).to(device)
    caches = model.new_caches()
    token, whole = ids, ids
    for _ in range(new):
        token = model.logits(model.hidden(token, caches=caches)[:, -1:]).argmax(-1)
        whole = torch.cat([whole, token], 1)
    hidden = model.hidden(whole)
    choice = model.logits(hidden).argmax(-1)[:, :-1]
    answers = torch.zeros_like(whole, dtype=torch.bool)
    answers[:, prompt:] = True
    hits, total = _drafts(model, whole, hidden, choice, answers)
    return hits / total
