"""Teach the draft head alone to foresee the model's own choice; the model itself does not change.

In the main training the head learns from the text; here it learns from what the model would say,
which is what a draft is compared with. A minute on a GPU is enough.
"""

from __future__ import annotations

import random
import sys
import time
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from .data import DOCUMENT_BIT, Packer
from .optimizer import Optimizer
from .training import LEEWAY, unpack_cuts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from .demo_data import DemoMixture
    from .model import Model

SEED, LENGTH, MIXED_ROWS = 5, 512, 120
SHARPER = 1.5
"""Targets lean to the likeliest token, because that is what a draft is compared with."""


def sharpen(
    model: Model,
    mixture: DemoMixture,
    tokenizer: Tokenizer,
    device: torch.device,
    *,
    steps: int,
    seconds: float,
    rows: int = 20,
    rate: float = 0.006,
) -> bool:
    """Train the draft head of a finished model in place, on its weights as they are shipped.

    Args:
        model: On `device`; rounded to bfloat16 first.
        mixture: Gives the texts.
        tokenizer: Encodes them.
        device: Where to train.
        steps: Steps to do.
        seconds: Most wall time; on a slower machine the schedule is shortened as a whole.
        rows: Rows of 512 tokens to a step.
        rate: Peak learning rate of the matrices.

    Returns:
        Whether the schedule was shortened.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
            parameter.requires_grad_(requires_grad=False)
    for parameter in model.mtp.parameters():
        parameter.requires_grad_(requires_grad=True)
    draw = _Batches(mixture, tokenizer, rows, device)
    optimizer = Optimizer(model.mtp, muon_rate=rate, adam_rate=rate / 8, weight_decay=0.0)
    begin, step, progress, is_shortened = time.monotonic(), 0, 0.0, False
    while progress < 1.0:
        optimizer.scale.fill_(min(1.0, max(0.0, 1.2 * (1.0 - progress))))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = _loss(model, *draw())
        for parameter in model.mtp.parameters():
            parameter.grad = None
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"drafts: step {step} loss {loss.item():.3f}", file=sys.stderr, flush=True)
        step += 1
        progress, elapsed = step / steps, time.monotonic() - begin
        if elapsed / seconds - LEEWAY > progress:
            progress, is_shortened = elapsed / seconds - LEEWAY, True
    print(f"drafts: {step} steps in {elapsed:.0f}s", file=sys.stderr, flush=True)
    return is_shortened


class _Batches:
    """Rows of 512 tokens: four fifths windows of prose, one fifth of everything."""

    def __init__(
        self, mixture: DemoMixture, tokenizer: Tokenizer, rows: int, device: torch.device
    ) -> None:
        texts = ["\n\n".join(source) for source in mixture.sources[:3]]
        encoded = tokenizer.encode_batch(
            [text[i : i + 20_000] for text in texts for i in range(0, len(text), 20_000)],
            add_special_tokens=False,
        )
        self._prose = torch.tensor([i for part in encoded for i in part.ids], device=device)
        rng = random.Random(SEED)  # noqa: S311 (training data, not a secret)
        # Drafts of looked-up values are right already; a few such texts keep them so.
        packed = Packer(tokenizer, lambda: mixture.draw(rng, 0.3, LENGTH)).rows(
            MIXED_ROWS * max(1, rows // 20), LENGTH
        )
        self._ids = torch.from_numpy(packed.ids.astype("int64")).to(device)
        self._masks = torch.from_numpy(packed.cuts).to(device)
        self._rows, self._mixed, self._device = rows, max(1, rows // 5), device
        torch.manual_seed(SEED)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Give tokens [R, 512] and cut masks."""
        device = self._device
        starts = torch.randint(
            len(self._prose) - LENGTH, (self._rows - self._mixed, 1), device=device
        )
        windows = self._prose[starts + torch.arange(LENGTH, device=device)]
        masks = torch.zeros_like(windows, dtype=torch.int32)
        masks[:, 0] = DOCUMENT_BIT
        picked = torch.randint(len(self._ids), (self._mixed,), device=device)
        return (
            torch.cat([windows, self._ids[picked]]),
            torch.cat([masks, self._masks[picked]]),
        )


def _loss(model: Model, ids: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the drafts against the model's own distribution one token later."""
    cuts = unpack_cuts(masks, len(model.shape.layer_types))
    with torch.no_grad():
        hidden = model.hidden(ids, cuts)
        wanted = (model.logits(hidden).float() * SHARPER).softmax(-1)
    drafted = model.logits(model.draft_hidden(ids.roll(-1, 1), hidden, cuts.documents))
    inside = (~cuts.documents[:, 1:-1]).float()
    loss = -(wanted[:, 1:-1] * functional.log_softmax(drafted[:, :-2].float(), -1)).sum(-1)
    return (loss * inside).sum() / inside.sum()
