"""Every state of an evacuation, from recorded objects of KubeVirt's own controllers.

The files in `tests/data/recorded/VERSION` come from the rig (`RECORD=1` with
`tests/integration/kubevirt/test_rig.py`). In each file, `source` says which controller wrote what.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exporter.engine.evacuations.diagnosis import Diagnosis, diagnose, diagnose_move
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Resource
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.facts.states import State
from exporter.kube.objects.instants import parse_instant
from exporter.kube.objects.kubevirt import parse_object
from tests.support.stores import ClockedStore


RESOURCES = {
    "VirtualMachineInstance": Resource.VMIS,
    "VirtualMachineInstanceMigration": Resource.VMIMS,
    "Pod": Resource.PODS,
    "KubeVirt": Resource.KUBEVIRTS,
    "Node": Resource.NODES,
}

FOLDER = Path(__file__).parents[3] / "data" / "recorded"
FILES = sorted(FOLDER.glob("*/*.json"))
FILE_NAMES = [f"{path.parent.name}-{path.stem}" for path in FILES]
VERSION = "{0.parent.name}".format
NAME = "{0.stem}".format
ENDED = {"succeeded", "cancelled"}
"""Recordings of evacuations that are over."""
DERIVED = {
    State.ENDED_NOT_FINISHED: "migrating",
    State.SHUTTING_DOWN: "target_not_ready",
    State.MIGRATION_STALLED: "migrating",
    State.WAITING_FOR_SYNC: "target_not_ready",
    State.UNKNOWN: "capacity",
}
"""States without a recording of their own, and the recording from which each is derived."""


def diagnosed(store: ClockedStore, evidence: Evidence, now: float) -> Diagnosis:
    """The diagnosis, which must exist."""
    diagnosis = diagnose(evidence, StuckPolicy(), store.load(), now)
    assert diagnosis is not None
    return diagnosis


def load(path: Path, *, limits: bool = True) -> tuple[ClockedStore, Evidence, float]:
    """A store with the recorded objects, the VMI's evidence, and the time of the recording."""
    recorded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    now = parse_instant(recorded["now"])
    assert now is not None
    store = ClockedStore(keep=16)
    store.now = now
    vmi = recorded["vmi"]
    sets = [vmi, *recorded["vmims"], *recorded["pods"], *recorded.get("others", [])]
    if limits and recorded["kubevirt_cr"] is not None:
        sets.append(recorded["kubevirt_cr"])
    for document in sets:
        store.put(parse_object(RESOURCES[document["kind"]], msgspec.json.encode(document)).fact)
    evidence = store.evidence(vmi["metadata"]["namespace"], vmi["metadata"]["name"])
    assert evidence is not None
    return store, evidence, now


@pytest.mark.parametrize("path", FILES, ids=FILE_NAMES)
def test_state(path: Path) -> None:
    """Each recording gives the state in its file name, or none if the evacuation is over."""
    store, evidence, now = load(path, limits=path.stem != "no_migration")
    if path.stem in ENDED:
        assert diagnose(evidence, StuckPolicy(), store.load(), now) is None
    else:
        assert diagnosed(store, evidence, now).state == path.stem


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*[0-9]/no_migration.json")), ids=VERSION)
def test_capacity_before_there_is_an_attempt(path: Path) -> None:
    """While the limits are reached and there is no VMIM, the state is waiting for capacity."""
    assert diagnosed(*load(path)).state is State.CAPACITY


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/migrating.json")), ids=VERSION)
def test_a_migration_that_goes_on_for_too_long(path: Path) -> None:
    """More than two hours later, the recorded migration is stalled."""
    store, evidence, now = load(path)
    assert diagnosed(store, evidence, now + 7300).state is State.MIGRATION_STALLED


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/target_not_ready.json")), ids=VERSION)
@pytest.mark.parametrize("phase", ["WaitingForSync", "Synchronizing"])
def test_an_attempt_in_a_phase_between_clusters(path: Path, phase: str) -> None:
    """An attempt in a phase of a decentralised migration has the state `WAITING_FOR_SYNC`."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    store, _, now = load(path)
    for vmim in recorded["vmims"]:
        if vmim["status"]["phase"] not in ("Succeeded", "Failed"):
            vmim["status"]["phase"] = phase
            store.put(parse_object(Resource.VMIMS, msgspec.json.encode(vmim)).fact)
    (evidence,) = store.evacuating()
    assert diagnosed(store, evidence, now).state is State.WAITING_FOR_SYNC


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/target_not_ready.json")), ids=VERSION)
def test_a_vmi_that_is_deleted_is_not_moved_any_more(path: Path) -> None:
    """Whatever an evacuation waits for, the state of a VMI that is being deleted says so."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    store, _, now = load(path)
    recorded["vmi"]["metadata"]["deletionTimestamp"] = recorded["now"]
    store.put(parse_object(Resource.VMIS, msgspec.json.encode(recorded["vmi"])).fact)
    (evidence,) = store.evacuating()
    assert diagnosed(store, evidence, now).state is State.SHUTTING_DOWN


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/further/ended_*.json")), ids=NAME)
def test_a_vmim_that_is_not_finished_after_the_end(path: Path) -> None:
    """A VMIM that stays Running for minutes after its migration has ended is not migrating."""
    store, evidence, _ = load(path)
    end = evidence.migration_end
    assert end is not None
    for seconds, state in ((300.0, State.MIGRATING), (301.0, State.ENDED_NOT_FINISHED)):
        move = diagnose_move(evidence, StuckPolicy(), store.load(), end + seconds)
        assert move is not None
        assert move.state is state


def test_every_state_is_recorded() -> None:
    """Every state has a recording, or is derived from one."""
    shown = ({path.stem for path in FILES} - ENDED) | set(DERIVED)
    assert shown == set(State), "record it in the rig (CONTRIBUTING.md), or add it to DERIVED"


@pytest.mark.parametrize("missing", [Resource.VMIMS, Resource.PODS])
@pytest.mark.parametrize("path", FILES, ids=FILE_NAMES)
def test_says_less_and_nothing_wrong_without_a_permission(path: Path, missing: Resource) -> None:
    """Without a permission the state may become unknown, but never wrong."""
    if path.stem in ENDED:
        return
    store, _, now = load(path)
    store.hide(missing)
    evidence = next(store.evacuating())
    assert diagnosed(store, evidence, now).state in (path.stem, State.UNKNOWN)
