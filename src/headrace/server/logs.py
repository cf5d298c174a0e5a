"""Log lines: text for people, or one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

LOG_FORMATS = ("text", "json")
#: Attributes that our own messages carry beside the text.
EXTRA = ("request_id", "method", "path", "status", "duration_s", "client")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what the message carries."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in EXTRA:
            if hasattr(record, name):
                line[name] = getattr(record, name)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_config(*, level: str, log_format: str) -> dict[str, Any]:
    """Settings for `logging.config.dictConfig`: our loggers and the web server's, to stderr.

    Args:
        level: debug, info, warning or error.
        log_format: One of LOG_FORMATS.
    """
    formatters: dict[str, dict[str, Any]] = {
        "text": {"format": "%(levelname)s: %(message)s"},
        "json": {"()": JsonFormatter},
    }
    logger = {"handlers": ["stderr"], "level": level.upper()}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"chosen": formatters[log_format]},
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "chosen",
                "stream": "ext://sys.stderr",
            }
        },
        # Records go on to the root logger too, where a program that embeds the server may listen.
        "loggers": {"headrace": logger, "uvicorn": logger},
    }
