"""The process around the application: signals, draining, and the engine's death."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

import uvicorn

from headrace.errors import ConfigError, EngineDeadError
from headrace.server.connections import connection_kind
from headrace.server.logs import log_config
from headrace.server.progress import log_progress

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from types import FrameType

    from fastapi import FastAPI

    from headrace.server.engine import ServedEngine
    from headrace.server.settings import ServerSettings

_LOG = logging.getLogger(__name__)
_HEALTH_INTERVAL_S = 0.5
_MOURNING_S = 2.0
"""Time between the engine's death and the process's end, for probes and open streams to see it."""
_ABORT_S = 2.0
"""Time for aborted requests to reach their clients."""


class Server(uvicorn.Server):
    """uvicorn's server, which drains before it stops and watches the engine.

    Args:
        config: uvicorn's own.
        engine: Whose health is watched.
        settings: The server's.

    Attributes:
        death: What the engine died of, if it did.
    """

    def __init__(
        self, config: uvicorn.Config, engine: ServedEngine, settings: ServerSettings
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._settings = settings
        self._app: FastAPI = config.app  # type: ignore[assignment]
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.death: EngineDeadError | None = None

    async def _serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        helpers = [
            asyncio.create_task(self._drain(self._stopping)),
            asyncio.create_task(self._watch_engine()),
            asyncio.create_task(
                log_progress(self._engine, interval_s=self._settings.log_stats_interval_s)
            ),
        ]
        try:
            await super()._serve(sockets)
        finally:
            for helper in helpers:
                helper.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: refuse new work, let running requests end. Second: stop at once."""
        del sig, frame
        if self._stopping is None or self._loop is None or self._is_draining:
            self.force_exit = self.should_exit = True
            return
        self._is_draining = True
        # A signal handler runs between any two instructions: only hand over.
        self._loop.call_soon_threadsafe(self._stopping.set)

    _is_draining = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and say where to ask, with a command to paste."""
        await super().startup(sockets)
        for listener in (sockets or []) if self.started else []:
            host, port = listener.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            _LOG.info("serving %s at %s", self._engine.model_name, url)
            _LOG.info(
                "try: curl %s/v1/completions -H 'Content-Type: application/json' "
                """-d '{"prompt": "Hello", "max_tokens": 16}'""",
                url,
            )

    async def _drain(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        try:
            gate = self._app.state.gate
            if gate is not None:
                gate.is_draining = True
                if not await _within(self._settings.shutdown_timeout_s, gate.wait_until_idle()):
                    await self._app.state.abort_all()
                    await _within(_ABORT_S, gate.wait_until_idle())
        finally:
            self.should_exit = True

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            if not self.started:
                continue
            try:
                await self._engine.check_health()
            except EngineDeadError as error:
                self.death = error
                await asyncio.sleep(_MOURNING_S)
                self.should_exit = True
                return


async def _within(limit_s: float, work: Awaitable[None]) -> bool:
    """Whether the work ended in time."""
    try:
        await asyncio.wait_for(work, limit_s)
    except TimeoutError:
        return False
    return True


def run_server(
    app: FastAPI, engine: ServedEngine, settings: ServerSettings, listener: socket.socket
) -> None:
    """Serve until a signal or the engine's death.

    Args:
        app: What answers.
        engine: Whose health is watched.
        settings: The server's.
        listener: Bound to the server's address.

    Raises:
        ConfigError: The address cannot be listened on any more.
        EngineDeadError: The engine died.
    """
    server = make_server(app, engine, settings)
    try:
        # Two may bind an address while nobody listens on it; only one may listen.
        listener.listen(server.config.backlog)
    except OSError as error:
        raise _taken(settings.host, settings.port, error) from error
    server.run(sockets=[listener])
    if server.death is not None:
        raise server.death


def make_server(app: FastAPI, engine: ServedEngine, settings: ServerSettings) -> Server:
    """Configure a server for an application; `server.serve(sockets=…)` runs it in a loop."""
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=connection_kind(settings.send_timeout_s),
        log_config=log_config(level=settings.log_level, log_format=settings.log_format),
        # The gate writes a line of its own, with the request's id.
        access_log=False,
        timeout_graceful_shutdown=1,
        server_header=False,
        ws="none",
    )
    return Server(config, engine, settings)


def listen(host: str, port: int) -> socket.socket:
    """Bind an address before anything else happens with it.

    Raises:
        ConfigError: It is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError, TypeError) as error:  # TypeError: no name can be encoded so.
        listener.close()
        raise _taken(host, port, error) from error
    listener.set_inheritable(True)
    return listener


def _taken(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host} port {port}: {error}; choose another --host or --port"
    )
