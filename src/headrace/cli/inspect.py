"""`headrace inspect`: what a model is made of and what fits."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import orjson
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.flags import ConfigFile, Engine, EngineFlags, engine_config

if TYPE_CHECKING:
    from headrace.engine.inspection import Inspection

_UNIT = 1024


def inspect(
    model: str | None = None,
    /,
    *,
    json: Annotated[bool, Parameter(negative="")] = False,
    config: ConfigFile = None,
    engine: Engine = EngineFlags(),  # noqa: B008 - frozen
) -> int:
    """Show a model's layers, state and memory, and how many sequences fit; loads no weights.

    Args:
        model: Same as --model; a config.json by itself will do.
        json: Print one JSON object.
        config: YAML, JSON or TOML file with settings named like flags.
        engine: The engine's settings.
    """
    del config
    # Imports torch.
    from headrace.engine.inspection import inspect_model  # noqa: PLC0415

    inspection = inspect_model(engine_config(engine, positional_model=model))
    if json:
        values = dataclasses.asdict(inspection)
        print(orjson.dumps(values, option=orjson.OPT_INDENT_2).decode())
    else:
        _print(inspection)
    return 0


def _print(inspection: "Inspection") -> None:
    console = Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    kinds = [layer.kind for layer in inspection.layers]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    table.add_row("model", f"{inspection.model} ({inspection.architecture})")
    weights = readable_bytes(inspection.weight_bytes)
    table.add_row("parameters", f"{inspection.parameters:,} ({weights})")
    table.add_row("layers", counts + (", MTP head" if inspection.mtp_layers else ""))
    if inspection.kv_bytes_per_token:
        table.add_row("KV per token", readable_bytes(inspection.kv_bytes_per_token))
    for group in inspection.state_groups:
        shapes = ", ".join(
            f"{name} {'x'.join(map(str, shape))}" for name, shape in group.shapes.items()
        )
        table.add_row(
            f"state block, {group.kind}",
            f"{readable_bytes(group.bytes_per_block)}: {len(group.layers)} layers of {shapes}",
        )
    table.add_row("state per sequence", readable_bytes(inspection.state_bytes_per_sequence))
    shortest = inspection.min_cacheable_prefix_tokens
    table.add_row(
        "shortest cached prefix", "no prefix cache" if shortest is None else f"{shortest} tokens"
    )
    store = inspection.state_store
    if store is not None:
        table.add_row(
            "state store",
            f"{readable_bytes(store.memory_bytes)} of memory, {readable_bytes(store.disk_bytes)} "
            f"of disk; a prompt of {store.prefix_tokens:,} tokens takes "
            f"{readable_bytes(store.prefix_bytes)}",
        )
    for fit in inspection.fits:
        table.add_row(
            f"at {fit.context_tokens:,} tokens", f"{fit.sequences} sequences at once"
        )
    if inspection.ignored_config_keys:
        # Text: a key of a file is no markup.
        table.add_row("not understood", Text(", ".join(inspection.ignored_config_keys)))
    console.print(table)


def readable_bytes(count: int) -> str:
    """Write a number of bytes with a unit, for people."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < _UNIT:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= _UNIT
    return f"{value:.1f} GiB"
