"""Parts of a checkpoint's tensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.models.config import ModelConfig
from headrace.models.registry import model_class, tensor_cuts
from headrace.models.shard import Shard
from headrace.testing import TINY_DICTS, random_weights
from headrace.weights import Shards, StoredWeights
from headrace.weights.cuts import Cut, cut_all, cuts
from headrace.weights.quantization import BlockScales

CONFIG = ModelConfig.from_dict(TINY_DICTS["qwen3_5"]())


def ranges(
    whole: int, own: int, size: int, segments: tuple[tuple[int, ...], tuple[int, ...]] | None = None
) -> list[tuple[tuple[int, int], ...]]:
    """What each rank has of the rows of a tensor."""
    sizes = (lambda _: None, lambda _: None)
    if segments is not None:
        sizes = (lambda _: segments[0], lambda _: segments[1])  # type: ignore[assignment]
    return [
        cuts({"w": (whole, 3)}, {"w": (own, 3)}, rank=rank, size=size, segments=sizes)["w"].ranges
        for rank in range(size)
    ]


def test_ranks_have_equal_parts_in_order() -> None:
    assert ranges(8, 2, 4) == [((0, 2),), ((2, 2),), ((4, 2),), ((6, 2),)]


def test_neighbours_have_copies_of_what_is_fewer_than_ranks() -> None:
    assert ranges(6, 3, 4) == [((0, 3),), ((0, 3),), ((3, 3),), ((3, 3),)]


def test_each_segment_is_cut_by_itself() -> None:
    # One key head for both ranks, and two values of which each has one.
    assert ranges(11, 7, 2, ((3, 8), (3, 4))) == [((0, 3), (3, 4)), ((0, 3), (7, 4))]


def test_the_last_rows_of_a_vocabulary_may_be_missing() -> None:
    assert ranges(7, 4, 2) == [((0, 4),), ((4, 3),)]
    cut = Cut(shape=(4, 1), axis=0, ranges=((4, 3),))
    out = torch.full((4, 1), torch.nan)
    cut.take(torch.arange(7.0)[:, None], out)
    assert out[:, 0].tolist() == [4.0, 5.0, 6.0, 0.0]


def test_a_tensor_that_is_the_same_on_all_ranks_is_not_cut() -> None:
    parts = tensor_cuts(CONFIG, Shard(rank=1, size=2))
    assert "model.norm.weight" not in parts
    assert parts["model.layers.0.mlp.gate_proj.weight"].axis == 0
    assert parts["model.layers.0.mlp.down_proj.weight"].axis == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(TINY_DICTS["qwen3_5"]()))
    save_file(random_weights(CONFIG, 7), path / "model.safetensors")
    return path


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_file_equals_the_part_of_what_it_holds(
    folder: Path, rank: int, dtype: torch.dtype
) -> None:
    parts = tensor_cuts(CONFIG, Shard(rank=rank, size=2))
    shapes = model_class(CONFIG).expected_tensors(CONFIG)
    stored = StoredWeights(Shards.of_folder(folder), shapes, cuts=parts)
    wanted = cut_all(random_weights(CONFIG, 7), parts)
    for name in shapes:
        assert stored.shape(name) == tuple(wanted[name].shape)
        out = torch.empty(stored.shape(name), dtype=dtype)
        stored.copy_to(name, out)
        assert out.equal(wanted[name].to(dtype)), name


def test_no_rank_reads_rows_that_it_has_not(folder: Path) -> None:
    """Bytes that a rank reads of tensors cut along rows, and what it keeps of all."""
    shapes = model_class(CONFIG).expected_tensors(CONFIG)
    read: list[int] = []

    class Counting(StoredWeights):
        def _read(self, name: str, out: torch.Tensor, offset: int = 0) -> None:
            read.append(out.nbytes)
            super()._read(name, out, offset)

    parts = tensor_cuts(CONFIG, Shard(rank=1, size=2))
    stored = Counting(Shards.of_folder(folder), shapes, cuts=parts)
    for name, cut in parts.items():
        if cut.axis == 0:
            out = torch.empty(cut.shape)
            read.clear()
            stored.copy_to(name, out)
            assert sum(read) <= out.nbytes, name
    kept = sum(stored[name].numel() for name in shapes)
    assert kept < 0.6 * sum(torch.Size(shape).numel() for shape in shapes.values())


def test_a_part_of_scaled_blocks_is_the_part_of_their_product(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(8, 12, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator)
    save_file({"w": matrix, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    blocks = BlockScales(rows=4, columns=4)
    shards = Shards.of_folder(tmp_path)
    whole = StoredWeights(shards, {"w": (8, 12)}, quantization=blocks)["w"]
    # Across blocks of both axes.
    for axis, start, length in ((0, 2, 5), (1, 3, 6)):
        shape = (length, 12) if axis == 0 else (8, length)
        cut = Cut(shape=shape, axis=axis, ranges=((start, length),))
        part = StoredWeights(shards, {"w": (8, 12)}, quantization=blocks, cuts={"w": cut})["w"]
        assert part.equal(whole.narrow(axis, start, length))
