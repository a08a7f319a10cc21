"""Text for people: durations, instants, and names without invisible characters."""

from datetime import UTC, datetime

from exporter.engine.model import Instant, Seconds


_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
_AGES: Seconds = 100 * 365 * 86_400.0
_LAST_INSTANT = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()


def split_span(seconds: int, most: int) -> list[tuple[int, str]]:
    """Split seconds into at most `most` units (d, h, m, s), largest first.

    Units of which there are none are left out, and smaller ones are cut off: 86,461 in two is 1 d.
    """
    left, parts = seconds, list[tuple[int, str]]()
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count or parts:
            parts.append((count, unit))
    return [part for part in parts[:most] if part[0]]


def write_span(seconds: Seconds, *, units: int = 4) -> str:
    """Seconds as people write them, in at most `units` units: 3m12s, 6h, 0.4s."""
    if seconds >= _AGES:
        return "over 100 years"
    if seconds < 60 and seconds != int(seconds):
        return f"{seconds:.1f}s"
    return "".join(f"{count}{unit}" for count, unit in split_span(round(seconds), units)) or "0s"


def write_instant(instant: Instant) -> str:
    """Unix seconds as RFC 3339 in UTC, with microseconds unless they are zero."""
    moment = datetime.fromtimestamp(min(instant, _LAST_INSTANT), tz=UTC)
    return moment.isoformat().replace("+00:00", "Z")


def clean(text: str, most: int) -> str:
    """Foreign text for people: escaped as in `escape`, cut to at most `most` characters."""
    safe = escape(text[: most + 1].strip())
    return safe if len(safe) <= most else f"{safe[: most - 1]}…"


def escape(text: str) -> str:
    """Write control characters, direction marks and other invisible characters as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
