"""A twin of the demo model with random weights, to which every memory matters.

The trained model may answer although a memory was damaged; random weights have no such preference,
so each part of each layer moves the log-probabilities of what follows.
"""

# ruff: noqa: PLR2004 (sizes that tell matrices from vectors)
from __future__ import annotations

import math

import torch

from .gate import damage, damages
from .model import DEMO, Model

MOVED_AT_LEAST = 0.5
MOVED_AT_MOST = 0.05
ROWS, PROMPT, AFTER = 3, 96, 8


def sensitive_model(seed: int) -> Model:
    """Give random weights under which every memory matters: slow decay, strong projections."""
    torch.manual_seed(seed)
    model = Model(DEMO)
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


def failures(moved: dict[str, float]) -> list[str]:
    """Name the damages that move too little, and the caches if they move too much."""
    found = [
        f"twin: damage {name} moves {by:.2f} < {MOVED_AT_LEAST}"
        for name, by in moved.items()
        if name != "none" and by < MOVED_AT_LEAST
    ]
    if moved["none"] > MOVED_AT_MOST:
        found.append(f"twin: caches move {moved['none']:.3f} > {MOVED_AT_MOST}")
    return found
