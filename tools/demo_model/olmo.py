"""A small OLMo-hybrid language model, written for training.

Names of parameters and maths are those of the published OLMo-hybrid checkpoints. With
`linear_allow_neg_eigval` the write strength of the delta rule lies in (0, 2) instead of (0, 1): at
2 a write turns the state along its key round, and two such writes cancel. That is what counting
by twos needs. No rotary positions, as published.

Shapes: B rows, T tokens, C model width, H attention heads, D head size, HK heads of the recurrent
layers, K and V their sizes, W conv window.

Source: OLMo hybrid as in transformers; negative eigenvalues: arXiv:2411.12537.
"""

# ruff: noqa: PLR2004 (sizes that tell matrices from vectors)
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .model import MLP, GatedRMSNorm, gated_delta_rule

_GATED_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoShape:
    """Sizes of a model, named as in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    linear_num_key_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    max_position_embeddings: int
    linear_allow_neg_eigval: bool = True
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6

    def config_json(self) -> dict[str, Any]:
        """Give config.json as published checkpoints have it."""
        return {
            "architectures": ["OlmoHybridForCausalLM"],
            "model_type": "olmo_hybrid",
            **dataclasses.asdict(self),
            "layer_types": list(self.layer_types),
            "num_hidden_layers": len(self.layer_types),
            "num_key_value_heads": self.num_attention_heads,
            "linear_num_value_heads": self.linear_num_key_heads,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 2,
            "dtype": "bfloat16",
        }


class Norm(nn.Module):
    """Root-mean-square norm with a plain scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class DeltaNet(nn.Module):
    """Linear attention layer: short convolutions, gated delta rule, gated norm."""

    def __init__(self, shape: OlmoShape) -> None:
        super().__init__()
        self.shape = shape
        width, heads = shape.hidden_size, shape.linear_num_key_heads
        sizes = dict.fromkeys("qk", heads * shape.linear_key_head_dim)
        sizes |= dict.fromkeys("vg", heads * shape.linear_value_head_dim)
        for name, size in {**sizes, "b": heads, "a": heads}.items():
            setattr(self, f"{name}_proj", nn.Linear(width, size, bias=False))
        for name in "qkv":
            size, taps = sizes[name], shape.linear_conv_kernel_dim
            setattr(self, f"{name}_conv1d", nn.Conv1d(size, size, taps, groups=size, bias=False))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        # Slow decay: what was counted must last for hundreds of tokens.
        self.A_log = nn.Parameter(torch.linspace(-12.0, -8.0, heads))
        self.o_norm = GatedRMSNorm(shape.linear_value_head_dim, _GATED_NORM_EPS)
        self.o_proj = nn.Linear(sizes["v"], width, bias=False)

    def _mixed(self, name: str, x: Tensor) -> Tensor:
        """Project and convolve over time, [B, T, HK, K or V]."""
        projected = getattr(self, f"{name}_proj")(x).transpose(1, 2)
        padded = functional.pad(projected, (self.shape.linear_conv_kernel_dim - 1, 0))
        mixed = functional.silu(getattr(self, f"{name}_conv1d")(padded)).transpose(1, 2)
        return mixed.unflatten(-1, (self.shape.linear_num_key_heads, -1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mix tokens, [B, T, C]; gives the mean write share, and its mean square, too."""
        share = self.b_proj(x).sigmoid()
        beta = share * (2.0 if self.shape.linear_allow_neg_eigval else 1.0)
        writes = torch.stack([share.mean(), share.square().mean()])
        log_decay = -self.A_log.exp() * functional.softplus(self.a_proj(x) + self.dt_bias)
        mixed = (self._mixed(name, x) for name in "qkv")
        out, _ = gated_delta_rule(*mixed, log_decay, beta, None, block=4)
        gate = self.g_proj(x).unflatten(-1, (self.shape.linear_num_key_heads, -1))
        return self.o_proj(self.o_norm(out, gate).flatten(2)), writes


class Attention(nn.Module):
    """Full attention without positions; queries and keys normed over all heads at once."""

    def __init__(self, shape: OlmoShape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        width = shape.hidden_size
        for name in "qkvo":
            setattr(self, f"{name}_proj", nn.Linear(width, width, bias=False))
        self.q_norm = Norm(width, shape.rms_norm_eps)
        self.k_norm = Norm(width, shape.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens, [B, T, C]."""
        normed = (self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x))
        heads = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in normed)
        out = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class LinearLayer(nn.Module):
    """Delta net and MLP, each on what was normed first."""

    def __init__(self, shape: OlmoShape) -> None:
        super().__init__()
        self.linear_attn = DeltaNet(shape)
        self.mlp = MLP(shape)
        self.attention_layer_norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.feedforward_layer_norm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the layer, [B, T, C]; gives the moments of its writes too."""
        mixed, writes = self.linear_attn(self.attention_layer_norm(x))
        x = x + mixed
        return x + self.mlp(self.feedforward_layer_norm(x)), writes


class FullLayer(nn.Module):
    """Attention and MLP, what each gives being normed."""

    def __init__(self, shape: OlmoShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_feedforward_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the layer, [B, T, C]; it writes no state."""
        x = x + self.post_attention_layernorm(self.self_attn(x))
        return x + self.post_feedforward_layernorm(self.mlp(x)), x.new_zeros(2)


class Trunk(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, shape: OlmoShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            LinearLayer(shape) if kind == "linear_attention" else FullLayer(shape)
            for kind in shape.layer_types
        )
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class OlmoModel(nn.Module):
    """The language model; the output head is the embedding."""

    def __init__(self, shape: OlmoShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 if "embed_tokens" in name else 0.5 * parameter.shape[1] ** -0.5
                # Blocks start as nothing, which lets Muon's large steps begin gently.
                ends = name.endswith(("linear_attn.o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.0 if ends else std)
        for layer in self.model.layers:
            if isinstance(layer, FullLayer):
                # These blocks are normed on their way out, so nothing would be no gentle start.
                nn.init.normal_(layer.mlp.down_proj.weight, std=0.02)
                nn.init.constant_(layer.post_attention_layernorm.weight, 0.1)
                nn.init.constant_(layer.post_feedforward_layernorm.weight, 0.1)

    def logits(self, ids: Tensor) -> Tensor:
        """Score the vocabulary after every token, [B, T, vocab] from [B, T]."""
        return self.logits_and_writes(ids)[0]

    def logits_and_writes(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Score the vocabulary, and sum means and mean squares of the layers' writes."""
        x = self.model.embed_tokens(ids)
        total = x.new_zeros(2)
        for layer in self.model.layers:
            x, writes = layer(x)
            total = total + writes
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight), total
