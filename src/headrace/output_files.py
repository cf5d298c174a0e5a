"""Files that commands write at their end, tried before the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def require_writable(flag: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before the work whose results it is for.

    Folders that are missing are made. A file that is there already stays as it is.

    Args:
        flag: How the user named the file.
        path: The file; None if there is to be none.

    Raises:
        ConfigError: It cannot be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} cannot be written: {error.strerror}; name another file"
        ) from error
