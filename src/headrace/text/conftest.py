"""Small tokenizers, one per way in which decoders work."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from headrace.text import Tokenizer

SAMPLE = "the lamp post by the house, wörld 你好 😀 Human: hello there"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level_backend(*, adds_bos: bool = False) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator([SAMPLE] * 9, trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend(), config={"eos_token": "<|im_end|>"})


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """Words with a visible space mark, and one token per byte for all else (as Llama 2 has it)."""
    words = ["▁the", "▁lamp", "▁post", "the", "▁", "l", "a", "m", "p", "o", "s", "t", "\n"]
    vocab = {token: place for place, token in enumerate(["<unk>", "<s>", "</s>", *words])}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, config={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="session")
def word_piece() -> Tokenizer:
    """Words with a space between them and pieces that join on (as BERT has it)."""
    pieces = ["[UNK]", "the", "lamp", "post", "##s", "##ing", "##e", "a", "b", "##b", ",", "##ö"]
    backend = tokenizers.Tokenizer(
        models.WordPiece({piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend)
