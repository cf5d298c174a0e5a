"""Where a setting's value comes from: default, config file, HEADRACE_* variable, flag.

The later in this list, the stronger. The layers hook into cyclopts, so that values from a file are
checked and reported exactly like flags.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from cyclopts import Token

from headrace.config import ENVIRONMENT_PREFIX, environment_settings
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cyclopts import App
    from cyclopts.argument import Argument, ArgumentCollection

DEFAULT = "default"
COMMAND_LINE = "command line"


class Layers:
    """Fills what the command line left open, and remembers where each value came from.

    Attributes:
        sources: Setting to its source: "default", "command line", a variable's or a file's name.
    """

    def __init__(
        self, *, known: Callable[[], frozenset[str]], environ: Mapping[str, str] | None = None
    ) -> None:
        """Take the environment.

        Args:
            known: Gives every setting of any command; called only if there are settings to judge.
                A file or environment may serve several commands, so a known setting that this
                command lacks is passed over; an unknown one is not.
            environ: Variables to read instead of the process's own.
        """
        self._known = known
        self._environ = environment_settings(environ)
        self.sources: dict[str, str] = {}
        self.notes: list[str] = []

    def __call__(
        self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection
    ) -> None:
        """Add values to the arguments that have none; called by cyclopts after the flags."""
        del app, commands
        options = {name: a for a in arguments if (name := _setting(a)) is not None}
        for name, argument in options.items():
            self.sources[name] = COMMAND_LINE if argument.tokens else DEFAULT
        # A variable that is empty counts as not set, as shells' `VAR= command` is meant.
        environ = {name: text for name, text in self._environ.items() if text}
        for name, text in environ.items():
            variable = ENVIRONMENT_PREFIX + name.upper()
            if name in options:
                self._fill(options[name], name, [text], variable)
            elif name not in (known := self._known()):
                self.notes.append(
                    f"{variable} is not a setting"
                    f"{_closest(variable, [ENVIRONMENT_PREFIX + k.upper() for k in known])}"
                )
        config = options.get("config")
        if config is not None and config.tokens:
            path = Path(config.tokens[-1].value)
            for name, values in read_config_file(path, known=self._known()).items():
                if name in options:
                    self._fill(options[name], name, values, str(path))

    def _fill(self, argument: Argument, name: str, values: list[str], source: str) -> None:
        if argument.tokens:
            return
        self.sources[name] = source
        for index, value in enumerate(values):
            argument.append(
                Token(keyword=argument.name, value=value, source=source, index=index)
            )


def read_config_file(path: Path, *, known: frozenset[str]) -> dict[str, list[str]]:
    """Read settings from a YAML, JSON or TOML file; keys are flags' names, dashes or underscores.

    Args:
        path: The file; its ending tells the format, and YAML is tried for others.
        known: Every setting of any command.

    Returns:
        Setting to its value as text, one per element of a list.

    Raises:
        ConfigError: The file is missing or malformed, or has a key that is no setting.
    """
    values: dict[str, list[str]] = {}
    for key, value in _parse(path).items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: {key!r} is not a setting{_closest(name, known)}")
        if value is None:
            continue
        elements = value if isinstance(value, list) else [value]
        values[name] = [_text(path, name, element) for element in elements]
    return values


def _parse(path: Path) -> dict[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    try:
        if path.suffix == ".json":
            value = json.loads(text)
        elif path.suffix == ".toml":
            value = tomllib.loads(text)
        else:
            value = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path} is malformed: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"config file {path} must map settings to values, found {type(value).__name__}"
        )
    return value


def _text(path: Path, name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(
        f"{path}: {name} must be text, a number, true or false, found {type(value).__name__}"
    )


def _setting(argument: Argument) -> str | None:
    """Name of the setting an argument stands for; None for positionals and groups of flags."""
    if not argument.parse or not argument.name.startswith("--"):
        return None
    return argument.name.removeprefix("--").replace("-", "_")


def _closest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
