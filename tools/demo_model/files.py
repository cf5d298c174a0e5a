"""Write and read the files of a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from .model import Model, Shape

if TYPE_CHECKING:
    from pathlib import Path

    from .olmo import OlmoModel


def save(model: Model | OlmoModel, folder: Path) -> None:
    """Write model.safetensors (bfloat16), config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to("cpu", torch.bfloat16) for k, v in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(model.shape.config_json(), indent=1) + "\n"
    (folder / "config.json").write_text(config)
    generation = {"eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def load(folder: Path, shape: Shape, device: torch.device) -> Model:
    """Read a model back: bfloat16 weights, computed with in float32."""
    model = Model(shape).to(device)
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({k: v.float() for k, v in tensors.items()})
    return model.eval()


def about(device: torch.device) -> dict[str, str]:
    """Say on what figures were measured."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__}
