"""Ways in which layers, buffers and sizes went wrong elsewhere (B73 to B125), for every family."""

from __future__ import annotations

import json
import random
import secrets
from dataclasses import replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from conformance import (
    GREEDY,
    GRID,
    MAX_LEN,
    VOCAB,
    Job,
    assert_balanced,
    assert_same_bits,
    drive,
    make_engine,
    script_for,
    small_model,
    solve,
)

from headrace.config import EngineConfig
from headrace.engine.inspection import inspect_model
from headrace.engine.load import _resolve
from headrace.models.config import ModelConfig
from headrace.models.reference_loop import run_reference
from headrace.ops.activations import softplus
from headrace.ops.gated_delta_step import gated_delta_step
from headrace.ops.mamba2_scan import mamba2_scan
from headrace.ops.mamba2_step import mamba2_step
from headrace.ops.mamba2_step.reference import mamba2_reference
from headrace.ops.paged_attention import attend_rows, key_rows, write_kv
from headrace.ops.state_columns import StatePool, premove
from headrace.testing import TINY_DICTS, tiny_family

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.scenarios

FAMILIES = ("qwen3_5", "granite", "lfm2")
TOLERANCE = 2e-4
"""Of the standard deviation: between a prompt's arithmetic and the step's."""


@pytest.fixture
def rng() -> random.Random:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, VOCAB) for _ in range(count)]


def family_model(family: str, rng: random.Random, **overrides: Any) -> Any:  # noqa: ANN401
    layers: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 2}
    layers |= {
        "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
        "granite": {"layer_types": ["mamba", "attention"]},
        "lfm2": {"full_attn_idxs": [1]},
    }[family]
    return tiny_family(family, rng.randrange(2**31), **(layers | overrides))


@pytest.mark.parametrize("family", FAMILIES)
def test_b73_sequences_that_begin_inside_a_chunk_decay_from_their_own_start(
    family: str, rng: random.Random
) -> None:
    """Lengths 7, 1, 19, 16, 33, 2 in one step, without an initial state, then each with one."""
    model = family_model(family, rng)
    engine = make_engine(model, max_num_seqs=8, max_num_batched_tokens=256)
    lengths = (7, 1, 19, 16, 33, 2)
    heads = [tokens(rng, GRID) for _ in lengths]
    params = replace(GREEDY, max_tokens=3)
    for head in heads:
        drive(engine, [Job([*head, 2], params)])
    assert engine.stats()["prefix_cache"]["hit_tokens"] == 0
    tails = [tokens(rng, n) for n in lengths]
    jobs = [solve(model, Job(tail, params)) for tail in tails]
    jobs += [
        solve(model, Job(head + tail, params)) for head, tail in zip(heads, tails, strict=True)
    ]
    for half in (jobs[:6], jobs[6:]):
        for job, output in zip(half, drive(engine, half), strict=True):
            assert_same_bits(job, output)
    # Each of the second round began with the state of its head.
    assert engine.stats()["prefix_cache"]["hit_tokens"] == len(lengths) * GRID
    assert_balanced(engine)


def test_b77_short_convolutions_give_the_same_in_a_batch_and_alone(rng: random.Random) -> None:
    model = family_model("lfm2", rng)
    engine = make_engine(model, batch_layout=rng.choice(("slots", "compact")))
    jobs = [
        solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=count)))
        for n, count in ((5, 64), (9, 64), (17, 30), (2, 64))
    ]
    for job, output in zip(jobs, drive(engine, jobs), strict=True):
        assert_same_bits(job, output)
        assert len(output.outputs[0].token_ids) == job.params.max_tokens
    assert_balanced(engine)


def test_b78_the_state_keeps_its_precision_over_two_thousand_steps(rng: random.Random) -> None:
    """Slow decay; a state rounded to bfloat16 after each step is shown to be what it costs."""
    del rng
    heads, key_dim, value_dim, count = 2, 16, 12, 2000
    keys = torch.nn.functional.normalize(torch.randn(count, 1, heads, key_dim), dim=-1)
    values = torch.randn(count, 1, heads, 1, value_dim)
    decay = torch.full((1, heads, 1), 0.999)
    rate = torch.full((1, heads, 1), 0.5)

    def final(stored: torch.dtype, compute: torch.dtype) -> torch.Tensor:
        state = torch.zeros(1, heads, 1, value_dim, key_dim, dtype=stored)
        for t in range(count):
            work = state.to(compute)
            if compute is torch.float64:
                key, value = keys[t].double()[:, :, None, None], values[t].double()
                work *= decay.double()[..., None, None]
                error = value - (work * key).sum(-1)
                work += (rate.double()[..., None] * error)[..., None] * key
            else:
                gated_delta_step(work, keys[t], values[t], decay, rate, query=None)
            state = work.to(stored)
        return state.double()

    exact = final(torch.float64, torch.float64)
    scale = float(exact.std())
    single = float((final(torch.float32, torch.float32) - exact).abs().max()) / scale
    half = float((final(torch.bfloat16, torch.float32) - exact).abs().max()) / scale
    print(f"errors after {count} steps, of the standard deviation: {single:.1e}, {half:.1e}")
    assert single < 1e-4
    assert half > 100 * single


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b78_the_states_dtype_is_the_one_asked_for_and_blocks_follow_it(
    tmp_path: Path, dtype: str
) -> None:
    path = tmp_path / "config.json"
    raw = TINY_DICTS["qwen3_5"](dtype=dtype)
    path.write_text(json.dumps(raw))
    sizes = {}
    for wish, given in (("auto", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")):
        config = EngineConfig(model=str(path), dtype=dtype, state_dtype=wish)  # type: ignore[arg-type]
        assert _resolve(config, ModelConfig.from_dict(raw)).state_dtype == given
        (group,) = inspect_model(config).state_groups
        sizes[wish] = group.bytes_per_block
    states = 2 * 4 * 12 * 8  # Layers, heads, value and key size.
    assert sizes["auto"] == sizes["float32"] == sizes["bfloat16"] + 2 * states


@pytest.mark.parametrize("family", FAMILIES)
def test_b79_prompt_and_generation_compute_the_same_function(
    family: str, rng: random.Random
) -> None:
    """24 tokens as a prompt, and one by one: logits and states, with sizes that all differ."""
    model = family_model(family, rng)
    prompt = tokens(rng, 24)
    whole = run_reference(model, prompt, 1, states_at=[24], scan_grid=GRID)
    single = run_reference(
        model, prompt[:1], 24, states_at=[24], scan_grid=GRID,
        choose=lambda _, position: prompt[position] if position < 24 else 0,
    )
    assert single.tokens[:23] == prompt[1:]
    scale = float(whole.logits[0].std())
    assert float((whole.logits[0] - single.logits[23]).abs().max()) < TOLERANCE * scale
    for one, other in zip(whole.states[24], single.states[24], strict=True):
        for name, state in one.items():
            spread = float(state.std())
            assert float((state - other[name]).abs().max()) < TOLERANCE * spread, name
            assert spread > 0.0


@pytest.mark.parametrize("scheme", ["columns", "replay"])
def test_b124_requests_in_the_highest_slots_touch_no_other_slots_memory(
    rng: random.Random, scheme: str
) -> None:
    """A pool of 16 slots, two requests in 15 and 9, drafts; everything else is poison."""
    model = small_model(rng.randrange(2**31))
    engine = make_engine(
        model, max_num_seqs=16, state_scheme=scheme, speculative="scripted:3",
        batch_layout="slots", async_scheduling=False,
    )
    engine.scheduler.policy = None
    free = engine.scheduler._free_slots
    order = [15, 9]
    engine.scheduler._free_slots = type(free)([s for s in free if s not in order])
    for slot in reversed(order):
        engine.scheduler._free_slots.appendleft(slot)
    worker, runtime = engine.worker, engine.parts.runtime
    rings = [buffer for group in worker.pools.rings for buffer in group.values()]
    for buffer in rings:
        runtime.write(buffer, torch.full(tuple(buffer.shape), float("nan"), dtype=buffer.dtype))
    used: set[int] = set()
    execute = worker.execute

    def watched(output: Any) -> Any:  # noqa: ANN401
        used.update(new.slot for new in output.admitted)
        return execute(output)

    worker.execute = watched  # type: ignore[method-assign]
    jobs = [solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=20))) for n in (5, 21)]
    for job in jobs:
        job.script = script_for(job, 3, rng)
    for job, output in zip(jobs, drive(engine, jobs), strict=True):
        assert_same_bits(job, output)
    assert used == set(order)
    for buffer in rings:
        ring = runtime.read(buffer).flatten(2).isnan().all(-1)
        untouched = [block for block in range(ring.shape[1]) if block - 1 not in order]
        assert bool(ring[:, untouched].all()), f"{buffer.name} was written outside its slots"
    assert bool(rings) == (scheme == "replay")


def test_b125_large_gates_neither_overflow_nor_wipe_the_state(rng: random.Random) -> None:
    """Gates from -200 to 200: softplus, decay, scan and step against double precision."""
    del rng
    gate = torch.linspace(-200.0, 200.0, 801)
    for dtype in (torch.float32, torch.bfloat16):
        x = gate.to(dtype).float()
        exact = torch.nn.functional.softplus(x.double(), threshold=1e9)
        found = softplus(x)
        assert bool(found.isfinite().all())
        assert torch.allclose(found.double(), exact, rtol=1e-6, atol=1e-30)
        for rate in (1e-4, 0.02, 1.0):
            decay = (-rate * found).exp()
            assert torch.allclose(decay.double(), (-rate * exact).exp(), rtol=1e-4, atol=1e-30)
            assert rate > 0.02 or bool((decay > 0.01).all()), "a slow decay wiped the state"
    heads, size, count = gate.shape[0], 4, 16
    log_decay = (-0.02 * softplus(gate)).expand(count, heads).contiguous()
    b, c = torch.randn(count, 1, size), torch.randn(count, 1, size)
    value = torch.randn(count, heads, size)
    start = torch.randn(heads, size, size)
    want, states = mamba2_reference(start, b, c, value, decay=log_decay.exp())
    scanned = start[None].clone()
    out, _ = mamba2_scan(
        scanned, b[None], c[None], value[None], log_decay=log_decay[None], rows_per_round=(1,)
    )
    stepped = start[None].clone()
    outputs = [
        mamba2_step(
            stepped.view(1, 1, heads, size, size), b[t][None], value[t].view(1, 1, heads, size),
            log_decay[t].exp().view(1, 1, heads), c=c[t][None],
        )
        for t in range(count)
    ]
    scale = float(want.std())
    for found in (out[0], torch.stack([o[0, 0] for o in outputs if o is not None])):
        assert bool(found.isfinite().all())
        assert float((found - want).abs().max()) < TOLERANCE * scale
    for state in (scanned[0], stepped[0]):
        assert float((state - states[-1]).abs().max()) < TOLERANCE * float(states[-1].std())


@pytest.mark.parametrize("family", ["qwen3_5", "granite"])
def test_b125_a_model_with_gates_of_any_size_agrees_with_itself(
    family: str, rng: random.Random
) -> None:
    model = family_model(family, rng)
    layers = model._weights.layers
    mixer = layers[0].mixer
    bias = mixer.gate_bias if family == "qwen3_5" else mixer.dt_bias
    bias.copy_(torch.linspace(-200.0, 200.0, bias.shape[0])[torch.randperm(bias.shape[0])])
    jobs = [solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=20))) for n in (3, 40)]
    for job in jobs:
        assert job.run is not None
        assert bool(job.run.logits.isfinite().all())
        job.script = script_for(job, 3, rng)
    engine = make_engine(model, speculative="scripted:3")
    for job, output in zip(jobs, drive(engine, jobs), strict=True):
        assert_same_bits(job, output)
    prompt = jobs[1].prompt
    single = run_reference(
        model, prompt[:1], len(prompt), scan_grid=GRID,
        choose=lambda _, position: prompt[position] if position < len(prompt) else 0,
    )
    assert jobs[1].run is not None
    wanted = jobs[1].run.logits[0]
    assert float((single.logits[-1] - wanted).abs().max()) < TOLERANCE * float(wanted.std())


# Memory ------------------------------------------------------------------------------------------


def test_b69_the_last_blocks_of_pools_beyond_two_to_the_31_elements(
    tmp_path: Path, rng: random.Random
) -> None:
    """Sparse files stand for the pools, so that only what is written takes memory."""

    def huge(name: str, *shape: int) -> torch.Tensor:
        blocks = 2**31 // int(np.prod(shape)) + 3
        file = np.memmap(tmp_path / name, dtype=np.float32, mode="w+", shape=(blocks, *shape))
        pool = torch.from_numpy(file)
        assert pool[:-2].numel() > 2**31
        return pool

    page, kv_heads, dim, length = 16, 2, 64, 30
    query = torch.randn(1, 1, 4, dim)
    key, value = torch.randn(length, kv_heads, dim), torch.randn(length, kv_heads, dim)

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([[k.shape[0] - 1, k.shape[0] - 2]], dtype=torch.int32)
        slots = torch.cat([table[0, at].long() * page + torch.arange(page) for at in (0, 1)])
        write_kv(k, v, key, value, slots[:length])
        lens = torch.tensor([length])
        rows = key_rows(table, lens, length, page, kv_heads)
        return attend_rows(query, k, v, rows, lens[:, None] - 1)

    small = torch.zeros(3, page, kv_heads, dim)
    pools = huge("k", page, kv_heads, dim), huge("v", page, kv_heads, dim)
    assert torch.equal(attend(*pools), attend(small, small.clone()))

    state = torch.randn(2, 4, 8, 8)
    pool = huge("state", 4, 8, 8)
    for states, first in ((pool, pool.shape[0] - 2), (torch.zeros(4, 4, 8, 8), 2)):
        states[first:] = state
        table = torch.tensor([[first + 1, first]], dtype=torch.int32)
        zero, one = torch.tensor([0]), torch.tensor([1])
        # The state has filled its block, so it moves to the next one.
        premove(
            (StatePool(tensor=states[None], kind="recurrent"),), table,
            computed=torch.tensor([4]), scheduled=one, accepted=one, state_column=zero,
            accepted_out=one.clone(), state_column_out=zero.clone(), block_size=4, max_accepted=1,
        )
        assert torch.equal(states[first], state[1])
        assert torch.equal(states[first + 1], state[1])
    del rng


def test_b89_pools_of_any_sizes_are_whole_and_apart(rng: random.Random) -> None:
    """Head sizes, KV heads, blocks, units, drafts: each pool has its own memory of its shape."""
    shapes = list(product((8, 16), (1, 2), (8, 16), (GRID, 3 * GRID), ("none", "mtp:3")))
    for head_dim, kv_heads, block, unit, drafts in rng.sample(shapes, 4):
        model = small_model(
            rng.randrange(2**31), head_dim=head_dim, num_key_value_heads=kv_heads,
            linear_key_head_dim=rng.choice((8, 12)), linear_value_head_dim=rng.choice((4, 20)),
        )
        engine = make_engine(
            model, block_size=block, state_block_size=unit, speculative=drafts,
            num_kv_blocks=2 + MAX_LEN // block * 3, num_state_blocks=16,
            state_scheme=rng.choice(("columns", "replay")),
        )
        spans = []
        for buffer in engine.parts.runtime._buffers.values():
            tensor = buffer.device_tensor
            assert tensor.is_contiguous()
            begin = tensor.data_ptr()
            spans.append((begin, begin + tensor.numel() * tensor.element_size(), buffer.name))
        spans.sort()
        for (_, end, name), (begin, _, other) in pairwise(spans):
            assert end <= begin, f"{name} and {other} overlap"
        jobs = [solve(model, Job(tokens(rng, n), replace(GREEDY, max_tokens=8))) for n in (3, 50)]
        for job, output in zip(jobs * 2, drive(engine, jobs) + drive(engine, jobs), strict=True):
            assert_same_bits(job, output)
        assert_balanced(engine)


@pytest.mark.parametrize(
    ("drafts", "scheme"), [(0, "replay"), (1, "columns"), (7, "columns"), (7, "replay")]
)
def test_b90_what_is_said_to_be_needed_is_what_is_allocated(
    tmp_path: Path, rng: random.Random, drafts: int, scheme: str
) -> None:
    """Figures of `inspect` against the buffers; S sequences verify at once and nothing grows."""
    seqs = 6
    speculative = f"mtp:{drafts}" if drafts else "none"
    options: dict[str, Any] = {
        "max_num_seqs": seqs, "speculative": speculative, "state_scheme": scheme,
        "max_num_batched_tokens": 64, "max_model_len": MAX_LEN,
    }
    model = small_model(rng.randrange(2**31))
    path = tmp_path / "config.json"
    raw = TINY_DICTS["qwen3_5"](
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )
    path.write_text(json.dumps(raw))
    found = inspect_model(EngineConfig(
        model=str(path), scan_grid=GRID, state_block_size=GRID, **options
    ))
    engine = make_engine(model, **options)
    engine.scheduler.policy = None
    runtime, sizes, pools = engine.parts.runtime, engine.parts.sizes, engine.worker.pools

    def total(*buffers: Any) -> int:  # noqa: ANN401
        return sum(
            buffer.device_tensor.numel() * buffer.device_tensor.element_size()
            for buffer in buffers
        )

    per_block = found.kv_bytes_per_token * sizes.block_size
    assert total(pools.k, pools.v) == sizes.num_kv_blocks * per_block
    (group,) = found.state_groups
    assert total(*pools.states[0].values()) == sizes.num_state_blocks * group.bytes_per_block
    ring = total(*pools.rings[0].values()) // (seqs + 1) if pools.rings else 0
    columns = engine.scheduler.scheme.max_blocks()
    assert found.state_bytes_per_sequence == columns * group.bytes_per_block + ring
    assert sizes.num_state_blocks > seqs * columns, "not every sequence could verify"
    before = total(*runtime._buffers.values())
    jobs = [solve(model, Job(tokens(rng, 3), replace(GREEDY, max_tokens=24))) for _ in range(seqs)]
    for job, output in zip(jobs, drive(engine, jobs), strict=True):
        assert_same_bits(job, output)
    assert engine.scheduler.num_preemptions == 0
    assert total(*runtime._buffers.values()) == before
