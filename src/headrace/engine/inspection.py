"""What a model is made of and what would fit, without loading its weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.engine.load import Checkpoint, _resolve, _scheme, _sizes, parse_speculative
from headrace.errors import ConfigError
from headrace.models.config import ModelConfig
from headrace.models.registry import model_class
from headrace.text.files import read_json_object
from headrace.weights import read_config
from headrace.weights.resolve import resolve_model

if TYPE_CHECKING:
    from headrace.config import EngineConfig
    from headrace.engine.load import Parts
    from headrace.models.batch import StateGroupSpec
    from headrace.worker.buffers import WorkerSizes
    from headrace.worker.state_scheme import StateScheme

_CONTEXTS = (1024, 4096, 16384, 65536, 262144)


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


def inspect_model(config: EngineConfig) -> Inspection:
    """Describe a model under the given settings.

    Args:
        config: Settings; `model` may also be a config.json by itself.

    Raises:
        ConfigError: Settings contradict each other or do not fit this machine.
        ModelError: There is no such model, or it is not supported.
    """
    model_config = _model_config(config)
    resolved = _resolve(config, model_config)
    model = _without_weights(model_config, resolved)
    speculation = parse_speculative(resolved.speculative, model_config)
    max_model_len = resolved.max_model_len or model_config.max_position_embeddings
    device = torch.device(resolved.device)
    scheme = _scheme(resolved, speculation, max_model_len, device, model.state_groups(0))
    sizes, max_model_len = _sizes(
        config=_less_weights(resolved, model),
        model=model,
        # A draft model's caches come on top; only this model is described.
        draft_model=None,
        scheme=scheme,
        max_drafts=speculation.num_drafts,
        max_model_len=max_model_len,
        device=device,
    )
    return _inspection(
        model_config, resolved, model=model, scheme=scheme, sizes=sizes,
        max_model_len=max_model_len,
    )


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
    per_layer = model_config.kv_width * model.dtype.itemsize
    has_cache = config.prefix_cache == "align"
    return Inspection(
        model=config.model,
        architecture=model_config.architecture,
        layers=tuple(Layer(index=i, kind=k) for i, k in enumerate(model_config.layer_types)),
        state_groups=tuple(_group(group) for group in groups),
        kv_bytes_per_token=model.num_kv_layers * per_layer,
        state_bytes_per_sequence=sum(_sequence_bytes(group, scheme) for group in groups),
        min_cacheable_prefix_tokens=scheme.unit if has_cache else None,
        fits=_fits(sizes, scheme, max_model_len),
        mtp_layers=model_config.num_mtp_layers,
        parameters=model.num_parameters,
        weight_bytes=model.num_parameters * model.dtype.itemsize,
        max_model_len=max_model_len,
        ignored_config_keys=model_config.ignored_keys,
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
    """Build the model on the meta device, where tensors have shapes and no memory."""
    cls = model_class(model_config)
    dtype: torch.dtype = getattr(torch, config.dtype)
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in cls.expected_tensors(model_config).items()
    }
    return cls.from_weights(model_config, tensors, dtype=dtype, state_dtype=config.state_dtype)


def _less_weights(config: EngineConfig, model: Any) -> EngineConfig:  # noqa: ANN401
    """Lower the memory share by the weights, which at this moment take no memory yet.

    Raises:
        ConfigError: The weights alone are too large.
    """
    if config.device == "cpu":
        return config
    _, total = torch.cuda.mem_get_info()
    num_bytes = model.num_parameters * model.dtype.itemsize
    left = config.gpu_memory_utilization - num_bytes / total
    if left <= 0.0:
        raise ConfigError(
            f"the weights take {num_bytes} bytes but gpu_memory_utilization "
            f"{config.gpu_memory_utilization:g} of the device is "
            f"{int(config.gpu_memory_utilization * total)}; use a smaller dtype or model"
        )
    return replace(config, gpu_memory_utilization=left)


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


def _fits(sizes: WorkerSizes, scheme: StateScheme, max_model_len: int) -> tuple[Fit, ...]:
    contexts = [context for context in _CONTEXTS if context < max_model_len]
    # Block 0 of every pool is nobody's.
    by_state = (sizes.num_state_blocks - 1) // scheme.max_blocks()
    fits = []
    for context in [*contexts, max_model_len]:
        blocks = -(-(context + sizes.max_drafts) // sizes.block_size) + 1
        by_kv = (sizes.num_kv_blocks - 1) // blocks
        fits.append(
            Fit(context_tokens=context, sequences=min(by_kv, by_state, sizes.max_num_seqs))
        )
    return tuple(fits)
