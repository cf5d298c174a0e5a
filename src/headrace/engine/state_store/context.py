"""What determines a piece's bytes beside its tokens; pieces are found under equal contexts only."""

from __future__ import annotations

import json
from hashlib import blake2b
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from headrace.config import EngineConfig
    from headrace.worker.transfers import PieceLayouts

_DIGEST_BYTES = 16


def context_of(
    config: EngineConfig, fingerprints: tuple[str, ...], layouts: PieceLayouts
) -> str:
    """Name the context of an engine.

    Layout, scheme, depth and number of drafts are not in it: a checkpoint of a prompt is computed
    by the scan on the absolute grid, which knows nothing of them.

    Args:
        config: Resolved settings.
        fingerprints: Of the weights, and of those of the draft model if there is one.
        layouts: The pieces, whose tensors a context has in common.

    Returns:
        32 hexadecimal digits.
    """
    facts: dict[str, Any] = {
        "weights": fingerprints,
        "dtype": config.dtype,
        "state_dtype": config.state_dtype,
        "kernels": config.kernels,
        "deterministic": config.deterministic,
        "block_size": config.block_size,
        "state_block_size": config.state_block_size,
        "scan_grid": config.scan_grid,
        "headrace": version("headrace"),
        "torch": torch.__version__,
        "device": _device(config),
        "tensors": [
            (part.name, str(part.dtype), part.shape)
            for layout in (layouts.kv, layouts.state) for part in layout.tensors
        ],
    }
    text = json.dumps(facts, sort_keys=True).encode()
    return blake2b(text, digest_size=_DIGEST_BYTES).hexdigest()


def _device(config: EngineConfig) -> list[str]:
    """The device, as far as sums depend on it."""
    if config.device == "cuda":
        return ["cuda", torch.cuda.get_device_name()]
    return ["cpu", torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
