"""Nemotron-H's MTP head against a plain float32 reference, and its bits under any batch."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.models.config import ModelConfig
from headrace.models.registry import model_class
from headrace.models.test_every_family import Chunk, run_all
from headrace.models.test_mtp import MtpBench, one_token_rows
from headrace.ops.linear import ROW_TILE
from headrace.testing import TINY_DICTS, Variant, random_weights

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.nemotron_h import NemotronHConfig

TOLERANCE = 2e-4
MARGIN = 1e-5
"""Least step from a chosen expert's score to the next one's, for rounding not to decide."""


@pytest.fixture
def seed() -> int:
    value = random.SystemRandom().randrange(2**31)
    print(f"{value=}")
    return value


def naive_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def naive_mlp(w: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    inner = torch.relu(x @ w[prefix + "up_proj.weight"].T) ** 2
    return inner @ w[prefix + "down_proj.weight"].T


def naive_attention(w: dict[str, Tensor], config: NemotronHConfig, x: Tensor) -> Tensor:
    tokens, heads, dim = x.shape[0], config.num_attention_heads, config.head_dim
    q, k, v = (
        (x @ w[f"{name}_proj.weight"].T).view(tokens, -1, dim).repeat_interleave(repeats, 1)
        for name, repeats in zip("qkv", (1, *[heads // config.num_kv_heads] * 2), strict=True)
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
    scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out.reshape(tokens, -1) @ w["o_proj.weight"].T


def naive_experts(
    w: dict[str, Tensor], config: NemotronHConfig, x: Tensor
) -> tuple[Tensor, list[bool]]:
    """Token by token, expert by expert; the experts of a token are from its best group.

    Returns:
        [T, C], and for which tokens no choice was so close that rounding may decide it.
    """
    scores = torch.sigmoid(x @ w["gate.weight"].T)
    k = config.num_chosen_experts
    out, is_clear = [], []
    for row, score in zip(x, scores, strict=True):
        ranked = score + w["gate.e_score_correction_bias"]
        groups = torch.stack(ranked.chunk(config.routing.num_groups))
        totals = groups.topk(2).values.sum(-1)
        best = int(totals.argmax())
        order = groups[best].argsort(descending=True)
        margins = (-totals.sort(descending=True).values.diff()[0], ranked_step(groups[best], k))
        is_clear.append(float(min(margins)) > MARGIN)
        chosen = order[:k] + best * groups.shape[1]
        factors = score[chosen] / score[chosen].sum() * config.routing.scale
        inside = w["fc1_latent_proj.weight"] @ row
        mixed = torch.zeros_like(inside)
        for expert, factor in zip(chosen.tolist(), factors, strict=True):
            mixed += factor * naive_mlp(w, f"experts.{expert}.", inside)
        out.append(w["fc2_latent_proj.weight"] @ mixed + naive_mlp(w, "shared_experts.", row))
    return torch.stack(out), is_clear


def ranked_step(scores: Tensor, k: int) -> Tensor:
    """Return the step from the k-th best score to the next one."""
    best = scores.sort(descending=True).values
    return best[k - 1] - best[k]


def naive_mtp(
    config: NemotronHConfig, weights: dict[str, Tensor], hidden: Tensor, next_token_ids: list[int]
) -> tuple[Tensor, list[bool]]:
    """Run the head, attention and then experts, over a sequence: hidden [T, C] at 0 .. T-1."""
    w = {name.removeprefix("mtp.layers."): tensor for name, tensor in weights.items()}
    eps = config.rms_norm_eps
    embedded = w["backbone.embeddings.weight"][next_token_ids]
    joined = [
        naive_norm(embedded, w["0.enorm.weight"], eps),
        naive_norm(hidden, w["0.hnorm.weight"], eps),
    ]
    x = torch.cat(joined, -1) @ w["0.eh_proj.weight"].T
    own = [
        {key.removeprefix(f"{i}."): value for key, value in w.items() if key.startswith(f"{i}.")}
        for i in range(2)
    ]
    mixers = [{key.removeprefix("mixer."): value for key, value in layer.items()} for layer in own]
    x = x + naive_attention(mixers[0], config, naive_norm(x, own[0]["norm.weight"], eps))
    out, is_clear = naive_experts(mixers[1], config, naive_norm(x, own[1]["norm.weight"], eps))
    return naive_norm(x + out, own[1]["final_layernorm.weight"], eps), is_clear


def build(seed: int, variant: Variant) -> tuple[Any, dict[str, Tensor]]:
    config = ModelConfig.from_dict(TINY_DICTS["nemotron_h"](hybrid_override_pattern="M*E-M"))
    weights = random_weights(config, seed, variant)
    return model_class(config).from_weights(config, weights, torch.float32), weights


@pytest.mark.parametrize("variant", ["A", "B"])
def test_the_head_agrees_with_the_plain_reference(seed: int, variant: Variant) -> None:
    rng = random.Random(seed)
    model, weights = build(seed, variant)
    bench = MtpBench(model, rng)
    tokens = [rng.randrange(160) for _ in range(40)]
    stream = bench.stream(tokens, 25)
    run_all(bench, [stream], rng)
    hidden = torch.stack([bench.hidden[id(stream)][p] for p in range(40)])
    got = torch.stack([bench.outputs[id(stream)][p] for p in range(40)])
    want, is_clear = naive_mtp(model.config, weights, hidden, [*tokens[1:], 0])
    assert sum(is_clear) > 20
    error = (got - want).abs()[is_clear].max() / want.std()
    assert float(error) < TOLERANCE


def test_chained_drafts_agree_with_the_plain_reference(seed: int) -> None:
    rng = random.Random(seed)
    model, weights = build(seed, "B")
    bench = MtpBench(model, rng)
    num_compared = 0
    rows = [[rng.randrange(160) for _ in range(20)] for _ in range(6)]
    streams = [bench.stream(tokens, 20) for tokens in rows]
    bench.step([], [Chunk(stream, 20) for stream in streams])
    padded = torch.zeros(ROW_TILE, 48)
    next_ids = torch.zeros(ROW_TILE, dtype=torch.long)
    for i, stream in enumerate(streams):
        padded[i] = bench.outputs[id(stream)][19]
        next_ids[i] = rng.randrange(160)
    got = model.mtp(one_token_rows(streams, 20), bench.caches, padded, next_ids)
    for i, stream in enumerate(streams):
        hidden = torch.stack([bench.hidden[id(stream)][p] for p in range(20)])
        chained = torch.cat([hidden, padded[i : i + 1]])
        following = [*rows[i][1:], 0, int(next_ids[i])]
        want, is_clear = naive_mtp(model.config, weights, chained, following)
        if is_clear[-1]:
            num_compared += 1
            assert float((got[i] - want[-1]).abs().max() / want.std()) < TOLERANCE
    assert num_compared >= 3


def test_the_head_has_the_same_bits_alone_and_with_mates(seed: int) -> None:
    rng = random.Random(seed)
    model, _ = build(seed, "A")
    tokens = [[rng.randrange(160) for _ in range(rng.randrange(26, 40))] for _ in range(3)]

    def outputs(indices: list[int]) -> dict[int, dict[int, Tensor]]:
        bench = MtpBench(model, rng)
        streams = {i: bench.stream(tokens[i], 10 + 7 * i) for i in indices}
        run_all(bench, list(streams.values()), rng)
        return {i: bench.outputs[id(stream)] for i, stream in streams.items()}

    together = outputs([2, 0, 1])
    for i in range(3):
        alone = outputs([i])[i]
        for position in range(len(tokens[i])):
            assert torch.equal(together[i][position], alone[position]), (i, position)


def test_a_head_of_two_attention_layers_has_keys_and_values_for_both(seed: int) -> None:
    raw = TINY_DICTS["nemotron_h"](mtp_hybrid_override_pattern="*-*")
    config = ModelConfig.from_dict(raw)
    weights = random_weights(config, seed)
    model = model_class(config).from_weights(config, weights, torch.float32)
    assert model.num_kv_layers == len(config.attention_layers) + 2
    bench = MtpBench(model, random.Random(seed))
    stream = bench.stream([i % 160 for i in range(20)], 20)
    bench.step([], [Chunk(stream, 20)])
    first, second = bench.caches.k[-2], bench.caches.k[-1]
    written = first.isfinite().all(-1).all(-1)
    assert int(written.sum()) == 20
    assert torch.equal(written, second.isfinite().all(-1).all(-1))
    assert not torch.equal(first[written], second[written])
