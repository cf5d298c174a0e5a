"""What would fit on GPUs that need not be here, and how fast it would decode.

Memory is counted by the code that sizes an engine's pools at start. Speeds come in two kinds:

    floor       the least time that bytes and operations take (floors.py): no engine is faster
    prediction  floor times the share of it that this engine reached where it was measured

A prediction is given only where the measured code would run: dense models whose generated tokens go
through fused kernels. GPUs stand side by side, each with a whole copy of the model.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.bench.ceilings import Ceilings
from headrace.bench.floors import StateTraffic, costs_of, decode_floor, prefill_floor
from headrace.engine.inspection import Blueprint, Fit
from headrace.engine.load import Memory
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.bench.floors import ModelCosts
    from headrace.config import EngineConfig

CONTEXTS = (1024, 8192, 65536)
BATCHES = (1, 8, 32, 128, 256)
STATE_DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
_FOLDER = Path(__file__).parent
_GPU_KEYS = ("memory_gib", "copy_tb_s", "matmul_tflops")
_OWN_USE_BYTES = 2**30
"""What the driver's context, libraries and loaded kernels take before anything is allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU by its figures.

    Attributes:
        name: For people.
        memory_gib: All of its memory, GiB.
        copy_tb_s: Speed of a large copy, bytes read and written, TB/s.
        matmul_tflops: Speed of a large bfloat16 product, TFLOP/s.
        source: Where the figures are from.
    """

    name: str
    memory_gib: float
    copy_tb_s: float
    matmul_tflops: float
    source: str

    @property
    def memory(self) -> Memory:
        """Its memory when an engine starts."""
        total = int(self.memory_gib * 2**30)
        return Memory(total=total, free=max(0, total - _OWN_USE_BYTES))

    @property
    def ceilings(self) -> Ceilings:
        """Its speeds."""
        return Ceilings(
            copy_bytes_per_s=self.copy_tb_s * 1e12,
            matmul_flops_per_s=self.matmul_tflops * 1e12,
            matmul_dtype="bfloat16",
            is_measured=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What share of the floor decoding reached in measured runs.

    Attributes:
        shape: Model that was measured.
        state_dtype, state_scheme, num_drafts: How.
        by_batch: Batch to share, ascending.
    """

    shape: str
    state_dtype: str
    state_scheme: str
    num_drafts: int
    by_batch: Mapping[int, float]

    def at(self, batch: int) -> float:
        """Interpolate over the logarithm of the batch; beyond the ends the last one holds."""
        points = sorted(self.by_batch.items())
        if batch <= points[0][0]:
            return points[0][1]
        for (low, first), (high, second) in pairwise(points):
            if batch <= high:
                part = math.log(batch / low) / math.log(high / low)
                return first + part * (second - first)
        return points[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Decoding at one batch, on one GPU.

    Attributes:
        batch: Sequences at once.
        fits: Whether memory holds them at this context.
        floor_tokens_per_s: No engine is faster.
        predicted_tokens_per_s: Floor times share; None where nothing like it was measured.
        share_of_floor: The measured share.
    """

    batch: int
    fits: bool
    floor_tokens_per_s: float
    predicted_tokens_per_s: float | None
    share_of_floor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """One GPU with states of one dtype.

    Attributes:
        state_dtype: Of recurrent states.
        state_scheme: columns or replay.
        state_bytes_per_sequence: What a running sequence owns at most; checkpoints come on top.
        fits: Sequences at once if max_num_seqs and max_model_len are set for them.
        decode: By batch.
    """

    state_dtype: str
    state_scheme: str
    state_bytes_per_sequence: int
    fits: tuple[Fit, ...]
    decode: tuple[Speed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The keys of `plan --json` (docs/interfaces.md).

    Attributes:
        gpu: One of them.
        gpus: How many; each runs a whole copy, so tokens per second of all are this many times
            those of one.
        kernels: What would compute generated tokens.
        obstacle: Why nothing fits, or None.
        context_tokens: Tokens before each decoding row, in the mean.
        tokens_per_step: Tokens that a row keeps of a step.
        prefill_floor_tokens_per_s: Of one prompt of that many tokens; no engine is faster.
        states: By dtype of the states; empty with an obstacle.
        notes: What the predictions rest on.
    """

    model: str
    architecture: str
    gpu: Gpu
    gpus: int
    dtype: str
    kernels: str
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    obstacle: str | None
    context_tokens: int
    tokens_per_step: float
    prefill_floor_tokens_per_s: float
    states: tuple[StatePlan, ...]
    notes: tuple[str, ...]


def find_gpu(name: str) -> Gpu:
    """Find a GPU by name, or read a JSON file that describes one.

    Args:
        name: A key of gpus.json in any case, or a path that ends with .json.

    Raises:
        ConfigError: It is neither; the known names and keys are in the message.
    """
    if name.endswith(".json"):
        return _gpu_of_file(Path(name))
    known = _read("gpus.json")
    found = known.get(name.lower())
    if found is None:
        raise ConfigError(
            f"gpu {name!r} is not known; choose {', '.join(known)}, or a JSON file with "
            f"{', '.join(_GPU_KEYS)}"
        )
    return Gpu(**found)


def make_plan(
    config: EngineConfig,
    gpu: Gpu,
    *,
    gpus: int = 1,
    context: int = 1024,
    acceptance: tuple[float, ...] = (),
) -> Plan:
    """Say what fits and how fast it would be.

    Args:
        config: Settings; "auto" drafts count as none, "auto" states as both dtypes.
        gpu: Of which kind.
        gpus: How many.
        context: Tokens before each decoding row, in the mean.
        acceptance: Share of rows that keep the first draft, the first two, and so on.

    Raises:
        ConfigError: Settings contradict each other, or acceptance does not fit the drafts.
        ModelError: There is no such model, or it is not supported.
    """
    if gpus < 1 or context < 1:
        raise ConfigError(f"gpus is {gpus} and context {context} but both must be at least 1")
    if config.speculative == "auto":
        config = replace(config, speculative="none")
    wanted = STATE_DTYPES if config.state_dtype == "auto" else (config.state_dtype,)
    blueprints = [
        Blueprint.of(replace(config, state_dtype=dtype), gpu.memory) for dtype in wanted
    ]
    first = blueprints[0]
    if len(acceptance) != first.max_drafts:
        raise ConfigError(
            f"acceptance has {len(acceptance)} places but a step has {first.max_drafts} drafts; "
            "give one share for each draft, as in --speculative mtp:3 --acceptance 0.8,0.64,0.512"
        )
    costs = costs_of(first.model)
    share, notes = _share_for(first, costs, gpu)
    obstacle = _obstacle(first)
    tokens_per_step = 1.0 + sum(acceptance)
    model = first.model
    prefill = prefill_floor(costs, gpu.ceilings, batch=1, tokens=context)
    return Plan(
        model=config.model,
        architecture=model.config.architecture,
        gpu=gpu,
        gpus=gpus,
        dtype=first.config.dtype,
        kernels=first.config.kernels,
        parameters=model.num_parameters,
        weight_bytes=first.weight_bytes,
        kv_bytes_per_token=first.kv_bytes_per_token,
        obstacle=obstacle,
        context_tokens=context,
        tokens_per_step=tokens_per_step,
        prefill_floor_tokens_per_s=prefill.tokens_per_s,
        states=() if obstacle else tuple(
            _state_plan(one, gpu, context, tokens_per_step, share) for one in blueprints
        ),
        notes=notes,
    )


def _obstacle(blueprint: Blueprint) -> str | None:
    """Say why not even one sequence of the shortest context fits."""
    shortest = min(CONTEXTS[0], blueprint.max_model_len)
    try:
        config = replace(blueprint.config, max_num_seqs=1, max_model_len=shortest)
        blueprint.sizes(config, shortest)
    except ConfigError as error:
        return str(error)
    return None


def _state_plan(
    blueprint: Blueprint, gpu: Gpu, context: int, tokens_per_step: float, share: Share | None
) -> StatePlan:
    model, scheme = blueprint.model, blueprint.scheme
    costs = costs_of(model)
    longest = blueprint.max_model_len
    contexts = [length for length in CONTEXTS if length <= longest] or [longest]
    most = blueprint.most_sequences(min(context, longest))
    return StatePlan(
        state_dtype=blueprint.config.state_dtype,
        state_scheme=scheme.name,
        state_bytes_per_sequence=blueprint.state_bytes_per_sequence,
        fits=tuple(
            Fit(context_tokens=length, sequences=blueprint.most_sequences(length))
            for length in contexts
        ),
        decode=tuple(
            _speed(blueprint, costs, gpu.ceilings, batch=batch, fits=batch <= most,
                   context=context, tokens_per_step=tokens_per_step, share=share)
            for batch in BATCHES
        ),
    )  # fmt: skip


def _speed(
    blueprint: Blueprint,
    costs: ModelCosts,
    ceilings: Ceilings,
    *,
    batch: int,
    fits: bool,
    context: int,
    tokens_per_step: float,
    share: Share | None,
) -> Speed:
    floor = decode_floor(
        costs,
        ceilings,
        StateTraffic(interval=getattr(blueprint.scheme, "interval", None)),
        batch=batch,
        context=context,
        num_drafts=blueprint.max_drafts,
        tokens_per_step=tokens_per_step,
        has_mtp=blueprint.config.speculative.startswith("mtp"),
    )
    reached = None if share is None else share.at(batch)
    return Speed(
        batch=batch,
        fits=fits,
        floor_tokens_per_s=floor.tokens_per_s,
        predicted_tokens_per_s=None if reached is None else reached * floor.tokens_per_s,
        share_of_floor=reached,
    )


def _share_for(
    blueprint: Blueprint, costs: ModelCosts, gpu: Gpu
) -> tuple[Share | None, tuple[str, ...]]:
    """Choose the measured runs that predictions rest on; none where other code would run."""
    if blueprint.config.kernels != "triton":
        return None, ("no prediction: decoding without fused kernels was not measured on a GPU",)
    if costs.experts is not None:
        return None, ("no prediction: mixtures of experts were not measured on a GPU",)
    document = _read("shares.json")
    shares = [
        Share(**group | {"by_batch": {int(b): s for b, s in group["by_batch"].items()}})
        for group in document["groups"]
    ]
    has_drafts = blueprint.max_drafts > 0
    share = next(one for one in shares if (one.num_drafts > 0) == has_drafts)
    drafts = f"{share.num_drafts} drafts" if has_drafts else "no drafts"
    notes = [
        f"shares of the floor are those of {share.shape}, {share.state_dtype} states, "
        f"{share.state_scheme}, {drafts}, on {document['device']} ({document['source']}); for "
        "other models, states and GPUs they are taken over, not measured"
    ]
    if not gpu.source.startswith("measured"):
        notes.append(f"speeds of this GPU: {gpu.source}")
    return share, tuple(notes)


def _gpu_of_file(path: Path) -> Gpu:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"gpu {path} cannot be read as JSON: {error}") from error
    wrong = not isinstance(values, dict) or not set(_GPU_KEYS) <= set(values)
    if wrong or set(values) - {*_GPU_KEYS, "name"}:
        raise ConfigError(
            f"gpu {path} must be an object with {', '.join(_GPU_KEYS)}, and may have a name; "
            f"found {sorted(values) if isinstance(values, dict) else type(values).__name__}"
        )
    for key in _GPU_KEYS:
        value = values[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ConfigError(f"gpu {path}: {key} is {value!r} but must be a number above 0")
    return Gpu(
        name=str(values.get("name", path.stem)),
        source=str(path),
        **{key: float(values[key]) for key in _GPU_KEYS},
    )


def _read(name: str) -> Any:  # noqa: ANN401 - JSON
    return json.loads((_FOLDER / name).read_text(encoding="utf-8"))
