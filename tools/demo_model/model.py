"""A small Qwen3.5-dense language model with an MTP head, written for training.

Names of parameters and maths are those of the published Qwen3.5 checkpoints, so that any engine
that reads them reads ours. Two things serve training alone: several documents share one row, and
"cuts" make a layer forget (see `Cuts`).

Shapes: B rows, T tokens, C model width, H query heads, G KV heads, D head size, HK and HV key and
value heads of the recurrent layers, K and V their sizes, W conv window, L layers.

Source: Gated DeltaNet, arXiv:2412.06464, in the chunked form of its section 3.3.
"""

# ruff: noqa: PLR2004 (shares and sizes of a recipe read best where they are used)
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

CHUNK = 64
# exp of this is below every float32 that matters, and sums of it keep their precision.
_FORGET = -60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model, named as in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    max_position_embeddings: int
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6

    def config_json(self) -> dict[str, Any]:
        """Give config.json as published text checkpoints have it."""
        config = dataclasses.asdict(self)
        factor, theta = config.pop("partial_rotary_factor"), config.pop("rope_theta")
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **config,
            "layer_types": list(self.layer_types),
            "num_hidden_layers": len(self.layer_types),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": theta,
                "partial_rotary_factor": factor,
            },
            "partial_rotary_factor": factor,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 2,
            "dtype": "bfloat16",
        }


class Cuts(NamedTuple):
    """Where layers forget: True at the first token that no longer sees what came before.

    Attributes:
        state: Recurrent state of linear layers, keys and values of full layers, [L, B, T] bool.
        conv: Windows of linear layers, [L, B, T] bool.
        documents: First tokens of documents, where every layer forgets, [B, T] bool.
    """

    state: Tensor
    conv: Tensor
    documents: Tensor


@dataclass(slots=True)
class LayerCache:
    """What one layer keeps between calls; None before the first.

    Attributes:
        conv: Newest inputs of the convolution, [B, HK*K*2 + HV*V, W-1].
        state: Recurrent state, [B, HV, K, V] float32.
        key, value: Keys after rotary positions, and values, [B, G, S, D].
    """

    conv: Tensor | None = None
    state: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None


class RMSNorm(nn.Module):
    """Root-mean-square norm with the scale stored as its difference from one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; float32 out."""
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


class GatedRMSNorm(nn.Module):
    """Norm with a plain scale, then a SiLU gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise x over its last dimension and gate it; float32 out."""
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return x * functional.silu(gate.float())


class _UnitLowerInverse(torch.autograd.Function):
    """Inverse of I + A for strictly lower triangular A, by blocks.

    Small blocks come from a product of powers (A to the power of their size is zero), larger ones
    from pairs of smaller. Powers over the whole chunk would lose everything to cancellation.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, block: int) -> Tensor:  # noqa: ANN401 (torch gives it no type)
        size = a.shape[-1]
        lead = a.shape[:-2]
        block = min(block, size)
        num = size // block

        def diagonal(width: int, row: int, col: int) -> Tensor:
            # Blocks [n, n] of the (2 x width) grid, their sub-block (row, col).
            count = size // (2 * width)
            grid = a.view(*lead, count, 2, width, count, 2, width)
            picked = grid.diagonal(dim1=-6, dim2=-3)
            return picked[..., row, :, col, :, :].movedim(-1, -3)

        blocks = a.view(*lead, num, block, num, block).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        eye = torch.eye(block, dtype=a.dtype, device=a.device)
        power = -blocks
        inverse = eye + power
        steps = block
        while steps > 2:
            power = power @ power
            inverse = inverse + inverse @ power
            steps //= 2
        width = block
        while width < size:
            upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
            corner = -(lower @ diagonal(width, 1, 0) @ upper)
            top = torch.cat([upper, torch.zeros_like(upper)], -1)
            inverse = torch.cat([top, torch.cat([corner, lower], -1)], -2)
            width *= 2
        inverse = inverse.reshape(a.shape)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 (torch: no type)
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1), None


def unit_lower_inverse(a: Tensor, block: int = 16) -> Tensor:
    """Invert I + A, A strictly lower triangular, [..., N, N] float32, N a power of two.

    Args:
        a: The matrices. Their elements must be at most 1 for blocks of 16, and at most 2 for 4:
            beyond that the powers grow so large that float32 loses the difference.
        block: Size of the blocks whose powers are taken, a power of two.
    """
    result: Tensor = _UnitLowerInverse.apply(a, block)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def _scan(
    new: Tensor, old: Tensor, key_decayed: Tensor, kept: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the state from chunk to chunk.

    Not compiled: unrolled, it takes longer to compile than the training it would save.

    Args:
        new: What chunks would write to an empty state, [R, N, 64, V].
        old: What they take back of the state before, [R, N, 64, K].
        key_decayed: [R, N, 64, K].
        kept: Decay over each chunk, [R, N, 1, 1].
        state: Before the first chunk, [R, K, V].

    Returns:
        The states before each chunk [R, N, K, V], the writes [R, N, 64, V] and the last state.
    """
    before, written = [], []
    for n in range(new.shape[1]):
        before.append(state)
        fresh = torch.baddbmm(new[:, n], old[:, n], state, alpha=-1)
        written.append(fresh)
        state = torch.baddbmm(state * kept[:, n], key_decayed[:, n].transpose(-1, -2), fresh)
    return torch.stack(before, 1), torch.stack(written, 1), state


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    *,
    block: int = 16,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over T tokens, 64 at a time.

    Args:
        query: [B, T, HV, K] float32, not normalised.
        key: The same.
        value: [B, T, HV, V] float32.
        log_decay: At most 0, [B, T, HV] float32.
        beta: Write strength, [B, T, HV] float32.
        state: State before the first token, [B, HV, K, V] float32; None is zero.
        block: See `unit_lower_inverse`; 4 where beta may be over 1.

    Returns:
        Outputs [B, T, HV, V] float32 and the state after the last token, [B, HV, K, V].
    """
    rows, length, heads, key_size = query.shape
    pad = -length % CHUNK

    def chunked(x: Tensor) -> Tensor:
        # [B, T, HV, X] -> [B * HV, N, 64, X]
        x = functional.pad(x, (0, 0, 0, 0, 0, pad)).transpose(1, 2)
        return x.reshape(rows * heads, -1, CHUNK, x.shape[-1])

    query = query * torch.rsqrt(query.pow(2).sum(-1, keepdim=True) + 1e-6) * key_size**-0.5
    key = key * torch.rsqrt(key.pow(2).sum(-1, keepdim=True) + 1e-6)
    q, k, v = chunked(query), chunked(key), chunked(value)
    decay = chunked(log_decay.unsqueeze(-1)).squeeze(-1).cumsum(-1)
    strength = chunked(beta.unsqueeze(-1))
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~lower, -1e9).exp()
    key_decayed = k * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    query_decayed = q * decay.exp().unsqueeze(-1)
    k_strong = k * strength
    inverse = unit_lower_inverse((k_strong @ k.transpose(-1, -2) * between).tril(-1), block)
    new = inverse @ (v * strength)
    old = inverse @ (k_strong * decay.exp().unsqueeze(-1))
    within = q @ k.transpose(-1, -2) * between
    kept = decay[..., -1].exp()[..., None, None]

    current = (
        torch.zeros(rows * heads, key_size, v.shape[-1], dtype=torch.float32, device=q.device)
        if state is None
        else state.reshape(rows * heads, key_size, -1)
    )
    before, written, current = _scan(new, old, key_decayed, kept, current)
    out = query_decayed @ before + within @ written
    out = out.reshape(rows, heads, -1, v.shape[-1])[:, :, :length].transpose(1, 2)
    return out, current.reshape(rows, heads, key_size, -1)


class GatedDeltaNet(nn.Module):
    """Linear attention layer: short convolution, gated delta rule, gated norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.key_dim = shape.linear_num_key_heads * shape.linear_key_head_dim
        self.value_dim = shape.linear_num_value_heads * shape.linear_value_head_dim
        channels = 2 * self.key_dim + self.value_dim
        window = shape.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(channels, channels, window, groups=channels, bias=False)
        heads = shape.linear_num_value_heads
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        # Decay rates from slow to fast: some heads must remember thousands of tokens.
        self.A_log = nn.Parameter(torch.linspace(-6.0, 0.0, heads))
        self.norm = GatedRMSNorm(shape.linear_value_head_dim, shape.rms_norm_eps)
        self.out_proj = nn.Linear(self.value_dim, shape.hidden_size, bias=False)
        self.in_proj_qkv = nn.Linear(shape.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden_size, self.value_dim, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden_size, heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden_size, heads, bias=False)

    def _convolve(self, x: Tensor, segments: Tensor | None, cache: LayerCache | None) -> Tensor:
        """Convolve over time, x [B, T, F]; a tap from another segment counts as zero."""
        length, taps = x.shape[1], self.shape.linear_conv_kernel_dim - 1
        weight = self.conv1d.weight.squeeze(1)
        if cache is not None:
            past = (
                x.new_zeros(x.shape[0], taps, x.shape[2])
                if cache.conv is None
                else cache.conv.transpose(1, 2)
            )
            x = torch.cat([past, x], 1)
            cache.conv = x[:, -taps:].transpose(1, 2)
        else:
            x = functional.pad(x, (0, 0, taps, 0))
        out = x[:, taps:] * weight[:, taps]
        for back in range(1, taps + 1):
            tap = x[:, taps - back : taps - back + length] * weight[:, taps - back]
            if segments is not None:
                same = functional.pad(segments, (back, 0))[:, :length] == segments
                tap = tap * same.unsqueeze(-1)
            out = out + tap
        return functional.silu(out)

    def forward(
        self,
        x: Tensor,
        state_cut: Tensor | None = None,
        conv_segments: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Mix tokens, x [B, T, C]; state_cut [B, T] bool and conv_segments [B, T] int or None."""
        rows, length, _ = x.shape
        shape = self.shape
        mixed = self._convolve(self.in_proj_qkv(x).float(), conv_segments, cache)
        query, key, value = mixed.split([self.key_dim, self.key_dim, self.value_dim], -1)
        repeat = shape.linear_num_value_heads // shape.linear_num_key_heads
        query = query.view(rows, length, -1, shape.linear_key_head_dim)
        key = key.view(rows, length, -1, shape.linear_key_head_dim)
        query, key = (y.repeat_interleave(repeat, 2) for y in (query, key))
        value = value.view(rows, length, -1, shape.linear_value_head_dim)
        beta = self.in_proj_b(x).float().sigmoid()
        rate = functional.softplus(self.in_proj_a(x).float() + self.dt_bias)
        log_decay = -self.A_log.exp() * rate
        if state_cut is not None:
            log_decay = log_decay + _FORGET * state_cut.unsqueeze(-1)
        with torch.autocast(x.device.type, enabled=False):
            out, state = gated_delta_rule(
                query, key, value, log_decay, beta, cache.state if cache is not None else None
            )
        if cache is not None:
            cache.state = state
        gate = self.in_proj_z(x).view(rows, length, -1, shape.linear_value_head_dim)
        return self.out_proj(self.norm(out, gate).reshape(rows, length, -1))


class Attention(nn.Module):
    """Full attention with grouped KV heads, partial rotary positions and an output gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads, kv_heads, size = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = nn.Linear(shape.hidden_size, heads * size * 2, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(size, shape.rms_norm_eps)
        self.k_norm = RMSNorm(size, shape.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Mix tokens, x [B, T, C]; mask [B, 1, T, T] bool, or None for plain causal attention."""
        rows, length, _ = x.shape
        heads, size = self.shape.num_attention_heads, self.shape.head_dim
        query, gate = self.q_proj(x).view(rows, length, heads, 2 * size).chunk(2, -1)
        query = rotate(self.q_norm(query).transpose(1, 2), rotary)
        key = self.k_proj(x).view(rows, length, -1, size)
        key = rotate(self.k_norm(key).transpose(1, 2), rotary)
        value = self.v_proj(x).view(rows, length, -1, size).transpose(1, 2)
        key, query = key.to(value.dtype), query.to(value.dtype)
        causal = mask is None
        if cache is not None:
            if cache.key is not None and cache.value is not None:
                key, value = torch.cat([cache.key, key], 2), torch.cat([cache.value, value], 2)
            cache.key, cache.value = key, value
            total = key.shape[2]
            if total != length:
                positions = torch.arange(total, device=x.device)
                mask = positions[None, :] <= positions[total - length :, None]
                causal = False
        repeat = heads // self.shape.num_key_value_heads
        key, value = (y.repeat_interleave(repeat, 1) for y in (key, value))
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal
        )
        out = out.transpose(1, 2) * torch.sigmoid(gate)
        return self.o_proj(out.reshape(rows, length, -1))


class MLP(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token, [B, T, C]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One layer: token mixer and feed-forward block, each around a residual."""

    def __init__(self, shape: Shape, layer_type: str) -> None:
        super().__init__()
        self.is_linear = layer_type == "linear_attention"
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(shape)
        else:
            self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        *,
        state_cut: Tensor | None = None,
        conv_segments: Tensor | None = None,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Run the layer, [B, T, C]."""
        hidden = self.input_layernorm(x)
        if self.is_linear:
            x = x + self.linear_attn(hidden, state_cut, conv_segments, cache)
        else:
            x = x + self.self_attn(hidden, rotary, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape, kind) for kind in shape.layer_types)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class MTP(nn.Module):
    """Draft head: from a token and the state that predicted it to the token after."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(shape, "full_attention")])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Model(nn.Module):
    """The language model with its draft head; the output head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.mtp = MTP(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 if "embed_tokens" in name else 0.5 * parameter.shape[1] ** -0.5
                # Blocks start as nothing, which lets Muon's large steps begin gently.
                nn.init.normal_(parameter, std=0.0 if name.endswith(_OUTPUTS) else std)

    def hidden(
        self, ids: Tensor, cuts: Cuts | None = None, caches: list[LayerCache] | None = None
    ) -> Tensor:
        """Give the hidden states after the last norm.

        Args:
            ids: Tokens, [B, T] int64.
            cuts: Where layers forget; None runs each row as one document.
            caches: One per layer, read and updated; None starts from nothing.

        Returns:
            [B, T, C] float32.
        """
        past = 0
        for cache in caches or []:
            if cache.key is not None:
                past = cache.key.shape[2]
        rotary = rotary_table(self.shape, ids.shape[1], ids.device, past)
        x = self.model.embed_tokens(ids)
        for index, layer in enumerate(self.model.layers):
            forgets: dict[str, Any] = {}
            if cuts is not None:
                state_cut = cuts.state[index] | cuts.documents
                if layer.is_linear:
                    conv_cut = cuts.conv[index] | cuts.documents
                    forgets = {"state_cut": state_cut, "conv_segments": segments_of(conv_cut)}
                else:
                    forgets = {"mask": segment_mask(segments_of(state_cut))}
            x = layer(x, rotary, cache=caches[index] if caches else None, **forgets)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the vocabulary, [B, T, vocab] from [B, T, C]."""
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def draft_hidden(
        self,
        next_ids: Tensor,
        hidden: Tensor,
        documents: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Run the draft head.

        Args:
            next_ids: The token after each position, [B, T] int64.
            hidden: Hidden states after the last norm, [B, T, C].
            documents: First tokens of documents, [B, T] bool, or None.
            cache: Keys and values of earlier calls, updated.

        Returns:
            Hidden states that predict the token after `next_ids`, [B, T, C].
        """
        mtp = self.mtp
        embedded = mtp.pre_fc_norm_embedding(self.model.embed_tokens(next_ids))
        x = mtp.fc(torch.cat([embedded, mtp.pre_fc_norm_hidden(hidden)], -1))
        past = cache.key.shape[2] if cache is not None and cache.key is not None else 0
        rotary = rotary_table(self.shape, next_ids.shape[1], next_ids.device, past)
        mask = None if documents is None else segment_mask(segments_of(documents))
        return mtp.norm(mtp.layers[0](x.float(), rotary, mask=mask, cache=cache))

    def new_caches(self) -> list[LayerCache]:
        """Give empty caches for `hidden`."""
        return [LayerCache() for _ in self.shape.layer_types]


_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def segments_of(cut: Tensor) -> Tensor:
    """Number the segments that cuts make, [B, T] int32 from [B, T] bool."""
    return cut.cumsum(-1, dtype=torch.int32)


def segment_mask(segments: Tensor) -> Tensor:
    """Let each token see the earlier ones of its segment, [B, 1, T, T] bool."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return ((segments[:, :, None] == segments[:, None, :]) & causal).unsqueeze(1)


def rotary_table(
    shape: Shape, length: int, device: torch.device, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Give cosines and sines of the rotary positions from `start`, [T, rotary size] float32."""
    size = int(shape.head_dim * shape.partial_rotary_factor)
    steps = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    positions = torch.arange(start, start + length, device=device, dtype=torch.float32)
    angles = positions[:, None] * (1.0 / shape.rope_theta**steps)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first dimensions of each head by the token's position, x [B, H, T, D] float32."""
    cos, sin = rotary
    size = cos.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, kept], -1)


NANO = Shape(
    vocab_size=512,
    hidden_size=96,
    intermediate_size=96,
    layer_types=("linear_attention", "linear_attention", "full_attention", "linear_attention"),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    max_position_embeddings=4096,
)
DEMO = Shape(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=512,
    layer_types=("linear_attention", "linear_attention", "full_attention") * 2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    max_position_embeddings=8192,
    rope_theta=100_000.0,
)
