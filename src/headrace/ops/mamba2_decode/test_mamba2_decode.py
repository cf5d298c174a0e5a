"""The fused mixer against its specification, in both state schemes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.ops.aot import KernelSpec, compile_kernels, spec_of
from headrace.ops.gated_delta_decode import Ring
from headrace.ops.mamba2_decode import MixerWeights, mamba2_decode, reference
from headrace.ops.mixer_cases import (
    Columns,
    Pools,
    Replay,
    assert_close,
    assert_others_untouched,
    case_of,
)

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from headrace.rt.detector import Detector

H, P, D, GROUPS, TAPS = 6, 16, 8, 2, 4
INNER = H * P
F = INNER + 2 * GROUPS * D
UPDATE = GROUPS * D + INNER + H
BLOCKS, RING_BLOCKS, RING, INTERVAL, DRAFTS = 18, 4, 16, 4, 2
DTYPES = [torch.float32, torch.bfloat16]
SCHEMES = ["columns", "replay"]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The launches, with small sizes until the test ends."""
    pytest.importorskip("triton")
    from headrace.ops.mamba2_decode import fused  # noqa: PLC0415  after the plugin's settings

    # Several programs for each head and row; none of them has whole channels.
    monkeypatch.setattr(fused, "TILE", 8 * D)
    monkeypatch.setattr(fused, "CHANNELS", 64)
    monkeypatch.setattr(fused, "PART", 64)
    return fused


def _pools(seed: int, dtype: torch.dtype) -> Pools:
    g = torch.Generator().manual_seed(seed)
    updates = torch.randn(RING_BLOCKS, RING, UPDATE, generator=g) * 0.3
    updates[..., -H:] = -torch.rand(RING_BLOCKS, RING, H, generator=g)
    return Pools(
        window=torch.randn(BLOCKS, TAPS - 1 + DRAFTS, F, generator=g).to(dtype),
        state=torch.randn(BLOCKS, H, P, D, generator=g).to(dtype),
        ring=Ring(
            inputs=torch.randn(RING_BLOCKS, RING, F, generator=g).to(dtype),
            updates=updates,
            interval=INTERVAL,
        ),
    )


def _weights(seed: int, **changes: Any) -> MixerWeights:  # noqa: ANN401
    g = torch.Generator().manual_seed(seed)
    weights = MixerWeights(
        conv=torch.randn(TAPS, F, generator=g) * 0.5,
        conv_bias=torch.randn(F, generator=g) * 0.2,
        # The first head's time steps are tiny.
        dt_bias=torch.rand(H, generator=g) * 3 - 3 - 17.0 * (torch.arange(H) == 0),
        decay_rate=-torch.exp(torch.rand(H, generator=g) * 3 - 2),
        skip=torch.rand(H, generator=g),
        norm=(1 + 0.1 * torch.randn(INNER, generator=g)).view(GROUPS, -1),
        norm_eps=1e-5,
        gates_after_norm=False,
    )
    return replace(weights, **changes)


def _tokens(seed: int, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Inputs, gate and time steps as slices of one projection, so their rows are strided."""
    g = torch.Generator().manual_seed(seed)
    projected = torch.randn(count, INNER + F + H, generator=g).to(dtype)
    gate, inputs, dt = projected.split((INNER, F, H), dim=-1)
    return inputs, gate, dt


def _run(
    op: ModuleType,
    pools: Pools,
    tokens: tuple[Tensor, ...],
    weights: MixerWeights,
    token_index: list[list[int]],
    lens: list[int],
    rows: Columns | Replay,
) -> Tensor:
    out = torch.full((tokens[0].shape[0], INNER), float("nan"), dtype=tokens[0].dtype)
    op.mamba2_decode(
        *tokens,
        weights,
        pools.window,
        pools.state,
        torch.tensor(token_index),
        torch.tensor(lens),
        rows,
        out,
        ring=pools.ring if isinstance(rows, Replay) else None,
    )
    return out


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_kernels_do_what_the_specification_says(
    scheme: str, dtype: torch.dtype, fused: ModuleType
) -> None:
    seed = random.randrange(1 << 30)
    print(f"{seed=}")
    index, lens, rows = case_of(scheme)
    weights, tokens = _weights(seed), _tokens(seed + 1, 9, dtype)
    expected, got = (_pools(seed + 2, dtype) for _ in range(2))
    want = _run(reference, expected, tokens, weights, index, lens, rows)
    out = _run(fused, got, tokens, weights, index, lens, rows)
    assert_close(out, want, dtype)
    for a, b in zip(got.tensors(), expected.tensors(), strict=True):
        assert_close(a, b, dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "changes",
    [
        {"norm": None, "conv_bias": None},
        {"gates_after_norm": True},
        {"norm": torch.linspace(0.5, 1.5, INNER).view(1, -1)},
    ],
    ids=["no norm", "gate after norm", "one norm"],
)
def test_every_familys_gate_and_norm(changes: dict[str, Any], fused: ModuleType) -> None:
    seed = random.randrange(1 << 30)
    print(f"{seed=}")
    weights, tokens = _weights(seed, **changes), _tokens(seed + 1, 3, torch.float32)
    rows = Columns.of([[3, 4, 5]], [2])
    want, out = (
        _run(op, _pools(seed, torch.float32), tokens, weights, [[0, 2, 1]], [3], rows)
        for op in (reference, fused)
    )
    assert_close(out, want, torch.float32)


@pytest.mark.interpreter
def test_tiny_time_steps_keep_their_digits(fused: ModuleType) -> None:
    """The logarithm of 1 plus what is lost beside the 1 would be 0."""
    tokens = _tokens(1, 1, torch.float32)
    pools = _pools(2, torch.float32)
    rows = Replay.of(base_block=[3], base_len=[8], computed=[8], write_block=[3], write_len=[12],
                   ring_block=[2])  # fmt: skip
    weights = _weights(3)
    _run(fused, pools, tokens, weights, [[0]], [1], rows)
    wanted = torch.nn.functional.softplus(tokens[2][0].double() + weights.dt_bias)
    wanted *= weights.decay_rate
    assert wanted[0].abs() < 1e-5
    torch.testing.assert_close(pools.ring.updates[2, 8, -H:].double(), wanted, rtol=2e-6, atol=0)


@pytest.mark.interpreter
@pytest.mark.parametrize("scheme", SCHEMES)
def test_blocks_of_others_and_rows_that_take_no_part_stay_untouched(
    scheme: str, race_detector: Detector, fused: ModuleType
) -> None:
    index, lens, rows = case_of(scheme)
    weights, tokens = _weights(1), _tokens(2, 9, torch.float32)
    pools, before = (_pools(3, torch.float32) for _ in range(2))
    out = _run(fused, pools, tokens, weights, index, lens, rows)
    assert_others_untouched(rows, tokens, pools, before, out, race_detector)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_gives_the_same_bits_however_tokens_are_grouped(
    dtype: torch.dtype, fused: ModuleType
) -> None:
    weights, tokens = _weights(4), _tokens(5, 3, dtype)
    together, apart = (_pools(6, dtype) for _ in range(2))
    rows = Columns.of([[3, 4, 5]], [1])
    out = _run(fused, together, tokens, weights, [[0, 1, 2]], [3], rows)
    # A step of one token, then one of two tokens that reads behind it.
    first = _run(fused, apart, tokens, weights, [[0, 0, 0]], [1], rows)
    rest = _run(fused, apart, tokens, weights, [[1, 2, 0]], [2], rows)
    assert torch.equal(out[0], first[0])
    assert torch.equal(out[1:], rest[1:])
    assert torch.equal(together.state[5], apart.state[4])


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_replay_gives_the_same_bits_however_tokens_are_grouped(
    dtype: torch.dtype, fused: ModuleType
) -> None:
    weights, tokens = _weights(7), _tokens(8, 7, dtype)
    results = []
    # Base at 10; positions 10 .. 16 in steps of these lengths, so 12 and 16 are crossed in
    # different ways: inside a step, at its end, at its start. The last tokens are drafts of the
    # step before, rejected there.
    for lengths in ([3, 3, 1], [1, 2, 1, 3]):
        pools, done, base_len = _pools(9, dtype), 0, 10
        outputs = []
        for length in lengths:
            write_len = (base_len // INTERVAL + 1) * INTERVAL
            rows = Replay.of(base_block=[3], base_len=[base_len], computed=[10 + done],
                             write_block=[3], write_len=[write_len], ring_block=[2])  # fmt: skip
            step = list(range(done, done + length))
            drafts = [(done + 5) % 7, (done + 3) % 7][: 3 - length]
            out = _run(fused, pools, tokens, weights, [step + drafts], [3], rows)
            outputs.append(out[step])
            base_len = write_len if 10 + done >= write_len else base_len
            done += length
        results.append(torch.cat(outputs))
    assert torch.equal(results[0], results[1])


def test_what_does_not_fit_is_refused() -> None:
    def run(**changes: Tensor) -> None:
        inputs, gate, dt = _tokens(0, 1, torch.float32)
        pools = _pools(0, torch.float32)
        given = {"inputs": inputs, "gate": gate, "dt": dt, "window": pools.window,
                 "state": pools.state} | changes  # fmt: skip
        mamba2_decode(
            **given,  # type: ignore[arg-type]
            weights=_weights(0),
            token_index=torch.zeros(1, 1, dtype=torch.int64),
            query_lens=torch.zeros(1),
            rows=Columns.of([[0]], [1]),
            out=torch.zeros(1, INNER),
        )

    with pytest.raises(ValueError, match=r"gate: 95 columns where 2 groups .* need 96"):
        run(gate=torch.zeros(1, INNER - 1))
    with pytest.raises(ValueError, match=r"dt: 7 columns .* need 6"):
        run(dt=torch.zeros(1, H + 1))
    with pytest.raises(ValueError, match="powers of 2, not P=12, D=8"):
        run(
            state=torch.zeros(2, H * 4 // 3, 12, D),
            dt=torch.zeros(1, H * 4 // 3),
        )
    with pytest.raises(ValueError, match="inputs: columns must be adjacent"):
        run(inputs=torch.zeros(1, 2 * F)[:, ::2])


SHAPES = {
    "nemotron-h-8b": (128, 64, 128, 8, "groups"),
    "granite-4-small": (128, 64, 128, 1, "whole"),
    "falcon-h1-1.5b": (48, 64, 256, 1, None),
    "zamba2-2.7b": (80, 64, 64, 1, "whole"),
    "codestral-mamba-7b": (128, 64, 128, 8, "whole"),
}
"""Heads, their size, size of a state, groups, and what is normed."""


def _specs(
    name: str, scheme: str, dtype: torch.dtype, query: int, monkeypatch: pytest.MonkeyPatch
) -> list[KernelSpec]:
    pytest.importorskip("triton")
    from headrace.ops.mamba2_decode import fused  # noqa: PLC0415  after the plugin's settings

    specs: list[KernelSpec] = []
    monkeypatch.setattr(
        fused,
        "launch_kernel",
        lambda kernel, _grid, *args, **options: specs.append(spec_of(kernel, args, options)),
    )
    heads, p_dim, d_dim, groups, norm = SHAPES[name]
    inner = heads * p_dim
    channels, rows = inner + 2 * groups * d_dim, 8
    with torch.device("meta"):
        bf16 = torch.bfloat16
        projected = torch.empty(rows * query, inner + channels + heads, dtype=bf16)
        gate, inputs, dt = projected.split((inner, channels, heads), -1)
        parts = {"groups": groups, "whole": 1, None: 0}[norm]
        weights = MixerWeights(
            conv=torch.empty(TAPS, channels),
            conv_bias=torch.empty(channels),
            dt_bias=torch.empty(heads),
            decay_rate=torch.empty(heads),
            skip=torch.empty(heads),
            norm=torch.empty(parts, inner // parts) if parts else None,
            norm_eps=1e-5,
            gates_after_norm=False,
        )
        ring, places = None, Columns(
            window_blocks=torch.empty(rows, query, dtype=torch.int32),
            accepted=torch.empty(rows, dtype=torch.int32),
        )
        if scheme == "replay":
            block, count = torch.empty(rows, dtype=torch.int32), torch.empty(rows).long()
            places = Replay(base_block=block, base_len=count, computed=count, write_block=block,
                            write_len=count, ring_block=block)  # type: ignore[assignment]  # fmt: skip
            width = groups * d_dim + inner + heads
            ring = Ring(
                inputs=torch.empty(rows, 32, channels, dtype=bf16),
                updates=torch.empty(rows, 32, width),
                interval=16,
            )
        mamba2_decode(
            inputs, gate, dt, weights,
            torch.empty(rows, TAPS - 2 + query, channels, dtype=bf16),
            torch.empty(rows, heads, p_dim, d_dim, dtype=dtype),
            torch.empty(rows, query).long(), torch.empty(rows).long(), places,
            torch.empty(rows * query, inner, dtype=bf16), ring=ring,
        )  # fmt: skip
    return specs


@pytest.mark.parametrize(
    "name", ["nemotron-h-8b", *(pytest.param(n, marks=pytest.mark.full) for n in [*SHAPES][1:])]
)
def test_they_compile_for_hopper_without_spills(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [("columns", torch.bfloat16, 1), ("columns", torch.float32, 4),
             ("replay", torch.bfloat16, 4), ("replay", torch.float32, 1)]  # fmt: skip
    specs = [spec for case in cases for spec in _specs(name, *case, monkeypatch)]
    specs = list({str(spec): spec for spec in specs}.values())
    for spec, compiled in zip(specs, compile_kernels(specs), strict=True):
        # Of the convolution of Zamba2 ptxas keeps two words aside to stay at 32 registers.
        assert compiled.spill_bytes <= 8, spec
        assert compiled.registers <= 168, spec
        if "state_kernel" in spec.kernel and compiled.instructions:
            # The state moves 16 bytes at a time.
            assert compiled.instructions.get("LDG.E.128", 0) >= 4, spec
            assert compiled.instructions.get("STG.E.128", 0) >= 4, spec
