"""A model of a given shape with random weights, made on the device.

For measuring speed and memory only. Scales are such that activations stay near 1 in any depth, so
that no value is infinite, denormal or zero where a real one would not be.
"""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import ModelError
from headrace.models.config import ModelConfig
from headrace.models.registry import model_class

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

_DECAY = (-4.0, -1.0)
_TIME_STEP = (-3.0, 0.0)


def read_shape(path: Path) -> ModelConfig:
    """Read a config.json.

    Raises:
        ModelError: It cannot be read, or describes no model that is supported.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"shape {path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"shape {path} holds a {type(raw).__name__}, not an object")
    return ModelConfig.from_dict(raw)


def random_model(
    config: ModelConfig, *, device: str, dtype: str, state_dtype: str, seed: int = 0
) -> Any:  # noqa: ANN401 - any class of headrace.models
    """Make a model.

    Args:
        config: Its sizes.
        device: Where.
        dtype: Compute dtype of the matrices; vectors are made in float32, as they are loaded.
        state_dtype: Dtype of recurrent states.
        seed: Of the draws.
    """
    cls = model_class(config)
    wide: torch.dtype = getattr(torch, dtype)
    weights = dict(draw_weights(config, device=device, dtype=dtype, seed=seed))
    model = cls.from_weights(config, weights, wide, state_dtype)
    del weights
    release_memory()
    return model


def draw_weights(
    config: ModelConfig, *, device: str, dtype: str, seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Draw the tensors of a checkpoint, one after another; arguments as of `random_model`."""
    generator = torch.Generator(device=torch.device(device)).manual_seed(seed)
    wide: torch.dtype = getattr(torch, dtype)
    for name, shape in model_class(config).expected_tensors(config).items():
        yield name, _draw(name, shape, torch.float32 if len(shape) == 1 else wide, generator)


def release_memory() -> None:
    """Give unused device memory back to the driver, where pools are sized by what is free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _draw(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device=generator.device)
    if name.endswith("A_log"):
        return tensor.uniform_(*_DECAY, generator=generator)
    if name.endswith("dt_bias"):
        return tensor.uniform_(*_TIME_STEP, generator=generator)
    if len(shape) == 1:
        # Norms, whether zero-centred or not, and skip factors.
        return tensor.zero_() if name.endswith("bias") else tensor.fill_(1.0)
    return tensor.normal_(0.0, shape[-1] ** -0.5, generator=generator)
