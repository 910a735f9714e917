"""Structured logs on stderr: one line an event, JSON for machines or columns for people.

Whatever is bound in the context (the request id of a call) is on every line. Prompts and outputs never are. What
cannot be written is lost: no request waits for a log, or ends with it.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal

import structlog
from structlog.typing import Processor

from engine.log_stream import lossy

LogFormat = Literal["json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logs(level: LogLevel, log_format: LogFormat) -> None:
    """Set up structlog, and the standard library's logging with the same output. Call it once, at start, before grpc is
    imported.
    """
    # Its core writes to stderr by itself, also what whoever reaches the port chooses (the text of a GOAWAY). Its Python
    # part logs headers that are no text, with what is in them.
    if os.environ.setdefault("GRPC_VERBOSITY", "NONE") == "NONE":
        logging.getLogger("grpc").setLevel(logging.CRITICAL)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = lossy(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_render(log_format)],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def _render(log_format: LogFormat) -> list[Processor]:
    if log_format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    plain = structlog.dev.plain_traceback  # rich tracebacks show local variables, and those hold prompts
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
