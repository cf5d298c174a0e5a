"""What a step launches needs nothing that only the device knows, and compiles for Hopper.

Both are shown on the meta device, whose tensors have shapes and no values: what asks for a value
there, such as `.item()`, raises.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from conformance import MAX_LEN, VOCAB, make_engine
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.config import EngineConfig
from headrace.engine.inspection import _without_weights
from headrace.models.batch import (
    ROW_TILE,
    Caches,
    ColumnsMetadata,
    ReplayMetadata,
    StateCache,
    StepBatch,
    VerifyRows,
)
from headrace.models.config import ModelConfig
from headrace.models.qwen3_5 import Qwen35Model
from headrace.ops.aot import MAX_SHARED_BYTES, Compiled, KernelSpec, compile_kernels, spec_of
from headrace.rt.buffers import tensors_of
from headrace.sampling_params import SamplingParams
from headrace.testing import (
    KERNEL_FAMILIES,
    KERNEL_OPS,
    KERNEL_SIZES,
    tiny_family,
    tiny_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace import rt
    from headrace.models.batch import Kernels
    from headrace.worker.launches import StepShape

SHAPES = sorted((Path(__file__).parents[2] / "benchmarks" / "shapes").glob("*.json"))

DRAFTS = ("none", "scripted:3", "mtp:2", "ngram:2", "draft:x:2")
STEPS = [
    ("slots", "columns", "mtp:2", "off"),
    ("compact", "columns", "draft:x:2", "on"),
    *(
        pytest.param(*step, marks=pytest.mark.full)
        for step in itertools.product(
            ("slots", "compact"), ("columns", "replay"), DRAFTS, ("off", "on")
        )
        if step not in
        (("slots", "columns", "mtp:2", "off"), ("compact", "columns", "draft:x:2", "on"))
    ),
]
"""Layout, scheme, drafts and graphs of a step; the first two stand for all."""


class NothingFromTheHost(TorchDispatchMode):
    """Fails if an operation takes values from the host's memory: neither can a graph capture that.

    Numbers are no values in memory: they travel with the launch.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        del types
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                raise AssertionError(f"{func} takes {tuple(value.shape)} from the host")
        return func(*args, **(kwargs or {}))


class NoNewValues(TorchFunctionMode):
    """Fails if a tensor is made of the host's values: those come to the device by a copy."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        del types
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy), f"{func} of {args}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "fault",
    [
        lambda: torch.tensor([1, 2], device="meta"),
        lambda: torch.as_tensor([1, 2]).to("meta"),
        lambda: torch.ones(2).to("meta"),
        lambda: torch.ones(2, device="meta").copy_(torch.ones(2)),
        lambda: torch.ones(2, device="meta").sum().item(),
        lambda: torch.ones(2, device="meta").nonzero(),
    ],
)
def test_values_of_the_host_are_noticed(fault: Callable[[], Any]) -> None:
    with pytest.raises((AssertionError, NotImplementedError, RuntimeError)), \
            NoNewValues(), NothingFromTheHost():
        fault()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """Kernels that were launched on the meta device; on the CPU there are the references."""
    pytest.importorskip("triton")
    # After the plugin's settings.
    from headrace.ops.add_rms_norm import fused as norm  # noqa: PLC0415
    from headrace.ops.attention_inputs import fused as heads  # noqa: PLC0415
    from headrace.ops.few_rows_linear import fused as few_rows  # noqa: PLC0415
    from headrace.ops.fixed_linear import fused as linear  # noqa: PLC0415
    from headrace.ops.gated_delta_decode import fused as mixer  # noqa: PLC0415
    from headrace.ops.gated_delta_prefill import fused as mixer_of_prompts  # noqa: PLC0415
    from headrace.ops.gated_product import fused as product  # noqa: PLC0415
    from headrace.ops.mamba2_decode import fused as mamba2  # noqa: PLC0415
    from headrace.ops.paged_decode import fused as attention  # noqa: PLC0415
    from headrace.ops.paged_prefill import fused as attention_of_prompts  # noqa: PLC0415
    from headrace.ops.routed_experts import fused as experts  # noqa: PLC0415
    from headrace.ops.state_columns import fused as columns  # noqa: PLC0415
    from headrace.ops.token_choice import fused as choice  # noqa: PLC0415

    specs: list[KernelSpec] = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:  # noqa: ANN401
        assert 0 not in grid
        specs.append(spec_of(kernel, args, options))

    def launch_if_any(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:  # noqa: ANN401
        if 0 not in grid:
            launch(kernel, grid, *args, **options)

    modules = (
        norm, heads, linear, mixer, mamba2, product, attention, experts, choice, few_rows
    )  # fmt: skip
    for module in modules:
        monkeypatch.setattr(module, "launch_kernel", launch)
    for module in (mixer_of_prompts, attention_of_prompts):
        monkeypatch.setattr(module, "launch_kernel", launch_if_any)
    # Its tuples nobody compiles here; and tensors without memory have no addresses to compare.
    monkeypatch.setattr(columns, "launch_kernel", lambda *_, **__: None)
    monkeypatch.setattr(columns, "refuse_shared", lambda *_: None)
    for op in KERNEL_OPS:
        monkeypatch.setattr(op, "can_launch", lambda tensor: tensor.device.type == "meta")
    return specs


def on_meta(value: Any) -> Any:  # noqa: ANN401
    """The same shapes without values."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: on_meta(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(on_meta(part) for part in value)
    return value


@pytest.mark.parametrize(("layout", "scheme", "drafts", "graphs"), STEPS)
def test_launches_of_a_step_ask_the_device_for_nothing_and_copy_nothing_to_it(
    layout: str, scheme: str, drafts: str, graphs: str, launched: list[KernelSpec]
) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], **KERNEL_SIZES,
    }
    ops = launch_twice_on_meta(
        tiny_model(**sizes), layout, scheme, drafts, graphs, with_prompts=True
    )
    assert {"advance", "forward", "verify"} <= ops
    assert ("save" in ops) == (scheme == "columns")
    drafter = drafts.partition(":")[0]
    names = {"none": set(), "draft": {"draft_model"}}.get(drafter, {f"draft_{drafter}"})
    assert {name for name in ops if name.startswith("draft")} == names
    kernels = {spec.kernel.partition(":")[2] for spec in launched}
    assert kernels == {
        "add_rms_norm_kernel", "attention_inputs_kernel", "gated_product_kernel",
        "gated_delta_decode_kernel", "paged_decode_kernel", "combine_splits_kernel",
        "best_of_parts_kernel", "best_of_row_kernel", "paged_prefill_kernel",
        "prefill_inputs_kernel", "prefill_window_kernel", "prefill_within_kernel",
        "prefill_along_kernel", "prefill_norm_kernel",
    }


@pytest.mark.parametrize("family", sorted(KERNEL_FAMILIES))
def test_launches_of_other_families_ask_the_device_for_nothing_either(
    family: str, launched: list[KernelSpec]
) -> None:
    model = tiny_family(family, vocab_size=VOCAB, **KERNEL_FAMILIES[family])
    drafts = "mtp:2" if family == "nemotron_h" else "scripted:3"
    ops = launch_twice_on_meta(model, "slots", "replay", drafts, "on")
    assert {"advance", "forward", "verify"} <= ops
    assert sum("state_kernel" in spec.kernel for spec in launched) > 1


def launch_twice_on_meta(
    model: Any,  # noqa: ANN401
    layout: str,
    scheme: str,
    drafts: str,
    graphs: str,
    *,
    with_prompts: bool = False,
) -> set[str]:
    """Serve requests, each sort of launch on the meta device too; return the ops.

    Only launches of steps without prompts, unless with_prompts.
    """
    engine = make_engine(
        model, draft_model=model if drafts.startswith("draft") else None, kernels="triton",
        graphs=graphs, batch_layout=layout, state_scheme=scheme, speculative=drafts,
        replay_interval=4 if scheme == "replay" else None,
        # So few that a prompt is beside rows that generate.
        max_num_batched_tokens=24,
    )
    # So that drafts are proposed from the first step on.
    engine.scheduler.policy = None
    twin = _without_weights(model.config, EngineConfig(dtype="float32", state_dtype="float32"))
    runtime, launch = engine.parts.runtime, engine.parts.runtime.launch
    seen: set[tuple[str, bool, int, int]] = set()

    def launch_twice(op: rt.Op[Any], stream: rt.Stream, **arguments: Any) -> None:  # noqa: ANN401
        shape: StepShape | None = arguments.get("shape")
        place = None
        if shape is not None and (with_prompts or not shape.known):
            place = (op.name, shape.may_cross, shape.max_query_len, len(shape.known))
        if place is not None and place not in seen:
            seen.add(place)
            without = {
                name: on_meta(tensors_of(name, value)) if name in op.effects else value
                for name, value in arguments.items()
            }
            if "fixed" in without:
                without["fixed"] = replace(without["fixed"], model=twin)
            if "model" in without:
                without["model"] = twin
            with NoNewValues(), NothingFromTheHost():
                op.fn(**without)
        launch(op, stream, **arguments)

    runtime.launch = launch_twice  # type: ignore[method-assign]
    rng = random.Random(0)
    for index, length in enumerate((5, 13, 20)):
        params = SamplingParams(
            temperature=float(index), top_k=5 * index, seed=index, max_tokens=5, ignore_eos=True
        )
        prompt = [rng.randrange(2, VOCAB) for _ in range(length)]
        request = engine.add_request(str(index), prompt, params)
        if drafts.startswith("scripted"):
            script = np.array([rng.randrange(VOCAB) for _ in range(MAX_LEN)])
            engine.worker.scripts[request.sequences[0].seq_id] = (script, script % 4)
    while engine.has_work():
        engine.step()
    # Prompts alone, and one beside generating rows.
    if with_prompts:
        assert {(q > 0, known > 0) for _, _, q, known in seen} >= {
            (False, True), (True, True), (True, False)
        }
    return {name for name, *_ in seen}


def specs_of_shape(
    path: Path,
    scheme: str,
    rows: int,
    queries: int,
    state_dtype: str,
    launched: list[KernelSpec],
    kernels: Kernels = "triton",
    max_drafts: int | None = None,
) -> list[KernelSpec]:
    """Different kernels that a decode step of a model of this shape launches, in bfloat16.

    No row has more than max_drafts drafts; by default those of this step.
    """
    columns_wide = queries if max_drafts is None else 1 + max_drafts

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    raw = json.loads(path.read_text(encoding="utf-8"))
    # One period of layers: the others launch the same.
    config = ModelConfig.from_dict(raw | {"num_hidden_layers": raw["full_attention_interval"]})
    settings = EngineConfig(dtype="bfloat16", state_dtype=state_dtype)  # type: ignore[arg-type]
    model = _without_weights(config, settings)
    assert model.kernel_obstacle(config) is None
    (group,) = model.state_groups(columns_wide - 1)
    layers, blocks, slots, page, ring = len(group.layers), 1 + 3 * rows, 1 + rows, 16, 32
    state = {
        each.name: numbers(layers, blocks, *each.shape, dtype=getattr(torch, each.dtype))
        for each in group.state
    }
    rings = {
        each.name: numbers(layers, slots, ring, *each.shape, dtype=getattr(torch, each.dtype))
        for each in group.ring
    }
    k, v = (
        numbers(
            model.num_kv_layers, 64 * rows, page, config.num_kv_heads, config.head_dim,
            dtype=model.dtype,
        )
        for _ in "kv"
    )
    block = numbers(rows, dtype=torch.int32)
    states: ColumnsMetadata | ReplayMetadata
    if scheme == "columns":
        columns = numbers(rows, columns_wide, dtype=torch.int32)
        states = ColumnsMetadata(window_blocks=columns, accepted=numbers(rows))
    else:
        states = ReplayMetadata(
            base_block=block, base_len=numbers(rows), computed=numbers(rows), write_block=block,
            write_len=numbers(rows), ring_block=block, max_pending=16 + queries - 1, interval=16,
        )
    tokens = -(-rows * queries // ROW_TILE) * ROW_TILE
    batch = StepBatch(
        num_tokens=rows * queries,
        token_ids=numbers(tokens),
        positions=numbers(tokens),
        kv_slot_mapping=numbers(tokens),
        verify=VerifyRows(
            num_rows=rows,
            max_query_len=queries,
            token_index=numbers(rows, queries),
            query_lens=numbers(rows),
            seq_lens=numbers(rows),
            max_seq_len=1000,
            block_table=numbers(rows, 64, dtype=torch.int32),
            states=(states,),
        ),
        known=(),
        kernels=kernels,
    )
    cache = StateCache(state=state, ring=rings if scheme == "replay" else {})
    hidden = model.forward(batch, Caches(k=k, v=v, groups=(cache,)))
    assert hidden.shape == (tokens, config.hidden_size)
    if kernels == "fixed":
        assert model.logits(hidden[:1], kernels).shape == (1, config.vocab_size)
    return list({str(spec): spec for spec in launched}.values())


@pytest.mark.parametrize("rows", [1, pytest.param(128, marks=pytest.mark.full)])
@pytest.mark.parametrize("scheme", ["replay", pytest.param("columns", marks=pytest.mark.full)])
@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_a_layer_launches_one_kernel_or_a_few(
    path: Path, scheme: str, rows: int, launched: list[KernelSpec]
) -> None:
    specs = specs_of_shape(path, scheme, rows, 1, "float32", launched)
    # Convolutions, then states; partial sums of attention, then their sum.
    assert sum("gated_delta_decode" in spec.kernel for spec in launched) == 3 * 2
    assert sum("paged_decode" in spec.kernel for spec in launched) == 2
    # Of four layers, each with two norms and one MLP or more, one attends. The last norm is the
    # model's.
    assert sum("add_rms_norm" in spec.kernel for spec in launched) == 2 * 4 + 1
    assert sum("attention_inputs" in spec.kernel for spec in launched) == 1
    assert sum("gated_product" in spec.kernel for spec in launched) >= 4 + 1
    # The choice, the order, two products and the sum of a mixture of experts.
    mixtures = [spec for spec in launched if "routed_experts" in spec.kernel]
    assert len(mixtures) == (4 * 5 if "a3b" in path.stem else 0)
    # Products of few rows: whole or in parts, and the sum of parts of each width.
    names = "few_rows_linear", "add_runs"
    products = [spec for spec in specs if any(name in spec.kernel for name in names)]
    assert sum("few_rows_linear" in spec.kernel for spec in products) <= 2
    assert bool(products) == (rows == 1)
    # All layers use the same machine code: norms with an addition and without, inputs of
    # attention, gates by silu and by sigmoid.
    inner = {spec.constants["WIDTH"] for spec in launched if "gated_product" in spec.kernel}
    assert len(specs) - len(products) == 2 + 2 + 2 + 1 + len(inner) + len(mixtures) // 4


@pytest.mark.parametrize("scheme", ["columns", "replay"])
@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_fixed_kernels_are_the_same_code_in_every_step(
    path: Path, scheme: str, launched: list[KernelSpec]
) -> None:
    """So no constant, and nothing that the compiler looks at, follows from a step's rows."""
    seen = []
    for rows, queries in ((1, 1), (3, 4), (16, 2), (200, 1)):
        launched.clear()
        specs_of_shape(
            path, scheme, rows, queries, "float32", launched, kernels="fixed", max_drafts=3
        )
        seen.append({as_code(spec) for spec in launched} - {None})
    assert all(codes == seen[0] for codes in seen[1:])
    made = {spec.kernel.rpartition(":")[2] for spec in launched}
    assert {"fixed_linear_kernel", "gated_delta_decode_kernel", "paged_decode_kernel"} <= made


def as_code(spec: KernelSpec) -> str | None:
    """What decides a kernel's machine code.

    Whether runs of a product are programs of their own does: their sums and their order are the
    same, and so is the code around them (`ops/fixed_linear` shows it bit by bit).
    """
    if spec.kernel.endswith(":add_runs_kernel"):
        return None
    constants = {name: v for name, v in spec.constants.items() if name != "IS_SPLIT"}
    # Sums of runs are float32, and so is what they are written to.
    signature = {name: v for name, v in spec.signature.items() if name != "out_ptr"}
    is_product = spec.kernel.endswith(":fixed_linear_kernel")
    return str(replace(
        spec, constants=constants, signature=signature if is_product else spec.signature,
    ))  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operations that a device would have to launch: all but views and new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        del types
        aliases = [result.alias_info for result in func._schema.returns]
        is_view = all(alias is not None and not alias.is_write for alias in aliases)
        name = func._schema.name.removeprefix("aten::")
        if not is_view and not name.startswith(("empty", "new_empty")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_layers_are_products_and_kernels_alone(
    path: Path, launched: list[KernelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else there is belongs to the step: it does not grow with the layers."""
    forward, launches = Qwen35Model.forward, Launches()

    def counted(*args: Any) -> torch.Tensor:  # noqa: ANN401
        with launches:
            return forward(*args)

    monkeypatch.setattr(Qwen35Model, "forward", counted)
    specs_of_shape(path, "replay", 32, 1, "float32", launched)
    # Four products in each of four layers, and the router's where there is one.
    assert launches.counts.pop("mm") == 4 * (5 if "a3b" in path.stem else 4)
    # The embedding, and outputs of mixers and of attention that start as zeros.
    assert launches.counts.pop("index_select") == 1
    assert launches.counts.pop("zeros") == 2
    # Tables of sines and cosines.
    tables = {"_to_copy": 1, "mul": 1, "cos": 1, "sin": 1, "neg": 1, "cat": 2}
    assert launches.counts == tables


@pytest.mark.full
@pytest.mark.parametrize(
    ("scheme", "state_dtype", "rows", "queries"),
    [
        ("columns", "float32", 1, 1),
        ("columns", "bfloat16", 128, 4),
        ("replay", "bfloat16", 128, 1),
        ("replay", "float32", 128, 4),
        ("replay", "float32", 1, 8),
    ],
)
@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_what_a_decode_step_launches_compiles_for_hopper_without_spills(
    path: Path, scheme: str, rows: int, queries: int, state_dtype: str, launched: list[KernelSpec]
) -> None:
    assert_compiles(specs_of_shape(path, scheme, rows, queries, state_dtype, launched))


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["columns", "replay"])
@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_fixed_kernels_compile_for_hopper_without_spills(
    path: Path, scheme: str, launched: list[KernelSpec]
) -> None:
    specs = specs_of_shape(
        path, scheme, 4, 1, "float32", launched, kernels="fixed", max_drafts=3
    )
    # Of the mixer's convolutions, with a ring and one value head for each key head, ptxas keeps two
    # words aside to stay at 56 registers.
    for spec, compiled in assert_compiles(specs, most_spilled=16).items():
        if "fixed_linear_kernel" in spec:
            assert compiled.tensor_core, spec


def assert_compiles(specs: list[KernelSpec], most_spilled: int = 0) -> dict[str, Compiled]:
    """Compile kernels, look at what each needs, and return what was made of each."""
    made = dict(zip(map(str, specs), compile_kernels(specs), strict=True))
    for spec, compiled in made.items():
        assert compiled.spill_bytes <= most_spilled, spec
        assert compiled.shared_bytes <= MAX_SHARED_BYTES, spec
        if ":paged_decode_kernel" in spec:
            products = [name for name in compiled.instructions if "MMA" in name]
            assert compiled.tensor_core or any(name.startswith("HMMA") for name in products), spec
    return made


@pytest.mark.parametrize(
    "path",
    [path if "4b" in path.stem else pytest.param(path, marks=pytest.mark.full) for path in SHAPES],
    ids=lambda path: path.stem,
)
def test_all_but_the_mixer_compile_for_hopper(path: Path, launched: list[KernelSpec]) -> None:
    """The mixer takes longer than all others together, and has such tests of its own."""
    specs = specs_of_shape(path, "replay", 128, 1, "float32", launched)
    specs = [spec for spec in specs if "gated_delta_decode" not in spec.kernel]
    assert len(specs) >= 6
    for spec, compiled in assert_compiles(specs).items():
        if "paged_decode" not in spec:
            loads = [name for name in compiled.instructions if name.startswith("LDG")]
            # 16 bytes at a time.
            assert not compiled.instructions or any(".128" in name for name in loads), spec
