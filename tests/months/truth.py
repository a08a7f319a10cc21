"""What really happened in the simulated cluster, and whether an alert's text says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise

from exporter.demo import objects
from exporter.demo.objects import Object
from exporter.demo.store import MIGRATIONS, NODES, VMIS, ObjectStore, decode_body
from tests.months.cluster import BEGAN, DAY, HOUR


SEEN = 150.0
"""Prometheus has seen what happened before these seconds, although a scrape may have failed."""
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \+0000 UTC")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A migration that has ended; the target is empty if it had none."""

    vm: str
    target: str
    ended: float
    failed: bool


@dataclass(frozen=True, slots=True)
class Statement:
    """The text of an alert, its labels, and when it began to fire, in seconds."""

    alert: str
    labels: Mapping[str, str]
    text: str
    at: float

    @property
    def vm(self) -> str:
        """Namespace and name of the VM that the alert is about."""
        return f"{self.labels['namespace']}/{self.labels['name']}"

    @property
    def node(self) -> str:
        """The node that the alert names."""
        return self.labels["node"]

    def number(self, pattern: str) -> int:
        """The number at `N` of this text."""
        match = re.search(pattern.replace("N", r"(\d+)"), self.text)
        assert match, f"{pattern!r} is not in {self.text!r}"
        return int(match[1])


@dataclass
class Truth:
    """The course of a store: each list has the values of one thing, and from when each held."""

    store: ObjectStore
    clock: Callable[[], float]
    places: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    """The node of each VM; empty if it does not run."""
    leaving: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    """Who requested the evacuation of each VM: descheduler or other; empty: it has none."""
    stays: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    """The strategy of each VM that cannot be migrated; else empty."""
    closed: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    """"cordoned" for each node that is cordoned; else empty."""
    up: list[tuple[float, int, int]] = field(default_factory=list)
    """How many exporters can be scraped, and how many should be."""
    attempts: list[Attempt] = field(default_factory=list)
    _ended: set[str] = field(default_factory=set)
    _targets: dict[str, str] = field(default_factory=dict)
    _seen: int = 0

    def __post_init__(self) -> None:
        self.store.listeners.add(self._observe)

    def _observe(self) -> None:
        since, self._seen = self._seen, self.store.revision
        for resource, record in (
            (VMIS, self._record_vmi),
            (MIGRATIONS, self._record_migration),
            (NODES, self._record_node),
        ):
            for change in self.store.caches[resource].changes_since(since) or ():
                record(change.key, decode_body(change.body), change.kind == "DELETED")

    def _record_vmi(self, key: str, vmi: Object, is_gone: bool) -> None:
        runs = not is_gone and objects.phase(vmi) == "Running"
        source = "descheduler" if objects.EVICTION_SOURCE in objects.annotations(vmi) else "other"
        migratable = objects.condition(vmi, "LiveMigratable") or {}
        is_kept = migratable.get("status") == "False"
        state = objects.state_of(vmi) or {}
        if state and state["migrationUid"] not in self._ended:
            self._targets[state["migrationUid"]] = state.get("targetNode", "")
        self._put(self.places, key, str(vmi["status"].get("nodeName") or "") if runs else "")
        self._put(self.leaving, key, source if runs and objects.evacuated_node(vmi) else "")
        self._put(self.stays, key, "stays" if runs and is_kept else "")

    def _record_node(self, key: str, node: Object, is_gone: bool) -> None:
        is_closed = not is_gone and objects.is_cordoned(node)
        self._put(self.closed, key, "cordoned" if is_closed else "")

    def _record_migration(self, _key: str, migration: Object, is_gone: bool) -> None:
        if is_gone or not objects.is_final(migration):
            return
        uid = migration["metadata"]["uid"]
        if uid in self._ended:
            return
        self._ended.add(uid)
        owner = objects.owner_key(migration)
        failed = objects.phase(migration) == "Failed"
        self.attempts.append(Attempt(owner, self._targets.pop(uid, ""), self.clock(), failed))

    def _put(self, series: dict[str, list[tuple[float, str]]], key: str, value: str) -> None:
        known = series.setdefault(key, [])
        if not known or known[-1][1] != value:
            known.append((self.clock(), value))

    # Questions

    def on(self, node: str, at: float) -> list[str]:
        """The VMs on a node."""
        return [vm for vm, places in self.places.items() if _value(places, at) == node]

    def leaving_at(self, at: float, source: str = "") -> list[str]:
        """The VMs that are being evacuated, because of this source."""
        leaving = {vm: _value(marks, at) for vm, marks in self.leaving.items()}
        return [vm for vm, mark in leaving.items() if mark and source in ("", mark)]

    def left(self, node: str, since: float, until: float) -> set[str]:
        """The VMs that have left a node."""
        return {
            vm
            for vm, places in self.places.items()
            for (_, before), (at, _) in pairwise(places)
            if before == node and since < at <= until
        }

    def failures(self, vm: str, until: float) -> int:
        """How many attempts have failed since the evacuation of a VM was requested."""
        marks = self.leaving.get(vm, ())
        since = max((at for at, mark in marks if mark and at <= until), default=until)
        return sum(
            vmim.failed for vmim in self.attempts if vmim.vm == vm and since <= vmim.ended <= until
        )

    def ended(self, since: float, until: float) -> Iterator[Attempt]:
        """The attempts that ended within a time."""
        return (attempt for attempt in self.attempts if since < attempt.ended <= until)

    def holds(self, series: Sequence[tuple[float, str]], since: float, until: float) -> bool:
        """Whether a value was never empty during a time."""
        inside = [value for at, value in series if since < at <= until]
        return bool(_value(series, since)) and all(inside)


def _value(series: Sequence[tuple[float, str]], at: float) -> str:
    return next((value for since, value in reversed(series) if since <= at), "")


# What the texts say. Each check yields what is not true.

Check = Callable[[Statement, Truth], Iterator[str]]


def find_errors(claim: Statement, truth: Truth, spans: Sequence[tuple[float, float]]) -> list[str]:
    """What is not true in the text of an alert.

    `spans` are the times of the faults: no other time may be in a text.
    """
    check = CHECKS.get(claim.alert)
    errors = [] if check is None else [*check(claim, truth)]
    for stamp in TIME.findall(claim.text):
        at = datetime.fromisoformat(stamp.removesuffix(" +0000 UTC")).replace(tzinfo=UTC)
        since = (at - BEGAN).total_seconds()
        if not any(began - SEEN <= since <= min(ended, claim.at) for began, ended in spans):
            errors.append(f"the time {stamp} is not that of a fault")
    return [f"{claim.alert} at {claim.at / 60:.0f} min: {error}: {claim.text}" for error in errors]


def _is_about(claim: Statement, truth: Truth) -> Iterator[str]:
    if f"VMI {claim.vm}" not in claim.text or f"node {claim.node}" not in claim.text:
        yield "the VM or the node is not named"
    if claim.node not in {_value(truth.places[claim.vm], at) for at in (claim.at, claim.at - SEEN)}:
        yield "the VM is on another node"


def _check_range(number: int, least: int, most: int, what: str) -> Iterator[str]:
    if not least <= number <= most:
        yield f"{what}: {least} to {most}"


def _stuck(claim: Statement, truth: Truth) -> Iterator[str]:
    yield from _is_about(claim, truth)
    if "has denied it" in claim.text:
        return
    if claim.vm not in truth.leaving_at(claim.at - SEEN):
        yield "the VM is not being evacuated"
    number = claim.number("Failed attempts: N") if "Failed attempts" in claim.text else 0
    yield from _count_failures(claim, truth, number)


def _failing(claim: Statement, truth: Truth) -> Iterator[str]:
    yield from _is_about(claim, truth)
    yield from _count_failures(claim, truth, claim.number("N migrations of VMI"))


def _count_failures(claim: Statement, truth: Truth, number: int) -> Iterator[str]:
    least, most = (truth.failures(claim.vm, at) for at in (claim.at - SEEN, claim.at))
    yield from _check_range(number, min(least, most), most, "failed attempts")


def _moving(claim: Statement, truth: Truth) -> Iterator[str]:
    yield from _is_about(claim, truth)
    if f"trigger {claim.labels['trigger']}" not in claim.text:
        yield "the trigger is not named"
    if claim.vm in truth.leaving_at(claim.at):
        yield "the VM is being evacuated"
    own = [attempt for attempt in truth.ended(claim.at - DAY, claim.at) if attempt.vm == claim.vm]
    if own and own[-1].ended > claim.at - HOUR and not own[-1].failed:
        yield "its last migration succeeded"


def _many(claim: Statement, truth: Truth) -> Iterator[str]:
    most = len(truth.leaving_at(claim.at - SEEN))
    yield from _check_range(claim.number("N evacuations are stuck"), 10, most, "evacuations")


def _held(claim: Statement, truth: Truth) -> Iterator[str]:
    most = len(truth.leaving_at(claim.at - SEEN, "descheduler"))
    yield from _check_range(claim.number("N evacuations that"), 5, most, "of the descheduler")


def _churning(claim: Statement, truth: Truth) -> Iterator[str]:
    if f"VMI {claim.vm}" not in claim.text:
        yield "the VM is not named"
    ends = [
        attempt.ended
        for attempt in truth.ended(claim.at - 2.5 * HOUR, claim.at)
        if attempt.vm == claim.vm and not attempt.failed
    ]
    if not any(later - sooner <= 2 * HOUR for sooner, later in zip(ends, ends[4:], strict=False)):
        yield "it was not migrated five times within two hours"


def _kept(claim: Statement, truth: Truth) -> Iterator[str]:
    number = claim.number("Their number is now N")
    here = truth.on(claim.node, claim.at - SEEN)
    if claim.labels["cause"] == "cordoned":
        if not truth.holds(truth.closed[claim.node], claim.at - DAY, claim.at):
            yield "the node was not cordoned for a day"
        yield from _check_range(number, len(here), len(here), "VMs")
        return
    kept = [vm for vm in here if _value(truth.stays[vm], claim.at)]
    failing = [vm for vm in here if truth.failures(vm, claim.at) >= 3]
    yield from _check_range(number, len(kept), len({*kept, *failing}), "VMs that stay or fail")


def _drain(claim: Statement, truth: Truth) -> Iterator[str]:
    if not truth.holds(truth.closed[claim.node], claim.at - HOUR / 2, claim.at - SEEN):
        yield "the node was not being drained for half an hour"
    left = truth.left(claim.node, claim.at - HOUR / 2, claim.at - SEEN)
    if "at most two VMs have left" in claim.text and len(left) > 2:
        yield f"{len(left)} VMs have left it"
    elif "only VMs are left" in claim.text:
        yield from (
            f"{vm} can leave"
            for vm in truth.on(claim.node, claim.at - SEEN)
            if not _value(truth.stays[vm], claim.at)
            and truth.failures(vm, claim.at) < 3
            and not truth.holds(truth.leaving[vm], claim.at - HOUR / 2, claim.at - SEEN)
        )
    elif "no VM has left" in claim.text and left:
        yield f"{len(left)} VMs have left it"


def _target(claim: Statement, truth: Truth) -> Iterator[str]:
    there = [
        attempt
        for attempt in truth.ended(claim.at - HOUR, claim.at)
        if attempt.target == claim.node
    ]
    failed = [attempt for attempt in there if attempt.failed]
    if len(failed) < 5 or len({attempt.vm for attempt in failed}) < 3:
        yield f"{len(failed)} migrations of {len({attempt.vm for attempt in failed})} VMs failed"
    if len(failed) < 0.8 * len(there):
        yield f"{len(failed)} of {len(there)} failed"


def _absent(claim: Statement, truth: Truth) -> Iterator[str]:
    lately = [(up, all_) for at, up, all_ in truth.up if claim.at - 480 < at < claim.at - 120]
    if claim.labels["cause"] == "every_replica":
        if any(up for up, _ in lately):
            yield "an exporter can be scraped"
        return
    number = claim.number("cannot scrape N replicas")
    if any(all_ - up != number or not up for up, all_ in lately):
        yield "another number of replicas is down"


def _ungated(claim: Statement, truth: Truth) -> Iterator[str]:
    marks = [mark for marks in truth.leaving.values() for mark in marks]
    if not any(mark == "descheduler" and claim.at - HOUR < at <= claim.at for at, mark in marks):
        yield "the descheduler has evicted nothing"


CHECKS: Mapping[str, Check] = {
    "KubeVirtEvacuationStuck": _stuck,
    "KubeVirtEvacuationFailingRepeatedly": _failing,
    "KubeVirtEvacuationDiverged": _is_about,
    "KubeVirtEvacuationsStuckMany": _many,
    "KubeVirtMigrationStuck": _moving,
    "KubeVirtVMChurning": _churning,
    "KubeVirtNodeCannotBeEmptied": _kept,
    "KubeVirtNodeDrainStuck": _drain,
    "KubeVirtTargetNodeFailing": _target,
    "KubeVirtDeschedulerSlotsHeld": _held,
    "KubeVirtDeschedulerWithoutGate": _ungated,
    "KubeVirtEvictionExporterAbsent": _absent,
}
"""The other texts say nothing that the cluster knows, apart from times."""
