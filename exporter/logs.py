"""Logs readable lines on a terminal, and JSON elsewhere."""

import logging
import math
import sys
from collections.abc import Hashable
from typing import TextIO

import structlog

from exporter.engine.facts.mappings import put_newest
from exporter.engine.facts.model import Instant, Seconds


LOGGED_EVERY: Seconds = 60.0
"""How often a `Throttle` lets the same event through."""

log = structlog.stdlib.get_logger()


class Trouble:
    """The present problem with one object or peer. Logs a warning if the problem changes."""

    def __init__(self, event: str, **place: object) -> None:
        self._event = event
        self._place = place
        self._why = ""

    def __bool__(self) -> bool:
        return bool(self._why)

    def record(self, why: str) -> None:
        """Set the problem. Log it unless it is the same as before."""
        if why != self._why:
            log.warning(self._event, why=why, **self._place)
        self._why = why

    def end(self) -> None:
        """Clear the problem."""
        self._why = ""


def configure_logging(*, form: str | None, level: str, stream: TextIO = sys.stderr) -> None:
    """Log everything, including the libraries' own lines, to `stream`.

    `form` is `json` or `console`; None: `console` if the stream is a terminal.
    """
    console = form == "console" or (form is None and stream.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
    ]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        if console
        else structlog.processors.JSONRenderer()
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _escape_controls if console else structlog.processors.format_exc_info,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("kubernetes_asyncio", "aiohttp.access", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # aiohttp.server logs a traceback for every invalid request, so any caller could flood the log.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            *shared[:2],
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


class Throttle:
    """Limits the log to one event per key and minute. It remembers `most` keys."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._logged_at: dict[Hashable, Instant] = {}

    def __len__(self) -> int:
        return len(self._logged_at)

    def lets_through(self, key: Hashable, now: Instant) -> bool:
        """Whether the event of this key is due at `now`; if so, it counts as logged."""
        if 0.0 <= now - self._logged_at.get(key, -math.inf) < LOGGED_EVERY:
            return False
        put_newest(self._logged_at, key, now, most=self._most)
        return True


def _escape_controls(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape control characters, because a caller's text could control the terminal."""
    return {
        key: ascii(value)[1:-1] if isinstance(value, str) and not value.isprintable() else value
        for key, value in event.items()
    }
