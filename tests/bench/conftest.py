"""The smallest hybrid shape that every benchmark can run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_experts": 0,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "full_attention_interval": 2,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.25,
    "dtype": "bfloat16",
    "eos_token_id": 1,
}


@pytest.fixture(scope="session")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the shape."""
    path = tmp_path_factory.mktemp("shape") / "tiny.json"
    path.write_text(json.dumps(SHAPE))
    return path
