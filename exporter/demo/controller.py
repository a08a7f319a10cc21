"""What virt-controller decides: evacuations, a VMIM's phases, backoff, garbage collection.

Pure ports of KubeVirt's functions: they turn the objects of one reconcile into its writes.
virt-api is in `webhooks.py`; virt-handler, kubelet and scheduler are in `node.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from exporter.demo import objects, webhooks
from exporter.demo.objects import Object


KEPT_MIGRATIONS = 5
"""Finished migrations kept per VMI name (`defaultFinalizedMigrationGarbageCollectionBuffer`)."""
FIRST_BACKOFF = timedelta(seconds=20)
UNSCHEDULABLE_TIMEOUT = timedelta(seconds=300)
PENDING_TIMEOUT = timedelta(seconds=900)
CAPACITY_RETRY = timedelta(seconds=5)
"""A migration without a free slot is requeued after this time (`getRequeueDelayForPriority`)."""
PODS_RETRY = timedelta(seconds=1)

PRE_TARGET = ("", "Pending")
PRE_HANDED_OFF = ("", "Pending", "Scheduling", "Scheduled")


@dataclass(frozen=True, slots=True)
class Rules:
    """KubeVirt's limits, and the factor by which its built-in waits are divided."""

    faster: float = 1.0
    per_cluster: int = objects.PARALLEL_PER_CLUSTER
    per_node: int = objects.PARALLEL_OUTBOUND_PER_NODE
    queues: bool = True
    """False: no VMIM is made for an evacuation while a limit is reached, as up to KubeVirt 1.8."""
    leaves_zombies: bool = False
    """Bug #18087: if a target pod with published ports is lost, the VMI gets no `endTimestamp`."""

    def wait(self, built_in: timedelta) -> timedelta:
        """One of KubeVirt's waits, shortened."""
        return built_in / self.faster


@dataclass(frozen=True, slots=True)
class MigrationView:
    """The objects that one reconcile of a migration reads."""

    migration: Object
    vmi: Object | None
    pods: Sequence[Object] = ()
    """All launcher pods of the VMI."""
    siblings: Sequence[Object] = ()
    """All migrations of that VMI name, this one included."""
    running: int = 0
    """Migrations that run in the cluster (`findRunningMigrations`)."""
    outbound: int = 0
    """Running migrations that leave this VMI's node."""

    @property
    def target(self) -> Object | None:
        """The migration's target pod."""
        return self.targets[0] if self.targets else None

    @property
    def targets(self) -> list[Object]:
        """The pods that were created for this migration."""
        return [pod for pod in self.pods if objects.is_target_of(pod, self.migration)]


@dataclass(frozen=True, slots=True)
class Writes:
    """What one reconcile writes; an unchanged object is not written."""

    migration: Object | None = None
    vmi: Object | None = None
    create_pod: Object | None = None
    delete_pods: Sequence[Object] = ()
    delete_migrations: Sequence[Object] = ()
    requeue_at: datetime | None = None


# The evacuation controller


def needs_evacuation(vmi: Object, siblings: Iterable[Object], pods: Iterable[Object]) -> bool:
    """Whether the evacuation controller creates a migration now (`evacuation.go`).

    No backoff here: after a failure the next VMIM is created at once, and waits in Pending.
    """
    marked = objects.evacuated_node(vmi)
    if not marked or marked != vmi["status"].get("nodeName") or objects.is_migrating(vmi):
        return False
    if objects.is_final(vmi) or objects.is_deleting(vmi):
        return False
    if vmi["spec"].get("evictionStrategy") not in ("LiveMigrate", "LiveMigrateIfPossible"):
        # External and None get no migration.
        return False
    if not objects.is_true(vmi, "LiveMigratable"):
        return False
    if any(not objects.is_final(sibling) for sibling in siblings):
        return False
    return objects.active_pods(pods) <= 1


# The VMI controller


def sync_vmi(vmi: Object, pods: Sequence[Object], now: datetime) -> Object:
    """The VMI's status as virt-controller writes it (`watch/vmi/lifecycle.go: updateStatus`)."""

    def sync(obj: Object) -> None:
        status = obj["status"]
        status["activePods"] = {pod["metadata"]["uid"]: objects.node_of(pod) for pod in pods}
        if not objects.evacuated_node(obj):
            objects.drop_condition(obj, "EvictionRequested")
        elif not objects.is_true(obj, "EvictionRequested"):
            requested = {
                "type": "EvictionRequested",
                "status": "True",
                "reason": "EvictionRequested",
                "message": "VMI is marked for eviction",
                "lastProbeTime": objects.format_time(now),
                "lastTransitionTime": objects.format_time(now),
            }
            objects.set_condition(obj, requested)
        if objects.phase(obj) == "Pending" and pods:
            status["phase"] = "Scheduling"
        first = objects.current_pod(obj, pods)
        if objects.phase(obj) == "Scheduling" and first and objects.is_pod_ready(first):
            # The hand-over of a new VMI to the virt-handler of its node.
            status["phase"] = "Scheduled"
            status["nodeName"] = objects.node_of(first)
            obj["metadata"].setdefault("labels", {})[objects.NODE_NAME] = objects.node_of(first)
        if objects.phase(obj) == "Running" and not pods:
            # Its pod was evicted or deleted.
            status["phase"] = "Failed"
        if first is not None:
            status.setdefault(
                "launcherContainerImageVersion", first["spec"]["containers"][0]["image"]
            )
            _copy_ready(obj, first, now)

    return objects.changed(vmi, sync)


def _copy_ready(vmi: Object, pod: Object, now: datetime) -> None:
    """`syncReadyConditionFromPod`, in place: the VMI is Ready if its current pod is Ready."""
    why = {"reason": "GuestNotRunning", "message": "Guest VM is not reported as running"}
    ready = {"type": "Ready", "status": "False", "lastProbeTime": None} | why
    if objects.phase(vmi) == "Running":
        ready = objects.condition(pod, "Ready") or ready
    objects.set_condition(vmi, ready | {"lastTransitionTime": objects.format_time(now)})


def sync_pod(vmi: Object, pod: Object, now: datetime) -> Object:
    """The VMI's current pod, as virt-controller marks it (`lifecycle.go: sync`, `descheduler.go`).

    Until the VMI has moved, the node label of its target pod names the source's node. The pod's
    readiness gate is met as soon as its VM runs.

    Since 1.7 the eviction-in-progress annotation follows `evacuationNodeName`. It survives failed
    attempts, and stays on the pod that a VMI has left.
    """
    if not objects.is_pod_ready(pod):
        return pod

    def sync(obj: Object) -> None:
        notes = obj["metadata"].setdefault("annotations", {})
        notes[objects.EVICT_ONLY] = ""
        obj["metadata"].setdefault("labels", {})[objects.NODE_NAME] = vmi["status"]["nodeName"]
        if objects.evacuated_node(vmi):
            notes[objects.EVICTION_IN_PROGRESS] = "true"
        else:
            notes.pop(objects.EVICTION_IN_PROGRESS, None)
        state = objects.state_of(vmi)
        if state.get("targetPod") == pod["metadata"]["name"]:
            ready = objects.parse_time(state["targetNodeDomainReadyTimestamp"])
            notes[objects.TARGET_READY] = f"{ready:%Y-%m-%d %H:%M:%S} +0000 UTC"
        if objects.phase(vmi) == "Running" and not objects.is_true(obj, objects.UNPAUSED):
            stamped = objects.format_time(now)
            unpaused = {
                "type": objects.UNPAUSED,
                "status": "True",
                "reason": "NotPaused",
                "message": "the virtual machine is not paused",
                "lastProbeTime": stamped,
                "lastTransitionTime": stamped,
            }
            objects.set_condition(obj, unpaused)

    return objects.changed(pod, sync)


# The migration controller


def reconcile_migration(view: MigrationView, now: datetime, rules: Rules) -> Writes:
    """One pass of `migration.go: execute`: sync, then status, both from the same state."""
    migration, vmi = view.migration, view.vmi
    if objects.OBSERVED_VERSION not in objects.annotations(migration):
        return Writes(migration=_observed(migration))
    if vmi is None:
        if objects.is_deleting(migration):
            # KubeVirt keeps the finalizer if the VMI is deleted before its migration has failed.
            return Writes(migration=_released(migration))
        return Writes(delete_migrations=[migration])
    synced = _sync(view, vmi, now, rules)
    updated = _update_status(view, vmi, now)
    if objects.is_final(migration):
        synced = replace(synced, delete_migrations=surplus(view.siblings))
    return replace(synced, migration=updated)


def surplus(siblings: Iterable[Object]) -> list[Object]:
    """All finished migrations except the five newest, oldest first.

    This is KubeVirt's `garbageCollectFinalizedMigrations`.
    """
    finished = [
        migration
        for migration in objects.newest_first(siblings)
        if objects.is_final(migration) and not objects.is_deleting(migration)
    ]
    return finished[KEPT_MIGRATIONS:][::-1]


def backoff_until(migration: Object, siblings: Iterable[Object], rules: Rules) -> datetime | None:
    """When a Pending migration may start (`handleMigrationBackoff`): 20 s, doubled per failure.

    Only evacuations and workload updates count, and only the newest waits. The failures since the
    last success count, among the five migrations that are kept.
    """
    if not _backs_off(migration):
        return None
    eligible = [sibling for sibling in objects.newest_first(siblings) if _backs_off(sibling)]
    if len(eligible) < 2 or eligible[0]["metadata"]["uid"] != migration["metadata"]["uid"]:
        return None
    failures = 0
    for older in eligible[1:]:
        if objects.phase(older) == "Succeeded":
            break
        if not objects.is_deleting(older) and objects.phase(older) == "Failed":
            failures += 1
    failed_at = objects.transition(eligible[1], "Failed")
    if failures == 0 or failed_at is None:
        return None
    return failed_at + rules.wait(FIRST_BACKOFF * 2 ** (failures - 1))


def _backs_off(migration: Object) -> bool:
    notes = objects.annotations(migration)
    return objects.EVACUATION in notes or objects.WORKLOAD_UPDATE in notes


def set_phase(migration: Object, phase: str, now: datetime) -> Object:
    """Enter a phase, and note its first time in `phaseTransitionTimestamps`."""
    if objects.phase(migration) == phase:
        return migration

    def enter(obj: Object) -> None:
        status = obj.setdefault("status", {})
        status["phase"] = phase
        entries = status.setdefault("phaseTransitionTimestamps", [])
        if all(entry["phase"] != phase for entry in entries):
            entries.append({"phase": phase, "phaseTransitionTimestamp": objects.format_time(now)})

    return objects.changed(migration, enter)


def hand_off(vmi: Object, migration: Object, pod: Object, rules: Rules) -> Object:
    """`handleTargetPodHandoff`: replaces the whole `migrationState`, also its start and end."""
    target = objects.node_of(pod)

    def hand(obj: Object) -> None:
        state: Object = {
            "migrationUid": migration["metadata"]["uid"],
            "sourceNode": obj["status"]["nodeName"],
            "targetNode": target,
            "targetPod": pod["metadata"]["name"],
            "migrationConfiguration": migration_configuration(rules),
        }
        source = objects.state_of(migration).get("sourcePod")
        if source:
            state["sourcePod"] = source
        obj["status"]["migrationState"] = state
        obj["metadata"].setdefault("labels", {})[objects.MIGRATION_TARGET_NODE] = target

    return objects.changed(vmi, hand)


def migration_configuration(rules: Rules) -> Object:
    """The cluster's defaults (`virt-config.go`); no MigrationPolicy matches here."""
    return {
        "nodeDrainTaintKey": "kubevirt.io/drain",
        "parallelOutboundMigrationsPerNode": rules.per_node,
        "parallelMigrationsPerCluster": rules.per_cluster,
        "allowAutoConverge": False,
        "bandwidthPerMigration": "0",
        "completionTimeoutPerGiB": 150,
        "progressTimeout": 150,
        "unsafeMigrationOverride": False,
        "allowPostCopy": False,
        "allowWorkloadDisruption": True,
        "utilityVolumesTimeout": 150,
    }


def mark_failed(vmi: Object, now: datetime) -> Object:
    """`handleMarkMigrationFailedOnVMI`: a migration that never started gets start and end now."""

    def fail(obj: Object) -> None:
        state = obj["status"]["migrationState"]
        state.setdefault("startTimestamp", objects.format_time(now))
        state |= {"endTimestamp": objects.format_time(now), "failed": True, "completed": True}

    return objects.changed(vmi, fail)


def _observed(migration: Object) -> Object:
    def observe(obj: Object) -> None:
        notes = obj["metadata"].setdefault("annotations", {})
        notes |= {objects.OBSERVED_VERSION: "v1", objects.STORAGE_VERSION: "v1"}

    # A migration that missed the webhook gets its label here (`ensureSelectorLabelPresent`).
    return objects.changed(webhooks.admit_migration(migration), observe)


def _released(migration: Object) -> Object:
    left = [
        finalizer
        for finalizer in migration["metadata"].get("finalizers", [])
        if finalizer != objects.MIGRATION_FINALIZER
    ]

    def release(obj: Object) -> None:
        obj["metadata"].pop("finalizers", None)
        if left:
            obj["metadata"]["finalizers"] = left

    return objects.changed(migration, release)


def _sync(view: MigrationView, vmi: Object, now: datetime, rules: Rules) -> Writes:
    """`migration.go: sync`: what to change in the migration's pod and VMI."""
    is_over = _is_ours(view, vmi) and objects.state_of(vmi).get("completed")
    if objects.is_deleting(vmi) or is_over or not _may_migrate(view, vmi):
        return Writes()
    match objects.phase(view.migration):
        case "Pending" | "Scheduling":
            return _sync_target(view, vmi, now, rules)
        case "Scheduled":
            return _sync_hand_off(view, vmi, rules)
        case "PreparingTarget" | "TargetReady" | "Failed":
            return _sync_failure(view, vmi, now, rules)
        case "Running" if objects.is_deleting(view.migration):
            return Writes(vmi=objects.changed(vmi, _request_abort))
        case _:
            return Writes()


def _sync_target(view: MigrationView, vmi: Object, now: datetime, rules: Rules) -> Writes:
    """Before hand-off: create the target pod, wait for it, or delete it."""
    if objects.is_deleting(view.migration):
        return Writes(delete_pods=view.targets[:1])
    if view.target is not None:
        return _expire(view.target, now, rules)
    if objects.phase(view.migration) == "Pending":
        return _start(view, vmi, now, rules)
    return Writes()


def _sync_hand_off(view: MigrationView, vmi: Object, rules: Rules) -> Writes:
    if _is_ours(view, vmi):
        return Writes()
    if objects.is_deleting(view.migration):
        return Writes(delete_pods=view.targets[:1])
    if view.target is not None and objects.is_pod_ready(view.target):
        return Writes(vmi=hand_off(vmi, view.migration, view.target, rules))
    return Writes()


def _sync_failure(view: MigrationView, vmi: Object, now: datetime, rules: Rules) -> Writes:
    """If the target is lost before the start, virt-controller writes the end into the VMI."""
    state = objects.state_of(vmi)
    if not _is_ours(view, vmi) or "endTimestamp" in state:
        return Writes()
    if objects.phase(view.migration) == "Failed":
        return Writes() if rules.leaves_zombies else Writes(vmi=mark_failed(vmi, now))
    is_down = view.target is None or objects.is_final(view.target)
    is_published = bool(state.get("targetDirectMigrationNodePorts"))
    if is_down and not is_published and "startTimestamp" not in state:
        return Writes(vmi=mark_failed(vmi, now))
    return Writes()


def _request_abort(vmi: Object) -> None:
    vmi["status"].get("migrationState", {}).update(abortRequested=True)


def _is_ours(view: MigrationView, vmi: Object) -> bool:
    """Whether the VMI's `migrationState` belongs to this migration."""
    return bool(objects.state_of(vmi).get("migrationUid") == view.migration["metadata"]["uid"])


def _may_migrate(view: MigrationView, vmi: Object) -> bool:
    """Whether the VMI's `migrationState` belongs to no other open migration (`canMigrateVMI`)."""
    present = objects.state_of(vmi).get("migrationUid")
    if not present or present == view.migration["metadata"]["uid"]:
        return True
    return all(
        objects.is_final(sibling)
        for sibling in view.siblings
        if sibling["metadata"]["uid"] == present
    )


def _start(view: MigrationView, vmi: Object, now: datetime, rules: Rules) -> Writes:
    """Create the target pod, unless backoff, pods or limits keep the migration Pending."""
    until = backoff_until(view.migration, view.siblings, rules)
    if until is not None and now < until:
        return Writes(requeue_at=until)
    if objects.current_pod(vmi, view.pods) is None:
        return Writes()
    if objects.active_pods(view.pods) > 1:
        return Writes(requeue_at=now + rules.wait(PODS_RETRY))
    if view.running >= rules.per_cluster or view.outbound >= rules.per_node:
        return Writes(requeue_at=now + rules.wait(CAPACITY_RETRY))
    if objects.phase(vmi) != "Running":
        return Writes()
    return Writes(create_pod=objects.build_launcher_pod(vmi, view.migration))


def _expire(pod: Object, now: datetime, rules: Rules) -> Writes:
    """`handlePendingPodTimeout`: delete a target pod that stays Pending too long."""
    if objects.phase(pod) != "Pending" or objects.is_deleting(pod):
        return Writes()
    is_stuck = objects.is_unschedulable(pod)
    timeout = rules.wait(UNSCHEDULABLE_TIMEOUT if is_stuck else PENDING_TIMEOUT)
    expires = objects.parse_time(pod["metadata"]["creationTimestamp"]) + timeout
    if now >= expires:
        return Writes(delete_pods=[pod])
    return Writes(requeue_at=expires)


def _update_status(view: MigrationView, vmi: Object, now: datetime) -> Object:
    """`migration.go: updateStatus`: the migration's next phase."""
    migration = view.migration
    if objects.is_final(migration):
        return _released(_copied(migration, vmi) if _is_ours(view, vmi) else migration)
    is_deleting = objects.is_deleting(migration)
    if is_deleting and not _is_ours(view, vmi):
        return set_phase(_aborting(migration, now), "Failed", now)
    if _has_failed(view, vmi):
        return set_phase(migration, "Failed", now)
    if is_deleting and objects.condition(migration, "migrationAbortRequested") is None:
        return _aborting(migration, now)
    entered = set_phase(migration, _next_phase(view, vmi), now)
    return _with_source_pod(entered, vmi, view.pods)


def _copied(migration: Object, vmi: Object) -> Object:
    """Copy the VMI's `migrationState` into its final migration."""
    state = objects.state_of(vmi)
    return objects.changed(migration, lambda obj: obj["status"].update(migrationState=state))


def _has_failed(view: MigrationView, vmi: Object) -> bool:
    """VMI or target is gone, the VMI has another migration, or virt-handler reports a failure."""
    present = objects.phase(view.migration)
    is_ours = _is_ours(view, vmi)
    has_target = view.target is not None
    return (
        objects.is_final(vmi)
        or (view.target is not None and objects.is_final(view.target))
        or (present not in PRE_TARGET and not has_target)
        or (present not in PRE_HANDED_OFF and not is_ours)
        or (is_ours and bool(objects.state_of(vmi).get("failed")))
    )


def _next_phase(view: MigrationView, vmi: Object) -> str:
    """`processMigrationPhase`, for migrations within one cluster."""
    present = objects.phase(view.migration)
    if present == "":
        return "Pending" if _may_migrate(view, vmi) else "Failed"
    state, target = objects.state_of(vmi), view.target
    following, may_follow = {
        "Pending": ("Scheduling", target is not None),
        "Scheduling": ("Scheduled", target is not None and objects.is_pod_ready(target)),
        "Scheduled": ("PreparingTarget", _is_ours(view, vmi) and "targetNode" in state),
        "PreparingTarget": ("TargetReady", "targetNodeAddress" in state),
        "TargetReady": ("Running", "startTimestamp" in state),
        "Running": ("Succeeded", bool(state.get("completed")) and not _is_plugging(vmi)),
    }[present]
    return following if may_follow else present


def _is_plugging(vmi: Object) -> bool:
    """Whether a hotplug of CPUs or memory, for which the VMI migrates, is not over."""
    has_cpus = objects.condition(vmi, "HotVCPUChange") is not None
    return has_cpus or objects.is_true(vmi, "HotMemoryChange")


def _with_source_pod(migration: Object, vmi: Object, pods: Sequence[Object]) -> Object:
    """`controller.go: SetSourcePod`: a migration gets its `sourcePod` while it is Pending."""
    source = objects.current_pod(vmi, pods)
    if objects.phase(migration) != "Pending" or source is None:
        return migration

    def name(obj: Object) -> None:
        obj["status"].setdefault("migrationState", {})["sourcePod"] = source["metadata"]["name"]

    return objects.changed(migration, name)


def _aborting(migration: Object, now: datetime) -> Object:
    if objects.condition(migration, "migrationAbortRequested") is not None:
        return migration
    asked = {
        "type": "migrationAbortRequested",
        "status": "True",
        "lastProbeTime": objects.format_time(now),
        "lastTransitionTime": None,
    }
    return objects.changed(migration, lambda obj: objects.set_condition(obj, asked))
