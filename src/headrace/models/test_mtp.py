"""The MTP module against a plain float32 reference, and its bits under any batch."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.models.batch import ROW_TILE, StepBatch, VerifyRows
from headrace.models.test_every_family import Bench, Chunk, P, Stream, run_all
from headrace.testing import random_weights, tiny_config, tiny_model

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.config import ModelConfig

TOLERANCE = 2e-4


@pytest.fixture
def seed() -> int:
    value = random.SystemRandom().randrange(2**31)
    print(f"{value=}")
    return value


def naive_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * (1.0 + weight)


def naive_rotary(x: Tensor, config: ModelConfig) -> Tensor:
    """Rotate [T, heads, D] for positions 0 .. T-1."""
    r = config.rotary_dim
    out = x.clone()
    for t in range(x.shape[0]):
        for i in range(r // 2):
            angle = t * config.rope_theta ** (-2.0 * i / r)
            a, b = x[t, :, i], x[t, :, i + r // 2]
            out[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[t, :, i + r // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def naive_mtp(
    config: ModelConfig, weights: dict[str, Tensor], hidden: Tensor, next_token_ids: list[int]
) -> Tensor:
    """Run the module over one whole sequence: hidden [T, C] at positions 0 .. T-1."""
    w = {name.removeprefix("mtp."): tensor for name, tensor in weights.items()}
    eps, heads, dim = config.rms_norm_eps, config.num_attention_heads, config.head_dim
    embedded = w["model.embed_tokens.weight"][next_token_ids]
    joined = torch.cat(
        [
            naive_norm(embedded, w["pre_fc_norm_embedding.weight"], eps),
            naive_norm(hidden, w["pre_fc_norm_hidden.weight"], eps),
        ],
        dim=-1,
    )
    x = joined @ w["fc.weight"].T
    layer = {k.removeprefix("layers.0."): v for k, v in w.items() if k.startswith("layers.0.")}
    y = naive_norm(x, layer["input_layernorm.weight"], eps)
    tokens = y.shape[0]
    both = (y @ layer["self_attn.q_proj.weight"].T).view(tokens, heads, 2 * dim)
    q, gate = both[..., :dim], both[..., dim:]
    k, v = (
        (y @ layer[f"self_attn.{n}_proj.weight"].T).view(tokens, config.num_kv_heads, dim)
        for n in "kv"
    )
    q = naive_rotary(naive_norm(q, layer["self_attn.q_norm.weight"], eps), config)
    k = naive_rotary(naive_norm(k, layer["self_attn.k_norm.weight"], eps), config)
    group = heads // config.num_kv_heads
    out = torch.zeros_like(q)
    for t in range(tokens):
        for h in range(heads):
            scores = k[: t + 1, h // group] @ q[t, h] / math.sqrt(dim)
            out[t, h] = torch.softmax(scores, 0) @ v[: t + 1, h // group]
    out = (out * torch.sigmoid(gate)).reshape(tokens, heads * dim)
    x = x + out @ layer["self_attn.o_proj.weight"].T
    y = naive_norm(x, layer["post_attention_layernorm.weight"], eps)
    gated = torch.nn.functional.silu(y @ layer["mlp.gate_proj.weight"].T)
    x = x + (gated * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return naive_norm(x, w["norm.weight"], eps)


class MtpBench(Bench):
    """Also runs the module over every step's tokens and keeps its outputs by position."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.outputs: dict[int, dict[int, Tensor]] = {}
        self.hidden: dict[int, dict[int, Tensor]] = {}

    def step(
        self,
        verify: list[tuple[Stream | None, list[int]]],
        known: list[Chunk],
        *,
        grid: int = 16,
    ) -> tuple[StepBatch, Tensor]:
        owners: list[tuple[Stream, int]] = []
        for stream, drafts in verify:
            if stream is not None:
                owners += [(stream, stream.computed + t) for t in range(1 + len(drafts))]
        for chunk in known:
            owners += [(chunk.stream, p) for p in range(chunk.stream.computed, chunk.end)]
        batch, hidden = super().step(verify, known, grid=grid)
        next_ids = torch.zeros_like(batch.token_ids)
        for i, (stream, position) in enumerate(owners):
            next_ids[i] = (stream.tokens + [0] * 9)[position + 1]
        model: Any = self.model
        out = model.mtp(batch, self.caches, hidden, next_ids)
        for i, (stream, position) in enumerate(owners):
            if position < stream.computed:
                self.outputs.setdefault(id(stream), {})[position] = out[i]
                self.hidden.setdefault(id(stream), {})[position] = hidden[i]
        return batch, hidden


def one_token_rows(streams: list[Stream], position: int) -> StepBatch:
    """Build the batch of a chained draft: one token a stream, at the same position."""
    n = len(streams)
    padding = [0] * (-n % ROW_TILE)
    width = max(len(s.table) for s in streams)
    slots = [s.table[position // P] * P + position % P for s in streams]
    return StepBatch(
        num_tokens=n,
        token_ids=torch.zeros(n + len(padding), dtype=torch.long),
        positions=torch.tensor([position] * n + padding),
        kv_slot_mapping=torch.tensor(slots + padding),
        verify=VerifyRows(
            num_rows=n,
            max_query_len=1,
            token_index=torch.arange(n)[:, None],
            query_lens=torch.ones(n, dtype=torch.long),
            seq_lens=torch.full((n,), position + 1),
            max_seq_len=position + 1,
            block_table=torch.tensor(
                [s.table + [0] * (width - len(s.table)) for s in streams], dtype=torch.int32
            ),
            states=(),
        ),
        known=(),
    )


@pytest.mark.parametrize("variant", ["A", "B"])
def test_the_module_agrees_with_the_plain_reference(seed: int, variant: str) -> None:
    rng = random.Random(seed)
    config = tiny_config()
    weights = random_weights(config, seed, variant)  # type: ignore[arg-type]
    model = tiny_model(seed, variant)  # type: ignore[arg-type]
    bench = MtpBench(model, rng)
    tokens = [rng.randrange(160) for _ in range(60)]
    stream = bench.stream(tokens, 40)
    run_all(bench, [stream], rng)
    hidden = torch.stack([bench.hidden[id(stream)][p] for p in range(60)])
    got = torch.stack([bench.outputs[id(stream)][p] for p in range(60)])
    want = naive_mtp(config, weights, hidden, [*tokens[1:], 0])
    got_logits, want_logits = model.logits(got), want @ weights["lm_head.weight"].T
    error = float((got_logits - want_logits).abs().max() / want_logits.std())
    assert error < TOLERANCE


def test_a_chained_draft_agrees_with_the_plain_reference(seed: int) -> None:
    rng = random.Random(seed)
    config, model = tiny_config(), tiny_model(seed, "B")
    weights = random_weights(config, seed, "B")
    bench = MtpBench(model, rng)
    tokens = [rng.randrange(160) for _ in range(30)]
    stream = bench.stream(tokens, 30)
    bench.step([], [Chunk(stream, 30)])
    hidden = torch.stack([bench.hidden[id(stream)][p] for p in range(30)])
    first = bench.outputs[id(stream)][29]
    padded = torch.zeros(ROW_TILE, first.shape[0])
    padded[0] = first
    next_ids = torch.zeros(ROW_TILE, dtype=torch.long)
    next_ids[0] = 77
    got = model.mtp(one_token_rows([stream], 30), bench.caches, padded, next_ids)[0]
    chained = torch.cat([hidden, first[None]])
    want = naive_mtp(config, weights, chained, [*tokens[1:], 0, 77])[-1]
    assert float((got - want).abs().max()) < TOLERANCE


def test_the_module_has_the_same_bits_alone_and_with_mates(seed: int) -> None:
    rng = random.Random(seed)
    model = tiny_model(seed)
    tokens = [[rng.randrange(160) for _ in range(rng.randrange(50, 70))] for _ in range(4)]

    def outputs(indices: list[int]) -> dict[int, dict[int, Tensor]]:
        bench = MtpBench(model, rng)
        streams = {i: bench.stream(tokens[i], 20 + 7 * i) for i in indices}
        run_all(bench, list(streams.values()), rng)
        return {i: bench.outputs[id(stream)] for i, stream in streams.items()}

    together = outputs([2, 0, 3, 1])
    for i in range(4):
        alone = outputs([i])[i]
        for position in range(len(tokens[i])):
            assert torch.equal(together[i][position], alone[position]), (i, position)


def test_chained_drafts_leave_padding_rows_unwritten(seed: int) -> None:
    rng = random.Random(seed)
    model = tiny_model(seed)
    bench = MtpBench(model, rng)
    stream = bench.stream([rng.randrange(160) for _ in range(20)], 20)
    bench.step([], [Chunk(stream, 20)])
    batch = one_token_rows([stream, stream], 20)
    assert batch.verify is not None
    slots = batch.kv_slot_mapping.clone()
    slots[1] = 0
    rows = dataclasses.replace(
        batch.verify,
        query_lens=torch.tensor([1, 0]),
        seq_lens=torch.tensor([21, 0]),
        block_table=batch.verify.block_table * torch.tensor([[1], [0]], dtype=torch.int32),
    )
    batch = dataclasses.replace(batch, kv_slot_mapping=slots, verify=rows)
    hidden = torch.randn(ROW_TILE, 48)
    out = model.mtp(batch, bench.caches, hidden, torch.zeros(ROW_TILE, dtype=torch.long))
    assert bool(out[0].isfinite().all())
    assert bool(bench.caches.k[:, 0].isnan().all())
