"""Formats the API's instants for people, with their distance from the time of the answer."""

import math
from datetime import datetime

from exporter.engine.model import Instant
from exporter.text import write_instant, write_span


class Unreadable(ValueError):
    """An answer has a value that no exporter of this version gives; the message says which."""


def read_instant(text: str) -> Instant:
    """Unix seconds from RFC 3339. Raises `Unreadable`."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise Unreadable(f"{text!r} is no instant") from None
    if moment.tzinfo is None:
        raise Unreadable(f"{text!r} is no instant: it has no time zone")
    return moment.timestamp()


def write_release(text: str) -> str:
    """An instant rounded up to whole seconds, so that nobody comes too early."""
    return write_instant(math.ceil(read_instant(text)))


def write_past(text: str, as_of: str) -> str:
    """An instant in whole seconds, and how long ago it was."""
    return f"{write_instant(math.floor(read_instant(text)))} ({write_distance(text, as_of)})"


def write_distance(text: str, as_of: str) -> str:
    """How far an instant is from `as_of`, in its two largest units."""
    seconds = read_instant(text) - read_instant(as_of)
    if seconds > 0:
        return f"in {write_span(math.ceil(seconds), units=2)}"
    return f"{write_span(int(-seconds), units=2)} ago"
