"""The training loop: batches in, weights out, the whole step replayed as one CUDA graph."""

# ruff: noqa: PLR2004 (shares and sizes of a recipe read best where they are used)
from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from .data import DOCUMENT_BIT, Feed, Rows
from .model import Cuts, Model
from .optimizer import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the training with one batch shape.

    Args:
        rows, length: Batch shape.
        share: Part of the time, in (0, 1].
        compiled: Compile the layers first, which pays only for a long stage.
    """

    rows: int
    length: int
    share: float
    compiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained.

    Args:
        stages: In order; their shares add up to one.
        max_steps: Training ends here, or at `seconds`, whichever comes first.
        seconds: Wall time of the loop, preparation not counted.
        deadline_s: Wall time of preparation and loop together; it shortens `seconds`.
        draft_weight: Weight of the draft head's loss.
    """

    stages: tuple[Stage, ...]
    max_steps: int
    seconds: float
    muon_rate: float = 0.02
    adam_rate: float = 4e-3
    weight_decay: float = 0.05
    draft_weight: float = 0.3
    deadline_s: float = float("inf")
    seed: int = 20_240_613


def unpack_cuts(masks: Tensor, num_layers: int) -> Cuts:
    """Spread cut masks [B, T] int32 over the layers."""
    bits = torch.arange(num_layers, device=masks.device, dtype=torch.int32)[:, None, None]
    state = (masks >> bits) & 1
    conv = (masks >> (bits + 8)) & 1
    return Cuts(state.bool(), conv.bool(), (masks & DOCUMENT_BIT).bool())


def losses(model: Model, ids: Tensor, weights: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Give the mean loss of the model and of its draft head.

    Args:
        model: The model.
        ids: [B, T] int64.
        weights: Weight of predicting each token, [B, T] float32.
        masks: Cut masks, [B, T] int32.
    """
    cuts = unpack_cuts(masks, len(model.shape.layer_types))
    hidden = model.hidden(ids, cuts)
    main = _cross_entropy(model.logits(hidden[:, :-1]), ids[:, 1:], weights[:, 1:])
    # A draft crosses no document: its target's weight is dropped where the next token starts one.
    inside = (~cuts.documents[:, 1:-1]).float() * (~cuts.documents[:, 2:]).float()
    # The last two positions have no target; they are computed to keep the length a round number.
    drafted = model.draft_hidden(ids.roll(-1, 1), hidden, cuts.documents)[:, :-2]
    draft = _cross_entropy(model.logits(drafted), ids[:, 2:], weights[:, 2:] * inside)
    return main, draft


def _cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    loss = functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="none"
    )
    weights = weights.flatten()
    return (loss * weights).sum() / weights.sum().clamp(min=1.0)


class _Step:
    """One training step of a fixed batch shape, captured as a CUDA graph where there is a GPU."""

    def __init__(
        self, model: Model, optimizer: Optimizer, draft_weight: float, rows: int, length: int
    ) -> None:
        device = optimizer.count.device
        self._model, self._optimizer, self._draft_weight = model, optimizer, draft_weight
        self.ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self.weights = torch.ones(rows, length, device=device)
        self.masks = torch.zeros(rows, length, dtype=torch.int32, device=device)
        self.masks[:, 0] = DOCUMENT_BIT
        self.main = torch.zeros((), device=device)
        self.draft = torch.zeros((), device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture()

    def _run(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None
        device = self.ids.device.type
        # bfloat16 on a CPU is slower than float32 where the chip has no unit for it.
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            main, draft = losses(self._model, self.ids, self.weights, self.masks)
            loss = main + self._draft_weight * draft
        loss.backward()
        self.main.copy_(main.detach())
        self.draft.copy_(draft.detach())
        self._optimizer.step()

    def _capture(self) -> None:
        # Warm-up runs change weights and averages; a zero learning rate and a copy undo that.
        optimizer = self._optimizer
        scale = optimizer.scale.clone()
        optimizer.scale.zero_()
        kept = [t.clone() for t in (*optimizer.momentum, *optimizer.first, *optimizer.second)]
        count = optimizer.count.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        for parameter in self._model.parameters():
            parameter.grad = None
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run()
        for tensor, old in zip(
            (*optimizer.momentum, *optimizer.first, *optimizer.second), kept, strict=True
        ):
            tensor.copy_(old)
        optimizer.count.copy_(count)
        optimizer.scale.copy_(scale)

    def __call__(self, ids: Tensor, weights: Tensor, masks: Tensor) -> None:
        self.ids.copy_(ids)
        self.weights.copy_(weights)
        self.masks.copy_(masks)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()


def _prepare(model: Model, optimizer: Optimizer, recipe: Recipe, stage: Stage) -> _Step:
    try:
        return _Step(model, optimizer, recipe.draft_weight, stage.rows, stage.length)
    except Exception as error:
        if not stage.compiled:
            raise
        print(f"not compiled, which is slower: {error!r}"[:600], file=sys.stderr, flush=True)
    torch.compiler.set_stance("force_eager")
    return _Step(model, optimizer, recipe.draft_weight, stage.rows, stage.length)


def rate_at(progress: float) -> float:
    """Give the share of the peak learning rate: a short rise, a plateau, a long way down."""
    if progress < 0.02:
        return progress / 0.02
    return min(1.0, max(0.0, (1.0 - progress) / 0.55))


class _Pool:
    """Batches on the device; each is used at least once, and again when the feed is slow."""

    def __init__(self, feed: Feed, device: torch.device, seed: int, capacity: int = 400) -> None:
        self._feed, self._device, self._capacity = feed, device, capacity
        self._rng = random.Random(seed)  # noqa: S311 (training data, not a secret)
        self._batches: list[tuple[Tensor, Tensor, Tensor]] = []
        self.taken = 0

    def _put(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        batch = (
            torch.from_numpy(rows.ids.astype("int32")).to(self._device),
            torch.from_numpy(rows.weights).to(self._device),
            torch.from_numpy(rows.cuts).to(self._device),
        )
        self.taken += 1
        if len(self._batches) < self._capacity:
            self._batches.append(batch)
        else:
            self._batches[self._rng.randrange(self._capacity)] = batch
        return batch

    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = self._feed.get(wait=len(self._batches) < 8)
        if rows is not None:
            return self._put(rows)
        return self._rng.choice(self._batches)


def train(
    model: Model,
    recipe: Recipe,
    feed: Feed,
    device: torch.device,
    *,
    each: Callable[[Model, int], None] | None = None,
) -> int:
    """Train a model in place.

    Args:
        model: On `device`.
        recipe: What to do for how long.
        feed: Batches, begun with the first stage's shape.
        device: Where to train.
        each: Called about every tenth of the way, to save what there is.

    Returns:
        Steps done.
    """
    optimizer = Optimizer(
        model,
        muon_rate=recipe.muon_rate,
        adam_rate=recipe.adam_rate,
        weight_decay=recipe.weight_decay,
    )
    torch.backends.cuda.matmul.allow_tf32 = True
    if any(stage.compiled for stage in recipe.stages):
        for layer in [*model.model.layers, *model.mtp.layers]:
            layer.compile(dynamic=False)
    begin, seconds = time.monotonic(), recipe.seconds
    step_count, next_report, progress, done = 0, 0.0, 0.0, 0.0
    tokens = 0
    for stage in recipe.stages:
        done += stage.share
        feed.shape[:] = [stage.rows, stage.length]
        pool = _Pool(feed, device, recipe.seed)
        torch.compiler.set_stance("default" if stage.compiled else "force_eager")
        step = _prepare(model, optimizer, recipe, stage)
        if step_count == 0:
            # Compiling is no part of the schedule, or the easy beginning would be skipped.
            took = time.monotonic() - begin
            print(f"prepared in {took:.0f}s", file=sys.stderr, flush=True)
            begin, seconds = time.monotonic(), min(seconds, recipe.deadline_s - took)
        while progress < min(done, 1.0):
            elapsed = time.monotonic() - begin
            progress = max(step_count / recipe.max_steps, elapsed / seconds)
            feed.progress.value = progress
            optimizer.scale.fill_(rate_at(progress))
            step(*pool.next())
            step_count += 1
            tokens += stage.rows * stage.length
            if step_count % 16 == 0 and device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            if progress >= next_report:
                print(
                    f"step {step_count} {elapsed:.0f}s progress {progress:.2f} "
                    f"loss {step.main.item():.4f} draft {step.draft.item():.4f} "
                    f"Mtok {tokens / 1e6:.1f} fresh {pool.taken}",
                    file=sys.stderr,
                    flush=True,
                )
                next_report += 0.04 if next_report < 0.2 else 0.1
                if each is not None:
                    each(model, step_count)
        del step
    torch.compiler.set_stance("force_eager")
    return step_count
