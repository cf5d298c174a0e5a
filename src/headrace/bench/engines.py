"""An engine as a measurement wants it: sized for its load, with real or random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from headrace.bench.floors import StateTraffic
from headrace.bench.random_weights import random_model, read_shape, release_memory
from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.load import load_parts
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_MARGIN_TOKENS = 16
_DEFAULTS = EngineConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an engine must have room for.

    Attributes:
        max_batch: Most requests at once.
        max_requests: Most requests that may wait.
        max_tokens: Tokens of the longest sequence, prompt and output.
    """

    max_batch: int
    max_requests: int
    max_tokens: int


def sized(config: EngineConfig, load: Load) -> EngineConfig:
    """Fit a config to a load; sizes that differ from the defaults are the user's and stay."""
    values: dict[str, Any] = {}
    if config.max_num_seqs == _DEFAULTS.max_num_seqs:
        values["max_num_seqs"] = load.max_batch
    if config.max_model_len is None:
        values["max_model_len"] = load.max_tokens + _MARGIN_TOKENS
    values["max_waiting"] = max(config.max_waiting, load.max_requests)
    return replace(config, **values)


def shape_model(config: EngineConfig, shape: Path) -> Any:  # noqa: ANN401 - any class of models
    """Make the random model that a config asks for.

    Raises:
        ConfigError: The device is not there.
        ModelError: The shape cannot be read or is not supported.
    """
    parsed = read_shape(shape)
    device = device_of(config)
    dtype: str = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" or parsed.dtype == "float32" else "bfloat16"
    state_dtype = "float32" if config.state_dtype == "auto" else config.state_dtype
    return random_model(
        parsed, device=device, dtype=dtype, state_dtype=state_dtype, seed=config.seed
    )


def device_of(config: EngineConfig) -> str:
    """Return the device that "auto" means.

    Raises:
        ConfigError: It is not there.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device is cuda but torch sees no CUDA device; use --device cpu")
    if config.device == "auto":
        return "cuda" if has_cuda else "cpu"
    return config.device


def open_engine(
    config: EngineConfig,
    *,
    model: Any = None,  # noqa: ANN401 - any class of headrace.models
    shares: tuple[float, ...] = (),
    adaptive_drafts: bool = False,
) -> Engine:
    """Build an engine.

    Args:
        config: Settings, sized already.
        model: A random model; None loads config.model.
        shares: Forced acceptance by place; empty leaves it real.
        adaptive_drafts: Let the number of drafts follow the batch; else it is always the most.

    Raises:
        ConfigError: Acceptance is to be forced but the engine does not speculate, or for a number
            of drafts that it has not.
    """
    release_memory()
    if model is not None and config.dtype == "auto":
        name: Any = str(model.dtype).removeprefix("torch.")
        config = replace(config, dtype=name)
    engine = Engine(config, parts=load_parts(config, model=model, has_text=False))
    drafts = engine.parts.sizes.max_drafts
    if shares and len(shares) != drafts:
        raise ConfigError(
            f"forced_acceptance has {len(shares)} places but speculation proposes {drafts} "
            f"drafts; use --speculative mtp:{len(shares)} with a model that has an MTP head"
        )
    if not adaptive_drafts:
        engine.scheduler.policy = None
    if shares:
        engine.worker.fixed = replace(engine.worker.fixed, forced_acceptance=shares)
    return engine


def state_traffic(engine: Engine) -> StateTraffic:
    """How often the engine's scheme writes states."""
    return StateTraffic(interval=getattr(engine.scheduler.scheme, "interval", None))
