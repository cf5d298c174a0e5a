"""LFM2 in plain float32: the pattern for a reference of a family that transformers lacks.

Nothing here comes from `headrace.models` or `headrace.ops`, and nothing is kept between calls, so
what it shares with them is the description alone. transformers has LFM2, so a test can hold this
against it.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class Lfm2Reference:
    """The model of a folder.

    Args:
        folder: Holds config.json and the files of weights.
    """

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        self.weights = {name: w.float() for file in files for name, w in load_file(file).items()}

    def __call__(self, token_ids: Tensor, *, use_cache: bool) -> SimpleNamespace:
        """Return an object with the logits of token ids [1, T], [1, T, vocabulary]."""
        assert not use_cache
        embedding = self.weights["model.embed_tokens.weight"]
        hidden = embedding[token_ids[0]]
        for i in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{i}."
            own = {
                name.removeprefix(prefix): w
                for name, w in self.weights.items()
                if name.startswith(prefix)
            }
            mix = self._convolution if "conv.conv.weight" in own else self._attention
            hidden = hidden + mix(self._norm(hidden, own["operator_norm.weight"]), own)
            normed = self._norm(hidden, own["ffn_norm.weight"])
            gate, up, down = (own[f"feed_forward.{name}.weight"] for name in ("w1", "w3", "w2"))
            hidden = hidden + (silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        final = self._norm(hidden, self.weights["model.embedding_norm.weight"])
        return SimpleNamespace(logits=(final @ embedding.T)[None])

    def _norm(self, x: Tensor, scale: Tensor) -> Tensor:
        mean_square = x.square().mean(-1, keepdim=True)
        return scale * x / (mean_square + self.config["norm_eps"]).sqrt()

    def _convolution(self, x: Tensor, own: dict[str, Tensor]) -> Tensor:
        before, after, values = (x @ own["conv.in_proj.weight"].T).chunk(3, -1)
        inputs, taps = before * values, own["conv.conv.weight"][:, 0]
        mixed = torch.zeros_like(inputs)
        for t in range(len(inputs)):
            for age in range(min(t + 1, taps.shape[1])):
                mixed[t] += taps[:, -1 - age] * inputs[t - age]
        return (after * mixed) @ own["conv.out_proj.weight"].T

    def _attention(self, x: Tensor, own: dict[str, Tensor]) -> Tensor:
        size = self.config["hidden_size"] // self.config["num_attention_heads"]
        query, key, value = (
            (x @ own[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, size)) for name in "qkv"
        )
        query = self._rotated(self._norm(query, own["self_attn.q_layernorm.weight"]))
        key = self._rotated(self._norm(key, own["self_attn.k_layernorm.weight"]))
        shared = query.shape[1] // key.shape[1]
        out = torch.zeros_like(query)
        for t in range(len(x)):
            for head in range(query.shape[1]):
                seen = key[: t + 1, head // shared], value[: t + 1, head // shared]
                scores = seen[0] @ query[t, head] * size**-0.5
                out[t, head] = scores.softmax(0) @ seen[1]
        return out.flatten(1) @ own["self_attn.out_proj.weight"].T

    def _rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        rates = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = (torch.arange(len(x))[:, None] * rates)[:, None]
        first, second = x.split(half, -1)
        turned = first * angles.cos() - second * angles.sin()
        return torch.cat([turned, second * angles.cos() + first * angles.sin()], -1)
