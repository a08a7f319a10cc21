"""virt-api's webhooks: admission of migrations, and evictions that become evacuations.

Pure ports of KubeVirt's functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter.demo import objects
from exporter.demo.objects import Object


def admit_migration(migration: Object) -> Object:
    """The mutating webhook of a VMIM: selector label and finalizer."""
    return objects.changed(migration, _admit)


def _admit(migration: Object) -> None:
    metadata = migration["metadata"]
    metadata.setdefault("labels", {})[objects.VMI_NAME] = migration["spec"]["vmiName"]
    finalizers = metadata.get("finalizers", [])
    if objects.MIGRATION_FINALIZER not in finalizers:
        metadata["finalizers"] = [*finalizers, objects.MIGRATION_FINALIZER]


@dataclass(frozen=True, slots=True)
class Eviction:
    """The eviction webhook's answer, and the marked VMI if the webhook marks it."""

    code: int
    message: str
    vmi: Object | None = None


def admit_eviction(vmi: Object, pod: Object, *, descheduler: bool) -> Eviction:
    """`pod-eviction-admitter.go`: mark the VMI and answer 429, or answer 200 to delete the pod."""
    answer = _answer_without_evacuation(vmi, pod)
    if answer is not None:
        return answer
    triggered = f'Eviction triggered evacuation of VMI "{objects.key(vmi)}"'
    if objects.evacuated_node(vmi):
        return Eviction(429, f"Evacuation in progress: {triggered}")
    if vmi["status"].get("nodeName") != objects.node_of(pod):
        return Eviction(429, "Eviction request for target Pod")

    def mark(marked: Object) -> None:
        marked["status"]["evacuationNodeName"] = objects.node_of(pod)
        if descheduler:
            # A later drain does not remove this, so it can be stale.
            marked["metadata"].setdefault("annotations", {})[objects.EVICTION_SOURCE] = (
                "descheduler"
            )

    return Eviction(429, triggered, objects.changed(vmi, mark))


def _answer_without_evacuation(vmi: Object, pod: Object) -> Eviction | None:
    """The answer if the VMI's strategy or a finished pod makes an evacuation impossible."""
    strategy = vmi["spec"].get("evictionStrategy")
    migratable = objects.is_true(vmi, "LiveMigratable")
    if objects.is_final(pod) or strategy in (None, "None"):
        return Eviction(200, "")
    if strategy == "LiveMigrate" and not migratable:
        name = vmi["metadata"]["name"]
        message = f"VMI {name} is configured with an eviction strategy but is not live-migratable"
        return Eviction(429, message)
    if strategy == "LiveMigrateIfPossible" and not migratable:
        return Eviction(200, "")
    return None


def cancel_evacuation(vmi: Object) -> Object:
    """`evacuate_cancel.go`: removes the mark, but not the eviction source or the current VMIM."""
    return objects.changed(vmi, lambda obj: obj["status"].pop("evacuationNodeName", None))
