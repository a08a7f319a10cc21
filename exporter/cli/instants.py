"""Formats instants for people, with their distance from `as_of`, the time of the answer."""

import math
from datetime import datetime

from exporter.text import write_instant, write_span


def write_release(moment: datetime, as_of: datetime) -> str:
    """The instant of a VM's release, rounded up to whole seconds, and how far away it is."""
    return f"{write_instant(math.ceil(moment.timestamp()))} ({write_distance(moment, as_of)})"


def write_past(moment: datetime, as_of: datetime) -> str:
    """An instant in whole seconds, and how long ago it was."""
    return f"{write_instant(math.floor(moment.timestamp()))} ({write_distance(moment, as_of)})"


def write_distance(moment: datetime, as_of: datetime) -> str:
    """How far an instant is from `as_of`, in its two largest units."""
    seconds = (moment - as_of).total_seconds()
    if seconds > 0:
        return f"in {write_span(math.ceil(seconds), units=2)}"
    return f"{write_span(int(-seconds), units=2)} ago"
