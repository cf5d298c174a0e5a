"""Small random models whose outputs depend on their state, for tests without a checkpoint.

Freshly initialised hybrid models hardly notice when their recurrent state is erased, so a test on
them passes with any state. Two kinds of weights make it matter:

* variant "A": slow decay, strong convolutions, projections times 4. Erasing the state changes the
  logits by more than 0.1. For tests about state: caching, resuming, drafts, chunks.
* variant "B": everything random, norms and gates included. For tests about loading and wiring.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from headrace.models.config import ModelConfig
from headrace.models.registry import check_parts, model_class, tensor_cuts
from headrace.models.shard import Shard
from headrace.ops import (
    add_rms_norm,
    attention_inputs,
    few_rows_linear,
    fixed_linear,
    gated_delta_decode,
    gated_delta_prefill,
    gated_product,
    mamba2_decode,
    paged_decode,
    paged_prefill,
    routed_experts,
    token_choice,
)
from headrace.tiny_configs import CONFIGS
from headrace.weights.cuts import cut_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from headrace.models.model import HybridModel
    from headrace.models.qwen3_5 import Qwen35Model
    from headrace.rt import Group

Variant = Literal["A", "B"]
Result = TypeVar("Result")

INIT_STD = 0.02
_OUTER = ("embed_tokens.weight", "embeddings.weight", "lm_head.weight")
VARIANT_A_DECAY = 0.02
VARIANT_A_CONV_STD = 0.5
VARIANT_A_GAIN = 4.0
VARIANT_A_SKIP = 0.1
VARIANT_B_STD = 0.08
VARIANT_B_NORM_STD = 0.05
VARIANT_B_X_PROJ_STD = 0.4
"""Of Mamba-1's projection to B and C: what the state gives is quadratic in it."""


KERNEL_OPS = (
    add_rms_norm,
    attention_inputs,
    few_rows_linear,
    fixed_linear,
    gated_delta_decode,
    gated_delta_prefill,
    gated_product,
    mamba2_decode,
    paged_decode,
    paged_prefill,
    routed_experts,
    token_choice,
)
"""Operations that steps take where `kernels` is triton; each decides by its `can_launch`."""

KERNEL_SIZES: dict[str, Any] = {"linear_key_head_dim": 16, "linear_value_head_dim": 32}
"""Changes of the small Qwen3.5 with which the fused kernels can run it."""

KERNEL_FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {"head_dim": 16, "attn_rotary_emb": 8, "mamba_d_state": 16},
    "falcon_h1": {"mamba_d_state": 16},
    "granite": {"hidden_size": 64, "mamba_d_state": 16, "mamba_n_heads": 8},
    "mamba2": {"state_size": 16},
    "nemotron_h": {"ssm_state_size": 16},
    "zamba2": {
        "hidden_size": 64, "attention_head_dim": 32, "attention_hidden_size": 128,
        "kv_channels": 16, "mamba_d_state": 16, "n_mamba_heads": 8,
    },
}  # fmt: skip
"""The same of further families' small models."""


def _with(whole: dict[str, Any], /, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON values
    values = copy.deepcopy(whole) | changes
    return {name: value for name, value in values.items() if value is not ...}


TINY_DICTS: dict[str, Callable[..., dict[str, Any]]] = {
    family: partial(_with, whole) for family, whole in CONFIGS.items()
}
"""Makes the contents of a small config.json of each family.

Keyword arguments replace or add keys; `...` leaves one out.
"""


def tiny_config(**overrides: Any) -> ModelConfig:  # noqa: ANN401 - JSON values
    """Return a small Qwen3.5's parsed config; see `TINY_DICTS`."""
    return ModelConfig.from_dict(TINY_DICTS["qwen3_5"](**overrides))


def random_weights(config: ModelConfig, seed: int, variant: Variant = "A") -> dict[str, Tensor]:
    """Draw weights under which the state matters.

    Args:
        config: The model's sizes.
        seed: Of the draw.
        variant: "A" or "B", see the module.

    Returns:
        Tensors by checkpoint name, f32 on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = _variant_a if variant == "A" else _variant_b
    shapes = model_class(config).expected_tensors(config)
    weights = {name: draw(name, shape, generator) for name, shape in shapes.items()}
    for name, tensor in weights.items():
        if _is_norm(name) and not _is_centred(config, name):
            tensor.add_(1.0)
    return weights


def tiny_model(seed: int = 0, variant: Variant = "A", **overrides: Any) -> Qwen35Model:  # noqa: ANN401 - JSON values
    """Build a small random float32 model on the CPU.

    Args:
        seed: Of the weights.
        variant: "A" or "B", see the module.
        overrides: Fields of the config to replace.

    Returns:
        The model.
    """
    config = tiny_config(**overrides)
    return model_class(config).from_weights(
        config, random_weights(config, seed, variant), torch.float32
    )


def tiny_family(
    family: str,
    seed: int = 0,
    variant: Variant = "A",
    **overrides: Any,  # noqa: ANN401 - JSON values
) -> HybridModel:
    """Build a small random float32 model of any family on the CPU.

    Args:
        family: Key of `TINY_DICTS`.
        seed: Of the weights.
        variant: "A" or "B", see the module.
        overrides: Fields of the config to replace.

    Returns:
        The model.
    """
    config = ModelConfig.from_dict(TINY_DICTS[family](**overrides))
    model: HybridModel = model_class(config).from_weights(
        config, random_weights(config, seed, variant), torch.float32
    )
    return model


def tiny_parts(
    family: str,
    groups: Sequence[Group],
    seed: int = 0,
    variant: Variant = "A",
    **overrides: Any,  # noqa: ANN401 - JSON values
) -> list[HybridModel]:
    """Divide the model that `tiny_family` builds among ranks.

    Args:
        family: Key of `TINY_DICTS`.
        groups: One for each rank, in order.
        seed: Of the weights.
        variant: "A" or "B", see the module.
        overrides: Fields of the config to replace.

    Returns:
        The ranks' models.
    """
    config = ModelConfig.from_dict(TINY_DICTS[family](**overrides))
    weights, cls = random_weights(config, seed, variant), model_class(config)
    check_parts(config, len(groups))
    return [
        cls.from_weights(
            config.part(shard.size),
            cut_all(weights, tensor_cuts(config, shard)),
            torch.float32,
            shard=shard,
        )
        for shard in map(Shard.of, groups)
    ]


def on_all_ranks(
    models: Sequence[HybridModel], function: Callable[[HybridModel], Result]
) -> list[Result]:
    """Call a function with each part of a model, in a thread for each.

    Args:
        models: The parts, of `rt.LocalGroup`s.
        function: What uses one.

    Returns:
        Its results, in the order of the parts.
    """
    def call(model: HybridModel) -> Result:
        try:
            return function(model)
        except BaseException:
            assert model.shard.group is not None
            model.shard.group.abort()
            raise

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(call, models))


def _is_norm(name: str) -> bool:
    return "norm" in name


def _is_convolution(shape: tuple[int, ...]) -> bool:
    """Whether these are taps of a depthwise convolution, [F, 1, W], whatever their name is."""
    return len(shape) == 3 and shape[1] == 1  # noqa: PLR2004


def _is_centred(config: ModelConfig, name: str) -> bool:
    """Whether a norm's factors are 1 + w; the gated norm of Gated DeltaNet is plain."""
    return config.model_type.startswith("qwen") and not name.endswith("linear_attn.norm.weight")


def _variant_a(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("A_log"):
        return torch.full(shape, VARIANT_A_DECAY).log()
    if name.endswith("dt_bias"):
        return torch.ones(shape)
    if name.endswith(".D"):
        return torch.full(shape, VARIANT_A_SKIP)
    if _is_norm(name) or name.endswith((".bias", "expert_bias")):
        return torch.zeros(shape)
    std = INIT_STD
    if _is_convolution(shape):
        std = VARIANT_A_CONV_STD
    elif not name.endswith(_OUTER):
        std = INIT_STD * VARIANT_A_GAIN
    return torch.randn(shape, generator=generator) * std


def _variant_b(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("A_log"):
        return torch.rand(shape, generator=generator) * 3.0 - 4.0
    if name.endswith("dt_bias"):
        return torch.rand(shape, generator=generator) * 3.0 - 3.0
    if name.endswith(".D"):
        return torch.rand(shape, generator=generator) + 0.5
    if _is_norm(name):
        return torch.randn(shape, generator=generator) * VARIANT_B_NORM_STD
    if name.endswith("x_proj.weight"):
        return torch.randn(shape, generator=generator) * VARIANT_B_X_PROJ_STD
    return torch.randn(shape, generator=generator) * VARIANT_B_STD
