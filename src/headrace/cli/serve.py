"""`headrace serve`: the HTTP server."""

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from headrace.cli.flags import ConfigFile, Engine, EngineFlags, engine_config

_HTTP = Group("HTTP", sort_key=5)


def serve(
    model: str | None = None,
    /,
    *,
    host: Annotated[str, Parameter(group=_HTTP)] = "127.0.0.1",
    port: Annotated[int, Parameter(group=_HTTP)] = 8000,
    api_key: Annotated[
        tuple[str, ...],
        Parameter(group=_HTTP, negative="", consume_multiple=False, show_default=False),
    ] = (),
    api_key_file: Annotated[Path | None, Parameter(group=_HTTP)] = None,
    max_body_bytes: Annotated[int, Parameter(group=_HTTP)] = 16 * 1024 * 1024,
    max_concurrent_requests: Annotated[int | None, Parameter(group=_HTTP)] = None,
    body_timeout: Annotated[float, Parameter(group=_HTTP)] = 60.0,
    send_timeout: Annotated[float | None, Parameter(group=_HTTP)] = 60.0,
    request_timeout: Annotated[float | None, Parameter(group=_HTTP)] = None,
    step_timeout: Annotated[float | None, Parameter(group=_HTTP)] = 600.0,
    shutdown_timeout: Annotated[float, Parameter(group=_HTTP)] = 30.0,
    log_level: Annotated[str, Parameter(group=_HTTP)] = "info",
    log_format: Annotated[str, Parameter(group=_HTTP)] = "text",
    access_log: Annotated[bool, Parameter(group=_HTTP, negative="")] = False,
    tool_call_parser: Annotated[str, Parameter(group=_HTTP)] = "auto",
    reasoning_parser: Annotated[str, Parameter(group=_HTTP)] = "auto",
    reasoning_field: Annotated[str, Parameter(group=_HTTP)] = "reasoning_content",
    log_stats_interval: Annotated[float, Parameter(group=_HTTP)] = 10.0,
    otlp_traces_endpoint: Annotated[str | None, Parameter(group=_HTTP)] = None,
    config: ConfigFile = None,
    engine: Engine = EngineFlags(),  # noqa: B008 - frozen
) -> int:
    """Serve a model over HTTP with OpenAI's interface.

    Args:
        model: Same as --model.
        host: Address to listen on; 0.0.0.0 is every one.
        port: Port to listen on; 0 takes a free one.
        api_key: A key clients must show; may be repeated, and several may stand in one value with
            commas between them. Without one, everybody may ask.
        api_key_file: File with more keys, one a line.
        max_body_bytes: Largest request body.
        max_concurrent_requests: Most requests in flight, waiting ones included; more get 429.
        body_timeout: Seconds a client has to send its body.
        send_timeout: Seconds in which a client has to take something of an answer that waits for
            it; then its connection is closed.
        request_timeout: Seconds an answer may take; then it ends with what there is.
        step_timeout: Seconds a step may take; an engine that is longer at one counts as dead.
        shutdown_timeout: Seconds that running requests have to end after SIGTERM.
        log_level: Lowest level that is logged: debug, info, warning or error.
        log_format: text, or json for one object a line.
        access_log: Log a line for each request.
        tool_call_parser: How the model writes tool calls: auto (from its chat template), none,
            hermes, qwen3_coder, granite, lfm2 or nemotron.
        reasoning_parser: How the model marks reasoning: auto (from its chat template), none, think
            or deepseek_r1.
        reasoning_field: Where answers have their reasoning: reasoning_content, reasoning or both.
        log_stats_interval: Seconds between lines with the engine's figures; 0 leaves them out.
        otlp_traces_endpoint: URL for OpenTelemetry traces; needs headrace[otel].
        config: YAML, JSON or TOML file with settings named like flags.
        engine: The engine's settings.
    """
    del config
    # Imports FastAPI and the engine.
    from headrace.server.app import serve as serve_http  # noqa: PLC0415
    from headrace.server.settings import ServerSettings  # noqa: PLC0415

    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=read_keys(api_key, api_key_file),
        max_body_bytes=max_body_bytes,
        max_concurrent_requests=max_concurrent_requests,
        body_timeout_s=body_timeout,
        send_timeout_s=send_timeout,
        request_timeout_s=request_timeout,
        step_timeout_s=step_timeout,
        shutdown_timeout_s=shutdown_timeout,
        log_level=log_level,
        log_format=log_format,
        access_log=access_log,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        reasoning_field=reasoning_field,
        log_stats_interval_s=log_stats_interval,
        otlp_traces_endpoint=otlp_traces_endpoint,
    )
    serve_http(engine_config(engine, positional_model=model), settings=settings)
    return 0


def read_keys(values: tuple[str, ...], file: Path | None) -> tuple[str, ...]:
    """API keys of `--api-key` and `--api-key-file`.

    Raises:
        ConfigError: The file cannot be read, or has no key.
    """
    # Imports dialects.
    from headrace.server.settings import keys_of_file  # noqa: PLC0415

    keys = tuple(part.strip() for value in values for part in value.split(","))
    return keys + (keys_of_file(file) if file is not None else ())
