"""The reference plugin's verdicts as cases: objects, requests and answers.

`all_probes` returns one `Probe` for each request of `FILES`. Its objects are rendered for
any `now`, so that the same cases run against the engine and, at the present time, over HTTP.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from exporter.engine.facts.model import Instant, Resource, Seconds


Json: TypeAlias = dict[str, Any]
Answer: TypeAlias = Mapping[str, Any]
"""Fields of a verdict by their names in the vectors."""

REFERENCE_DEFAULTS = {
    "migrationCooldownSeconds": 900,
    "maxMigrationCooldownSeconds": 21_600,
    "migrationHistoryWindowSeconds": 172_800,
}
"""The values that the reference uses for an argument that is 0."""

FILES = ("reference.json", "new.json")
"""The cases from the reference's own tests, and those that were read from its code."""
_DOMAIN = "kubevirt.io/domain"
_INSTANT = re.compile(r"@now(?P<offset>[+-]\d+)s(?P<spelling>(?:;(?:tz|frac)=[^;]+)*)")


class Kind(StrEnum):
    """How an object was seen: in the list at startup, or in the watch."""

    LISTED = "LISTED"
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True)
class Sighting:
    """One object, as it was read at this time."""

    at: Instant
    kind: Kind
    resource: Resource
    object: Json


@dataclass(frozen=True)
class Probe:
    """One request of one case.

    `policy` is our own `policy:` section, with the guards off. `candidate` is namespace and name of
    the pod's VMI, or None if the pod is no launcher. `expected` is the reference's answer. The
    request comes `offset` seconds after the case's `now`, or before it if that is negative.
    """

    id: str
    case_id: str
    says: str
    policy: Json
    candidate: tuple[str, str] | None
    offset: Seconds
    expected: Answer
    case: Json

    def at(self, now: Instant) -> Instant:
        """The time of the request."""
        return now + self.offset

    def sightings(self, now: Instant) -> list[Sighting]:
        """The objects read before the request, in order: first the lists, then the watch."""
        startup = _offset(self.case.get("startup_at", "@now+0s"))
        listed = [
            Sighting(now + startup, Kind.LISTED, Resource.VMIS, render(event["object"], now))
            for event in self.case["vmi_events"]
            if event["type"] == "INITIAL"
        ] + [
            Sighting(now + startup, Kind.LISTED, Resource.VMIMS, render(vmim, now))
            for vmim in self.case.get("vmims", [])
        ]
        watched = [
            Sighting(
                now + _offset(event.get("at", "@now+0s")),
                Kind(event["type"]),
                Resource.VMIS,
                render(event["object"], now),
            )
            for event in self.case["vmi_events"]
            if event["type"] != "INITIAL"
        ]
        return [sighting for sighting in listed + watched if sighting.at <= self.at(now)]


@cache
def all_probes() -> tuple[Probe, ...]:
    """Every request for a verdict in the reference's cases."""
    return tuple(
        probe
        for vector in _vectors()
        if "now" in vector["case"] and "differs" not in vector
        for probe in _probes(vector)
    )


@cache
def all_refused() -> tuple[Probe, ...]:
    """The cases whose arguments our settings refuse; the vector says why in `differs`."""
    return tuple(probe for vector in _vectors() if "differs" in vector for probe in _probes(vector))


@cache
def all_argument_cases() -> tuple[Probe, ...]:
    """The cases that are about arguments alone: `expected` has `valid` or `settled_args`."""
    return tuple(
        _probe(vector, vector["expect"], vector["case"]["pod"], 0.0, "")
        for vector in _vectors()
        if "now" not in vector["case"]
    )


def policy_section(args: Mapping[str, int], *, defaulting: bool) -> Json:
    """The `policy:` section that means the same as these arguments, with both guards off.

    An argument for which the reference uses its default is left out, except the window: its default
    is 48 h there and 24 h here.
    """
    section: Json = {"guards": {"pendingMigrations": False, "evacuations": False}}
    for argument, seconds in args.items():
        key = argument.removesuffix("Seconds")
        if seconds or not defaulting:
            section[key] = f"{seconds}s" if seconds else 0
        elif key == "migrationHistoryWindow":
            section[key] = f"{REFERENCE_DEFAULTS[argument]}s"
    return section


def render(value: Any, now: Instant) -> Any:
    """A case's JSON with its `@now...` strings written as RFC 3339."""
    match value:
        case dict():
            return {key: render(inner, now) for key, inner in value.items()}
        case list():
            return [render(inner, now) for inner in value]
        case str() if (match := _INSTANT.fullmatch(value)) is not None:
            spelling = dict(part.split("=", 1) for part in match["spelling"].split(";") if part)
            return _spell(now + float(match["offset"]), **spelling)
        case _:
            return value


def _spell(instant: Instant, tz: str = "Z", frac: str = "") -> str:
    zone: timezone = UTC
    if tz != "Z":
        hours, minutes = int(tz[1:3]), int(tz[-2:])
        zone = timezone((-1 if tz[0] == "-" else 1) * timedelta(hours=hours, minutes=minutes))
    moment = datetime.fromtimestamp(instant, tz=zone)
    return f"{moment:%Y-%m-%dT%H:%M:%S}{'.' if frac else ''}{frac}{tz}"


def _offset(text: str) -> Seconds:
    match = _INSTANT.fullmatch(text)
    assert match is not None, text
    return float(match["offset"])


def _vectors() -> list[Json]:
    texts = [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in FILES]
    return [vector for text in texts for vector in json.loads(text)["vectors"]]


def _probes(vector: Json) -> Iterator[Probe]:
    case, expect = vector["case"], vector["expect"]
    if "probes" not in case:
        yield _probe(vector, expect, case["pod"], 0.0, "")
        return
    for number, (asked, expected) in enumerate(zip(case["probes"], expect["probes"], strict=True)):
        yield _probe(vector, expected, asked["pod"], _offset(asked["at"]), f"#{number}")


def _probe(vector: Json, expected: Answer, pod: Json, offset: Seconds, suffix: str) -> Probe:
    case = vector["case"]
    name = pod.get("annotations", {}).get(_DOMAIN)
    return Probe(
        id=case["id"] + suffix,
        case_id=case["id"],
        says=vector["says"],
        policy=policy_section(case["args"], defaulting=case["defaulting"]),
        candidate=(pod["namespace"], name) if name else None,
        offset=offset,
        expected=expected,
        case=case,
    )
