"""Instants in Kubernetes objects: RFC 3339."""

import re
from datetime import UTC, datetime
from functools import lru_cache

from exporter.engine.facts.model import Instant
from exporter.text import FIRST_INSTANT, LAST_INSTANT


_RFC3339 = re.compile(
    r"\d{4}-\d\d-\d\d[Tt](?!24)\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:[0-5]\d)", re.ASCII
)
"""`fromisoformat` also accepts other formats, such as a week, a comma, or hour 24 (Python 3.13)."""


def parse_instant(value: object) -> Instant | None:
    """Parse RFC 3339 to Unix seconds; None if absent or invalid."""
    return _parse_instant(value) if isinstance(value, str) else None


@lru_cache(maxsize=128)
def _parse_instant(text: str) -> Instant | None:
    """Parse one text. Digits after the microseconds are ignored.

    The results are cached, because one object repeats an instant up to three times. This saves two
    thirds of the time for a VMIM, and equal instants share one float. A larger cache is slower: it
    does not fit into the processor's.
    """
    # KubeVirt's own format needs no check by the pattern, which takes longer than the parser.
    if len(text) != 20 or text[4::3] != "--T::Z" or text[11:13] == "24":
        if _RFC3339.fullmatch(text) is None:
            return None
        text = text.upper()
    try:
        instant = datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
    return instant if FIRST_INSTANT <= instant <= LAST_INSTANT else None


def write_time(instant: Instant) -> str:
    """Format Unix seconds as a Kubernetes Time, which has whole seconds."""
    return datetime.fromtimestamp(instant, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_micro_time(instant: Instant) -> str:
    """Format Unix seconds as a Kubernetes MicroTime."""
    return datetime.fromtimestamp(instant, tz=UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
