"""`headrace deploy`: several replicas behind one address, through Ray Serve."""

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from headrace.cli.flags import ConfigFile, Engine, EngineFlags, engine_config
from headrace.cli.serve import read_keys

_HTTP = Group("HTTP", sort_key=5)
_REPLICAS = Group("Replicas", sort_key=6)


def deploy(
    model: str | None = None,
    /,
    *,
    min_replicas: Annotated[int, Parameter(group=_REPLICAS)] = 1,
    max_replicas: Annotated[int | None, Parameter(group=_REPLICAS)] = None,
    routers: Annotated[int, Parameter(group=_REPLICAS)] = 1,
    target_requests: Annotated[float, Parameter(group=_REPLICAS)] = 32.0,
    max_requests: Annotated[int, Parameter(group=_REPLICAS)] = 1024,
    max_extra_load: Annotated[int, Parameter(group=_REPLICAS)] = 16,
    max_retries: Annotated[int, Parameter(group=_REPLICAS)] = 2,
    cpus: Annotated[float, Parameter(group=_REPLICAS)] = 1.0,
    gpus: Annotated[float | None, Parameter(group=_REPLICAS)] = None,
    ray_address: Annotated[str | None, Parameter(group=_REPLICAS)] = None,
    host: Annotated[str, Parameter(group=_HTTP)] = "127.0.0.1",
    port: Annotated[int, Parameter(group=_HTTP)] = 8000,
    api_key: Annotated[
        tuple[str, ...],
        Parameter(group=_HTTP, negative="", consume_multiple=False, show_default=False),
    ] = (),
    api_key_file: Annotated[Path | None, Parameter(group=_HTTP)] = None,
    shutdown_timeout: Annotated[float, Parameter(group=_HTTP)] = 30.0,
    config: ConfigFile = None,
    engine: Engine = EngineFlags(),  # noqa: B008 - frozen
) -> int:
    """Serve a model with several engines behind one address; needs headrace[ray].

    Args:
        model: Same as --model.
        min_replicas: Replicas that are always there.
        max_replicas: Most replicas; above --min-replicas their number follows the load.
        routers: Processes that pick replicas.
        target_requests: Requests in flight for each replica that autoscaling aims at.
        max_requests: Most requests in flight in a replica; more wait in the router.
        max_extra_load: Requests that a replica which holds the prompt may have in flight more than
            the least loaded one.
        max_retries: Other replicas to try where one was lost before it answered.
        cpus: CPU cores that Ray reserves for each replica.
        gpus: GPUs that Ray reserves for each replica; as many as it uses unless given.
        ray_address: Ray cluster to use, auto for the one this machine is part of; without it one
            is started here, and ended with the command.
        host: Address to listen on; 0.0.0.0 is every one.
        port: Port to listen on.
        api_key: A key clients must show; may be repeated, and several may stand in one value with
            commas between them. Without one, everybody may ask.
        api_key_file: File with more keys, one a line.
        shutdown_timeout: Seconds that running requests of a replica have to end.
        config: YAML, JSON or TOML file with settings named like flags.
        engine: The engine's settings.
    """
    del config
    # Imports Ray.
    from headrace.deploy.ray_app import make_app, run_app  # noqa: PLC0415
    from headrace.deploy.settings import DeploySettings  # noqa: PLC0415
    from headrace.server.settings import ServerSettings  # noqa: PLC0415

    server = ServerSettings(
        host=host, port=port, api_keys=read_keys(api_key, api_key_file),
        shutdown_timeout_s=shutdown_timeout,
    )
    settings = DeploySettings(
        min_replicas=min_replicas,
        max_replicas=min_replicas if max_replicas is None else max_replicas,
        routers=routers,
        target_requests=target_requests,
        max_requests=max_requests,
        max_extra_load=max_extra_load,
        max_retries=max_retries,
        cpus=cpus,
        gpus=gpus,
    )
    app = make_app(engine_config(engine, positional_model=model), server, settings)
    run_app(app, server, address=ray_address)
    return 0
