"""Thirty stuck VMs as on a bad day, and six that are only being moved."""

from collections.abc import Iterator

from exporter.engine.facts.changes import Observed
from exporter.engine.facts.model import (
    Fact,
    KubeVirtSettings,
    Node,
    Outcome,
    Trigger,
    Vmi,
    Vmim,
    Why,
    WhySource,
)
from exporter.engine.facts.states import State
from exporter.engine.store.store import Store
from tests.support.builders import NOW, a_pod, a_running_state, a_vmi, a_vmim, an_evacuating_vmi


NO_ROOM = "make room on another node"
CRASH = "read the launcher's log around the error of libvirt or QEMU"
STUCK = {
    NO_ROOM: 12,
    "remove what makes the VM non-migratable": 6,
    "repair or fence n3": 5,
    CRASH: 4,
    "raise the ResourceQuota of the namespace": 3,
}
"""How many VMs are stuck by next step."""
_OLD = 10_800.0
_SCHEDULER = (
    "0/6 nodes are available: 1 node(s) were unschedulable, 5 Insufficient memory. preemption: 0/6"
    " nodes are available: 1 Preemption is not helpful for scheduling, 5 No preemption victims"
    " found for incoming pod."
)
_QEMU = "operation failed: guest CPU doesn't match specification: missing features: pcid,erms"
_DISKS = "cannot migrate VMI: PVC {name} is not shared, live migration requires ReadWriteMany"


def put_stuck_vms(store: Store) -> None:
    """Add the VMs of `STUCK`, one of them with a user's migration, and six others, at `NOW`."""
    store.apply(Observed(KubeVirtSettings()), NOW)
    for name in ("n1", "n2", "n4", "n5", "n6"):
        store.apply(Observed(Node(name=name)), NOW)
    silent = Node(name="n3", is_ready=False, is_silent=True, silent_since=NOW - _OLD)
    store.apply(Observed(silent), NOW)
    for fact, why in (*_without_room(), *_immobile(), *_cut_off(), *_failing(), *_over_quota()):
        store.apply(Observed(fact, why), NOW)
    for number in range(6):
        state = a_running_state(uid=f"m-moving-{number}", source_node="n6")
        vmi = _evacuating(f"moving-{number}", "n6", age=90.0, migration=state)
        store.apply(Observed(vmi), NOW)


_Facts = Iterator[tuple[Fact, tuple[Why, ...]]]


def _without_room() -> _Facts:
    """No node has room; one of these VMs is moved by a user, and not evacuated."""
    why = Why(WhySource.POD_SCHEDULED, "Unschedulable", _SCHEDULER, NOW - 100.0)
    for number in range(12):
        name = f"shop-frontend-{number}"
        age = _OLD + 60.0 * number
        vmi = _evacuating(name, "n1", age=age) if number else _plain(name, "n1")
        trigger = Trigger.EVACUATION if number else Trigger.MANUAL
        yield vmi, ()
        yield _attempt(name, "n1", phase="Scheduling", created=NOW - 2 * _OLD, trigger=trigger), ()
        yield (
            a_pod(
                name=f"virt-launcher-{name}-t",
                uid=f"t-{name}",
                vmi_uid=vmi.uid,
                node="",
                phase="Pending",
                ready=False,
                scheduled=False,
                unschedulable=True,
                migration_uid=f"m-{name}",
            ),
            (why,),
        )


def _immobile() -> _Facts:
    for number in range(6):
        name = f"ledger-of-all-accounts-{number}"
        message = _DISKS.format(name=name)
        why = Why(WhySource.LIVE_MIGRATABLE, "DisksNotLiveMigratable", message, NOW - 86_400.0)
        yield _evacuating(name, "n2", migratable=False, namespace="bank"), (why,)


def _cut_off() -> _Facts:
    for number in range(5):
        yield _evacuating(f"cache-{number}", "n3"), ()


def _failing() -> _Facts:
    """Attempts fail one after the other; at this instant some wait, and one migrates."""
    why = Why(WhySource.FAILED_ATTEMPT, "Running", _QEMU, NOW - 20.0)
    for number in range(4):
        name = f"build-{number}"
        yield _evacuating(name, "n4"), ()
        for attempt in range(3):
            ended = NOW - 20.0 - 400.0 * attempt
            yield (
                _attempt(
                    name,
                    "n4",
                    uid=f"f-{name}-{attempt}",
                    created=ended - 90.0,
                    phase="Failed",
                    finished=True,
                    finished_at=ended,
                    handed_off=True,
                    start=ended - 30.0,
                    end=ended,
                    outcome=Outcome.FAILED,
                    scheduled_at=ended - 40.0,
                ),
                (why,) if not attempt else (),
            )
        if number > 1:
            yield _attempt(name, "n4", created=NOW - 5.0, phase="Running" * (number == 3)), ()


def _over_quota() -> _Facts:
    message = "exceeded quota: vms, requested: limits.memory=9Gi, used: 60Gi, limited: 64Gi"
    for number in range(3):
        name = f"pool-7f9c8b6d5-{number}"
        yield _evacuating(name, "n5", namespace="laboratory"), ()
        yield (
            _attempt(
                name, "n5", namespace="laboratory", created=NOW - _OLD, wait_reason=State.QUOTA
            ),
            (Why(WhySource.MIGRATION_CONDITION, "migrationRejectedByResourceQuota", message),),
        )


def _plain(name: str, node: str, **fields: object) -> Vmi:
    own = {"name": name, "uid": f"uid-{name}", "node": node, **fields}
    return a_vmi(eviction_strategy="LiveMigrate", migratable=True, **own)


def _evacuating(name: str, node: str, *, age: float = _OLD, **fields: object) -> Vmi:
    own = {"name": name, "uid": f"uid-{name}", "node": node, "evacuation_node": node, **fields}
    return an_evacuating_vmi(age=age, **own)


def _attempt(name: str, node: str, **fields: object) -> Vmim:
    own: dict[str, object] = {"uid": f"m-{name}", "vmi_name": name, "trigger": Trigger.EVACUATION}
    own |= {"evacuates": node, "source_node": node, **fields}
    return a_vmim(name=f"kubevirt-evacuation-{own['uid']}", **own)
