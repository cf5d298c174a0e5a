"""From files to a model: FP8 blocks, dtypes on disk, a missing MTP layer, the memory it takes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.inspection import inspect_model
from headrace.engine.load import Checkpoint, load_model
from headrace.errors import ConfigError, HeadraceError, UnsupportedModelError, WeightsError
from headrace.models.config import ModelConfig
from headrace.models.reference_loop import run_reference
from headrace.models.registry import model_class
from headrace.testing import TINY_DICTS, random_weights

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

CPU = torch.device("cpu")
LOADED = EngineConfig(dtype="float32", state_dtype="float32")
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
LARGEST_E4M3 = 448.0


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    value = torch.seed() % 2**31
    print(f"{request.node.name}: weights of seed {value}")
    return value


def write_folder(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, files: int = 1
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = names[number * len(names) // files : (number + 1) * len(names) // files]
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


def load(folder: Path, config: EngineConfig = LOADED) -> Any:  # noqa: ANN401
    return load_model(Checkpoint.of_folder(folder), config, CPU)


def logits_of(model: Any) -> Tensor:  # noqa: ANN401
    return run_reference(model, [3, 1, 4, 1, 5, 9, 2, 6], 4, scan_grid=16).logits


# FP8 ---------------------------------------------------------------------------------------------


def block_index(shape: torch.Size, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    sizes = zip(shape[-2:], block, strict=True)
    rows, columns = (torch.arange(size) // part for size, part in sizes)
    return rows[:, None].expand(shape[-2:]), columns.expand(shape[-2:])


def quantise(
    weights: dict[str, Tensor], block: tuple[int, int], scale_dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Store matrices as published checkpoints do; also give what the stored numbers stand for."""
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in weights.items():
        is_matrix = "proj" in name and "in_proj_a" not in name and "in_proj_b" not in name
        if not is_matrix:
            stored[name] = meant[name] = weight
            continue
        at = (..., *block_index(weight.shape, block))
        count = [-(-size // part) for size, part in zip(weight.shape[-2:], block, strict=True)]
        largest = torch.zeros(*weight.shape[:-2], *count)
        for i in range(weight.shape[-2]):
            for j in range(0, weight.shape[-1], block[1]):
                spot = (..., i // block[0], j // block[1])
                part = weight[..., i, j : j + block[1]].abs().amax(-1)
                largest[spot] = torch.maximum(largest[spot], part)
        scales = (largest / LARGEST_E4M3).clamp_min(1e-12).to(scale_dtype)
        stored[name] = (weight / scales.float()[at]).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scales
        meant[name] = stored[name].float() * scales.float()[at]
    return stored, meant


@pytest.mark.parametrize(
    ("family", "block", "scale_dtype"),
    [
        ("qwen3_5", (128, 128), torch.float32),
        ("qwen3_5", (16, 32), torch.bfloat16),
        ("qwen3_5_moe", (16, 20), torch.float8_e8m0fnu),
        ("qwen3_next", (32, 16), torch.float32),
        ("granite", (16, 16), torch.float32),
    ],
)
def test_fp8_blocks_load_as_the_numbers_they_stand_for(
    tmp_path: Path, seed: int, family: str, block: tuple[int, int], scale_dtype: torch.dtype
) -> None:
    base = "qwen3_5_moe" if family == "qwen3_next" else family
    next_names = {"model_type": family, "architectures": ["Qwen3NextForCausalLM"]}
    config = TINY_DICTS[base](**(next_names if family == "qwen3_next" else {}))
    parsed = ModelConfig.from_dict(config)
    stored, meant = quantise(random_weights(parsed, seed, "B"), block, scale_dtype)
    config["quantization_config"] = FP8 | {"weight_block_size": list(block)}
    model = load(write_folder(tmp_path / "model", config, stored, files=3))
    wanted = model_class(parsed).from_weights(parsed, meant, torch.float32)
    assert torch.equal(logits_of(model), logits_of(wanted))
    # The test is blind if scales do not matter.
    some = next(name for name in stored if name.endswith("_scale_inv"))
    assert not torch.equal(
        meant[some.removesuffix("_scale_inv")], stored[some.removesuffix("_scale_inv")].float()
    )


def test_a_multimodal_config_says_outside_how_its_text_model_is_stored(
    tmp_path: Path, seed: int
) -> None:
    text = TINY_DICTS["qwen3_5"]()
    parsed = ModelConfig.from_dict(text)
    stored, meant = quantise(random_weights(parsed, seed, "B"), (128, 128), torch.float32)
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": False,
        "quantization_config": FP8,
    }
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: t
        for name, t in stored.items()
    }
    model = load(write_folder(tmp_path / "model", outer, renamed))
    wanted = model_class(parsed).from_weights(parsed, meant, torch.float32)
    assert torch.equal(logits_of(model), logits_of(wanted))
    outer["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(outer))
    with pytest.raises(UnsupportedModelError, match="quant_method is 'awq', which is not"):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method is 'awq', which is not supported; use"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq', which is not supported"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        ({"quant_method": "compressed-tensors"}, "quant_method is 'compressed-tensors'"),
        ({"bits": 4}, "quant_method is None"),
        (FP8 | {"weight_block_size": None}, "FP8 without weight_block_size"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme is 'static'; supported is"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'; supported is 'e4m3'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size is .*two positive integers"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size is .*two positive integers"),
        (["fp8"], "quantization_config is .*must be an object"),
    ],
)
def test_other_quantisations_are_refused_by_name(entry: object, message: str) -> None:
    for family in TINY_DICTS:
        with pytest.raises(HeadraceError, match=message):
            ModelConfig.from_dict(TINY_DICTS[family](quantization_config=entry))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("drop", r"is F8_E4M3 but its scales '.*_scale_inv' are missing"),
        ("shape", r"_scale_inv' of .* has shape \[9, 1\].*blocks of 128 x 128"),
        ("dtype", r"dtype I32, but blocks"),
        ("unscaled", r"has dtype F32 and yet scales"),
        ("unsaid", r"scales of FP8 weights, but config.json has no quantization_config"),
        ("stray", r"no use for: 'model\.norm\.what_scale_inv'"),
    ],
)
def test_scales_that_do_not_fit_are_named(
    tmp_path: Path, seed: int, damage: str, message: str
) -> None:
    config = TINY_DICTS["qwen3_5"](quantization_config=FP8)
    parsed = ModelConfig.from_dict(config)
    stored, _ = quantise(random_weights(parsed, seed), (128, 128), torch.float32)
    name = "model.layers.1.mlp.down_proj.weight"
    scale = name + "_scale_inv"
    if damage == "drop":
        del stored[scale]
    elif damage == "shape":
        stored[scale] = torch.ones(9, 1)
    elif damage == "dtype":
        stored[scale] = torch.ones(1, 1, dtype=torch.int32)
    elif damage == "unscaled":
        stored[name] = stored[name].float()
    elif damage == "unsaid":
        del config["quantization_config"]
    else:
        stored["model.norm.what_scale_inv"] = torch.ones(1, 1)
    with pytest.raises(WeightsError, match=message):
        load(write_folder(tmp_path / "model", config, stored))


def test_every_tensor_may_have_a_dtype_of_its_own(tmp_path: Path, seed: int) -> None:
    config = TINY_DICTS["qwen3_5"]()
    parsed = ModelConfig.from_dict(config)
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    stored = {
        name: tensor.to(dtypes[index % len(dtypes)])
        for index, (name, tensor) in enumerate(random_weights(parsed, seed, "B").items())
    }
    folder = write_folder(tmp_path / "model", config, stored, files=2)
    wide = {name: tensor.float() for name, tensor in stored.items()}
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        wanted = model_class(parsed).from_weights(parsed, wide, dtype)
        model = load(folder, replace(LOADED, dtype=name))  # type: ignore[arg-type]
        assert model.dtype is dtype
        assert torch.equal(logits_of(model), logits_of(wanted))


@pytest.mark.parametrize("copy", [False, True])
def test_a_tied_head_needs_no_copy_on_disk_and_reads_none(
    tmp_path: Path, seed: int, *, copy: bool
) -> None:
    config = TINY_DICTS["qwen3_5"](tie_word_embeddings=True)
    parsed = ModelConfig.from_dict(config)
    stored = random_weights(parsed, seed)
    wanted = model_class(parsed).from_weights(parsed, dict(stored), torch.float32)
    if copy:
        stored["lm_head.weight"] = torch.full_like(stored["model.embed_tokens.weight"], 7.0)
    model = load(write_folder(tmp_path / "model", config, stored))
    assert torch.equal(logits_of(model), logits_of(wanted))
    config["tie_word_embeddings"] = False
    if not copy:
        with pytest.raises(WeightsError, match=r"lacks 1 tensor: 'lm_head\.weight'"):
            load(write_folder(tmp_path / "model", config, stored))


# A missing MTP layer -----------------------------------------------------------------------------


def test_a_checkpoint_saved_without_its_mtp_layer_is_served_without_mtp_drafts(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A tool that does not know the MTP layer drops it on saving and leaves config.json alone."""
    config = TINY_DICTS["qwen3_5"](max_position_embeddings=128)
    weights = random_weights(ModelConfig.from_dict(config), seed)
    bare = {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")}
    folder = write_folder(tmp_path / "model", config, bare)
    small: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    with caplog.at_level(logging.WARNING):
        llm = LLM(str(folder), **small)
    assert "saved without the MTP layer" in caplog.text
    assert "served without MTP drafts" in caplog.text
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    tokens = llm.generate([3, 1, 4], params)[0].outputs[0].token_ids
    assert llm.stats()["draft_tokens"] == 0
    whole = LLM(str(write_folder(tmp_path / "whole", config, weights)), **small)
    assert whole.generate([3, 1, 4], params)[0].outputs[0].token_ids == tokens
    assert whole.stats()["draft_tokens"] > 0
    assert inspect_model(EngineConfig(model=str(folder), **small)).mtp_layers == 0
    with pytest.raises(
        ConfigError, match=r"speculative is 'mtp:2' but .*no tensor mtp.*fetch the.*ngram:K"
    ):
        LLM(str(folder), speculative="mtp:2", **small)


def test_an_mtp_layer_of_which_a_part_is_missing_is_an_error(tmp_path: Path, seed: int) -> None:
    config = TINY_DICTS["qwen3_5"]()
    weights = random_weights(ModelConfig.from_dict(config), seed)
    del weights["mtp.fc.weight"]
    with pytest.raises(WeightsError, match=r"lacks 1 tensor: 'mtp\.fc\.weight'"):
        load(write_folder(tmp_path / "model", config, weights))


# Memory ------------------------------------------------------------------------------------------

_MEASURE = """
import json, sys, threading, torch
from pathlib import Path
from headrace.config import EngineConfig
from headrace.engine.load import Checkpoint, load_model

def memory():
    # Not the pages of mapped files: those of the libraries come and go.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

def watch():
    while not done.wait(0.001):
        seen.append(memory())

torch.ones(64, 64) @ torch.ones(64, 64)
checkpoint = Checkpoint.of_folder(Path(sys.argv[1]))
config = EngineConfig(dtype=sys.argv[2], state_dtype="float32")
before, seen, done = memory(), [], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(checkpoint, config, torch.device("cpu"))
done.set()
watcher.join()
print(json.dumps({"before": before, "after": memory(), "peak": max(seen), "looks": len(seen),
                  "weights": model.num_parameters * model.dtype.itemsize}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [
        ("bfloat16", True),
        pytest.param("bfloat16", False, marks=pytest.mark.full),
        pytest.param("float32", False, marks=pytest.mark.full),
    ],
)
def test_loading_takes_the_weights_and_less_than_a_file(
    tmp_path: Path, dtype: str, *, fp8: bool
) -> None:
    """Eight files; the process's peak is held against its weights plus one of them."""
    config = TINY_DICTS["qwen3_5_moe"](
        hidden_size=512,
        num_hidden_layers=4,
        vocab_size=4096,
        num_experts=16,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        tie_word_embeddings=True,
        mtp_num_hidden_layers=0,
    )
    parsed = ModelConfig.from_dict(config)
    shapes = model_class(parsed).expected_tensors(parsed)
    stored: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        is_expert = ".experts." in name
        stored[name] = torch.full(shape, 0.5, dtype=torch.bfloat16)
        if fp8 and is_expert:
            stored[name] = stored[name].to(torch.float8_e4m3fn)
            scales = (shape[0], -(-shape[1] // 128), -(-shape[2] // 128))
            stored[name + "_scale_inv"] = torch.ones(scales)
    if fp8:
        config["quantization_config"] = FP8
    folder = write_folder(tmp_path / "model", config, stored, files=8)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    del stored
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder), dtype],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        # By default the allocator keeps up to 64 MiB that was freed, now here, now there.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"},
    )
    found = json.loads(result.stdout)
    above = found["peak"] - found["before"] - found["weights"]
    print(
        f"{dtype}, FP8 {fp8}: weights {found['weights'] >> 20} MiB, largest file "
        f"{max(sizes) >> 20} MiB, peak above both weights and start {above >> 20} MiB"
    )
    assert found["looks"] > 20
    assert found["weights"] > 4 * max(sizes), "the files are too few to tell"
    assert found["after"] - found["before"] > 0.9 * found["weights"], "the weights are not there"
    assert above < max(sizes) + (16 << 20)
