"""What a model is made of and what would fit, without loading its weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.engine.load import (
    Checkpoint,
    Memory,
    _resolve,
    _scheme,
    _sizes,
    has_store,
    parse_speculative,
    resolve_graphs,
    resolve_on,
    store_limits,
)
from headrace.errors import ConfigError
from headrace.models.config import ModelConfig
from headrace.models.registry import model_class
from headrace.models.shard import Shard
from headrace.text.files import read_json_object
from headrace.weights import read_config
from headrace.weights.resolve import resolve_model

if TYPE_CHECKING:
    from headrace.config import EngineConfig
    from headrace.engine.load import Parts
    from headrace.models.batch import StateGroupSpec
    from headrace.worker.buffers import WorkerSizes
    from headrace.worker.state_scheme import Columns, Replay, StateScheme

_LONG_PROMPT = 16384
_CONTEXTS = (1024, 4096, 16384, 65536, 262144)
_MOST_SEQUENCES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup:
    """Recurrent layers that share a state table.

    Args:
        kind: For example gated_delta_net.
        layers: Their indices in the model.
        shapes: Tensor of a state block to its shape per layer.
        bytes_per_block: All tensors of all layers.
    """

    kind: str
    layers: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]
    bytes_per_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How many sequences of a length can run at once under the given settings.

    Args:
        context_tokens: Prompt and output of each.
        sequences: At once, at most max_num_seqs.
    """

    context_tokens: int
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRoom:
    """What the state store has room for.

    Args:
        path: Folder of its files, or None.
        memory_bytes: Bound in host memory.
        disk_bytes: Bound of the files.
        prefix_tokens: Length of a long prompt.
        prefix_bytes: What it takes there: its KV, and one checkpoint.
    """

    path: str | None
    memory_bytes: int
    disk_bytes: int
    prefix_tokens: int
    prefix_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer."""

    index: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The keys of `inspect --json` (docs/interfaces.md).

    Args:
        state_bytes_per_sequence: State blocks, and ring if the scheme has one, that a running
            sequence owns at most; checkpoints come on top.
        min_cacheable_prefix_tokens: Shortest prefix that can hit; None without a prefix cache.
        weight_bytes: Of all parameters in the compute dtype.
        mtp_layers: Layers of the multi-token-prediction head.
        ignored_config_keys: Keys of config.json that are not understood.
        state_store: None without one.
    """

    model: str
    architecture: str
    layers: tuple[Layer, ...]
    state_groups: tuple[StateGroup, ...]
    kv_bytes_per_token: int
    state_bytes_per_sequence: int
    min_cacheable_prefix_tokens: int | None
    fits: tuple[Fit, ...]
    mtp_layers: int
    parameters: int
    weight_bytes: int
    max_model_len: int
    ignored_config_keys: tuple[str, ...]
    state_store: StoreRoom | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blueprint:
    """A model without weights under resolved settings, and the memory that it is to live in.

    Attributes:
        config: Settings without "auto".
        model: Of a class of headrace.models, on the meta device.
        scheme: How states are kept.
        max_drafts: Of a step.
        max_model_len: As asked for, or the model's own.
        device: Where it would run.
        memory: Of a GPU, before the weights; None on a CPU.
    """

    config: EngineConfig
    model: Any
    scheme: Columns | Replay
    max_drafts: int
    max_model_len: int
    device: torch.device
    memory: Memory | None

    @classmethod
    def of(cls, config: EngineConfig, memory: Memory | None = None) -> Blueprint:
        """Draw one.

        Args:
            config: Settings; `model` may also be a config.json by itself.
            memory: Of a GPU that need not be in this machine, and which settings are then meant
                for; None takes the device that settings name.

        Raises:
            ConfigError: Settings contradict each other or do not fit the device.
            ModelError: There is no such model, or it is not supported.
        """
        model_config = _model_config(config)
        if memory is None:
            resolved = _resolve(config, model_config)
        else:
            resolved = resolve_on("cuda", config, model_config)
        is_captured = resolve_graphs(resolved, has_kernels=resolved.kernels == "triton")
        resolved = replace(resolved, graphs="on" if is_captured else "off")
        device = torch.device(resolved.device)
        if memory is None and device.type != "cpu":
            memory = Memory.of(device)
        model = _without_weights(model_config, resolved)
        speculation = parse_speculative(resolved.speculative, model_config)
        max_model_len = resolved.max_model_len or model_config.max_position_embeddings
        return cls(
            config=resolved,
            model=model,
            scheme=_scheme(resolved, speculation, max_model_len, device, model.state_groups(0)),
            max_drafts=speculation.num_drafts,
            max_model_len=max_model_len,
            device=device,
            memory=memory,
        )

    @property
    def weight_bytes(self) -> int:
        """Of all parameters in the compute dtype."""
        count: int = self.model.num_parameters * self.model.dtype.itemsize
        return count

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, MTP layer included."""
        return _kv_bytes_per_token(self.model)

    @property
    def state_bytes_per_sequence(self) -> int:
        """State blocks and ring that a running sequence owns at most."""
        groups = self.model.state_groups(self.max_drafts)
        return sum(_sequence_bytes(group, self.scheme) for group in groups)

    def sizes(self, config: EngineConfig, max_model_len: int) -> tuple[WorkerSizes, int]:
        """What an engine would allocate behind the weights, and the longest sequence it takes.

        Args:
            config: `self.config`, or the same with other limits.
            max_model_len: Wanted.

        Raises:
            ConfigError: Not even one sequence fits.
        """
        return _sizes(
            config=config,
            model=self.model,
            # A draft model's caches come on top; only this model is described.
            draft_model=None,
            scheme=self.scheme,
            max_drafts=self.max_drafts,
            max_model_len=max_model_len,
            device=self.device,
            memory=None if self.memory is None else self._less_weights(self.memory),
        )

    def inspection(self) -> Inspection:
        """Describe the model as it would be served.

        Raises:
            ConfigError: Not even one sequence fits.
        """
        sizes, max_model_len = self.sizes(self.config, self.max_model_len)
        return _inspection(
            self.model.config, self.config, model=self.model, scheme=self.scheme, sizes=sizes,
            max_model_len=max_model_len,
        )

    def most_sequences(self, context: int) -> int:
        """How many sequences can run at once if max_num_seqs and max_model_len are set for them.

        Args:
            context: Prompt and output of each, in tokens.
        """
        lower, upper = 0, _MOST_SEQUENCES
        while lower < upper:
            middle = (lower + upper + 1) // 2
            if self._fits(middle, context):
                lower = middle
            else:
                upper = middle - 1
        return lower

    def _fits(self, count: int, context: int) -> bool:
        config = replace(self.config, max_num_seqs=count, max_model_len=context)
        try:
            sizes, _ = self.sizes(config, context)
        except ConfigError:
            return False
        (fit,) = _fits(sizes, self.scheme, (context,))
        return fit.sequences == count

    def _less_weights(self, memory: Memory) -> Memory:
        """Take away the weights, which at this moment take no memory yet.

        Raises:
            ConfigError: The weights alone are too large.
        """
        share = self.config.gpu_memory_utilization
        if self.weight_bytes >= share * memory.total:
            raise ConfigError(
                f"the weights take {self.weight_bytes} bytes but gpu_memory_utilization {share:g} "
                f"of the device is {int(share * memory.total)}; use a smaller dtype or model"
            )
        return replace(memory, free=memory.free - self.weight_bytes)


def inspect_model(config: EngineConfig) -> Inspection:
    """Describe a model under the given settings.

    Args:
        config: Settings; `model` may also be a config.json by itself.

    Raises:
        ConfigError: Settings contradict each other or do not fit this machine.
        ModelError: There is no such model, or it is not supported.
    """
    return Blueprint.of(config).inspection()


def describe_parts(parts: Parts) -> dict[str, Any]:
    """Describe a model that is loaded, as JSON values.

    Returns:
        The keys of `inspect --json`, about the pools that are allocated, and the settings that
        matter for reading them.
    """
    config, sizes = parts.config, parts.sizes
    found = _inspection(
        parts.model_config, config, model=parts.model, scheme=parts.scheduler.scheme,
        sizes=sizes, max_model_len=parts.max_model_len,
    )
    return {
        **asdict(found),
        "name": parts.name,
        "block_size": sizes.block_size,
        "max_num_seqs": sizes.max_num_seqs,
        "num_drafts": sizes.max_drafts,
        "device": config.device,
        "dtype": config.dtype,
        "state_dtype": config.state_dtype,
        "kernels": config.kernels,
        "state_scheme": config.state_scheme,
        "speculative": config.speculative,
        "prefix_cache": config.prefix_cache,
    }


def _inspection(
    model_config: ModelConfig,
    config: EngineConfig,
    *,
    model: Any,  # noqa: ANN401 - any class of headrace.models
    scheme: StateScheme,
    sizes: WorkerSizes,
    max_model_len: int,
) -> Inspection:
    groups: tuple[StateGroupSpec, ...] = model.state_groups(sizes.max_drafts)
    has_cache = config.prefix_cache == "align"
    return Inspection(
        model=config.model,
        architecture=model_config.architecture,
        layers=tuple(Layer(index=i, kind=k) for i, k in enumerate(model_config.layer_types)),
        state_groups=tuple(_group(group) for group in groups),
        kv_bytes_per_token=_kv_bytes_per_token(model),
        state_bytes_per_sequence=sum(_sequence_bytes(group, scheme) for group in groups),
        min_cacheable_prefix_tokens=scheme.unit if has_cache else None,
        fits=_fits(
            sizes, scheme, (*(c for c in _CONTEXTS if c < max_model_len), max_model_len)
        ),
        mtp_layers=model_config.num_mtp_layers,
        parameters=model.num_parameters,
        weight_bytes=model.num_parameters * model.dtype.itemsize,
        max_model_len=max_model_len,
        ignored_config_keys=model_config.ignored_keys,
        state_store=(
            _store_room(config, model, scheme, max_model_len) if has_store(config) else None
        ),
    )


def _store_room(
    config: EngineConfig, model: Any, scheme: StateScheme, max_model_len: int  # noqa: ANN401
) -> StoreRoom:
    memory, disk = store_limits(config)
    tokens = min(max_model_len, _LONG_PROMPT) // scheme.unit * scheme.unit
    kv = model.num_kv_layers * model.config.kv_width * model.dtype.itemsize + torch.int64.itemsize
    state = sum(_group(group).bytes_per_block for group in model.state_groups(0))
    return StoreRoom(
        path=config.state_store, memory_bytes=memory, disk_bytes=disk, prefix_tokens=tokens,
        prefix_bytes=tokens * kv + state,
    )


def _model_config(config: EngineConfig) -> ModelConfig:
    """What the model is, by its config.json and, where there are weight files, their heads."""
    file = Path(config.model)
    if file.suffix == ".json" and file.is_file():
        return ModelConfig.from_dict(read_json_object(file))
    folder = resolve_model(config.model)
    if any(folder.glob("*.safetensors")):
        return Checkpoint.of_folder(folder, config.speculative).config
    return ModelConfig.from_dict(read_config(folder))


def _without_weights(model_config: ModelConfig, config: EngineConfig) -> Any:  # noqa: ANN401
    """Build the model on the meta device, where tensors have shapes and no memory.

    Of a model that several devices share it is the part of one.
    """
    cls, size = model_class(model_config), config.tensor_parallel_size
    if size > 1:
        model_config = model_config.part(size)
    dtype: torch.dtype = getattr(torch, config.dtype)
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in cls.expected_tensors(model_config).items()
    }
    shard = {} if size == 1 else {"shard": Shard(size=size)}
    return cls.from_weights(
        model_config, tensors, dtype=dtype, state_dtype=config.state_dtype, **shard
    )


def _kv_bytes_per_token(model: Any) -> int:  # noqa: ANN401
    count: int = model.num_kv_layers * model.config.kv_width * model.dtype.itemsize
    return count


def _tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return math.prod(shape) * size


def _group(group: StateGroupSpec) -> StateGroup:
    per_layer = sum(_tensor_bytes(spec.shape, spec.dtype) for spec in group.state)
    return StateGroup(
        kind=group.kind,
        layers=group.layers,
        shapes={spec.name: spec.shape for spec in group.state},
        bytes_per_block=per_layer * len(group.layers),
    )


def _sequence_bytes(group: StateGroupSpec, scheme: StateScheme) -> int:
    blocks = _group(group).bytes_per_block * scheme.max_blocks()
    ring_size: int = getattr(scheme, "ring_size", 0)
    per_entry = sum(_tensor_bytes(spec.shape, spec.dtype) for spec in group.ring)
    return blocks + ring_size * per_entry * len(group.layers)


def _fits(
    sizes: WorkerSizes, scheme: StateScheme, contexts: tuple[int, ...]
) -> tuple[Fit, ...]:
    # Block 0 of every pool is nobody's.
    by_state = (sizes.num_state_blocks - 1) // scheme.max_blocks()
    fits = []
    for context in contexts:
        blocks = -(-(context + sizes.max_drafts) // sizes.block_size) + 1
        by_kv = (sizes.num_kv_blocks - 1) // blocks
        fits.append(
            Fit(context_tokens=context, sequences=min(by_kv, by_state, sizes.max_num_seqs))
        )
    return tuple(fits)
