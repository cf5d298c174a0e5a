"""From the name of a model to the folder it lies in."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from headrace.errors import ConfigError, ModelError

ASSETS = Path(__file__).parents[1] / "assets"
SHIPPED = ("demo", "nano", "parity")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.jinja")


def resolve_model(name: str) -> Path:
    """Find a model's folder.

    Args:
        name: "demo", "nano" or "parity" (shipped with the package; demo is the largest one
            shipped), a folder, or a hub id such as "Qwen/Qwen3.5-0.8B", which is downloaded once.

    Returns:
        A folder with config.json.

    Raises:
        ConfigError: The name is none of these, or of a folder without config.json.
        ModelError: A shipped model is missing, or the hub cannot be reached.
    """
    if name in SHIPPED:
        return _shipped(name)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} has no config.json; name a folder in Hugging Face's layout "
                "(config.json, *.safetensors, tokenizer.json)"
            )
        return folder
    if folder.is_file():
        raise ConfigError(f"model {name!r} is a file; name the folder it lies in")
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return _download(name)
    close = difflib.get_close_matches(name, [*SHIPPED, *_neighbours(folder)], n=1)
    hint = f"did you mean {close[0]!r}?" if close else "name a folder that holds config.json"
    raise ConfigError(
        f"model {name!r} is no folder, no hub id (owner/name) and none of the shipped models "
        f"({', '.join(SHIPPED)}); {hint}"
    )


def _neighbours(folder: Path) -> list[str]:
    """Folders beside one that is not there, as the user would have to write them."""
    try:
        return [str(path) for path in folder.parent.iterdir() if (path / "config.json").is_file()]
    except OSError:
        return []


def shipped_name(folder: Path) -> str | None:
    """Return the name of the shipped model in a folder, None for any other folder."""
    return folder.name if folder.parent == ASSETS else None


def _shipped(name: str) -> Path:
    for candidate in (name, "nano") if name == "demo" else (name,):
        if (ASSETS / candidate / "config.json").is_file():
            return ASSETS / candidate
    raise ModelError(
        f"model {name!r} is missing from this installation ({ASSETS / name}); "
        "install headrace again"
    )


def _download(hub_id: str) -> Path:
    try:
        # An extra: most users never leave the machine, and the library's import is slow.
        from huggingface_hub import snapshot_download  # noqa: PLC0415
    except ImportError:
        raise ModelError(
            f"model {hub_id!r} is no local folder, and downloading from a hub needs the extra: "
            "pip install 'headrace[hub]'"
        ) from None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_FILES)))
    # The library raises many kinds for one fact: the files did not come.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {hub_id!r} is no local folder and "
            f"could not be fetched from the hub ({reason}); check the name and the network, "
            "or name a folder"
        ) from error
