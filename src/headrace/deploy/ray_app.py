"""The deployment for Ray Serve: replicas, routers and the plug-in that picks between them.

Alone in importing Ray. `build` is the import path of a Ray Serve config file
(examples/deploy/serve.yaml); `headrace deploy` runs the same application.
"""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import aclosing, suppress
from logging.config import dictConfig
from typing import TYPE_CHECKING, Any

from headrace.config import EngineConfig
from headrace.deploy.ingress import Ingress
from headrace.deploy.messages import ForwardedRequest, Message, ReplicaLostError
from headrace.deploy.prefixes import PrefixReader, TextModel
from headrace.deploy.replica import Replica
from headrace.deploy.routing import Candidate, Either, RecentRoutes, rank, unpack_keys
from headrace.deploy.settings import DeploySettings
from headrace.errors import ConfigError, QueueFullError
from headrace.server.bodies import BodyReader
from headrace.server.logs import log_config
from headrace.server.settings import ServerSettings

try:
    import ray
    from ray import serve
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.exceptions import (
        BackPressureError,
        DeploymentUnavailableError,
        ReplicaUnavailableError,
    )
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
except ImportError as error:
    raise ConfigError(
        f"several replicas need Ray Serve, which cannot be imported ({error}); "
        "pip install 'headrace[ray]', or put a proxy before headrace serve (docs/deploy.md)"
    ) from error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

_LOG = logging.getLogger(__name__)
APP_NAME = "headrace"
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 10.0
_ROUTER_REQUESTS = 16384
"""Most requests in flight in a router: it only waits for them."""


class PrefixRouter(RequestRouter):
    """Ray Serve's plug-in that orders replicas for a request; see `headrace.deploy.routing`.

    Ray asks them in this order: one that is full is passed over.
    """

    def initialize_state(self, *, max_extra_load: int, summary_period_s: float,
                         max_summary_keys: int) -> None:
        """Take the settings; Ray calls this once, with the router's keyword arguments."""
        self._max_extra_load = max_extra_load
        self._recent = RecentRoutes(lifetime_s=5 * summary_period_s, max_keys=max_summary_keys)
        self._held: dict[str, tuple[bytes, frozenset[bytes]]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray's news of which replicas there are and what they hold."""
        super().update_replicas(replicas)
        names = {one.replica_id.unique_id for one in replicas}
        self._recent.keep_only(names)
        self._held = {name: held for name, held in self._held.items() if name in names}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Order the replicas, each in a rank of its own."""
        request = _forwarded(pending_request)
        if pending_request is not None:
            # Without it Ray would ask again and again without a pause while all are full.
            pending_request.routing_context.should_backoff = True
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        avoided = request.avoided if request is not None else frozenset()
        candidates = [
            Candidate(
                name=name,
                load=self.replica_queue_len_cache.get(one.replica_id) or 0,
                held=Either(self._summary(name, one), self._recent.held(name)),
                is_avoided=name in avoided,
            )
            for name, one in by_name.items()
        ]
        keys = unpack_keys(request.keys) if request is not None else []
        return [[by_name[name]] for name in rank(keys, candidates, self._max_extra_load)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: Any, result: Any  # noqa: ANN401, ARG002
    ) -> None:
        """Remember where a prompt went until the replica says itself that it holds it."""
        request = _forwarded(pending_request)
        if request is not None:
            self._recent.note(replica_id.unique_id, unpack_keys(request.keys))

    def _summary(self, name: str, replica: RunningReplica) -> frozenset[bytes]:
        packed = replica.routing_stats.get("keys", b"")
        known = self._held.get(name)
        if known is None or known[0] != packed:
            known = self._held[name] = (packed, frozenset(unpack_keys(packed)))
        return known[1]


def _forwarded(pending: PendingRequest | None) -> ForwardedRequest | None:
    found = pending.args[0] if pending is not None and pending.args else None
    return found if isinstance(found, ForwardedRequest) else None


class ReplicaActor:
    """A replica as Ray Serve calls it.

    Args:
        config: The engine's settings.
        server: The server's.
        deploy: The deployment's.
    """

    def __init__(
        self, config: EngineConfig, server: ServerSettings, deploy: DeploySettings
    ) -> None:
        from headrace.engine.async_llm import AsyncLLM  # noqa: PLC0415 - imports torch

        dictConfig(log_config(level=server.log_level, log_format=server.log_format))
        name = serve.get_replica_context().replica_id.unique_id
        engine = AsyncLLM(config, step_timeout_s=server.step_timeout_s)
        self._replica = Replica(name, engine, server, max_summary_keys=deploy.max_summary_keys)

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        """Yield the ASGI messages of a request's answer."""
        async with aclosing(self._replica.answer(request)) as messages:
            async for message in messages:
                yield message

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Ray from time to time; routers get what it returns."""
        return await self._replica.summary()

    async def check_health(self) -> None:
        """Called by Ray: a replica that raises is replaced."""
        await self._replica.check_health()

    async def __del__(self) -> None:
        """Called by Ray once nothing is in flight here, before the process ends."""
        await self._replica.stop()


class RouterActor:
    """A router as Ray Serve builds it.

    Args:
        replicas: Ray's handle of them.
        config: The engine's settings.
        server: The server's.
        deploy: The deployment's.
    """

    def __init__(
        self, replicas: Any, config: EngineConfig, server: ServerSettings,  # noqa: ANN401
        deploy: DeploySettings,
    ) -> None:
        dictConfig(log_config(level=server.log_level, log_format=server.log_format))
        self._handle = replicas.options(stream=True)
        bodies = BodyReader(max_bytes=server.max_body_bytes, timeout_s=server.body_timeout_s)
        self._ingress = Ingress(
            self._forward, PrefixReader(TextModel.load(config), config, bodies), bodies,
            api_keys=server.api_keys, max_retries=deploy.max_retries,
        )

    def __serve_build_asgi_app__(self) -> Ingress:
        """Called by Ray: what answers HTTP."""
        return self._ingress

    async def _forward(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        answer = self._handle.answer.remote(request)
        try:
            async for message in answer:
                yield _without_id(message)
        except BackPressureError as error:
            raise QueueFullError(f"{error}; try again later, or add replicas") from error
        except (RayActorError, DeploymentUnavailableError, ReplicaUnavailableError) as error:
            raise ReplicaLostError(
                "the replica with this request has ended; send the request again"
            ) from error
        except RayTaskError:
            raise  # A fault in the replica's own code: no other one would do better.
        except RayError as error:
            raise ReplicaLostError(
                f"the replica cannot be reached ({type(error).__name__}); send the request again"
            ) from error
        finally:
            # The client may have gone away in the middle; Ray goes on until it is told.
            with suppress(RayError):
                answer.cancel()


def _without_id(message: Message) -> Message:
    """Leave the request's id out of an answer's head: Ray's proxy puts the same one there."""
    if message["type"] != "http.response.start":
        return message
    return {**message, "headers": [one for one in message["headers"] if one[0] != b"x-request-id"]}


def make_app(config: EngineConfig, server: ServerSettings, deploy: DeploySettings) -> Any:  # noqa: ANN401
    """Put the deployment together; `ray.serve.run` starts it.

    Args:
        config: The engine's settings, the same for every replica.
        server: The server's.
        deploy: The deployment's.

    Returns:
        A Ray Serve application.
    """
    common = {
        "health_check_period_s": _HEALTH_PERIOD_S,
        "health_check_timeout_s": _HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": server.shutdown_timeout_s + _HEALTH_PERIOD_S,
    }
    scaling: dict[str, Any] = {"num_replicas": deploy.min_replicas}
    if deploy.max_replicas > deploy.min_replicas:
        scaling = {"autoscaling_config": AutoscalingConfig(
            min_replicas=deploy.min_replicas, max_replicas=deploy.max_replicas,
            target_ongoing_requests=deploy.target_requests,
        )}
    replica = serve.deployment(
        ReplicaActor, name="replica", max_ongoing_requests=deploy.max_requests,
        ray_actor_options={"num_cpus": deploy.cpus, "num_gpus": _gpus(config, deploy)},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={
                "max_extra_load": deploy.max_extra_load,
                "summary_period_s": deploy.summary_period_s,
                "max_summary_keys": deploy.max_summary_keys,
            },
            request_routing_stats_period_s=deploy.summary_period_s,
        ),
        **scaling, **common,
    )
    router = serve.deployment(
        serve.ingress()(RouterActor), name="router", num_replicas=deploy.routers,
        max_ongoing_requests=_ROUTER_REQUESTS, ray_actor_options={"num_cpus": 0}, **common,
    )
    return router.bind(replica.bind(config, server, deploy), config, server, deploy)


def run_app(app: Any, server: ServerSettings, *, address: str | None) -> None:  # noqa: ANN401
    """Run an application until a signal comes; then let running requests end.

    Args:
        app: What `make_app` returned.
        server: Host and port are used.
        address: Ray cluster to use; None starts one and ends it.

    Raises:
        ConfigError: The replicas do not start.
    """
    dictConfig(log_config(level=server.log_level, log_format=server.log_format))
    is_own = address is None
    if is_own:
        ray.init(include_dashboard=False, log_to_driver=True)
    else:
        ray.init(address=address)
    try:
        # On a cluster too: every machine with a replica takes requests.
        serve.start(
            proxy_location="EveryNode", http_options={"host": server.host, "port": server.port}
        )
        try:
            serve.run(app, name=APP_NAME, route_prefix="/")
        except RuntimeError as error:
            raise ConfigError(f"the replicas do not start: {error}") from error
        _LOG.info("serving at http://%s:%d", server.host, server.port)
        _wait_for_signal()
    finally:
        if is_own:
            serve.shutdown()
        else:
            serve.delete(APP_NAME)
        ray.shutdown()


def _wait_for_signal() -> None:
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    is_over.wait()


def _gpus(config: EngineConfig, deploy: DeploySettings) -> float:
    """GPUs of a replica; Ray hides all others from it."""
    if deploy.gpus is not None:
        return deploy.gpus
    import torch  # noqa: PLC0415

    has_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return config.tensor_parallel_size if has_gpu else 0


def build(args: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a Ray Serve application
    """Put the deployment together from the `args` of a Ray Serve config file.

    Args:
        args: `engine`, `server` and `deploy`: fields of EngineConfig, ServerSettings and
            DeploySettings.

    Raises:
        ConfigError: A name is unknown, or a value is wrong.
    """
    kinds: dict[str, Any] = {
        "engine": EngineConfig, "server": ServerSettings, "deploy": DeploySettings,
    }
    unknown = sorted(set(args) - set(kinds))
    if unknown:
        raise ConfigError(f"args has {unknown[0]!r}; it takes {', '.join(kinds)}")
    return make_app(*(_settings(name, kind, args.get(name) or {}) for name, kind in kinds.items()))


def _settings(section: str, kind: Any, values: Mapping[str, Any]) -> Any:  # noqa: ANN401
    known = kind.__dataclass_fields__
    for name in values:
        if name not in known:
            raise ConfigError(f"args.{section} has no setting {name!r}; it has {', '.join(known)}")
    return kind(**{
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    })
