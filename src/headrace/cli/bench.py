"""`headrace bench`: flags to options; the measuring is in headrace.bench."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import App, Group, Parameter

from headrace.bench.options import OfflineOptions, ServeOptions, documented
from headrace.cli.flags import ConfigFile, Engine, EngineFlags, engine_config

_MEASUREMENT = Group("Measurement", sort_key=5)


def _flags(options: type) -> type[Any]:
    """Make flags of a class of options, as `cli.flags` does of EngineConfig."""
    hints = get_type_hints(options)
    help_of = documented(options)
    fields: list[tuple[str, Any, Any]] = [
        (
            field.name,
            Annotated[hints[field.name], Parameter(group=_MEASUREMENT, negative="")],
            dataclasses.field(
                default=field.default, metadata={"help": help_of.get(field.name, "")}
            ),
        )
        for field in dataclasses.fields(options)
    ]
    flags = dataclasses.make_dataclass(
        options.__name__ + "Flags", fields, bases=(options,), frozen=True, kw_only=True
    )
    flags.__module__ = __name__
    return flags


if TYPE_CHECKING:
    OfflineFlags = OfflineOptions
    ServeFlags = ServeOptions
else:
    OfflineFlags = _flags(OfflineOptions)
    ServeFlags = _flags(ServeOptions)

Offline = Annotated[OfflineFlags, Parameter(name="*")]
Load = Annotated[ServeFlags, Parameter(name="*")]


def throughput(
    model: str | None = None,
    /,
    *,
    measurement: Offline = OfflineFlags(),  # noqa: B008 - frozen
    config: ConfigFile = None,
    engine: Engine = EngineFlags(),  # noqa: B008 - frozen
) -> int:
    """Measure tokens per second of full batches, or of an open load, without a server.

    Args:
        model: Same as --model.
        measurement: What to measure.
        config: YAML, JSON or TOML file with settings named like flags.
        engine: The engine's settings.
    """
    del config
    return _run("throughput", measurement, model, engine)


def latency(
    model: str | None = None,
    /,
    *,
    measurement: Offline = OfflineFlags(),  # noqa: B008 - frozen
    config: ConfigFile = None,
    engine: Engine = EngineFlags(),  # noqa: B008 - frozen
) -> int:
    """Measure times to the first token, between tokens and of whole requests, without a server.

    Args:
        model: Same as --model.
        measurement: What to measure.
        config: YAML, JSON or TOML file with settings named like flags.
        engine: The engine's settings.
    """
    del config
    return _run("latency", measurement, model, engine)


def serve(
    model: str | None = None,
    /,
    *,
    load: Load = ServeFlags(),  # noqa: B008 - frozen
    config: ConfigFile = None,
) -> int:
    """Measure a running server that speaks OpenAI's protocol.

    Args:
        model: Same as --served-model.
        load: What to send.
        config: YAML, JSON or TOML file with settings named like flags.
    """
    del config
    from headrace.bench.__main__ import run  # noqa: PLC0415

    options = _plain(ServeOptions, load)
    if model is not None:
        options = dataclasses.replace(options, served_model=model)
    return run("serve", options)


def _run(
    command: str, measurement: OfflineOptions, model: str | None, engine: EngineFlags
) -> int:
    # Imports the engine, and with it torch.
    from headrace.bench.__main__ import run  # noqa: PLC0415

    config = engine_config(engine, positional_model=model)
    return run(command, _plain(OfflineOptions, measurement), config)


def _plain(options: type[Any], flags: object) -> Any:  # noqa: ANN401 - one of two classes
    return options(**{f.name: getattr(flags, f.name) for f in dataclasses.fields(options)})


app = App(name="bench", help="Measure an engine or a server.")
for _command in (throughput, latency, serve):
    app.command(_command)
