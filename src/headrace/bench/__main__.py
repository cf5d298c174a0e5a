"""`python -m headrace.bench`: the same commands where the command line's libraries are missing."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from headrace.bench.options import OfflineOptions, ServeOptions, documented
from headrace.config import EngineConfig
from headrace.errors import ConfigError, HeadraceError, RequestError
from headrace.output_files import require_writable

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "throughput": ("Tokens per second of full batches or an open load.",
                   (OfflineOptions, EngineConfig)),
    "latency": ("Times to the first token, between tokens and of whole requests.",
                (OfflineOptions, EngineConfig)),
    "serve": ("The same load against a server over HTTP.", (ServeOptions,)),
}  # fmt: skip
EXIT_FAILURE = 1
EXIT_WRONG_USE = 2
_CHILD = "first-token"


def run_command(tokens: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    if tokens and tokens[0] == _CHILD:
        from headrace.bench.start import first_token  # noqa: PLC0415 - starts the clock

        first_token(tokens[1])
        return 0
    given = _parser().parse_args(tokens)
    try:
        return run(given.command, **_values(given))
    except (ConfigError, RequestError) as error:
        return _failed(str(error), EXIT_WRONG_USE)
    except HeadraceError as error:
        return _failed(str(error), EXIT_FAILURE)


def run(
    command: str, options: OfflineOptions | ServeOptions, config: EngineConfig | None = None
) -> int:
    """Measure, or compare two files, and print.

    Args:
        command: throughput, latency or serve.
        options: Its options.
        config: The engine's settings; None for serve.
    """
    from headrace.bench.report import finish, show_comparison  # noqa: PLC0415 - not for --help

    for flag in ("json", "plot", "trace"):
        require_writable(f"--{flag}", getattr(options, flag, None))
    if options.compare is not None:
        show_comparison(options.compare, options.plot)
        return 0
    if isinstance(options, ServeOptions):
        from headrace.bench.serve import measure_server  # noqa: PLC0415 - needs httpx

        document = measure_server(options)
    else:
        from headrace.bench import offline  # noqa: PLC0415 - imports torch

        measure = {"throughput": offline.throughput, "latency": offline.latency}[command]
        document = measure(config or EngineConfig(), options)
    finish(document, json=options.json, plot=options.plot)
    return EXIT_FAILURE if any(row.get("error") for row in document["rows"]) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m headrace.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (summary, groups) in _COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )  # fmt: skip
        if EngineConfig in groups:
            command.add_argument("positional_model", nargs="?", metavar="MODEL")
        for group in groups:
            title = "engine" if group is EngineConfig else "measurement"
            _add_fields(command.add_argument_group(title), group)
    return parser


def _add_fields(parser: Any, group: type) -> None:  # noqa: ANN401 - argparse's group has no name
    hints = get_type_hints(group)
    help_of = documented(group)
    for field in dataclasses.fields(group):
        flag = "--" + field.name.replace("_", "-")
        given: dict[str, Any] = {
            "dest": field.name,
            "default": field.default,
            # A % in the text would be taken for argparse's own.
            "help": help_of.get(field.name, "").replace("%", "%%") or None,
        }
        parser.add_argument(flag, **given, **_reading(hints[field.name]))


def _reading(hint: Any) -> dict[str, Any]:  # noqa: ANN401 - a type
    """Say how argparse reads a type."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    optional = bool(kinds) and get_origin(hint) is not Literal
    kind = kinds[0] if optional and len(kinds) == 1 else hint
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple:
        return {"type": Path, "nargs": 2, "metavar": ("A", "B")}
    return {"type": kind}


def _values(given: argparse.Namespace) -> dict[str, Any]:
    values = vars(given)
    if isinstance(values.get("compare"), list):
        values["compare"] = tuple(values["compare"])
    groups = _COMMANDS[given.command][1]
    if values.get("positional_model"):
        values["model"] = values["positional_model"]
    found: dict[str, Any] = {}
    for group in groups:
        names = [field.name for field in dataclasses.fields(group)]
        name = "config" if group is EngineConfig else "options"
        found[name] = group(**{field: values[field] for field in names})
    return found


def _failed(message: str, code: int) -> int:
    sys.stderr.write(f"headrace: error: {message}\n")
    return code


if __name__ == "__main__":
    raise SystemExit(run_command(sys.argv[1:]))
