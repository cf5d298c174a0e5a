"""Checkpoint folders to parameters.

`StoredWeights` and what goes with it are imported on first use, so that a command that only looks
for a model folder does not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.weights.fingerprint import weights_fingerprint
    from headrace.weights.load import StoredWeights, read_config
    from headrace.weights.quantization import BlockScales, quantization_of
    from headrace.weights.shards import Shards

__all__ = [
    "BlockScales",
    "Shards",
    "StoredWeights",
    "quantization_of",
    "read_config",
    "weights_fingerprint",
]

_HOME = {
    "Shards": "headrace.weights.shards",
    "BlockScales": "headrace.weights.quantization",
    "StoredWeights": "headrace.weights.load",
    "quantization_of": "headrace.weights.quantization",
    "read_config": "headrace.weights.load",
    "weights_fingerprint": "headrace.weights.fingerprint",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
