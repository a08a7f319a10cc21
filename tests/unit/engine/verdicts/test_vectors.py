"""Our verdicts compared with those of the reference plugin, with both guards off.

Every case must give the same answer, except those in `DIFFERENCES`. Each of these shows a fault of
the reference (`Fault`). Our answers in these cases are derived by hand.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest

from exporter.engine.facts.model import Checkpoint, Mismatch
from exporter.engine.facts.policy import Verdict
from exporter.engine.verdicts.rules import not_ours
from exporter.kube.objects.kubevirt import Changed, Deleted, parse_event, parse_object
from exporter.settings import read_settings
from exporter.settings.document import InvalidSettings
from tests.data.vectors import Kind, Probe, all_argument_cases, all_probes, all_refused
from tests.support.builders import NOW
from tests.support.stores import ClockedStore
from tests.support.verdicts import decide


class Fault(StrEnum):
    """The faults of the reference plugin that can be seen in its own cases."""

    FIRST_LIST_NOT_COUNTED = "an end first seen in a list that is not counted"
    FAILURES_FORGOTTEN = "failures forgotten on restart"
    MALFORMED_START_BLOCKS = "a malformed start that blocks"


@dataclass(frozen=True)
class Difference:
    """A case in which the reference is wrong: our answer, its derivation, and the faults."""

    ours: Mapping[str, Any]
    derivation: str
    faults: tuple[Fault, ...] = (Fault.FIRST_LIST_NOT_COUNTED,)


def denied(cooldown: int, count: int, derivation: str) -> Difference:
    """Our answer is a cooldown after `count` endings.

    One of them was in the first list, and the others are VMIMs.
    """
    ours = {"effective_cooldown_seconds": cooldown, "migration_count": count}
    return Difference({"preEvictionFilter": "deny"} | ours, derivation)


DIFFERENCES = {
    "backoff/count-0-cap-0": denied(900, 1, "max(900, 10) * 2^0; 300 < 900"),
    "backoff/count-1-cap-0": denied(1800, 2, "900 * 2^1; 300 < 1800"),
    "backoff/count-2-cap-0": denied(3600, 3, "900 * 2^2; 300 < 3600"),
    "backoff/count-3-cap-0": denied(7200, 4, "900 * 2^3; 300 < 7200"),
    "backoff/count-2-cap-1200": denied(1200, 3, "min(900 * 2^2, 1200); 300 < 1200"),
    "backoff/count-4-cap-1200": denied(1200, 5, "min(900 * 2^4, 1200); 300 < 1200"),
    "backoff/duration-base-count-1": denied(3600, 2, "max(900, 1800) * 2^1; 2400 < 3600"),
    "backoff/duration-base-count-2": denied(7200, 3, "max(900, 1800) * 2^2; 2400 < 7200"),
    "backoff/duration-base-count-3": denied(14400, 4, "max(900, 1800) * 2^3; 2400 < 14400"),
    "backoff/steady-state-24h": denied(
        21600, 6, "5 of 6 VMIMs: min(max(900, 600) * 2^5, 21600); 18000 < 21600"
    ),
    "backoff/steady-state-48h": denied(21600, 7, "min(max(900, 600) * 2^6, 21600); 18000 < 21600"),
    "live_update/unchanged-end": Difference(
        {"migration_count": 1},
        "the ending 60 s ago is in the first list, and the update repeats it = 1",
    ),
    "live_update/second-completion": Difference(
        {"migration_count": 2},
        "the ending 7200 s ago in the first list + the one 300 s ago = 2",
    ),
    "live_update/end-cleared": Difference(
        {"migration_count": 1, "filter": "deny"},
        "the ending 7200 s ago in the first list stays a record when a new migration clears it"
        " = 1; a start without an end blocks at filter",
    ),
    "seeding/other-phases#0": Difference(
        {"migration_count": 3},
        "an end is proof of a hand-off (migrationState is empty before it), so each that ended"
        " in the window counts, whatever its outcome: Succeeded + Failed + Running with an end = 3",
        (Fault.FAILURES_FORGOTTEN, Fault.FIRST_LIST_NOT_COUNTED),
    ),
    "readme/count-0": denied(900, 1, "max(900, 10) * 2^0; 60 < 900"),
    "readme/malformed-start-no-end": Difference(
        {"filter": "allow"},
        "a start that cannot be parsed is not there, so nothing runs",
        (Fault.MALFORMED_START_BLOCKS,),
    ),
}


def answer(probe: Probe) -> dict[str, Any]:
    """Our answer to a probe, in the vectors' format."""
    store = load(probe)
    policy = read_settings({"policy": probe.policy}).policy
    evidence = None if probe.candidate is None else store.evidence(*probe.candidate)

    def verdict(checkpoint: Checkpoint) -> Verdict:
        if evidence is None:
            return not_ours(Mismatch.UNKNOWN)
        return decide(evidence, policy, probe.at(NOW), checkpoint=checkpoint)

    filtered, evicted = verdict(Checkpoint.FILTER), verdict(Checkpoint.PRE_EVICTION)
    whole = {
        "filter": "allow" if filtered.allowed else "deny",
        "preEvictionFilter": "allow" if evicted.allowed else "deny",
        "effective_cooldown_seconds": evicted.effective_cooldown,
        "migration_count": evicted.migrations_in_window,
    }
    return {field: whole[field] for field in probe.expected}


def load(probe: Probe) -> ClockedStore:
    """A store with the objects of the probe's case."""
    store = ClockedStore(keep=read_settings({"policy": probe.policy}).policy.endings_kept)
    for sighting in probe.sightings(NOW):
        raw = json.dumps(sighting.object).encode()
        if sighting.kind is Kind.LISTED:
            store.put(parse_object(sighting.resource, raw).fact)
            continue
        line = json.dumps({"type": sighting.kind, "object": sighting.object}).encode()
        event = parse_event(sighting.resource, line)
        if isinstance(event, Deleted):
            store.remove(sighting.resource, event.namespace, event.name, event.uid)
        else:
            assert isinstance(event, Changed)
            store.put(event.fact)
    return store


def answer_about_arguments(probe: Probe) -> dict[str, Any]:
    """Our answer about the policy of a case: its validity, or its durations."""
    try:
        policy = read_settings({"policy": probe.policy}).policy
    except InvalidSettings:
        return {"valid": False}
    if "valid" in probe.expected:
        return {"valid": True}
    return {
        "settled_args": {
            "migrationCooldownSeconds": policy.migration_cooldown,
            "maxMigrationCooldownSeconds": policy.max_migration_cooldown,
            "migrationHistoryWindowSeconds": policy.migration_history_window,
        }
    }


@pytest.mark.parametrize("probe", all_probes(), ids=lambda probe: probe.id)
def test_verdict(probe: Probe) -> None:
    """The verdict is that of the reference, except for the cases in `DIFFERENCES`."""
    difference = DIFFERENCES.get(probe.id)
    assert answer(probe) == (probe.expected if difference is None else difference.ours)


@pytest.mark.parametrize("probe", all_refused(), ids=lambda probe: probe.id)
def test_arguments_that_differ_are_refused(probe: Probe) -> None:
    """Arguments that the reference accepts and our settings do not."""
    with pytest.raises(InvalidSettings):
        read_settings({"policy": probe.policy})


@pytest.mark.parametrize("probe", all_argument_cases(), ids=lambda probe: probe.id)
def test_arguments(probe: Probe) -> None:
    """Our settings accept and reject the same arguments as the reference, with the same meaning."""
    assert answer_about_arguments(probe) == probe.expected


def test_every_difference_is_one() -> None:
    """Each case in `DIFFERENCES` really differs, and says what the reference plugin does wrong."""
    expected = {probe.id: probe.expected for probe in all_probes()}
    for probe_id, difference in DIFFERENCES.items():
        assert difference.ours != expected[probe_id], probe_id
        assert difference.ours.keys() == expected[probe_id].keys(), probe_id
        assert difference.faults, probe_id


def test_counts(prove: Callable[[str], None]) -> None:
    """All 94 cases are compared, and the numbers of equal and different ones are printed."""
    cases = {probe.case_id for probe in all_probes() + all_argument_cases()}
    different = {probe.case_id for probe in all_probes() if probe.id in DIFFERENCES}
    prove(
        f"reference vectors: {len(cases - different)} equal,"
        f" {len(different)} rightly different, of {len(cases)}"
    )
    assert (len(cases), len(different)) == (94, 17)
