"""What the server itself can be told; the engine's settings are `headrace.config.EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.dialects import REASONING_PARSERS, TOOL_PARSERS
from headrace.errors import ConfigError
from headrace.server.logs import LOG_FORMATS

if TYPE_CHECKING:
    from pathlib import Path

MEBIBYTE = 1024 * 1024
REASONING_FIELDS = ("reasoning_content", "reasoning", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP side.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        api_keys: Accepted keys; none means that everybody may ask.
        max_body_bytes: Largest request body; larger ones get 413.
        max_prompts: Most prompts in one completions request.
        max_concurrent_requests: Most requests in flight, waiting ones included; more get 429. None
            leaves it to the engine's queue.
        body_timeout_s: Seconds a client has to send its body; after them it gets 408.
        send_timeout_s: Seconds in which a client has to take something of an answer that waits for
            it; after them its connection is closed and its sequences end. None waits forever.
        request_timeout_s: Seconds an answer may take; after them it ends with what there is and the
            finish reason abort. None sets no limit.
        step_timeout_s: Seconds a step of the engine may take; an engine that is longer at one
            counts as dead. None sets no limit.
        shutdown_timeout_s: Seconds that running requests have to end after SIGTERM.
        log_level: Lowest level that is logged.
        log_format: text, or json for one object a line.
        access_log: Log a line for each request.
        tool_call_parser: Format of tool calls; auto finds it in the chat template.
        reasoning_parser: Marks of reasoning; auto finds them in the chat template.
        reasoning_field: Where answers have their reasoning.
        log_stats_interval_s: Seconds between lines with the engine's figures while it works; 0
            leaves them out.
        otlp_traces_endpoint: URL that gets OpenTelemetry traces over HTTP; None sends none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 * MEBIBYTE
    max_prompts: int = 1024
    max_concurrent_requests: int | None = None
    body_timeout_s: float = 60.0
    send_timeout_s: float | None = 60.0
    request_timeout_s: float | None = None
    step_timeout_s: float | None = 600.0
    shutdown_timeout_s: float = 30.0
    log_level: str = "info"
    log_format: str = "text"
    access_log: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    reasoning_field: str = "reasoning_content"
    log_stats_interval_s: float = 10.0
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:  # noqa: PLR2004 - the range of ports
            raise ConfigError(f"port must be in 0..65535, got {self.port}")
        if any(not key for key in self.api_keys):
            raise ConfigError("an API key is empty; give a key or leave --api-key out")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}")
        for name, known in (
            ("log_level", ("debug", "info", "warning", "error")),
            ("log_format", LOG_FORMATS),
            ("tool_call_parser", TOOL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
            ("reasoning_field", REASONING_FIELDS),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(known)}")
        self._check_limits()

    def _check_limits(self) -> None:
        if self.max_concurrent_requests is not None and self.max_concurrent_requests < 1:
            raise ConfigError(
                f"max_concurrent_requests must be at least 1, got {self.max_concurrent_requests}"
            )
        for name in ("shutdown_timeout_s", "log_stats_interval_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("body_timeout_s", "send_timeout_s", "request_timeout_s", "step_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be positive, got {value}")


def keys_of_file(path: Path) -> tuple[str, ...]:
    """Read API keys, one a line; blank lines and lines that begin with # are passed over.

    Raises:
        ConfigError: The file cannot be read, or has no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"file of API keys {path} cannot be read: {error}") from error
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise ConfigError(f"file of API keys {path} has no key; write one a line")
    return keys
