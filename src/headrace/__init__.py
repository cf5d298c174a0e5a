"""An inference engine for hybrid language models.

The names below load on first use, so that `import headrace` and `headrace --help` stay instant:
none of them imports torch before it is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.config import EngineConfig
    from headrace.engine.async_llm import AsyncLLM
    from headrace.engine.llm import LLM
    from headrace.outputs import CompletionOutput, RequestOutput
    from headrace.sampling_params import SamplingParams
    from headrace.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOME = {
    "LLM": "headrace.engine.llm",
    "AsyncLLM": "headrace.engine.async_llm",
    "CompletionOutput": "headrace.outputs",
    "EngineConfig": "headrace.config",
    "RequestOutput": "headrace.outputs",
    "SamplingParams": "headrace.sampling_params",
    "StructuredOutputsParams": "headrace.structured_outputs",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module the first time it is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
