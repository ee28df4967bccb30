"""Logs are events with ids, for people on a terminal or as JSON lines. Metrics are never read from them."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from common.recorder import RECORDER


def setup(role: str, *, json: bool | None = None, level: str = "info", **ids: Any) -> structlog.stdlib.BoundLogger:
    """Configure logging of this process and return its logger, bound to ``role`` and ``ids``.

    JSON lines by default where stderr is no terminal (a service manager, a file); colours for people elsewhere.
    """
    as_json = not sys.stderr.isatty() if json is None else json
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            RECORDER.keep,  # the last lines go into this process's report
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(role=role, **ids)
    return logger
