"""The training loop: batches in, weights out, the whole step replayed as one CUDA graph."""

# ruff: noqa: PLR2004 (shares and sizes of a recipe read best where they are used)
from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from .data import DOCUMENT_BIT, Batch, Feed, Pairs, Plan, Rows
from .model import Cuts, Model
from .optimizer import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the training with one batch shape.

    Args:
        rows, length: Batch shape.
        share: Part of the steps, in (0, 1].
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
        stages: In order; their shares of the steps add up to one.
        steps: Training ends here; what is learned when depends on the step alone.
        seconds: Most wall time of the loop, preparation not counted. On a machine too slow for it
            the whole schedule is shortened, and `Trained.is_shortened` says so.
        deadline_s: Most wall time of preparation and loop together.
        draft_weight: Weight of the draft head's loss.
        swap_weight: Weight of the loss on swapped memories, where the mixture has pairs.
        swap_split: Tokens of a pair's row before the memories are swapped.
    """

    stages: tuple[Stage, ...]
    steps: int
    seconds: float
    muon_rate: float = 0.02
    adam_rate: float = 4e-3
    weight_decay: float = 0.05
    draft_weight: float = 0.3
    swap_weight: float = 0.0
    swap_split: int = 0
    deadline_s: float = float("inf")

    def divided(self, by: int, *, compiled: bool) -> Recipe:
        """Give the recipe with fewer rows, for small machines."""
        stages = tuple(
            dataclasses.replace(
                stage, rows=max(1, stage.rows // by), compiled=stage.compiled and compiled
            )
            for stage in self.stages
        )
        return dataclasses.replace(self, stages=stages)


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


def swapped_loss(model: Model, ids: Tensor, weights: Tensor, taken: Tensor, split: int) -> Tensor:
    """Give the mean loss after `split` tokens, where rows take memories over from their partners.

    Args:
        model: The model.
        ids: Row 2i and row 2i + 1 are partners, [R, T] int64.
        weights: Weight of predicting each token, [R, T].
        taken: Bit L takes over layer L's state or KV, bit 8 + L its window, [R] int32.
        split: Where memories change hands.
    """
    caches = model.new_caches()
    before = model.hidden(ids[:, :split], caches=caches)
    for layer, cache in enumerate(caches):
        for field, bit in (("state", layer), ("key", layer), ("value", layer), ("conv", layer + 8)):
            own = getattr(cache, field)
            if own is not None:
                partner = own.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
                is_taken = ((taken >> bit) & 1).bool().view(-1, *[1] * (own.ndim - 1))
                setattr(cache, field, torch.where(is_taken, partner, own))
    after = model.hidden(ids[:, split:], caches=caches)
    hidden = torch.cat([before[:, -1:], after], 1)[:, :-1]
    return _cross_entropy(model.logits(hidden), ids[:, split:], weights[:, split:])


def _cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    loss = functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="none"
    )
    weights = weights.flatten()
    return (loss * weights).sum() / weights.sum().clamp(min=1.0)


class _Step:
    """One training step of a fixed batch shape, captured as a CUDA graph where there is a GPU."""

    def __init__(
        self, model: Model, optimizer: Optimizer, recipe: Recipe, stage: Stage, example: Batch
    ) -> None:
        device = optimizer.count.device
        self._model, self._optimizer, self._recipe = model, optimizer, recipe
        self.ids = torch.zeros(stage.rows, stage.length, dtype=torch.int64, device=device)
        self.weights = torch.ones(stage.rows, stage.length, device=device)
        self.masks = torch.zeros(stage.rows, stage.length, dtype=torch.int32, device=device)
        self.masks[:, 0] = DOCUMENT_BIT
        self.losses = {name: torch.zeros((), device=device) for name in ("main", "draft")}
        self._pairs: tuple[Tensor, Tensor, Tensor] | None = None
        if example.pairs is not None and recipe.swap_weight:
            shape = example.pairs.ids.shape
            self._pairs = (
                torch.zeros(shape, dtype=torch.int64, device=device),
                torch.ones(shape, device=device),
                torch.zeros(shape[0], dtype=torch.int32, device=device),
            )
            self.losses["swap"] = torch.zeros((), device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture()

    def _run(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None
        device, recipe = self.ids.device.type, self._recipe
        # bfloat16 on a CPU is slower than float32 where the chip has no unit for it.
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            main, draft = losses(self._model, self.ids, self.weights, self.masks)
            found = {"main": main, "draft": draft}
            loss = main + recipe.draft_weight * draft
            if self._pairs is not None:
                # Another shape, for which compiling would not pay.
                with torch.compiler.set_stance("force_eager"):
                    found["swap"] = swapped_loss(self._model, *self._pairs, recipe.swap_split)
                loss = loss + recipe.swap_weight * found["swap"]
        loss.backward()
        for name, value in found.items():
            self.losses[name].copy_(value.detach())
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

    def __call__(self, batch: Batch) -> None:
        """Learn from a batch."""
        _fill((self.ids, self.weights, self.masks), batch.rows)
        if self._pairs is not None:
            assert batch.pairs is not None
            _fill(self._pairs, batch.pairs)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()


def _fill(tensors: tuple[Tensor, Tensor, Tensor], arrays: Rows | Pairs) -> None:
    for tensor, array in zip(tensors, arrays, strict=True):
        # torch has few operations on uint16.
        signed = array.astype("int32") if array.dtype.kind == "u" else array
        tensor.copy_(torch.from_numpy(signed))


def _prepare(
    model: Model, optimizer: Optimizer, recipe: Recipe, stage: Stage, batch: Batch
) -> _Step:
    try:
        return _Step(model, optimizer, recipe, stage, batch)
    except Exception as error:
        if not stage.compiled:
            raise
        _tell(f"not compiled, which is slower: {error!r}"[:600])
    torch.compiler.set_stance("force_eager")
    return _Step(model, optimizer, recipe, stage, batch)


LEEWAY = 0.03
"""Part of a time limit by which a schedule may be late before it is shortened."""


def rate_at(progress: float) -> float:
    """Give the share of the peak learning rate: a short rise, a plateau, a long way down."""
    if progress < 0.02:
        return progress / 0.02
    return min(1.0, max(0.0, (1.0 - progress) / 0.55))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training was.

    Args:
        steps, tokens: Done, and seen in packed rows.
        seconds: Of the loop; preparation is not counted.
        is_shortened: The time limit came into play, so the weights depend on the machine's speed.
    """

    steps: int
    tokens: int
    seconds: float
    is_shortened: bool


def plan_of(recipe: Recipe) -> Plan:
    """Give the shapes of a recipe's batches."""
    ends, end = [], 0.0
    for stage in recipe.stages:
        end += stage.share
        ends.append((end, stage.rows, stage.length))
    return Plan(steps=recipe.steps, stages=tuple(ends))


def train(
    model: Model,
    recipe: Recipe,
    feed: Feed,
    *,
    each: Callable[[Model, int], None] | None = None,
) -> Trained:
    """Train a model in place.

    Args:
        model: On the device to train on.
        recipe: What to do for how long.
        feed: Batches of `plan_of(recipe)`.
        each: Called about every tenth of the way, to save what there is.
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
    step_count, tokens, next_report, progress, done = 0, 0, 0.0, 0.0, 0.0
    is_shortened = False
    for stage in recipe.stages:
        done += stage.share
        torch.compiler.set_stance("default" if stage.compiled else "force_eager")
        step: _Step | None = None
        while progress < min(done, 1.0):
            batch = feed.get((stage.rows, stage.length))
            if step is None:
                step = _prepare(model, optimizer, recipe, stage, batch)
            if step_count == 0:
                # Compiling is no part of the schedule, or the easy beginning would be skipped.
                took = time.monotonic() - begin
                _tell(f"prepared in {took:.0f}s")
                begin, seconds = time.monotonic(), min(seconds, recipe.deadline_s - took)
            optimizer.scale.fill_(rate_at(progress))
            step(batch)
            step_count += 1
            tokens += stage.rows * stage.length
            elapsed = time.monotonic() - begin
            if progress >= next_report:
                figures = " ".join(
                    f"{name} {loss.item():.4f}" for name, loss in step.losses.items()
                )
                _tell(f"step {step_count} {elapsed:.0f}s progress {progress:.2f} {figures}")
                next_report += 0.04 if next_report < 0.2 else 0.1
                if each is not None:
                    each(model, step_count)
            progress, least = step_count / recipe.steps, elapsed / seconds - LEEWAY
            if least > progress:
                # Shortened as a whole: the fall of the learning rate is what is worth most.
                progress, is_shortened = least, True
                feed.hurry(progress)
        del step
    torch.compiler.set_stance("force_eager")
    return Trained(
        steps=step_count,
        tokens=tokens,
        seconds=time.monotonic() - begin,
        is_shortened=is_shortened,
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
