"""Choosing a token with numpy, from the parameters' meaning; nothing of the worker is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from headrace.text import Tokenizer

if TYPE_CHECKING:
    from headrace.sampling_params import SamplingParams

MASK_64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def gumbel(seed: int, position: int, vocab_size: int) -> np.ndarray:
    key = mix((mix(seed & MASK_64) + position * GOLDEN) & MASK_64)
    bits = [mix((key + entry * GOLDEN) & MASK_64) >> 41 for entry in range(vocab_size)]
    uniform = (torch.tensor(bits, dtype=torch.float32) + 0.5) * 2.0**-23
    noise: np.ndarray = (-torch.log(-torch.log(uniform))).numpy()
    return noise


def choose(params: SamplingParams, logits: np.ndarray, position: int) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    scaled = logits / np.float32(params.temperature)
    order = np.argsort(-scaled, kind="stable")
    if params.top_k > 0:
        scaled[scaled < scaled[order[params.top_k - 1]]] = -np.inf
    if params.top_p < 1:
        weights = np.exp(scaled.astype(np.float64) - scaled.max())
        mass = np.cumsum(weights[order]) / weights.sum()
        scaled[order[1:][mass[:-1] >= params.top_p]] = -np.inf
    scaled[scaled < scaled.max() + np.log(np.float32(params.min_p) + np.float32(0))] = -np.inf
    assert params.seed is not None
    return int((scaled + gumbel(params.seed, position, len(logits))).argmax())


def ascii_tokenizer(vocab_size: int, *, num_reserved: int = 0) -> Tokenizer:
    """ASCII characters by their codes, and the rest of the byte alphabet as far as it fits.

    The first `num_reserved` ids have no text.
    """
    ascii_bytes = {chr(code): code for code in range(33, 127)}
    ascii_bytes["Ġ"] = 32
    rest = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(ascii_bytes))
    free = [code for code in range(num_reserved, vocab_size) if code not in ascii_bytes.values()]
    vocab = ascii_bytes | dict(zip(rest, free, strict=False))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)
