"""A twin of the demo model with random weights, to which every memory matters.

The trained model may answer although a memory was damaged; random weights have no such preference,
so each part of each layer moves the log-probabilities of what follows.
"""

# ruff: noqa: PLR2004 (sizes that tell matrices from vectors)
from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.damage import damageable, damaged_outputs
from headrace.engine.engine import Engine
from headrace.engine.load import load_parts
from headrace.sampling_params import MAX_LOGPROBS

from .files import load, save
from .gate import damage, damages
from .model import DEMO, Model, Shape

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.outputs import RequestOutput

MOVED_AT_LEAST = 0.5
MOVED_AT_MOST = 0.05
ROWS, PROMPT, AFTER = 3, 96, 8


def sensitive_model(seed: int, shape: Shape = DEMO) -> Model:
    """Give random weights under which every memory matters: slow decay, strong projections."""
    torch.manual_seed(seed)
    model = Model(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(math.log(0.02))
            elif "conv1d" in name:
                parameter.normal_(std=0.5)
            elif parameter.ndim == 2:
                parameter.normal_(std=0.02 if "embed" in name else 0.08)
        # A head of small embeddings would flatten every difference.
        model.model.embed_tokens.weight.mul_(24.0)
    return model.eval()


@torch.no_grad()
def moved_by(seed: int, device: torch.device) -> dict[str, float]:
    """Give each damage's largest change of a log-probability; "none" is what caching changes.

    All are compared with a run over the whole text without caches.
    """
    model = sensitive_model(seed).to(device)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, DEMO.vocab_size, (ROWS, PROMPT + AFTER), generator=generator).to(device)
    whole = model.logits(model.hidden(ids))[:, PROMPT:].log_softmax(-1)
    caches = model.new_caches()
    model.hidden(ids[:, :PROMPT], caches=caches)
    found = {}
    for name in damages(model):
        hidden = model.hidden(ids[:, PROMPT:], caches=damage(caches, name))
        moved = model.logits(hidden).log_softmax(-1) - whole
        found[name] = float(moved.abs().max())
    return found


def moved_in_engine(
    seed: int, folder: Path, *, shape: Shape = DEMO, prompt: int = PROMPT, after: int = AFTER
) -> dict[str, float]:
    """Give what the engine's log-probabilities differ by from the model's own uncached run.

    The engine goes on from random prompts as it likes; the model then runs over the same tokens,
    without caches. Compared are the log-probabilities that the engine lists, of tokens after the
    damage. "none" is the engine without damage, "everything" the same with drafts, prefix cache
    and running ahead.

    Args:
        seed: Of weights and prompts.
        folder: Where the weights are written for the engine to load.
        shape: The model's sizes.
        prompt: Tokens of each prompt.
        after: Tokens compared of each answer.
    """
    save(sensitive_model(seed, shape), folder)
    # As saved, in bfloat16.
    model = load(folder, shape, torch.device("cpu"))
    rng = random.Random(seed)  # noqa: S311 (test data, not a secret)
    prompts = [[rng.randrange(shape.vocab_size) for _ in range(prompt)] for _ in range(ROWS)]
    params = SamplingParams(
        temperature=0, max_tokens=after + 1, ignore_eos=True, logprobs=MAX_LOGPROBS
    )
    full = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", max_num_seqs=ROWS,
        max_model_len=prompt + after + 1,
    )  # fmt: skip
    plain = replace(damageable(full), speculative="none")
    found: dict[str, float] = {}
    for name, config in (("everything", full), ("none", plain)):
        engine = Engine(config, parts=load_parts(config, has_text=False))
        found[name] = _apart(model, prompts, LLM(engine=engine).generate(prompts, params))
    for name in damages(model):
        if name != "none":
            layer, what, how = name.split()
            outputs = damaged_outputs(engine, prompts, params, what, layer=int(layer), how=how)
            found[name] = _apart(model, prompts, outputs)
    return found


@torch.no_grad()
def _apart(model: Model, prompts: list[list[int]], outputs: list[RequestOutput]) -> float:
    """Give the largest difference of a log-probability after an answer's first token."""
    largest = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        (answer,) = output.outputs
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        own = model.logits(model.hidden(ids)).log_softmax(-1)[0]
        for at, listed in enumerate(answer.logprobs[1:], start=len(prompt)):
            for token, said in listed.items():
                largest = max(largest, abs(said.logprob - float(own[at, token])))
    return largest


def failures(moved: dict[str, float], what: str = "twin") -> list[str]:
    """Name the damages that move too little, and the caches if they move too much."""
    undamaged = [name for name in ("none", "everything") if name in moved]
    found = [
        f"{what}: damage {name} moves {by:.2f} < {MOVED_AT_LEAST}"
        for name, by in moved.items()
        if name not in undamaged and by < MOVED_AT_LEAST
    ]
    return found + [
        f"{what}: caches move {moved[name]:.3f} > {MOVED_AT_MOST}"
        for name in undamaged
        if moved[name] > MOVED_AT_MOST
    ]
