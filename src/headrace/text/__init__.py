"""Text on both sides of the tokens: tokenizer, chat template, text of a growing sequence.

A leaf package: imports no torch, so that a client or a command can use it without loading it. Its
classes are imported on first use, so that token ids alone need neither tokenizers nor jinja2.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.text.chat_template import ChatTemplate
    from headrace.text.generation import GenerationDefaults
    from headrace.text.stream import StopMatch, TextStream
    from headrace.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "GenerationDefaults", "StopMatch", "TextStream", "Tokenizer"]

_HOME = {
    "ChatTemplate": "headrace.text.chat_template",
    "GenerationDefaults": "headrace.text.generation",
    "StopMatch": "headrace.text.stream",
    "TextStream": "headrace.text.stream",
    "Tokenizer": "headrace.text.tokenizer",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
