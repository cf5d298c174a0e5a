"""JSON files of a model folder, read with errors that name the file and the remedy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that must hold one JSON object.

    Raises:
        ModelError: The file is missing, unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; is {path.parent} a complete model folder?") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch the file again") from error
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}; "
            "fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def read_json_object_if_present(path: Path) -> dict[str, Any]:
    """Read a file as `read_json_object` does; a file that does not exist counts as empty."""
    return read_json_object(path) if path.exists() else {}
