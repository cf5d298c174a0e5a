"""A model that knows nothing and runs in a moment."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 256,
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with random weights, a tokenizer of bytes and a chat template."""
    import torch  # noqa: PLC0415 - only these tests need it
    from safetensors.torch import save_file  # noqa: PLC0415
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    from headrace.models.config import ModelConfig  # noqa: PLC0415
    from headrace.models.registry import model_class  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("random-model")
    seed = secrets.randbits(32)
    print(f"weights of seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    config = ModelConfig.from_dict(CONFIG)
    shapes = model_class(config).expected_tensors(config)
    save_file(
        {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", CONFIG),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}),
        ("generation_config.json", {"do_sample": False, "eos_token_id": 257}),
    ):
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture
def references_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let references stand in for fused kernels: what those are asked for, without their code."""
    from headrace.testing import KERNEL_OPS  # noqa: PLC0415 - only these tests need it

    for op in KERNEL_OPS:
        monkeypatch.setattr(op, "can_launch", lambda _: False)
