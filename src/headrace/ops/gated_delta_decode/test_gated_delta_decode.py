"""The fused mixer against its specification, in both state schemes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.ops.aot import Compiled, KernelSpec, compile_kernel, compile_kernels, spec_of
from headrace.ops.gated_delta_decode import MixerWeights, Ring, reference
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

HK, HV, K, V, TAPS = 3, 3, 8, 16, 4
F = 2 * HK * K + HV * V
BLOCKS, RING_BLOCKS, INTERVAL, DRAFTS = 24, 5, 4, 2
RING = 16


GROUPED = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The launch, with small sizes until the test ends."""
    pytest.importorskip("triton")
    from headrace.ops.gated_delta_decode import fused  # noqa: PLC0415  after the plugin's settings

    # Several tiles for each head.
    monkeypatch.setattr(fused, "ROWS", 8)
    monkeypatch.setattr(fused, "REPLAY_ROWS", 8)
    return fused


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _weights(seed: int) -> MixerWeights:
    g = _generator(seed)
    decay = -torch.exp(torch.rand(HV, generator=g) * 3 - 4)
    return MixerWeights(
        conv=torch.randn(TAPS, F, generator=g) * 0.5,
        gate_bias=torch.cat((torch.zeros(HV), torch.rand(HV, generator=g) * 3 - 3)),
        gate_factor=torch.cat((-torch.ones(HV), decay)),
        unit_scale=torch.cat((torch.full((HK,), K**-0.5), torch.ones(HK))),
        norm=1 + 0.1 * torch.randn(V, generator=g),
        norm_eps=1e-6,
    )


def _pools(seed: int, dtype: torch.dtype) -> Pools:
    g = _generator(seed)
    updates = torch.randn(RING_BLOCKS, RING, HK * K + HV * V + 2 * HV, generator=g) * 0.3
    updates[..., -2 * HV :] = torch.rand(RING_BLOCKS, RING, 2 * HV, generator=g)
    return Pools(
        window=torch.randn(BLOCKS, TAPS - 1 + DRAFTS, F, generator=g).to(dtype),
        state=torch.randn(BLOCKS, HV, V, K, generator=g).to(dtype),
        ring=Ring(
            inputs=torch.randn(RING_BLOCKS, RING, F, generator=g).to(dtype),
            updates=updates,
            interval=INTERVAL,
        ),
    )


def _tokens(seed: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, gate and logits as slices of one projection, so their rows are strided."""
    projected = torch.randn(count, F + HV * V + 2 * HV, generator=_generator(seed)).to(dtype)
    inputs, gate, logits = projected.split((F, HV * V, 2 * HV), dim=-1)
    return inputs, gate, logits


def _run(
    op: ModuleType,
    pools: Pools,
    tokens: tuple[Tensor, Tensor, Tensor],
    weights: MixerWeights,
    token_index: list[list[int]],
    lens: list[int],
    rows: Columns | Replay,
) -> Tensor:
    out = torch.full((tokens[0].shape[0], HV * V), float("nan"), dtype=tokens[0].dtype)
    op.gated_delta_decode(
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


@pytest.mark.thinned
@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["columns", "replay"])
def test_the_kernel_does_what_the_specification_says(
    scheme: str, dtype: torch.dtype, fused: ModuleType
) -> None:
    seed = random.randrange(1 << 30)
    print(f"{seed=}")
    index, lens, rows = case_of(scheme)
    weights, tokens = _weights(seed), _tokens(seed + 1, 9, dtype)
    expected, got = _pools(seed + 2, dtype), _pools(seed + 2, dtype)
    want = _run(reference, expected, tokens, weights, index, lens, rows)
    out = _run(fused, got, tokens, weights, index, lens, rows)
    assert_close(out, want, dtype)
    for a, b in zip(got.tensors(), expected.tensors(), strict=True):
        assert_close(a, b, dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("columns", torch.float32), ("replay", torch.float32),
        # By products.
        ("replay", torch.bfloat16),
    ],
)  # fmt: skip
def test_blocks_of_others_and_rows_that_take_no_part_stay_untouched(
    scheme: str, dtype: torch.dtype, race_detector: Detector, fused: ModuleType
) -> None:
    index, lens, rows = case_of(scheme)
    weights, tokens, pools = _weights(1), _tokens(2, 9, dtype), _pools(3, dtype)
    before = pools.clone()
    out = _run(fused, pools, tokens, weights, index, lens, rows)
    assert_others_untouched(rows, tokens, pools, before, out, race_detector)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", GROUPED, ids=str)
def test_columns_gives_the_same_bits_however_tokens_are_grouped(
    dtype: torch.dtype, fused: ModuleType
) -> None:
    weights, tokens = _weights(4), _tokens(5, 3, dtype)
    together, apart = _pools(6, dtype), _pools(6, dtype)
    rows = Columns.of([[3, 4, 5]], [1])
    out = _run(fused, together, tokens, weights, [[0, 1, 2]], [3], rows)
    # A step of one token, then one of two tokens that reads behind it.
    first = _run(fused, apart, tokens, weights, [[0, 0, 0]], [1], rows)
    rest = _run(fused, apart, tokens, weights, [[1, 2, 0]], [2], Columns.of([[3, 4, 5]], [1]))
    assert torch.equal(out[0], first[0])
    assert torch.equal(out[1:], rest[1:])
    assert torch.equal(together.state[5], apart.state[4])


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", GROUPED, ids=str)
def test_replay_gives_the_same_bits_however_tokens_are_grouped(
    dtype: torch.dtype, fused: ModuleType
) -> None:
    weights, tokens = _weights(7), _tokens(8, 7, dtype)
    results = []
    # Base at 10; positions 10 .. 16 in steps of these lengths, so 12 and 16 are crossed in
    # different ways: inside a step, at its end, at its start.
    for lengths in ([3, 3, 1], [1, 2, 1, 3]):
        pools, done, base_len, base = _pools(9, dtype), 0, 10, 3
        outputs = []
        for length in lengths:
            write_len = (base_len // INTERVAL + 1) * INTERVAL
            rows = Replay.of(base_block=[base], base_len=[base_len], computed=[10 + done],
                             write_block=[base], write_len=[write_len], ring_block=[2])  # fmt: skip
            step = list(range(done, done + length)) + [0] * (3 - length)
            out = _run(fused, pools, tokens, weights, [step], [length], rows)
            outputs.append(out[done : done + length])
            base_len = write_len if 10 + done >= write_len else base_len
            done += length
        results.append(torch.cat(outputs))
    if dtype == torch.float32:
        assert torch.equal(results[0], results[1])
    else:
        # One product over the pending tokens rounds by other sums than one token after another.
        assert_close(results[0], results[1], dtype)


@pytest.mark.interpreter
def test_rejected_drafts_leave_no_trace_in_replay(fused: ModuleType) -> None:
    weights, tokens = _weights(10), _tokens(11, 6, torch.float32)
    plain, drafted = _pools(12, torch.float32), _pools(12, torch.float32)

    def rows(computed: int) -> Replay:
        return Replay.of(base_block=[3], base_len=[8], computed=[computed], write_block=[3],
                         write_len=[12], ring_block=[2])  # fmt: skip

    _run(fused, plain, tokens, weights, [[0]], [1], rows(9))
    expected = _run(fused, plain, tokens, weights, [[1]], [1], rows(10))
    # Tokens 4 and 5 are drafts that the verify rejects.
    _run(fused, drafted, tokens, weights, [[0, 4, 5]], [3], rows(9))
    out = _run(fused, drafted, tokens, weights, [[1, 4, 5]], [3], rows(10))
    assert torch.equal(out[1], expected[1])


def _compiled(scheme: str, state: str, **sizes: int) -> Compiled:
    pytest.importorskip("triton")
    is_replay = scheme == "replay"
    columns = ("blocks", "accepted")
    replay = ("base_block", "base_len", "computed", "write_block", "write_len", "ring_block")
    absent = columns if is_replay else (*replay, "ring_input", "ring_update")
    constants: dict[str, object] = {
        **{f"{name}_ptr": None for name in absent},
        "HK": 16, "GROUP": 2, "K": 128, "V": 128, "ROWS": 32, "BATCH": 4, "PHASE": 2, "TAPS": 4,
        "QUERY": 4, "ENTRIES_PADDED": 8, "RING": 32, "INTERVAL": 16, "IS_REPLAY": is_replay,
        **sizes,
    }  # fmt: skip
    bf16 = ("inputs", "gate", "logits", "out", "conv", "window", "ring_input")
    fp32 = ("gate_bias", "gate_factor", "unit_scale", "norm", "ring_update", "scratch")
    i64 = ("token_index", "query_lens", "base_len", "computed", "write_len")
    i32 = ("blocks", "accepted", "base_block", "write_block", "ring_block")
    pointers = {
        f"{name}_ptr": kind
        for names, kind in ((bf16, "*bf16"), (fp32, "*fp32"), (i64, "*i64"), (i32, "*i32"))
        for name in names
    } | {"state_ptr": state}
    strides = dict.fromkeys(
        ("inputs_stride", "gate_stride", "logits_stride", "out_stride", "blocks_stride"), "i32"
    ) | {"window_stride": "i64", "state_stride": "i64"}
    return compile_kernel(
        KernelSpec(
            kernel="headrace.ops.gated_delta_decode.kernel:gated_delta_decode_kernel",
            signature=pointers | strides | {"eps": "fp32"} | dict.fromkeys(constants, "constexpr"),
            constants=constants,
            aligned=(*pointers, "inputs_stride", "gate_stride", "window_stride", "state_stride"),
            options={"num_warps": 4},
        )
    )


def _replay_compiled(
    monkeypatch: pytest.MonkeyPatch, *, query: int, key: int = 128, value: int = 128
) -> list[Compiled]:
    """The two kernels of bfloat16 states, for 16 key heads and twice as many value heads."""
    pytest.importorskip("triton")
    from headrace.ops.gated_delta_decode import fused  # noqa: PLC0415  after the plugin's settings

    def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    f32, i64 = torch.float32, torch.int64
    rows, hk, hv = 8, 16, 32
    channels = 2 * hk * key + hv * value
    weights = MixerWeights(
        conv=numbers(TAPS, channels), gate_bias=numbers(2 * hv, dtype=f32),
        gate_factor=numbers(2 * hv, dtype=f32), unit_scale=numbers(2 * hk, dtype=f32),
        norm=numbers(value, dtype=f32), norm_eps=1e-6,
    )  # fmt: skip
    blocks, lengths = numbers(rows, dtype=torch.int32), numbers(rows, dtype=i64)
    specs: list[KernelSpec] = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:  # noqa: ANN401
        assert 0 not in grid
        specs.append(spec_of(kernel, args, options))

    monkeypatch.setattr(fused, "launch_kernel", launch)
    projected = numbers(rows * query, channels + hv * value + 2 * hv)
    inputs, gate, logits = projected.split((channels, hv * value, 2 * hv), dim=-1)
    fused.gated_delta_decode(
        inputs,
        gate,
        logits,
        weights,
        numbers(rows, 6, channels),
        numbers(rows, hv, value, key),
        numbers(rows, query, dtype=i64),
        lengths,
        Replay(
            base_block=blocks, base_len=lengths, computed=lengths, write_block=blocks,
            write_len=lengths, ring_block=blocks,
        ),
        numbers(rows * query, hv * value),
        ring=Ring(
            inputs=numbers(rows, 32, channels),
            updates=numbers(rows, 32, hk * key + hv * value + 2 * hv, dtype=f32),
            interval=16,
        ),
    )  # fmt: skip
    assert [spec.kernel.partition(":")[2] for spec in specs] == [
        "replay_prepare_kernel", "replay_answer_kernel",
    ]
    return compile_kernels(specs)


@pytest.mark.parametrize("query", [4, pytest.param(8, marks=pytest.mark.full)])
def test_the_replay_kernels_compile_for_hopper_with_tensor_cores_and_without_spills(
    query: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, answer = _replay_compiled(monkeypatch, query=query)
    # Four programs of four warps share a multiprocessor, or eight of one; with many tokens three.
    for compiled, registers in ((prepare, 255), (answer, 128 if query <= 4 else 168)):
        assert compiled.spill_bytes == 0
        assert compiled.registers <= registers
        assert compiled.shared_bytes <= 56 * 1024
    assert not prepare.instructions or "HMMA.1688.F32.TF32" in prepare.instructions
    assert answer.tensor_core > 0
    # The state and the changes move 16 bytes at a time.
    assert not answer.instructions or answer.instructions["LDG.E.128"] >= 16


@pytest.mark.parametrize(("scheme", "state"), [("columns", "*bf16"), ("replay", "*fp32")])
def test_the_kernel_compiles_for_hopper_without_spills(scheme: str, state: str) -> None:
    compiled = _compiled(scheme, state)
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 168
    # The state moves 16 bytes at a time.
    assert compiled.instructions.get("LDG.E.128", 0) >= 8
    assert compiled.instructions.get("STG.E.128", 0) >= 4


@pytest.mark.parametrize(("scheme", "key", "value"), [("columns", 8, 16), ("replay", 32, 16)])
def test_the_kernel_compiles_for_heads_whose_values_are_not_as_long_as_their_keys(
    scheme: str, key: int, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler holds a loop's variables to one shape; the interpreter does not."""
    for phase in (1, 2):
        assert _compiled(scheme, "*fp32", K=key, V=value, ROWS=16, PHASE=phase).spill_bytes == 0
    if scheme == "replay":
        compiled = _replay_compiled(monkeypatch, query=1, key=key, value=value)
        assert [each.spill_bytes for each in compiled] == [0, 0]
