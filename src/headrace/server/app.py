"""The routes, and the process that serves them."""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager
from logging.config import dictConfig
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from headrace import __version__
from headrace.errors import HeadraceError, NotFoundError, RequestError
from headrace.server.errors import (
    UnavailableError,
    error_body,
    error_response,
    error_status,
    json_response,
    shaped,
)
from headrace.server.gate import Gate
from headrace.server.logs import log_config
from headrace.server.messages import CountTokensBody, MessagesBody
from headrace.server.metrics import CONTENT_TYPE, Metrics
from headrace.server.openapi import add_schemas, body_of, error_answers
from headrace.server.page import add_page
from headrace.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    TraceBody,
)
from headrace.server.replies import JsonReply
from headrace.server.responses import ResponsesBody
from headrace.server.service import Service
from headrace.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from headrace.config import EngineConfig
    from headrace.server.engine import ServedEngine

_LOG = logging.getLogger(__name__)


def create_app(engine: ServedEngine, settings: ServerSettings | None = None) -> FastAPI:
    """Build the ASGI application of an engine.

    The application starts the engine and shuts it down with itself. `app.state.gate` is the
    middleware that knows of draining, or None before the first event; `app.state.abort_all` ends
    all requests; `app.state.service` answers them.

    Args:
        engine: What answers.
        settings: The server's; defaults where None.
    """
    chosen = settings or ServerSettings()
    metrics = Metrics(engine)
    service = Service(engine, chosen, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        yield
        await service.close()
        await engine.shutdown()

    app = FastAPI(
        title="headrace", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.gate = None
    app.state.abort_all = service.abort_all
    app.state.service = service

    class AppGate(Gate):
        """The gate, known to the application from its first event on."""

        def __init__(self, inner: Any) -> None:  # noqa: ANN401 - an ASGI application
            super().__init__(
                inner,
                api_keys=chosen.api_keys,
                max_in_flight=chosen.max_concurrent_requests,
                metrics=metrics,
                is_logging=chosen.access_log,
                traced=service.enter_trace,
            )
            app.state.gate = self

    app.add_middleware(AppGate)
    _add_errors(app, metrics)
    _add_operation(app, engine, metrics)
    _add_trace(app, service, metrics)
    add_page(app, engine)
    _add_cache(app, engine)
    _add_models(app, engine, service)
    _add_generation(app, service)
    _add_text(app, service)
    _add_openapi(app)
    return app


def serve(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_keys: str | Sequence[str] = (),
    settings: ServerSettings | None = None,
) -> None:
    """Load a model and serve it until a signal ends the process.

    Args:
        config: The engine's settings.
        host: Address to listen on.
        port: Port to listen on.
        api_keys: Accepted keys; none lets everybody ask.
        settings: All settings of the server at once, instead of the three before.

    Raises:
        ConfigError: A setting is wrong or the address is taken.
        ModelError: The model cannot be used.
        EngineDeadError: The engine died; the process should end with a code other than 0.
    """
    # Imported here: `create_app` is of use without an engine and without torch.
    from headrace.engine.async_llm import AsyncLLM  # noqa: PLC0415
    from headrace.engine.follower import follow_if_launched  # noqa: PLC0415
    from headrace.server.runner import listen, run_server  # noqa: PLC0415

    follow_if_launched(config)

    if settings is None:
        keys = (api_keys,) if isinstance(api_keys, str) else tuple(api_keys)
        settings = ServerSettings(host=host, port=port, api_keys=keys)
    # Before the model, which may take minutes: what loading has to say is logged as asked, and a
    # port that is taken is no news at the end of it.
    dictConfig(log_config(level=settings.log_level, log_format=settings.log_format))
    with listen(settings.host, settings.port) as listener:
        _LOG.info("loading %s", config.model)
        engine = AsyncLLM(config, step_timeout_s=settings.step_timeout_s)
        run_server(create_app(engine, settings), engine, settings, listener)


def _add_errors(app: FastAPI, metrics: Metrics) -> None:
    async def known(request: Request, error: Exception) -> Response:
        metrics.refused(error_status(error))
        return error_response(error, request.url.path)

    async def of_routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        metrics.refused(error.status_code)
        message = str(error.detail)
        if error.status_code == 404:  # noqa: PLR2004
            message = f"no route {request.method} {request.url.path}; see /openapi.json"
        elif error.status_code == 405:  # noqa: PLR2004
            message = f"{request.url.path} does not take {request.method}"
        headers = dict(error.headers or {})
        body = shaped(error_body(error.status_code, message), request.url.path)
        return json_response(body, error.status_code, headers)

    async def gone(_: Request, error: Exception) -> Response:
        del error
        # Nobody reads it: the client left in the middle of its own body, which is no fault of ours.
        return Response(status_code=400)

    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(HeadraceError, known)
    app.add_exception_handler(HTTPException, of_routing)
    app.add_exception_handler(Exception, known)


def _add_operation(app: FastAPI, engine: ServedEngine, metrics: Metrics) -> None:
    @app.get("/health", responses=error_answers())
    async def health() -> Response:
        """Whether the engine can answer: the probe of liveness."""
        await engine.check_health()
        return json_response({"status": "ok"})

    @app.get("/ping", include_in_schema=False)
    async def ping() -> Response:
        return await health()

    @app.get("/ready", responses=error_answers())
    async def ready() -> Response:
        """Whether new requests are welcome: the probe of readiness."""
        await engine.check_health()
        if app.state.gate.is_draining:
            raise UnavailableError("the server is shutting down")
        return json_response({"status": "ready"})

    @app.get("/version", responses=error_answers())
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics", responses=error_answers(is_text=True), response_class=PlainTextResponse)
    async def exposition() -> Response:
        return Response(metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    @app.get("/stats", responses=error_answers())
    async def stats() -> Response:
        """The engine's figures as JSON."""
        figures = engine.stats()
        return json_response({"model": engine.model_name, "version": __version__, **figures})


def _add_cache(app: FastAPI, engine: ServedEngine) -> None:
    @app.get("/cache/pins", responses=error_answers())
    async def pins() -> Response:
        """What requests have pinned in the prefix cache, by name."""
        return json_response(await engine.pins())

    @app.delete("/cache/pins/{name:path}", responses=error_answers())
    async def release_pin(name: str) -> Response:
        """Let what a pin spares be evicted again."""
        if not await engine.release_pin(name):
            raise NotFoundError(f"there is no pin {name!r}; GET /cache/pins lists them")
        return json_response({"released": name})


def _add_trace(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.post("/trace", responses=error_answers(), openapi_extra=body_of(TraceBody))
    async def trace(request: Request) -> Response:
        """Record the next steps as a trace in Chrome's format, which Perfetto opens."""
        body = await service.bodies.read(request, TraceBody)
        return JsonReply(
            lambda: service.engine.trace(body.steps, timeout_s=body.timeout_s), metrics.refused
        )


def _add_models(app: FastAPI, engine: ServedEngine, service: Service) -> None:
    card = {
        "id": engine.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "headrace",
        "root": engine.config.model,
        "parent": None,
        "max_model_len": engine.max_model_len,
        "min_cacheable_prefix_tokens": engine.min_cacheable_prefix_tokens,
    }

    @app.get("/v1/models", responses=error_answers())
    async def models() -> Response:
        return json_response({"object": "list", "data": [card]})

    # Ids of the hub have a slash in them.
    @app.get("/v1/models/{model_id:path}", responses=error_answers())
    async def model(model_id: str) -> Response:
        if not model_id:
            raise NotFoundError("no model is named; GET /v1/models lists them")
        service.check_model(model_id)
        return json_response(card)


def _add_generation(app: FastAPI, service: Service) -> None:
    engine_name = service.engine.model_name

    @app.post(
        "/v1/chat/completions", responses=error_answers(streams=True),
        openapi_extra=body_of(ChatBody),
    )
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        return await service.chat(await service.bodies.read(request, ChatBody))

    @app.post(
        "/v1/completions", responses=error_answers(streams=True),
        openapi_extra=body_of(CompletionBody),
    )
    async def completions(request: Request) -> Response:
        """Continue prompts."""
        return await service.complete(await service.bodies.read(request, CompletionBody))


    @app.post(
        "/v1/responses", responses=error_answers(streams=True), openapi_extra=body_of(ResponsesBody)
    )
    async def responses(request: Request) -> Response:
        """Go on with a conversation in OpenAI's newer form; nothing is stored."""
        return await service.respond(await service.bodies.read(request, ResponsesBody))

    @app.post(
        "/v1/messages", responses=error_answers(streams=True, is_messages=True),
        openapi_extra=body_of(MessagesBody),
    )
    async def messages(request: Request) -> Response:
        """Go on with a conversation in Anthropic's form."""
        return await service.message(await service.bodies.read(request, MessagesBody))

    @app.post(
        "/v1/messages/count_tokens", responses=error_answers(is_messages=True),
        openapi_extra=body_of(CountTokensBody),
    )
    async def count_tokens(request: Request) -> Response:
        """Tokens of a conversation in Anthropic's form."""
        body = await service.bodies.read(request, CountTokensBody)
        return json_response(await service.count_tokens(body))

    @app.post("/v1/embeddings", responses=error_answers())
    async def embeddings() -> Response:
        """Refuse: models that generate text give no embeddings."""
        raise RequestError(
            f"{engine_name} generates text and gives no embeddings; ask a server with an embedding "
            "model", param="model",
        )


def _add_text(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=error_answers(), openapi_extra=body_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        body = await service.bodies.read(request, TokenizeBody)
        return json_response(await service.tokenize(body))

    @app.post("/detokenize", responses=error_answers(), openapi_extra=body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        body = await service.bodies.read(request, DetokenizeBody)
        service.check_model(body.model)
        return json_response({"prompt": await service.prompts.detokenise(body.tokens)})

    @app.get("/tokenizer_info", responses=error_answers())
    async def tokenizer_info() -> Response:
        """Special tokens and the chat template."""
        template = service.engine.chat_template
        return json_response({
            "tokenizer_class": "PreTrainedTokenizerFast",
            **service.prompts.tokenizer.special_tokens,
            "chat_template": template.source if template is not None else None,
        })


def _add_openapi(app: FastAPI) -> None:
    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = add_schemas(
                get_openapi(title=app.title, version=app.version, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


