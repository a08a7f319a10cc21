"""Every state of an evacuation, read off objects as KubeVirt's own controllers wrote them.

The files in `tests/recorded/` come from the rig (`RECORD=1` with `tests/system/test_rig.py`), each
with the controller that wrote it in `source`; those written by hand, because their owner is not in
the rig, say so there.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exporter.engine.diagnosis import State, diagnose
from exporter.engine.evidence import Evidence
from exporter.engine.model import Resource, StuckPolicy
from exporter.engine.store import Store
from exporter.kube.instants import parse_instant
from exporter.kube.kubevirt import parse_object


RESOURCES = {
    "VirtualMachineInstance": Resource.VMIS,
    "VirtualMachineInstanceMigration": Resource.VMIMS,
    "Pod": Resource.PODS,
    "KubeVirt": Resource.KUBEVIRTS,
}

FOLDER = Path(__file__).parents[2] / "recorded"
FILES = sorted(FOLDER.glob("*.json"))
ENDED = {"succeeded", "cancelled"}
"""Recorded too: what is left when an evacuation is over."""
DERIVED = {State.MIGRATION_STALLED: "migrating", State.UNKNOWN: "capacity"}
"""States that are another recording, seen later or with a permission missing."""


def load(path: Path, *, limits: bool = True) -> tuple[Store, Evidence, float]:
    """What the exporter knows of a recorded set, and the instant of the recording."""
    recorded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    now = parse_instant(recorded["now"])
    assert now is not None
    store = Store(endings_kept=16)
    store.vmims_seen = store.pods_seen = True
    store.heard_at = now
    vmi = recorded["vmi"]
    sets = [vmi, *recorded["vmims"], *recorded["pods"], *recorded.get("others", [])]
    if limits and recorded["kubevirt_cr"] is not None:
        sets.append(recorded["kubevirt_cr"])
    for one in sets:
        store.put(parse_object(RESOURCES[one["kind"]], msgspec.json.encode(one)).fact)
    evidence = store.evidence(vmi["metadata"]["namespace"], vmi["metadata"]["name"])
    assert evidence is not None
    return store, evidence, now


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_state(path: Path) -> None:
    """The recorded objects have the state that the file is named by, or none where it is over."""
    store, evidence, now = load(path, limits=path.stem != "no_migration")
    found = diagnose(evidence, StuckPolicy(), store.load(), now)
    if path.stem in ENDED:
        assert found is None
        return
    assert found is not None
    assert found.state == path.stem


def test_capacity_before_there_is_an_attempt() -> None:
    """KubeVirt 1.8 makes no VMIM while its limits are reached: that is told where they are seen."""
    store, evidence, now = load(FOLDER / "no_migration.json")
    found = diagnose(evidence, StuckPolicy(), store.load(), now)
    assert found is not None
    assert found.state is State.CAPACITY


def test_a_migration_that_goes_on_for_too_long() -> None:
    """The recorded migration, more than two hours later, is stalled."""
    store, evidence, now = load(FOLDER / "migrating.json")
    found = diagnose(evidence, StuckPolicy(), store.load(), now + 7300)
    assert found is not None
    assert found.state is State.MIGRATION_STALLED


def test_every_state_is_recorded() -> None:
    """No state is without a recording of its own, or of what it follows from."""
    assert ({path.stem for path in FILES} - ENDED) | set(DERIVED) == set(State)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_who_wrote_it(path: Path) -> None:
    """Each file says which controller wrote it, or that it was written by hand."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    assert recorded["source"]
    assert recorded["kubevirt"]
    assert recorded["state"] == path.stem


@pytest.mark.parametrize("missing", ["vmims", "pods"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_says_less_and_nothing_wrong_without_a_permission(path: Path, missing: str) -> None:
    """What may not be seen makes a state unknown at most, never another one."""
    if path.stem in ENDED:
        return
    store, _, now = load(path)
    setattr(store, f"{missing}_seen", False)
    evidence = next(store.evacuating())
    found = diagnose(evidence, StuckPolicy(), store.load(), now)
    assert found is not None
    assert found.state in (path.stem, State.UNKNOWN)
