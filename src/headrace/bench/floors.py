"""The least time a step can take: its bytes and operations at the device's measured speeds.

    step = max(weights / copy, operations / matmul)      matrix products
         + state read and written + windows read and written + KV read, each / copy
         + drafts * max(head and MTP layer / copy, their operations / matmul)

The replay scheme writes its state once per interval. Left out: activations, the replay ring, the
sampler's pass over the logits, launches, and the KV of the MTP layer. So a share of 1 is out of
reach. Prefill counts operations: products, causal attention, the chunked scan.

B rows of a step, k drafts of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from headrace.bench.ceilings import Ceilings

_CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts of all layers.

    Attributes:
        count: Experts of a layer.
        per_token: Of them, used by one token.
        params: Of all experts of all layers.
    """

    count: int
    per_token: int
    params: int

    def touched(self, rows: float) -> float:
        """Share of the experts that `rows` tokens use, if they choose uniformly."""
        return 1.0 - (1.0 - self.per_token / self.count) ** rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """What a model's tokens cost, from its shape alone.

    Attributes:
        body_params: Parameters that every token uses: without experts, embedding, head and MTP.
        head_params: Of the head, which is read whole; an embedding is not.
        mtp_params: Of the MTP layer.
        weight_bytes: Of one parameter.
        state_bytes: Recurrent state of a sequence.
        window_bytes: Convolution windows of a sequence.
        kv_bytes_per_token: Keys and values, MTP layer left out.
        attention_flops: Of one query with one key, all layers.
        scan_flops_per_token: Of the chunked scan, all layers.
        experts: None for dense models.
    """

    body_params: int
    head_params: int
    mtp_params: int
    weight_bytes: int
    state_bytes: int
    window_bytes: int
    kv_bytes_per_token: int
    attention_flops: int
    scan_flops_per_token: int
    experts: Experts | None = None

    def bytes_of_step(self, rows: float) -> float:
        """Weights that a step of so many tokens reads, head included."""
        params: float = self.body_params + self.head_params
        if self.experts is not None:
            params += self.experts.params * self.experts.touched(rows)
        return params * self.weight_bytes

    @property
    def active_params(self) -> float:
        """Parameters that one token is multiplied with, head left out."""
        if self.experts is None:
            return self.body_params
        return self.body_params + self.experts.params * self.experts.per_token / self.experts.count


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTraffic:
    """How often a scheme touches the recurrent state.

    Attributes:
        interval: Tokens between writes of the replay scheme; None for columns, which write the
            state after every token of a step.
    """

    interval: int | None

    def writes(self, num_drafts: int, tokens_per_step: float) -> float:
        """States that a row writes in a step."""
        if self.interval is None:
            return 1.0 + num_drafts
        return min(1.0, tokens_per_step / self.interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """A lower bound.

    Attributes:
        seconds: Of a step, or of all prompts.
        tokens_per_s: At that time.
        parts_ms: What it is made of.
    """

    seconds: float
    tokens_per_s: float
    parts_ms: dict[str, float]


_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")


def costs_of(model: Any) -> ModelCosts:  # noqa: ANN401 - any class of headrace.models
    """Take a model's costs from its tensors' shapes."""
    config = model.config
    sizes = {name: math.prod(shape) for name, shape in model.expected_tensors(config).items()}
    embedding = sum(_total(sizes, name) for name in _EMBEDDINGS)
    # A head of its own is read instead of the embedding; a tied one is the embedding, read whole.
    head = _total(sizes, "lm_head") or embedding
    mtp = sum(count for name, count in sizes.items() if name.startswith("mtp."))
    routed = _routed(config, sizes)
    routed_params = routed.params if routed is not None else 0
    body = sum(sizes.values()) - embedding - _total(sizes, "lm_head") - mtp - routed_params
    state = window = scan = 0
    for group in model.state_groups(0):
        for spec in group.state:
            bytes_each = math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
            if spec.kind == "recurrent":
                state += bytes_each * len(group.layers)
                scan += _scan_flops(group.kind, spec.shape) * len(group.layers)
            else:
                window += bytes_each * len(group.layers)
    layers = len(config.attention_layers)
    itemsize = model.dtype.itemsize
    return ModelCosts(
        body_params=body,
        head_params=head,
        mtp_params=mtp,
        weight_bytes=itemsize,
        state_bytes=state,
        window_bytes=window,
        kv_bytes_per_token=layers * config.kv_width * itemsize,
        attention_flops=4 * layers * config.num_attention_heads * config.head_dim,
        scan_flops_per_token=scan,
        experts=routed,
    )


def decode_floor(
    costs: ModelCosts,
    ceilings: Ceilings,
    state: StateTraffic,
    *,
    batch: int,
    context: float,
    num_drafts: int = 0,
    tokens_per_step: float = 1.0,
    has_mtp: bool = False,
) -> Floor:
    """Bound decoding.

    Args:
        costs: The model.
        ceilings: The device.
        state: The state scheme.
        batch: B.
        context: Tokens before each row, in the mean.
        num_drafts: k.
        tokens_per_step: Tokens that a row keeps of a step, in the mean.
        has_mtp: Drafts come from the model's own head; other drafters count as free.
    """
    copy, matmul = ceilings.copy_bytes_per_s, ceilings.matmul_flops_per_s
    rows = batch * (1 + num_drafts)
    flops = 2 * (costs.active_params + costs.head_params) * rows
    draft = 0.0
    if has_mtp and num_drafts:
        params = costs.mtp_params + costs.head_params
        one = max(params * costs.weight_bytes / copy, 2 * params * batch / matmul)
        draft = num_drafts * one
    touched = 1.0 + state.writes(num_drafts, tokens_per_step)
    parts = {
        "products": max(costs.bytes_of_step(rows) / copy, flops / matmul),
        "drafts": draft,
        "state": touched * batch * costs.state_bytes / copy,
        "windows": 2 * batch * costs.window_bytes / copy,
        "kv": batch * context * costs.kv_bytes_per_token / copy,
    }
    seconds = sum(parts.values())
    return Floor(
        seconds=seconds,
        tokens_per_s=batch * tokens_per_step / seconds,
        parts_ms={name: 1e3 * part for name, part in parts.items()},
    )


def prefill_floor(
    costs: ModelCosts, ceilings: Ceilings, *, batch: int, tokens: int, cached: int = 0
) -> Floor:
    """Bound the computation of prompts.

    Args:
        costs: The model.
        ceilings: The device.
        batch: Prompts.
        tokens: Computed tokens of each.
        cached: Tokens before them whose keys, values and states are there.
    """
    copy, matmul = ceilings.copy_bytes_per_s, ceilings.matmul_flops_per_s
    total = batch * tokens
    pairs = total * (cached + tokens / 2)
    parts = {
        "products": 2 * costs.active_params * total / matmul,
        "attention": costs.attention_flops * pairs / matmul,
        "scan": costs.scan_flops_per_token * total / matmul,
    }
    weights = costs.bytes_of_step(total) - costs.head_params * costs.weight_bytes
    moved = (weights + batch * cached * costs.kv_bytes_per_token) / copy
    seconds = max(sum(parts.values()), moved)
    return Floor(
        seconds=seconds,
        tokens_per_s=total / seconds,
        parts_ms={name: 1e3 * part for name, part in (parts | {"bytes": moved}).items()},
    )


def _total(sizes: dict[str, int], part: str) -> int:
    return sum(count for name, count in sizes.items() if part in name and "mtp." not in name)


_ROUTED = (".experts.", "block_sparse_moe.input_linear", "block_sparse_moe.output_linear")
"""What is in the names of the experts' tensors and of no others."""


def _routed(config: Any, sizes: dict[str, int]) -> Experts | None:  # noqa: ANN401
    # Of the mixture models' configs only; dense ones have neither field.
    count = getattr(config, "num_experts", 0) or 0
    per_token = getattr(config, "num_chosen_experts", 0) or 0
    params = sum(
        size
        for name, size in sizes.items()
        if not name.startswith("mtp.") and any(part in name for part in _ROUTED)
    )
    if not count or not per_token or not params:
        return None
    return Experts(count=count, per_token=per_token, params=params)


def _scan_flops(kind: str, shape: tuple[int, ...]) -> int:
    """Operations of a token in one layer's chunked scan.

    The state is read, corrected and updated once; inside a chunk come products of keys and queries
    with keys (and of their solution with keys and values).
    """
    state = math.prod(shape)
    flops = 6 * state
    if kind == "gated_delta_net":
        heads, value, key = shape
        flops += 2 * _CHUNK * heads * (3 * key + 2 * value)
    return flops
