"""`headrace config show`: every setting, its value, and where it came from."""

import dataclasses
from typing import Annotated

import orjson
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from headrace.cli.flags import ConfigFile, Engine, EngineFlags, engine_config
from headrace.cli.settings import DEFAULT


def show(
    *,
    json: Annotated[bool, Parameter(negative="")] = False,
    config: ConfigFile = None,
    engine: Engine = EngineFlags(),  # noqa: B008 - frozen
    sources: Annotated[dict[str, str] | None, Parameter(parse=False)] = None,
) -> int:
    """Show the engine's settings and the source of each: default, file, variable or flag.

    Args:
        json: Print one JSON object: setting to {value, source}.
        config: YAML, JSON or TOML file with settings named like flags.
        engine: The engine's settings.
        sources: Where each setting came from.
    """
    del config
    values = dataclasses.asdict(engine_config(engine))
    source_of = {name: (sources or {}).get(name, DEFAULT) for name in values}
    if json:
        rows = {name: {"value": v, "source": source_of[name]} for name, v in values.items()}
        print(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
        return 0
    table = Table("setting", "value", "source", box=None, pad_edge=False)
    for name, value in values.items():
        shown = "-" if value is None else str(value)
        source = source_of[name]
        table.add_row(name, shown, source, style="dim" if source == DEFAULT else None)
    Console(highlight=False).print(table)
    return 0
