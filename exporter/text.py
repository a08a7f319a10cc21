"""Text for people: durations in the units that they think in, and words that hide nothing."""

from exporter.engine.model import Seconds


_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
_AGES: Seconds = 100 * 365 * 86_400.0


def split_span(seconds: int, most: int) -> list[tuple[int, str]]:
    """How many of which units a duration has, d, h, m or s: of so many, from its greatest on.

    Those that it has none of are left out, and what is smaller is cut off: 86,461 in two is 1 d.
    """
    left, parts = seconds, list[tuple[int, str]]()
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count or parts:
            parts.append((count, unit))
    return [part for part in parts[:most] if part[0]]


def write_span(seconds: Seconds, *, units: int = 4) -> str:
    """Seconds as a person writes them: 3m12s, 6h, 0.4s; cut off after so many units."""
    if seconds >= _AGES:
        return "over 100 years"
    if seconds < 60 and seconds != int(seconds):
        return f"{seconds:.1f}s"
    return "".join(f"{count}{unit}" for count, unit in split_span(round(seconds), units)) or "0s"


def escape(text: str) -> str:
    """Text with every character that does more than be seen written as an escape."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
