"""Which numbers of ranks can share a model, and what they have of it."""

from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.models.config import ModelConfig
from headrace.models.registry import FAMILIES, check_parts, model_class
from headrace.models.shard import Counts
from headrace.testing import TINY_DICTS

NEXT = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_experts": 0}


def config_of(family: str, **changes: Any) -> ModelConfig:  # noqa: ANN401
    return ModelConfig.from_dict(TINY_DICTS[family](**changes))


def test_a_size_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError) as caught:
        check_parts(config_of("qwen3_5"), 3)
    assert str(caught.value) == (
        "tensor_parallel_size is 3 but the model's num_attention_heads is 4, which so many devices "
        "cannot share; sizes that work are 1, 2, 4"
    )


def test_every_size_that_is_named_is_accepted() -> None:
    config = config_of("qwen3_5", intermediate_size=48)
    accepted = []
    for size in range(1, 65):
        try:
            check_parts(config, size)
        except ConfigError as error:
            assert str(size) not in str(error).rpartition(" are ")[2].split(", ")  # noqa: PT017
        else:
            accepted.append(size)
            assert config.part(size).num_attention_heads * size == config.num_attention_heads
    assert accepted == [1, 2, 4]


def test_what_is_copied_need_only_divide_the_ranks() -> None:
    counts = Counts(divided={"heads": 12}, copied={"kv_heads": 2})
    assert [n for n in range(1, 13) if counts.obstacle(n) is None] == [1, 2, 4, 6, 12]
    assert counts.obstacle(3) == ("kv_heads", 2)


def test_a_family_that_is_not_divided_is_refused_with_those_that_are() -> None:
    whole = [
        each for each in FAMILIES if each.config_class.counts is ModelConfig.counts
    ]
    for each in whole:
        model_type = next(iter(each.architectures))
        names = [name for name in TINY_DICTS if TINY_DICTS[name]()["model_type"] == model_type]
        config = config_of(names[0])
        with pytest.raises(
            ConfigError, match=rf"{config.architecture} is not divided .*Qwen3_5ForCausalLM"
        ):
            check_parts(config, 2)
        check_parts(config, 1)


@pytest.mark.parametrize("size", [2, 4])
def test_parts_cover_the_model(size: int) -> None:
    config = config_of("qwen3_5")
    own, whole = config.part(size), model_class(config).expected_tensors(config)
    assert own.num_kv_heads == max(1, config.num_kv_heads // size)
    assert own.vocab_size == config.vocab_size
    assert own.vocab_rows * size >= config.vocab_size
    for name, shape in model_class(config).expected_tensors(own).items():
        assert all(part * size >= count for part, count in zip(shape, whole[name], strict=True))


def test_key_heads_that_share_a_matrix_go_to_one_rank_each() -> None:
    config = config_of("qwen3_5", **NEXT, linear_num_key_heads=1)
    with pytest.raises(ConfigError, match=r"linear_num_key_heads is 1.*sizes that work are 1$"):
        check_parts(config, 2)
