"""The shipped rules with shorter durations.

A test cannot wait for half an hour. Rules that are written for the test would prove nothing about
the shipped rules. So one factor divides every `for`, `keep_firing_for`, range, offset and interval
of the shipped rules.
"""

import copy
import re
from collections.abc import Callable

from tests.generate.rules import Groups, all_rules


_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_DURATION = r"(?:\d+(?:ms|[smhdw]))+"
_PART = re.compile(r"(\d+)(ms|[smhdw])")
# A string is matched as a whole, and is not changed.
_STRING = r'"(?:[^"\\]|\\.)*"'
_IN_EXPRESSION = re.compile(
    rf"{_STRING}|(?P<before>\[|:|\boffset\s+-?)(?P<duration>{_DURATION})(?=\]|:|\s|\)|$)"
)
_FIELDS = ("for", "keep_firing_for")


def scale(groups: Groups, factor: float) -> Groups:
    """The rules with every duration divided by the factor."""
    return map_durations(groups, lambda text: write_duration(read_duration(text) / factor))


def map_durations(groups: Groups, change: Callable[[str], str]) -> Groups:
    """The rules with only the durations changed."""

    def in_place(match: re.Match[str]) -> str:
        if match["duration"] is None:
            return match[0]
        return match["before"] + change(match["duration"])

    changed = copy.deepcopy(groups)
    for group in changed["groups"]:
        if "interval" in group:
            group["interval"] = change(group["interval"])
    for rule in all_rules(changed):
        for field in _FIELDS:
            if field in rule:
                rule[field] = change(rule[field])
        rule["expr"] = _IN_EXPRESSION.sub(in_place, rule["expr"])
    return changed


def read_duration(text: str) -> float:
    """A duration as Prometheus writes it, in milliseconds."""
    return float(sum(int(number) * _UNITS[unit] for number, unit in _PART.findall(text)))


def write_duration(milliseconds: float) -> str:
    """The duration for Prometheus, at least a millisecond."""
    return f"{max(1, round(milliseconds))}ms"
